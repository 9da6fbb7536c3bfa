"""What a step's phases have taken, from one call and in torch's profiler: names, bytes, which step."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dmp
from dmp import DistributedModelParallel, column_wise, data_parallel, row_wise, step_phases, table_wise
from planner import Constraint, ShardingPlanner
from planner.costs.copies import APART_BYTES, BESIDE_BYTES
from planner.costs.cost_model import EVEN, MOST_FILLED, PHASES
from sharders import EmbeddingBagCollectionSharder
from sharders.channel import Channel, GroupChannel, Purpose, Sizes, Transfer
from sharders.embedding.data_path import pooled
from sharders.embedding.data_path.engine import Engine
from sharders.embedding.exchange import stages, touched_rows
from sharders.embedding.ids import input_dist
from tests.equality import attach, env_of, layouts_for, loss_of, make_batch, make_module
from tests.ranks import run_ranks

OF_TABLES = ["input a2a", "lookup fwd", "output a2a", "grad a2a", "lookup bwd"]


class Counting(GroupChannel):
    """Over a process group; counts what leaves this rank by the elements that each other rank gets."""

    total = 0

    def all_to_all(self, send: torch.Tensor, send_sizes: Sizes, *rest: Any, **options: Any) -> Transfer:
        others = [n for rank, n in enumerate(send_sizes) if rank != self.rank]
        Counting.total += math.fsum(others) * send.element_size()  # type: ignore[assignment]
        return super().all_to_all(send, send_sizes, *rest, **options)

    def all_gather(self, send: torch.Tensor) -> torch.Tensor:
        gathered = super().all_gather(send)
        Counting.total += gathered.nbytes - send.nbytes
        return gathered

    def sum(self, tensor: torch.Tensor) -> None:
        Counting.total += tensor.nbytes * (self.size - 1) * 2 // self.size
        super().sum(tensor)


def _counting(group: dist.ProcessGroup | None, purpose: Purpose) -> Channel:
    return Counting(group)


def _counted(mesh: str, kind: str, interval: int) -> None:
    env, module = env_of(mesh), make_module(kind)
    attach(module, "sgd")
    place = layouts_for(env)["mixed"]
    plan = {name: place(i, tuple(p.shape), env) for i, (name, p) in enumerate(module.named_parameters())}
    sharders = [EmbeddingBagCollectionSharder(sync_interval=interval)] if interval > 1 else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Engine.__init__.__kwdefaults__, "transport", _counting)  # type: ignore[index]
        model = DistributedModelParallel(module, env=env, plan=plan, sharders=sharders)
    for step in range(3):
        Counting.total = 0
        batch = make_batch(kind, env.data_rank, step)
        if kind.endswith("weighted"):
            batch[0].weights().requires_grad_()  # type: ignore[attr-defined]
        loss_of(model(*batch)).backward()
        found = step_phases(model)
        assert sum(of.sent_bytes for of in found.values()) == Counting.total > 0
        assert [name for name in found if name in OF_TABLES] == OF_TABLES
        is_copied, has_average = bool(env.axes("replicate")), interval > 1 and (step + 1) % interval == 0
        if is_copied and (interval == 1 or has_average):
            assert found["replica sync"].sent_bytes > 0
        assert ("tensor gather" in found) == bool(env.axes("tensor"))
        assert found["lookup fwd"].sent_bytes == found["lookup bwd"].sent_bytes == 0
        assert all(of.seconds > 0 for of in found.values())


@pytest.mark.parametrize(
    ("mesh", "kind", "interval"),
    [
        ("dp2", "ebc", 1),
        ("dp2", "ec", 1),
        ("host2xlocal2", "ebc_weighted", 1),
        ("replicate2xshard2", "ebc", 1),
        ("replicate2xshard2", "ebc", 2),
        ("shard2xtp2", "ebc_weighted", 1),
    ],
)
@pytest.mark.sampled(2)
def test_bytes_are_those_that_a_channel_sees(mesh: str, kind: str, interval: int) -> None:
    run_ranks(4 if "x" in mesh else 2, _counted, mesh, kind, interval)


def _known() -> None:
    """Two ranks, one table on each: 6 samples of rank 0, 4 of rank 1."""
    env = env_of("dp2")
    module = nn.ModuleDict({"a": nn.EmbeddingBag(10, 8, mode="sum"), "b": nn.EmbeddingBag(10, 16, mode="sum")})
    attach(module, "sgd")

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = module

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.tables["a"](ids).sum() + self.tables["b"](ids).sum() + self.tables["b"](ids).sum()

    plan = {"tables.a.weight": table_wise(0), "tables.b.weight": table_wise(1)}
    model = DistributedModelParallel(Both(), env=env, plan=plan)
    assert step_phases(model) == {}
    for _ in range(2):  # a module called twice counts twice, a step before does not count
        samples = (6, 4)
        model(torch.ones(samples[env.rank], 3, dtype=torch.int64)).backward()
        found = step_phases(model)
        of_peer, width = samples[1 - env.rank], (8, 32)[env.rank]
        assert found["output a2a"].sent_bytes == of_peer * width * 4
        assert found["grad a2a"].sent_bytes == samples[env.rank] * (32, 8)[env.rank] * 4
    half = copy.deepcopy(model)
    assert step_phases(half) == {}
    half(torch.ones(4, 3, dtype=torch.int64))
    assert list(step_phases(half)) == ["input a2a", "lookup fwd", "output a2a"]
    assert "grad a2a" in step_phases(model)
    assert "ms" in str(step_phases(model)) and "bytes" in str(step_phases(model))


def test_bytes_of_a_step_are_known_ones() -> None:
    run_ranks(2, _known)


def _profiled(kind: str) -> None:
    env, module = env_of("dp2"), make_module(kind)
    attach(module, "adagrad")
    layouts = [row_wise(), table_wise(1), column_wise([0, 1]), data_parallel(), row_wise()]
    plan = dict(zip((name for name, _ in module.named_parameters()), layouts, strict=False))
    model = DistributedModelParallel(module, env=env, plan=plan)
    loss_of(model(*make_batch(kind, env.rank, 0))).backward()  # first uses apart
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        loss = loss_of(model(*make_batch(kind, env.rank, 0)))
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        loss.backward()
    names = [{event.key for event in each.key_averages()} & {*PHASES} for each in (forward, backward)]
    assert names == [{*OF_TABLES[:3]}, {*OF_TABLES[3:]}]


@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_a_profile_has_the_phases_under_the_names_of_the_report(kind: str) -> None:
    run_ranks(2, _profiled, kind)


def test_modelled_seconds_stand_beside() -> None:
    module = nn.Sequential(nn.EmbeddingBag(10, 4, mode="sum"))
    attach(module, "sgd")
    model = DistributedModelParallel(module)
    model(torch.tensor([[1, 2]])).sum().backward()
    found = step_phases(nn.ModuleList([model]))
    assert list(found) == OF_TABLES and model.plan.report is not None
    modelled = dict(zip(model.plan.report.phases, model.plan.report.phase_seconds, strict=True))
    assert {name: of.modelled_seconds for name, of in found.items()} == {name: modelled[name] for name in found}
    assert all(of.modelled_bytes == of.sent_bytes == 0 for of in found.values())
    other = DistributedModelParallel(nn.EmbeddingBag(10, 4), plan={"weight": row_wise()})
    other.module.begin(torch.tensor([[1]]))  # type: ignore[operator]
    assert step_phases(other) == {} == step_phases(dmp.to_unsharded(other))


_SAMPLES = 1200


def _compared(layouts: dict[str, tuple[str, int, int]]) -> None:
    """Every kind of layout with short bags and long ones; gradients of dense weights are not among what is compared."""
    env = env_of("dp2")
    for layout, ids, rows in layouts.values():
        tables = nn.ModuleDict({f"t{i}": nn.EmbeddingBag(rows, 16, mode="sum") for i in range(6)})
        attach(tables, "sgd")

        class Summed(nn.Module):
            def __init__(self, tables: nn.ModuleDict) -> None:
                super().__init__()
                self.tables = tables

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                return sum(table(ids).sum() for table in self.tables.values())  # type: ignore[return-value]

        constraints = {"*": Constraint(layouts=[layout], pooling_factor=ids)}
        planner = ShardingPlanner(batch_size=_SAMPLES, constraints=constraints)
        model = DistributedModelParallel(Summed(tables), env=env, planner=planner)
        generator = torch.Generator().manual_seed(env.rank)
        each_as_often = torch.arange(_SAMPLES * ids) % 600
        model(each_as_often[torch.randperm(_SAMPLES * ids, generator=generator)].view(-1, ids)).backward()
        for name, of in step_phases(model).items():
            headers = 6 * 128  # of the six modules
            assert of.modelled_bytes == pytest.approx(of.sent_bytes, rel=0.03, abs=headers), (layout, ids, name, of)
        assert sum(of.sent_bytes for of in step_phases(model).values()) > 100 * headers


def test_modelled_bytes_are_those_that_are_sent() -> None:
    assert (BESIDE_BYTES, EVEN) == (touched_rows.BESIDE_BYTES, stages.EVEN)
    assert APART_BYTES == pooled.APART_BYTES
    assert MOST_FILLED == input_dist.MOST_FILLED
    kinds = ("table_wise", "row_wise", "column_wise", "data_parallel")
    cases = {f"{kind} {ids}": (kind, ids, 600) for kind in kinds for ids in (1, 5)}
    run_ranks(2, _compared, {**cases, "copies by rows": ("data_parallel", 1, 20_000)})
