"""The planner's model of a step: what costs add up to, on which ranks, and beside a model that is really there."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import dmp
from dmp import (
    Layout,
    ParameterInfo,
    ShardingEnv,
    column_wise,
    data_parallel,
    grid,
    row_wise,
    table_row_wise,
    table_wise,
)
from planner import Constraint, CostModel, ShardingPlanner, Topology
from planner.costs.copies import each_by_rows
from planner.costs.cost_model import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    GRADIENT_OUTER,
    OUTPUT_OUTER,
    PHASES,
    SYNC,
)
from planner.costs.protocol import ALL_REDUCE, BYTES, SPLIT, ShardTable, setups_of
from planner.costs.speeds import Speeds
from planner.costs.step import Placed, loads, phase_seconds, whole
from sharders import default_sharders
from tests.planner_bags import MEASURED, BagSharder, bags, hosts, one_axis
from tests.ranks import mesh, run_ranks

ENVS = (one_axis(8), hosts(2, 4), ShardingEnv.abstract((2, 4), ("replicate", "shard")))


def info(rows: int, dim: int, **known: object) -> ParameterInfo:
    return ParameterInfo((rows, dim), torch.float32, "table", "rowwise_adagrad", state_bytes=(0.0, 4.0), **known)  # type: ignore[arg-type]


@pytest.mark.parametrize("env", ENVS, ids=str)
@pytest.mark.parametrize("topology", [MEASURED, Topology(1e10, 1e12, 1e13, 1e11, 1e-5)], ids=["measured", "usual"])
def test_costs_are_affine_in_columns(env: ShardingEnv, topology: Topology) -> None:
    rng = np.random.default_rng(0)
    n = 40
    flags = [rng.integers(0, 2, n).astype(bool) for _ in range(3)]
    rows = rng.integers(1, 10_000, n).astype(float)
    shares = rng.choice([1.0, 0.5, 0.0], n)
    shards = ShardTable.from_columns(
        *(rows, 64.0, rows * 2, 4.0, rng.uniform(1, 20, n), 2.0, flags[0], True, flags[1], rng.choice([0.0, 4.0], n)),
        *(4.0, flags[2], shares, rng.choice([1.0, 0.25], n), rng.choice([0.0, 100.0], n)),
        *(rng.choice([0.0, 8.0], n), rng.choice([0.0, 50.0], n), rng.integers(0, 2, n).astype(bool)),
    )
    widths = [replace(shards, columns=np.full(n, width)) for width in (4.0, 32.0, 100.0)]
    own_ids = 64 / env.tensor_size * shards.ids_per_sample * shards.row_share
    by_rows = np.stack([each_by_rows(wide, own_ids, env) for wide in widths])
    alike = (by_rows == by_rows[0]).all(0)  # copies are never cut: one that is as wide sends something else
    assert alike.mean() > 0.8
    at = [np.stack(CostModel().costs(wide, env, topology, 64))[:, alike] for wide in widths]
    assert np.allclose(at[1], at[0] + (at[2] - at[0]) * 28 / 96, rtol=1e-12, atol=0)
    assert at[0].shape == (2, alike.sum(), len(PHASES) + 1)
    assert all((of >= 0).all() for of in at)


@pytest.mark.parametrize("env", ENVS, ids=str)
def test_where_few_rows_have_the_ids_fewer_are_read_and_updated(env: ShardingEnv) -> None:
    of_table = whole(info(100_000, 64), 8.0)
    halved = of_table._replace(rows=50_000, row_share=0.5)
    kinds = [of_table, halved, of_table._replace(replicated=True)]
    guessed, all_rows, few = (
        CostModel().costs(ShardTable.of([kind._replace(named_rows=n) for kind in kinds]), env, MEASURED, 512)[0]
        for n in (0.0, 1e6, 500.0)
    )
    assert np.array_equal(guessed, all_rows)
    changed = few < 0.98 * guessed
    assert changed[:, [FORWARD, BACKWARD]].all()
    rest = [i for i in range(guessed.shape[1]) if i not in (FORWARD, BACKWARD)]
    assert np.array_equal(few[:2, rest], guessed[:2, rest])
    assert (few[2] <= guessed[2]).all() and few[2, [GRADIENT, SYNC]].sum() < guessed[2, [GRADIENT, SYNC]].sum()
    assert few[1, FORWARD] < 0.75 * few[0, FORWARD], "a block has its part of them"


@pytest.mark.parametrize("env", ENVS, ids=str)
def test_a_block_whose_rows_nobody_names_is_still_told_so(env: ShardingEnv) -> None:
    """It gets the lengths of all bags; a block of no rows is none."""
    half = whole(info(100_000, 64), 1.0)._replace(rows=50_000)
    blocks = [half._replace(row_share=share) for share in (1e-9, 0.0)]
    blocks.append(half._replace(rows=0, row_share=0.0))
    local, everywhere = CostModel().costs(ShardTable.of(blocks), env, MEASURED, 512)
    for of in (local, everywhere):
        assert of[1, :-1] == pytest.approx(of[0, :-1], rel=1e-6)
    assert everywhere[1, 0] > 0 and not local[2, :-1].any() and not everywhere[2, :-1].any()


def test_row_blocks_and_copies_of_each_width_are_a_run() -> None:
    def seconds(kind: int, env: ShardingEnv, *dims: int) -> float:
        setups = setups_of(CostModel(), env, MEASURED, [info(1000, dim) for dim in dims])
        assert len(setups) == 6
        return float(setups[kind].sum())

    alone, on_hosts = ENVS[0], ENVS[1]
    for kind, width in ((SPLIT, 3.3e-4), (ALL_REDUCE, 2e-4)):
        assert seconds(kind, alone, 16, 64, 32, 64) == pytest.approx(seconds(kind, alone, 64, 64) + 2 * width)
    of_split = [seconds(SPLIT, on_hosts, *dims) for dims in ((16, 64, 32, 64), (64,))]
    assert of_split[0] == of_split[1], "ranks of a host add up bags of all widths together"


def test_what_partial_bags_and_copies_take_besides() -> None:
    """Partial bags are added up, by byte; what there is of copies is paid instead of what is of tables."""
    nothing = replace(MEASURED, speeds=Speeds(), link_latency=0.0, link_bandwidth=1e30)
    some = replace(nothing, speeds=Speeds(place_part=1e-9, pack_part=2e-9, group=1e-3, split=2e-3, copies=5e-3))

    def seconds(layout: Layout, ids: float) -> float:
        return float(phase_seconds(CostModel(), [Placed(info(1000, 64), layout, ids)], ENVS[0], some, 16).sum())

    bag_bytes = 16 * 64 * 4
    assert seconds(table_wise(0), 1.0) == pytest.approx(1e-3)
    assert seconds(row_wise(), 100.0) == pytest.approx(3e-3), "all bags travel, and are added where they are placed"
    assert seconds(row_wise(), 1.0) == pytest.approx(3e-3 + 3e-9 * bag_bytes)
    assert seconds(data_parallel(), 1.0) == pytest.approx(5e-3)


@pytest.mark.parametrize("env", [hosts(2, 4), one_axis(2)], ids=str)
def test_a_shard_costs_the_same_whatever_else_is_asked(env: ShardingEnv) -> None:
    """Else plans, and bounds, would be of what was asked about and not of what was chosen."""
    copies = [whole(info(rows, 64), 1.0)._replace(replicated=True) for rows in (300, 400, 5_000, 100_000)]
    shards = [*copies, *(of._replace(replicated=False) for of in copies)]
    alone = [CostModel().costs(ShardTable.of([of]), env, MEASURED, 512) for of in shards]
    together = CostModel().costs(ShardTable.of(shards), env, MEASURED, 512)
    for by_shard, of_all in zip(zip(*alone, strict=True), together, strict=True):
        assert np.array_equal(np.concatenate(by_shard), of_all)


def test_planned_is_pinned_where_some_tables_are_copied() -> None:
    """Small ones, whose gradients travel whole, beside large ones, that might be copied and of which rows would."""
    env, sizes = one_axis(8), (5_000_000, *10 * (500,))
    only = [{}, *10 * ({"layouts": "data_parallel"},)]
    given = {f"t{i}.weight": Constraint(pooling_factor=20, **of) for i, of in enumerate(only)}
    module = nn.ModuleDict({f"t{i}": nn.EmbeddingBag(n, 64, mode="sum", device="meta") for i, n in enumerate(sizes)})
    planner = ShardingPlanner(batch_size=1024, constraints=given)
    plan = planner.plan(module, default_sharders(), env)
    assert {str(entry.layout) for entry in plan.values()} > {"data_parallel()"}
    pinned = planner.plan(module, default_sharders(), env, pinned=plan)
    assert pinned.report.step_seconds == pytest.approx(plan.report.step_seconds, rel=1e-9)
    assert plan.report.lower_bound <= pinned.report.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("env", [hosts(2, 4), one_axis(8)], ids=str)
@pytest.mark.parametrize("kinds", ["t", "r", "d", "tr", "td", "trchgd"])
def test_a_plans_phases_are_the_sum_of_its_shards(env: ShardingEnv, kinds: str) -> None:
    known_layouts: dict[str, Layout] = {
        "t": table_wise(5),
        "r": row_wise(),
        "c": column_wise([0, 5]),
        "h": table_row_wise(1),
        "g": grid([[0, 4], [1, 5], [2, 6], [3, 7]]),
        "d": data_parallel(),
    }
    kinds = kinds if len(env.table_shape) > 1 else kinds.replace("g", "c").replace("h", "r")  # what the sharder runs
    layouts = {f"t{i}": known_layouts[kind] for i, kind in enumerate(kinds)}
    module = bags(*((1000 + i, 64) for i in range(len(kinds))))
    planner = ShardingPlanner(MEASURED, batch_size=256)
    planner.plan(module, [BagSharder()], env, {f"{name}.weight": layout for name, layout in layouts.items()})
    found = BagSharder().parameters(module["t0"])["weight"]  # type: ignore[arg-type]
    infos = [ParameterInfo((1000 + i, 64), torch.float32, "table", found.optimizer) for i in range(len(kinds))]
    placed = [Placed(i, layout, 1.0) for i, layout in zip(infos, layouts.values(), strict=True)]
    assert planner.report is not None
    known = by_name(phase_seconds(CostModel(), placed, env, MEASURED, 256))
    said = dict.fromkeys(known, 0.0)
    for name, seconds in zip(planner.report.phases, planner.report.phase_seconds, strict=True):
        if name in said:
            said[name] += seconds
    del said["lookup bwd"], known["lookup bwd"]  # the planner knows the optimizer's state, which nobody told here
    assert said == pytest.approx(known, rel=1e-4)  # the last row block is shorter


def test_groups_of_tables_are_paid_once_each() -> None:
    """Tables of whole rows, of row blocks and copies are looked up apart, but for hosts, whose ranks add bags up."""
    of_copies = {"copies": 1e-4, "copies_results": 3e-4, "copies_gradients": 2e-4}
    nothing = replace(Speeds(), group=1e-4, group_results=3e-4, group_gradients=2e-4, **of_copies)
    topology = replace(MEASURED, speeds=nothing, link_latency=0.0, link_bandwidth=1e30)
    each = [table_wise(1), column_wise([2, 3]), row_wise(), row_wise(), data_parallel()]
    for env, groups in ((one_axis(8), 3), (hosts(2, 4), 1)):
        placed = [Placed(info(1000, 64), layout, 1.0) for layout in each]
        assert phase_seconds(CostModel(), placed, env, topology, 16).sum() == pytest.approx(groups * 6e-4)
        assert phase_seconds(CostModel(), placed[:2], env, topology, 16).sum() == pytest.approx(6e-4)


LATENCY = 1e-3


@pytest.mark.parametrize(
    ("env", "copies", "whole"),
    [
        (one_axis(8), 2 * 3, 4 * 3),  # a header and the gradients; ids and results too
        (hosts(2, 4), 2 * 3, 2 * 3 + 2 * (2 + 1)),  # rows of copies go by themselves; results and gradients by stages
        (ShardingEnv.abstract((2, 4), ("replicate", "shard")), 2 * 3, 2 * 3 + 2 * 2 + 1),
        (one_axis(1), 0, 0),
    ],
    ids=str,
)
def test_latencies_are_of_the_exchanges_that_are_made(env: ShardingEnv, copies: int, whole: int) -> None:
    """Copies alone send no ids and get no results; `test_collectives` counts what there is."""
    topology = Topology(1e10, 1e30, 1e30, link_bandwidth=1e30, link_latency=LATENCY)

    def latencies(*layouts: Layout, samples: int = 16) -> float:
        placed = [Placed(info(1000, 64), layout, 1.0) for layout in layouts]
        return float(phase_seconds(CostModel(), placed, env, topology, samples).sum()) / LATENCY

    assert latencies(data_parallel(), data_parallel()) == pytest.approx(copies)
    assert latencies(table_wise(0)) == pytest.approx(whole)
    is_flat, each = env.size == 1 or env.shape == (8,), 0 if env.size == 1 else 3
    beside = 0 if is_flat else each  # an exchange of their own
    assert latencies(table_wise(0), data_parallel()) == pytest.approx(whole + beside)
    # Many rows are summed as whole tables; where they may travel while others do, these have an exchange to themselves.
    many = each if is_flat else 2 * each
    assert latencies(table_wise(0), data_parallel(), samples=1 << 13) == pytest.approx(whole + many)


def test_bags_that_go_straight_between_hosts_are_an_exchange_over_all_ranks() -> None:
    """It travels beside the two stages of others, and takes longer, however little there is."""
    topology = Topology(1e10, 1e30, 1e30, link_bandwidth=1e30, link_latency=(2 * LATENCY, LATENCY))

    def latencies(*placed: tuple[Layout, float]) -> float:
        tables = [Placed(info(1000, 64), layout, ids) for layout, ids in placed]
        known = float(phase_seconds(CostModel(), tables, hosts(2, 4), topology, 16).sum())
        planner = ShardingPlanner(
            topology,
            batch_size=16,
            constraints={f"t{i}*": Constraint(pooling_factor=ids) for i, (_, ids) in enumerate(placed)},
        )
        pinned = {f"t{i}.weight": layout for i, (layout, _) in enumerate(placed)}
        planner.plan(bags(*[(1000, 64)] * len(placed)), [BagSharder()], hosts(2, 4), pinned)
        assert planner.report is not None
        assert planner.report.step_seconds == pytest.approx(known)
        return known / LATENCY

    ids, results = 2 * 3 * 2, 2 * (2 + 2)
    assert latencies((table_wise(0), 1.0)) == pytest.approx(ids + results)
    assert latencies((row_wise(), 100.0)) == pytest.approx(ids + results)
    assert latencies((row_wise(), 1.0)) == pytest.approx(ids + 2 * 3 * 2)
    assert latencies((row_wise(), 1.0), (table_wise(0), 1.0)) == pytest.approx(ids + 2 * 3 * 2)


def test_few_small_tables_are_copied_where_that_saves_exchanges() -> None:
    """All of them, and no plan that copies only some is taken for as good; larger ones are sharded as before."""
    topology = Topology(1e10, 1e11, 1e12, link_bandwidth=1e10, link_latency=1e-3)
    for rows, names in ((500, {"data_parallel"}), (5_000_000, {"column_wise", "row_wise", "table_wise"})):
        planner = ShardingPlanner(topology, batch_size=64)
        plan = planner.plan(bags(*[(rows, 64)] * 3), dmp.default_sharders(), one_axis(4))
        assert {entry.layout.name for entry in plan.values()} <= names
        assert planner.report is not None and planner.report.gap < 0.05


@pytest.mark.parametrize("env", [one_axis(4), hosts(2, 2)], ids=str)
@pytest.mark.sampled(2)
def test_pieces_of_columns_cost_as_much_planned_as_pinned(env: ShardingEnv) -> None:
    """Ids go to every piece of a cut: what that takes where samples are is counted for each."""
    module, sharders = bags((5003, 256), (5003, 260), (77, 128)), dmp.default_sharders()
    constraints = {"*": Constraint(forbid=["row_wise", "data_parallel"], min_columns=16, pooling_factor=20)}
    planner = ShardingPlanner(MEASURED, constraints, batch_size=2048)
    plan = planner.plan(module, sharders, env)
    assert "column_wise" in {entry.layout.name for entry in plan.values()}
    planned = planner.report.phase_seconds  # type: ignore[union-attr]
    pinned = ShardingPlanner(MEASURED, constraints, batch_size=2048).plan(module, sharders, env, plan).report
    assert planned == pytest.approx(pinned.phase_seconds, rel=1e-9)  # type: ignore[union-attr]


def by_name(seconds: np.ndarray) -> dict[str, float]:  # type: ignore[type-arg]
    found = dict.fromkeys(PHASES, 0.0)
    for name, of_phase in zip(PHASES, seconds.tolist(), strict=True):
        found[name] += of_phase
    return found


def test_a_host_sends_what_lies_on_it_once() -> None:
    """Whole on a rank, or long bags in row blocks over the host's ranks: the sums that leave the host are the same."""
    env = hosts(2, 4)
    assert CostModel().spans(env).tolist() == [4 if i in (OUTPUT_OUTER, GRADIENT_OUTER) else 1 for i in range(8)]
    assert CostModel().spans(one_axis(8)).max() == 1
    plain = Topology(1e10, 1e30, 1e30, 1e9, 0.0)  # nothing but the links
    whole, cut = (
        loads(CostModel(), [Placed(info(1000, 64), layout, 20.0)], env, plain, 128)
        for layout in (table_wise(6), table_row_wise(1))
    )
    for phase in (OUTPUT_OUTER, GRADIENT_OUTER):
        assert whole[:, phase] == pytest.approx(cut[:, phase])
        assert whole[:4, phase].max() < 1e-12 < whole[4:, phase].min()
        bag_bytes = 8 * 128 * 64 * 4
        assert whole[4, phase] == pytest.approx(bag_bytes / 4 / 2 / 1e9)


