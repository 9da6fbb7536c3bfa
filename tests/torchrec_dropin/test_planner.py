"""TorchRec's constraints, topology, reservations and planner, where ours are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dmp
from dmp import ShardingEnv
from planner import Constraint, ShardingPlanner, Topology, from_torchrec, propose_mesh
from tests.equality import make_module
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:HeuristicalStorageReservation is known to cause:FutureWarning")
GIB = 1 << 30


def _constraints(**options: Any) -> Any:
    from torchrec.distributed.planner.types import ParameterConstraints

    return ParameterConstraints(**options)


def _topology(**options: Any) -> Any:
    from torchrec.distributed.planner import Topology as Theirs

    return Theirs(**{"world_size": 4, "compute_device": "cpu", **options})


def test_constraints(caplog: pytest.LogCaptureFixture) -> None:
    from torchrec.distributed.types import ShardingType

    hosts = ShardingEnv.abstract((2, 2), ("host", "local"), "cpu")
    flat = ShardingEnv.abstract((4,), ("dp",), "cpu")
    kinds = ["table_row_wise", "table_column_wise", "column_wise", "grid_shard", "data_parallel"]
    theirs = _constraints(sharding_types=kinds, pooling_factors=[3.0, 1.5])
    theirs.compute_kernels, theirs.min_partition, theirs.enforce_hbm = ["fused", "fused_uvm"], 8, True
    assert from_torchrec(theirs, hosts) == Constraint(
        layouts=["table_row_wise", "column_wise", "grid", "data_parallel"],
        pooling_factor=[3.0, 1.5],
        kernel="fused",
        min_columns=8,
    )
    assert from_torchrec({"t": theirs}, flat)["t"].layouts == ("row_wise", "column_wise", "grid", "data_parallel")
    assert from_torchrec(_constraints()) == Constraint()
    as_enum = _constraints(sharding_types=[ShardingType.ROW_WISE, ShardingType.TABLE_COLUMN_WISE])
    assert from_torchrec(as_enum).layouts == ("row_wise", "column_wise")
    assert from_torchrec(_constraints(pooling_factors=[7.0])).pooling_factor == 7.0
    assert "ParameterConstraints: ['enforce_hbm'] mean nothing" in caplog.text
    assert "['fused', 'fused_uvm'] only ['fused', 'dense']" in caplog.text
    assert from_torchrec(_constraints(compute_kernels=["fused", "dense"])).kernel is None
    assert caplog.text.count("mean nothing") == 1


def test_figures_of_a_topology() -> None:
    """Bytes per millisecond there, per second here."""
    cuda = ShardingEnv.abstract((2, 8), ("host", "local"), "cuda")
    theirs = _topology(
        world_size=16,
        compute_device="cuda",
        hbm_cap=80 * GIB,
        local_world_size=8,
        intra_host_bw=6e8,
        inter_host_bw=2.5e7,
    )
    ours = from_torchrec(theirs, cuda)
    assert ours.memory_bytes == 80 * GIB and ours.memory_bandwidth == pytest.approx(897 * GIB)
    assert ours.link_bandwidth == pytest.approx((2.5e10, 6e11))
    assert (ours.flops, ours.link_latency) == (Topology.of(cuda).flops, Topology.of(cuda).link_latency)
    four = ShardingEnv.abstract((4,), ("dp",), "cpu")
    ours = from_torchrec(_topology(ddr_cap=2 * GIB, ddr_mem_bw=5e7), four)
    assert (ours.memory_bytes, ours.memory_bandwidth) == (2 * GIB, 5e10)
    with pytest.raises(ValueError, match=r"torchrec.distributed.planner.types.Topology is of 4 ranks on 'cpu'"):
        from_torchrec(_topology(), cuda)
    with pytest.raises(ValueError, match=r"from_torchrec\(topology, env\)"):
        from_torchrec(_topology())
    with pytest.raises(ValueError, match="got int"):
        from_torchrec(3)


def _theirs(**options: Any) -> Any:
    from torchrec.distributed.planner import EmbeddingShardingPlanner

    return EmbeddingShardingPlanner(topology=_topology(ddr_cap=GIB), **options)


def test_reservations() -> None:
    from torchrec.distributed.planner.storage_reservations import (
        FixedAbsoluteStorageReservation,
        FixedPercentageStorageReservation,
        HeuristicalStorageReservation,
    )

    env = ShardingEnv.abstract((4,), ("dp",), "cpu")
    module = make_module("ebc")
    for reservation, fraction in (
        (FixedPercentageStorageReservation(0.4), 0.4),
        (FixedAbsoluteStorageReservation(GIB // 4), 0.25),
        (HeuristicalStorageReservation(0.05), 0.05),
        (HeuristicalStorageReservation(0.05, dense_tensor_estimate=GIB // 2), 0.55),
    ):
        ours = from_torchrec(_theirs(storage_reservation=reservation, batch_size=64))
        assert isinstance(ours, ShardingPlanner) and ours.batch_size == 64
        ours.plan(module, dmp.default_sharders(), env)
        assert ours.report.usable_bytes == pytest.approx(GIB * (1 - fraction))


def _wrapped() -> list[str]:
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)  # type: ignore[arg-type]
    kinds = {"t0": "row_wise", "t2": "table_wise", "t3": "column_wise"}
    constraints = {name: _constraints(sharding_types=[kind]) for name, kind in kinds.items()}
    topology = _topology(world_size=env.size)
    from torchrec.distributed.planner import EmbeddingShardingPlanner

    planners = [
        EmbeddingShardingPlanner(topology=topology, constraints=constraints),
        ShardingPlanner(topology=topology, constraints=constraints),
    ]
    found = []
    for planner in planners:
        model = dmp.DistributedModelParallel(make_module("ebc"), planner=planner)
        found.append(",".join(model.plan[f"embedding_bags.{name}.weight"].layout.name for name in kinds))
    return found


def test_torchrecs_planner_in_the_wrapper() -> None:
    assert run_ranks(2, _wrapped) == [["row_wise,table_wise,column_wise"] * 2] * 2


def _collection(rows: int = 1000, dim: int = 64) -> Any:
    import torchrec

    config = {"num_embeddings": rows, "embedding_dim": dim}
    tables = [torchrec.EmbeddingBagConfig(name=f"t{i}", feature_names=[f"f{i}"], **config) for i in range(4)]
    return torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def test_planning_with_their_sharders() -> None:
    """On a mesh that is not here: what a sharder's types and constraints leave is planned."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    class RowsOrWhole(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return ["row_wise", "table_wise"]

    two, hosts = ShardingEnv.abstract((2,), ("dp",), "cpu"), ShardingEnv.abstract((2, 4), ("host", "local"), "cpu")
    planner = ShardingPlanner(_topology(world_size=2), batch_size=64)
    plan = planner.plan(_collection(), [RowsOrWhole()], two)
    assert {entry.layout.name for entry in plan.values()} <= {"row_wise", "table_wise"}
    assert planner.report is not None and planner.report.parameters[0].alternatives  # their enumerator's options
    with pytest.raises(dmp.PlanError, match=r"does not fit.*bytes \(.*\) short") as caught:
        planner.plan(_collection(10**9, 1 << 20), [RowsOrWhole()], two)
    assert caught.value.bytes_short
    for kinds, env, names in (
        (["column_wise"], two, {"column_wise"}),
        (["grid_shard"], hosts, {"grid"}),
        (["table_row_wise"], hosts, {"table_row_wise"}),
    ):
        constraints = {f"t{i}": _constraints(sharding_types=kinds, min_partition=32) for i in range(4)}
        plan = ShardingPlanner(constraints=constraints).plan(_collection(), [EmbeddingBagCollectionSharder()], env)
        assert {entry.layout.name for entry in plan.values()} == names


