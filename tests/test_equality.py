"""Every module kind x layout x optimizer x mesh equals the unsharded module on the global batch."""

from __future__ import annotations

import math
from itertools import product

import pytest

from tests.equality import KINDS, MESHES, MORE_OPTIMIZERS, run_matrix, run_random
from tests.ranks import run_ranks

# Those with a tensor axis have a sample of the matrix in test_tensor_axis.py; the order of axes changes little.
_SLOW = {name for name, (shape, axes) in MESHES.items() if math.prod(shape) > 4 or "tp" in axes}
_SLOW |= {"shard2xreplicate2"}
_SLOW_KINDS = {
    "dp4": ("bag_mean", "bag_weighted"),
    "host2xlocal2": ("bag", "bag_mean", "ebc_weighted", "embedding"),
    "replicate2xshard2": ("bag", "bag_mean", "bag_weighted", "ebc_weighted", "embedding"),
}


_THINNED = {
    "single",
    "dp1",
    "dp2",
    "dp4",
    "host2xlocal2",
    "replicate2",
    "replicate2xshard2",
}  # a third of the product; whole if slow


def _cases() -> list[object]:
    found = []
    for m, k in product(MESHES, KINDS):
        is_slow = m in _SLOW or k in _SLOW_KINDS.get(m, ())
        if m in _THINNED and not is_slow:
            found.append(pytest.param(m, k, 3, id=f"{m}-{k}-third"))
        slow = [pytest.mark.slow] if is_slow or m in _THINNED else []
        found.append(pytest.param(m, k, 1, id=f"{m}-{k}", marks=slow))
    return found


@pytest.mark.parametrize(("mesh", "kind", "every"), _cases())
@pytest.mark.sampled(40)
def test_equals_unsharded(mesh: str, kind: str, every: int) -> None:
    world = max(1, math.prod(MESHES[mesh][0]))
    failed = run_ranks(world, run_matrix, mesh, kind, every, timeout=300)
    assert not any(failed), "\n".join(sorted({line for of_rank in failed for line in of_rank}))


@pytest.mark.parametrize(
    ("mesh", "kind", "every"),
    [
        ("dp2", "ebc", 12),
        ("replicate2", "ec", 12),
        *(pytest.param("dp2", kind, 1, marks=pytest.mark.slow) for kind in ("ebc", "ebc_weighted", "ec", "bag_mean")),
        *(
            pytest.param(mesh, "ebc", 1, marks=pytest.mark.slow)
            for mesh in ("single", "dp4", "host2xlocal2", "replicate2xshard2", "shard2xtp2")
        ),
    ],
)
@pytest.mark.sampled(2)
def test_more_optimizers(mesh: str, kind: str, every: int) -> None:
    world = max(1, math.prod(MESHES[mesh][0]))
    failed = run_ranks(world, run_matrix, mesh, kind, every, MORE_OPTIMIZERS, timeout=300)
    assert not any(failed), "\n".join(sorted({line for of_rank in failed for line in of_rank}))


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 50), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    ("mesh", "kind"),
    [("dp2", "ebc"), ("dp4", "ebc_weighted"), ("dp4", "ec"), ("host2xlocal2", "ebc"), ("replicate2xshard2", "ebc")],
)
@pytest.mark.sampled(6)
def test_random_rectangles(mesh: str, kind: str, seeds: range) -> None:
    world = math.prod(MESHES[mesh][0])
    failed = run_ranks(world, run_random, mesh, kind, seeds, timeout=300)
    assert not any(failed), "\n".join(sorted({line for of_rank in failed for line in of_rank}))
