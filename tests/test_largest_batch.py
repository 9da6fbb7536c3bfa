"""The largest batch that a plan has room for: planned anew with the same plan it fits, and a larger one does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dmp import PlanError, ShardingEnv, default_sharders
from planner import PlanReport, ShardingPlanner, Topology
from planner.largest_batch import largest_batch
from tests.oracle import attach


class Net(nn.Module):
    """Tables of long bags, before dense layers."""

    def __init__(self, optimizer: str | None = "adagrad") -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 64, mode="sum") for rows in (4_000, 900_000, 60_000, 200_000))
        attach(self.tables, optimizer)
        self.top = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1))


def topology(env: ShardingEnv, memory: float) -> Topology:
    return Topology(memory, 1e11, 1e12, [1e10] * len(env.shape), [1e-6] * len(env.shape))


MESHES = [((4,), ("dp",)), ((8,), ("shard",)), ((2, 4), ("replicate", "shard")), ((2, 2), ("shard", "tp"))]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("shape", "names"), MESHES)
@pytest.mark.parametrize("optimizer", ["adagrad", None])
def test_it_fits_and_a_larger_one_does_not(
    shape: tuple[int, ...], names: tuple[str, ...], optimizer: str | None
) -> None:
    with torch.device("meta"):
        module = Net(optimizer)
    env, sharders = ShardingEnv.abstract(shape, names), default_sharders()

    def planned(batch: int, pinned: object = None) -> PlanReport:
        planner = ShardingPlanner(topology(env, 1.2e9), batch_size=batch)
        plan = planner.plan(module, sharders, env, pinned=pinned)  # type: ignore[arg-type]
        assert planner.report is not None and (pinned is None or plan == pinned)
        return planner.report

    planner = ShardingPlanner(topology(env, 1.2e9), batch_size=512)
    plan = planner.plan(module, sharders, env)
    largest = planner.report.largest_batch  # type: ignore[union-attr]
    assert largest > 512
    again = planned(largest, plan)
    assert not any("would fit" in note for note in again.notes)
    assert again.largest_batch == 0 or again.largest_batch <= 1.02 * largest
    if optimizer is None:  # beside it Adam has no room
        notes = planned(int(1.05 * largest), plan).notes
        assert any("need about" in note or "no plan has room" in note for note in notes), largest
    else:
        with pytest.raises(PlanError) as error:
            planned(int(1.05 * largest), plan)
        assert error.value.bytes_short, largest
    assert f"a batch of up to {largest:,} on each rank fits" in str(planner.report)
    assert PlanReport.from_json(planner.report.to_json()).largest_batch == largest  # type: ignore[union-attr]


def test_what_a_line_does_not_say() -> None:
    assert largest_batch(lambda n: 1000 - n, 1000) == 1000
    assert largest_batch(lambda n: 999 - n, 1000) == 0
    assert largest_batch(lambda n: 5.0, 64) == 0
    for room in (lambda n: 1e6 - n**1.3, lambda n: 1e6 - 50 * n**0.8, lambda n: 1e6 - n - (n > 5000) * 9e5):
        found = largest_batch(room, 64)
        assert room(found) >= 0 > room(int(1.05 * found) + 1), found
