"""What travels: the planner's model settles it by shapes, the data path by what batches bring; both by one rule.

Neither imports the other, so each has the rule for itself.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dmp
from dmp import Layout, ParameterInfo, ShardingEnv
from planner.costs import cost_model as model
from planner.costs.copies import Travel, each_by_rows, travel
from planner.costs.protocol import ShardInfo, ShardTable
from planner.costs.step import whole
from sharders.embedding.data_path.pooled import PooledPath
from sharders.embedding.exchange.placement import Placement, Table
from sharders.embedding.exchange.stages import TwoStages
from sharders.embedding.exchange.touched_rows import Touched, are_fewer, go_beside
from sharders.embedding.ids.input_dist import InputDist
from tests.planner_bags import hosts, one_axis

_SAMPLES = 1 << 22


def _info(rows: int, dim: int, dtype: torch.dtype = torch.float32) -> ParameterInfo:
    return ParameterInfo((rows, dim), dtype, "table", "sgd", state_bytes=(0.0, 0.0))


@pytest.mark.parametrize(
    "env", [one_axis(2), one_axis(8), hosts(2, 4), ShardingEnv.abstract((2, 4), ("replicate", "shard"))]
)
def test_how_gradients_of_copies_travel(env: ShardingEnv) -> None:
    """Of all copied tables together, some of which would travel otherwise by themselves."""
    rng = np.random.default_rng(env.size)
    is_flat = len(env.shape) == 1
    found, alone, samples = set(), set(), 1024
    for _ in range(400):
        dtype = torch.float64 if rng.random() < 0.2 else torch.bfloat16 if rng.random() < 0.3 else torch.float32
        item_bytes = max(4, dtype.itemsize)  # of what travels
        tables, copies, known, named = [], [], [], []
        most = rng.choice([10, 14, 18, 22])
        for i in range(rng.integers(1, 9)):
            rows, dim = int(2 ** rng.uniform(3, most)), int(rng.choice([4, 16, 64, 256]))
            ids = max(1, int(rows * rng.uniform(0.05, 1.2) / rng.choice([1, env.size])))
            tables.append(Table(f"t{i}", rows, dim, dtype, (f"f{i}",)))
            copies.append(bool(rng.random() < 0.7))
            known.append(whole(_info(rows, dim, dtype), ids / samples)._replace(replicated=copies[-1]))
            named.append(min(ids, rows))
        layouts = [dmp.data_parallel() if is_copied else dmp.row_wise() for is_copied in copies]
        placement = Placement(tables, layouts, env)
        of_copies = [(n, table.dim) for n, table, is_copied in zip(named, tables, copies, strict=True) if is_copied]
        touched = Touched(sum(n for n, _ in of_copies), sum(n * dim for n, dim in of_copies))
        theirs = None
        if of_copies:
            theirs = Travel.WHOLE
            if are_fewer(placement, [touched] * env.size, is_flat, item_bytes):
                come = env.size * (8 * touched.rows + item_bytes * touched.elements)
                theirs = _while_others_do(tables, copies, env, samples, item_bytes)
                theirs = theirs if go_beside(come, is_flat) else Travel.AFTER
        shards = ShardTable.of(known)
        ours = travel(shards, env, samples)
        assert ours is theirs, (tables, copies, named)
        assert model.CostModel().settled(shards, env, samples * env.tensor_size).travel is ours
        found.add(ours)
        if ours is not None:
            by_rows = each_by_rows(shards, samples * shards.ids_per_sample, env)[copies]
            alone.add((ours is Travel.WHOLE, bool(by_rows.all()), bool(by_rows.any())))
    meanwhile = {Travel.ALONE, Travel.BESIDE, Travel.ONLY}
    assert found >= {None, Travel.WHOLE, Travel.AFTER} | (meanwhile if is_flat else set())
    assert (True, False, True) in alone, "some would go by rows if they were alone"


def _while_others_do(
    tables: list[Table], copies: list[bool], env: ShardingEnv, samples: int, item_bytes: int
) -> Travel:
    columns = sum(table.dim for table, is_copied in zip(tables, copies, strict=True) if not is_copied)
    peers = SimpleNamespace(by_table_rank=[*range(env.table_size)])
    dtype = torch.float64 if item_bytes == 8 else torch.float32
    path: Any = SimpleNamespace(peers=peers, _sharded_columns=columns, dtype=dtype)
    call: Any = SimpleNamespace(samples=[samples] * env.table_size)
    if PooledPath._sends_apart(path, call):
        return Travel.ALONE if columns else Travel.ONLY
    return Travel.BESIDE


@pytest.mark.parametrize("env", [one_axis(2), one_axis(8), hosts(2, 4)])
def test_rows_of_one_copy(env: ShardingEnv) -> None:
    """Taken by itself, as by a model that is not settled, it travels as if it were the only one."""
    rng = np.random.default_rng(env.size)
    found = set()
    for _ in range(200):
        rows, dim, samples = int(2 ** rng.uniform(3, 22)), int(rng.choice([1, 4, 16, 64, 256])), 1 << 10
        ids = max(1, int(rows * rng.uniform(0.05, 1.2) / rng.choice([1, env.size])))
        shard = ShardTable.of([whole(_info(rows, dim), ids / samples)._replace(replicated=True)])
        (by_rows,) = each_by_rows(shard, samples * shard.ids_per_sample, env)
        assert by_rows == (travel(shard, env, samples) is not Travel.WHOLE)
        found.add(bool(by_rows))
    assert found == {False, True}


def _bag_counts(placement: Placement, ids: float) -> list[int]:
    """With ids, of each row block."""
    (blocks,), rows = placement.row_blocks, placement.tables[0].rows
    shares = np.array([(stop - start) / rows for start, stop in blocks])
    return [round(n) for n in _SAMPLES * np.where(ids > 1, 1 - (1 - shares) ** max(ids, 1), ids * shares)]


def _shards(placement: Placement, env: ShardingEnv, ids: float) -> ShardTable:
    table = placement.tables[0]
    inner = env.shape[-1]
    shards = placement.shards[0]
    found = []
    for shard in shards:
        on_host = sum(other.rank // inner == shard.rank // inner for other in shards)
        known = ShardInfo.of(
            _info(table.rows, table.dim), shard, ids, False, 1 / on_host if len(env.shape) > 1 else 1.0
        )
        found.append(known._replace(row_blocks=len(shards)))
    return ShardTable.of(found)


def _is_clear(placement: Placement, env: ShardingEnv, ids: float) -> bool:
    """Whether a few ids more or less change nothing."""
    few, many = (model.filled(_shards(placement, env, ids * by), env) < 1 for by in (0.97, 1.03))
    return bool((few == many).all())


def test_filled_bags_on_one_axis() -> None:
    rng = np.random.default_rng(0)
    found = set()
    for _ in range(200):
        size, rows, ids = int(rng.choice([2, 4, 8, 16])), int(2 ** rng.uniform(6, 20)), float(2 ** rng.uniform(-2, 6))
        env = one_axis(size)
        placement = Placement([Table("t", rows, 8, torch.float32, ("f",))], [dmp.row_wise()], env)
        if not _is_clear(placement, env, ids):
            continue
        bags = _bag_counts(placement, ids)
        of_path: Any = SimpleNamespace(_two_stages=None, _by_partials=True)
        theirs, _ = InputDist._settled(of_path, bags, _SAMPLES)
        ours = model.filled(_shards(placement, env, ids), env) < 1
        assert set(ours.tolist()) == {theirs}, (size, rows, ids)
        found.add(theirs)
    assert found == {False, True}


def test_bags_that_go_straight_between_hosts() -> None:
    """Plans count on what the data path does, where it gains clearly; and on no more."""
    rng = np.random.default_rng(0)
    found = set()
    for _ in range(150):
        num_hosts, inner = (int(rng.choice([2, 4, 8])) for _ in range(2))
        env, rows = hosts(num_hosts, inner), int(2 ** rng.uniform(8, 20))
        ids = float(rng.choice([0.3, 1, 1, 2, 5, 20, 60]))
        layout: Layout = dmp.row_wise() if rng.random() < 0.6 else dmp.table_row_wise(int(rng.integers(num_hosts)))
        placement = Placement([Table("t", rows, 8, torch.float32, ("f",))], [layout], env)
        if not _is_clear(placement, env, ids):
            continue
        shards, bags = _shards(placement, env, ids), _bag_counts(placement, ids)
        segments = [[slot.row_block for slot in of_rank] for of_rank in placement.slots]
        by_rank = [TwoStages(placement, me, inner, segments) for me in range(env.size)]
        theirs = all(is_all or bool(tables) for is_all, tables in (of.settle(bags, _SAMPLES, 0.7) for of in by_rank))
        part = model.with_ids(shards, 1 / shards.row_blocks)
        is_clear = (ids <= 1) | (model.CLEARLY * part <= shards.host_share)
        ours = model.goes_straight(shards, env)
        assert np.array_equal(ours, is_clear & theirs), (env.shape, layout, rows, ids)
        found |= {(theirs, bool(of)) for of in is_clear}
    assert len(found) >= 3
