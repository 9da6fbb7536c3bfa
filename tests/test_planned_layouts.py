"""What the planner chooses trains as one process: drawn tables, under drawn constraints, on real ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dmp import ShardingEnv
from tests.equality import MESHES
from tests.planned_jobs import drawn_tables, equals_unsharded, module_of, planned
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("mesh", "seeds", "optimizers"),
    [
        ("host2xlocal2", range(2, 3), ("adagrad",)),
        ("dp4", range(10, 11), ("rowwise_adagrad",)),  # rows over three ranks among it
        *(
            pytest.param(mesh, range(12), (None, "sgd", "adagrad", "rowwise_adagrad"), marks=pytest.mark.slow)
            for mesh in ("dp2", "dp4", "host2xlocal2", "replicate2xshard2")
        ),
    ],
    ids=str,
)
@pytest.mark.sampled(2)
def test_plans_train_as_one_process(
    mesh: str, seeds: range, optimizers: tuple[str | None, ...], tmp_path: Path
) -> None:
    """Also from a checkpoint that was saved under another plan."""
    failed = run_ranks(
        math.prod(MESHES[mesh][0]), equals_unsharded, mesh, seeds, optimizers, str(tmp_path), timeout=550
    )
    assert not any(failed), "\n".join(sorted({line for of_rank in failed for line in of_rank}))


@pytest.mark.slow
def test_what_is_drawn_has_every_layout() -> None:
    found: set[str] = set()
    for seed in range(24):
        env, tables = ShardingEnv.abstract((2, 2), ("host", "local"), "cpu"), drawn_tables(seed)
        plan = planned(module_of(tables, seed), tables, env, seed)
        found |= {entry.layout.name for entry in plan.values()}
        found |= {"uneven" for entry in plan.values() if "widths" in str(entry.layout)}
        shapes = {name: tuple(p.shape) for name, p in module_of(tables, seed).named_parameters()}
        for mesh in (env, ShardingEnv.abstract((4,), ("dp",), "cpu")):
            plan = planned(module_of(tables, seed), tables, mesh, seed)
            blocks = [{s.offsets[0] for s in plan[n].layout.shards(shape, mesh)} for n, shape in shapes.items()]
            found |= {f"{len(of)} row blocks on {len(mesh.shape)} axes" for of in blocks}
    assert "3 row blocks on 1 axes" in found, found
    assert found >= {"table_wise", "row_wise", "column_wise", "table_row_wise", "grid", "data_parallel"}, found