def test_constraints_of_any_mesh() -> None:
    """Where meshes are proposed too; a type that a table of six columns does not allow is one of several."""
    constraints = {"t*": _constraints(sharding_types=["column_wise", "table_row_wise", "table_wise"])}
    found = propose_mesh(_collection(dim=6), 4, constraints=constraints, device_type="cpu")
    assert ("dp",) in {proposal.axes for proposal in found}


def test_what_a_planner_is_not_asked_with() -> None:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as Theirs

    env = ShardingEnv.abstract((2,), ("dp",), "cpu")
    for asked in (ShardingPlanner().plan, ShardingPlanner().collective_plan):
        with pytest.raises(ValueError, match=r"expected env to be a dmp\.ShardingEnv; got None\. ShardingEnv\.from_"):
            asked(_collection(), [Theirs()], None)  # type: ignore[arg-type, list-item]
    with pytest.raises(dmp.ShardError, match=r"got the class EmbeddingBagCollectionSharder: call it"):
        ShardingPlanner().plan(_collection(), [Theirs], env)  # type: ignore[list-item]
    for kind, offered in (("grid_shard", "'grid'; .* offers"), ("nope", "'nope'; .* offers")):
        planner = ShardingPlanner(constraints={"t1": _constraints(sharding_types=[kind])})
        with pytest.raises(dmp.PlanError, match=offered):
            planner.plan(_collection(), [Theirs()], env)
