"""A transformer's training step has the collectives of hand-written FSDP2 and tensor parallelism, and no other.

By hand, sequence parallelism splits the embedding's output and the head's input already. Ours keeps both whole, so one
reduce-scatter forward and one backward are an all-reduce each, whatever the number of blocks. Without FSDP2, torch
leaves the gradients of norms as parts of a sum, which each of three operations of AdamW sums anew; ours are summed
once, in the backward pass.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.bench.transformer_collectives import WORK, Counts, counts, points
from tests.bench.transformer_workload import MESHES, MODES

pytestmark = [
    # The counter puts backward hooks on every module.
    pytest.mark.filterwarnings("ignore:For backward hooks to be called"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    # FSDP2 warns of in-place writes to the logits, which are a view by hand; nobody writes.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]
OF_ADAMW = 3


def expected(theirs: tuple[Counts, Counts], mesh: str, mode: str, num_layers: int) -> tuple[Counts, Counts]:
    """Ours, by theirs: equal, but for what the head of this file says."""
    backward, update = map(Counter, theirs)
    if MODES[mode].get("sequence_parallel"):
        backward.update({"reduce_scatter_tensor": -2, "all_reduce": 2})
        num_norms = 2 * num_layers + 1
        if MESHES[mesh][1] == ("tp",):
            backward["all_reduce"] += num_norms
            update["all_reduce"] -= OF_ADAMW * num_norms
    return {op: n for op, n in backward.items() if n}, {op: n for op, n in update.items() if n}


# The loss over the split vocabulary costs the same on two axes as on one: `make bench-transformer` counts all.
POINTS = [pytest.param(*p, marks=[pytest.mark.slow] if "loss" in p[1] and " x tp" in p[0] else []) for p in points()]


@pytest.mark.parametrize(("mesh", "mode"), POINTS)
@pytest.mark.sampled(8)
def test_collectives_of_a_step(mesh: str, mode: str) -> None:
    theirs, ours = counts(WORK, mesh, mode)
    assert ours == expected(theirs, mesh, mode, WORK.layers)
    assert sum(ours[0].values()) > 0


@pytest.mark.slow
def test_each_further_block_costs_the_same() -> None:
    small, large = (counts(replace(WORK, layers=layers), "shard 2 x tp 2", "sequence parallel") for layers in (1, 2))
    for theirs, ours in (small, large):
        assert sum(ours[0].values()) == sum(theirs[0].values())
    grown = [Counter(large[side][0]) - Counter(small[side][0]) for side in (0, 1)]
    assert grown[0] == grown[1] and grown[0]["all_reduce"] == 2  # norms in a block