def test_a_shard_without_rows_costs_nothing() -> None:
    cost = loads(CostModel(), [Placed(info(3, 64), row_wise(), 1.0)], one_axis(8), MEASURED, 128)
    assert (cost[3:] == cost[3]).all()
    assert (cost[:3, BYTES] > cost[3, BYTES]).all()
    assert cost[3, 1] == 0  # looks nothing up


@pytest.mark.parametrize("name", ["lookup_row", "step"])
def test_speeds_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=rf"Speeds\.{name} must be \[?seconds.*, none below 0; got"):
        Speeds(**{name: -1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Speeds"):
        Topology(1, 1, 1, 1, 0, speeds=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("figure", [float("inf"), 1e-300], ids=str)
def test_figures_that_no_machine_has_are_named(figure: float) -> None:
    usual = {"memory_bytes": 1e9, "memory_bandwidth": 1e12, "flops": 1e13, "link_bandwidth": 1e11, "link_latency": 0.0}
    for name in usual:
        with pytest.raises(ValueError, match=rf"Topology\.{name} must be from 1e-15 to 1e\+30; got {figure}"):
            Topology(**{**usual, name: figure})


# Beside a model that is there

LAYOUTS: tuple[Layout, ...] = (
    *(table_wise(0), table_wise(1), row_wise(), column_wise([0, 1]), column_wise([1, 0], widths=[16, 16])),
    data_parallel(),
)
SHAPES = ((101, 16), (64, 32), (333, 8), (50, 64), (77, 32), (20, 16))
STATES = {"sgd": (0.0, 0.0), "adagrad": (4.0, 0.0), "rowwise_adagrad": (0.0, 4.0)}


@mock.patch.dict(os.environ, DMP_SHARED_MEMORY="0")  # the profiler sees what the allocator gives alone
def held_bytes(kind: str, batch_size: int) -> tuple[int, int]:
    """On each rank: bytes of tables with their state; the most that a step has in memory besides."""
    import torchrec

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its package scripts functions
        from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    tables = [
        torchrec.EmbeddingBagConfig(name=f"t{i}", num_embeddings=n, embedding_dim=d, feature_names=[f"f{i}"])
        for i, (n, d) in enumerate(SHAPES)
    ]
    module = torchrec.EmbeddingBagCollection(tables=tables)
    optimizers = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}
    _apply_optimizer_in_backward(optimizers[kind], module.parameters(), {"lr": 0.1})
    plan = dict(zip([name for name, _ in module.named_parameters()], LAYOUTS, strict=True))
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    model = dmp.DistributedModelParallel(module, env=env, plan=plan)
    banks = [tbe.bank for tbe in model.module._engine.store.tbes]  # type: ignore[union-attr]
    held = sum(t.nbytes for bank in banks for t in (bank.weights, *bank.state.values()))

    def step() -> None:
        values = torch.cat([torch.randint(0, n, (batch_size,)) for n, _ in SHAPES])
        keys = [f"f{i}" for i in range(len(SHAPES))]
        lengths = torch.ones(len(values), dtype=torch.int64)
        out = model(torchrec.KeyedJaggedTensor(keys=keys, values=values, lengths=lengths)).values()
        out.backward(torch.randn_like(out))

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return held, int(np.cumsum([size for _, size in changes]).max())


@pytest.mark.slow
@pytest.mark.parametrize("kind", STATES)
def test_memory_beside_a_real_model(kind: str) -> None:
    """Weights and optimizer state to the byte, what comes and goes with a step within a third."""
    batch_size = 4096
    env = ShardingEnv.abstract((2,), ("dp",), "cpu")
    placed = [
        Placed(ParameterInfo(shape, torch.float32, "table", kind, state_bytes=STATES[kind]), layout, 1.0)
        for shape, layout in zip(SHAPES, LAYOUTS, strict=True)
    ]
    at_rest, running = (loads(CostModel(), placed, env, MEASURED, b)[:, BYTES] for b in (0, batch_size))
    gradient = 20 * 16 * 4  # the data-parallel table's, whole; of a batch without ids no rows travel
    for rank, (held, peak) in enumerate(run_ranks(2, held_bytes, kind, batch_size)):
        assert at_rest[rank] - gradient == held
        assert 0.75 < (running[rank] - held) / peak < 1.34
