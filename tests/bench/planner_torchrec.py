"""TorchRec's planner on the same cases: its plans, kept in a file, and its model's costs as a problem for our search.

Run as a program it plans the cases below with TorchRec's own planner, default settings, each in a process of its own,
and writes the plans that it finishes within a limit: they are the same on every machine.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import resource
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from time import process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from dmp import ShardingPlan
from planner.search import Infeasible, Item, Option, Problem, search
from tests.bench.planner_cases import BATCH, PER_HOST, WORKLOADS, TableSet, mesh, table_set

PLANS = WORKLOADS / "torchrec_plans.json"
LIMIT_S = 200  # of processor time
TRIED = {
    "mlperf_dcnv2": (8, 16, 64, 128, 512),
    "nv_small": (8, 16),
    "random_40": (8, 16, 64, 128),
    "random_60_wide": (16,),
    "random_120_tight": (8, 16),
}


@dataclass(frozen=True)
class Theirs:
    """A plan of TorchRec's planner.

    Args:
        plan: with its rectangles.
        step_ms: by its own model.
        seconds: of the processor that it took.
    """

    plan: ShardingPlan
    step_ms: float
    seconds: float


def their_plan(tables: str, ranks: int) -> Theirs | None:
    """From the file; None where it had none within the limit."""
    found = _kept().get(f"{tables} @ {ranks}", {})
    if "plan" not in found:
        return None
    return Theirs(ShardingPlan.from_json(json.dumps(found["plan"])), found["step_ms"], found["seconds"])


@cache
def _kept() -> Mapping[str, Any]:
    kept: dict[str, Any] = json.loads(PLANS.read_text()) if PLANS.exists() else {}
    return kept


def our_step_ms(tables: TableSet, ranks: int, module: Any) -> float:
    """What our search makes of TorchRec's model: the busiest rank's sum, in its milliseconds.

    Only options that keep weights in the device's memory are searched.
    """
    planner = _planner(tables, ranks)
    topology = planner._storage_reservation.reserve(
        topology=planner._topology, batch_size=BATCH, module=module, sharders=_sharders()
    )
    options: dict[str, list[Option]] = {}
    for option in enumerated(tables, ranks, module):
        if option.compute_kernel in ("fused", "dense"):
            options.setdefault(option.name, []).append(_as_ours(option, ranks))
    capacity = np.array([device.storage.hbm for device in topology.devices], dtype=float)
    items = tuple(Item(tuple(of_table)) for of_table in options.values())
    try:
        return search(Problem(items, capacity, np.zeros((ranks, 2)), np.zeros((1, 1)))).seconds
    except Infeasible:
        return float("inf")


def _as_ours(option: Any, ranks: int) -> Option:
    """Blocks of a rank, of a host, or of all: of how many consecutive ranks the shards go on together."""
    loads = np.array([[s.perf.total, s.storage.hbm] for s in option.shards], dtype=float)
    size = {"uniform": ranks, "host": PER_HOST, "multi_host": PER_HOST}.get(option.partition_by, 1)
    if option.sharding_type == "table_column_wise":  # anywhere on a host: as column-wise, here alone
        size = 1
    return Option(loads.reshape(-1, size, 2), np.zeros(2))


def enumerated(tables: TableSet, ranks: int, module: Any) -> Iterable[Any]:
    """TorchRec's sharding options; shards of one size are estimated once, which gives the same figures to the bit."""
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

    class Once(EmbeddingEnumerator):
        def populate_estimates(self, sharding_options: list[Any]) -> None:
            every = [option.shards for option in sharding_options]
            for option in sharding_options:
                option.shards = list({tuple(shard.size): shard for shard in option.shards}.values())
            super().populate_estimates(sharding_options)
            for option, shards in zip(sharding_options, every, strict=True):
                estimated = {tuple(shard.size): shard for shard in option.shards}
                for shard in shards:
                    like = estimated[tuple(shard.size)]
                    shard.perf, shard.storage = like.perf, like.storage
                option.shards = shards

    found: Iterable[Any] = Once(_topology(ranks), BATCH, _constraints(tables)).enumerate(module, _sharders())
    return found


def _topology(ranks: int) -> Any:
    """The H100 boxes of `Topology.of`, in bytes per millisecond."""
    from torchrec.distributed.planner import Topology

    return Topology(
        world_size=ranks,
        compute_device="cuda",
        hbm_cap=int(80e9),
        ddr_cap=int(256e9),
        local_world_size=PER_HOST,
        hbm_mem_bw=2.5e12 / 1000,
        intra_host_bw=450e9 / 1000,
        inter_host_bw=50e9 / 1000,
    )


def _constraints(tables: TableSet) -> dict[str, Any]:
    from torchrec.distributed.planner.types import ParameterConstraints

    return {f"t{i}": ParameterConstraints(pooling_factors=list(t.pooling)) for i, t in enumerate(tables.tables)}


def _sharders() -> list[Any]:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    return [EmbeddingBagCollectionSharder()]


def _planner(tables: TableSet, ranks: int) -> Any:
    from torchrec.distributed.planner import EmbeddingShardingPlanner

    return EmbeddingShardingPlanner(
        topology=_topology(ranks), batch_size=BATCH, constraints=_constraints(tables), debug=False
    )


def _child(there: Connection, tables: TableSet, ranks: int, module: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 10))
    planner = _planner(tables, ranks)
    begin = process_time()
    try:
        plan = planner.plan(module, _sharders())
    except Exception as error:
        there.send({"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"})
        return
    seconds, sums = process_time() - begin, [0.0] * ranks
    for option in planner._best_plan:
        for shard in option.shards:
            sums[shard.rank] += shard.perf.total
    theirs = ShardingPlan.from_torchrec(plan, module, mesh(ranks))
    layouts = ShardingPlan({name: entry.layout for name, entry in theirs.items()})
    kernels = sorted({option.compute_kernel for option in planner._best_plan})
    found = {"step_ms": max(sums), "seconds": round(seconds, 1), "kernels": kernels}
    there.send({**found, "plan": json.loads(layouts.to_json())})


def main() -> None:
    """Plan every case in `TRIED`, or those of the sets named, and write the file."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    kept = dict(_kept())
    context = multiprocessing.get_context("fork")
    for name in sys.argv[1:] or TRIED:
        tables = table_set(name)
        module = tables.module()
        for ranks in TRIED[name]:
            here, there = context.Pipe(duplex=False)
            child = context.Process(target=_child, args=(there, tables, ranks, module))
            child.start()
            there.close()
            try:
                found = here.recv()
            except EOFError:
                found = {"error": f"no plan in {LIMIT_S} CPU s"}
            child.join()
            kept[f"{name} @ {ranks}"] = found
            print(name, ranks, {k: v for k, v in found.items() if k != "plan"}, flush=True)
            PLANS.write_text(json.dumps(kept, sort_keys=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
