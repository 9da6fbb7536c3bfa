"""Models that have blocks computed again in the backward pass from the start, on meshes with a tensor axis."""

from __future__ import annotations

import pytest
import torch

from dmp import DistributedModelParallel, ShardingEnv, full_state_dict
from tests.fuzz.program_model import Model, Spec
from tests.ranks import mesh, run_ranks


def _trained(again: bool, is_tied: bool) -> list[str]:
    spec = Spec(0, ("sum", "mean"), True, 3, is_tied, again)
    env = ShardingEnv.from_mesh(mesh((2,), ("tp",)))
    model, whole = DistributedModelParallel(Model(spec).double(), env=env), Model(spec).double()
    ids = torch.arange(12).view(3, 4)
    for each in (model, whole):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            each(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(full_state_dict(model), dict(whole.state_dict()))
    return [name for name, each in model.plan.items() if each.layout.name in ("colwise", "rowwise")]


@pytest.mark.parametrize(("again", "is_tied"), [(True, False), (True, True), (False, False)])
def test_blocks_are_found_proved_and_trained(again: bool, is_tied: bool) -> None:
    """Reentrant ones: what stands for a block like another led to itself, and wrapping did not end."""
    for split in run_ranks(2, _trained, again, is_tied):
        assert "blocks.2.down.weight" in split
