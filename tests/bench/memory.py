"""Peak memory of wrapping a model on meta: a 2 GB table over four ranks."""

from __future__ import annotations

import gc

import torch

import dmp
from dmp.wrap.values.initial_values import BLOCK_ELEMENTS
from tests.bench.report import Result
from tests.bench.resident import reset_peak, resident
from tests.bench.workload import Workload, make_model, make_plan
from tests.ranks import close_pools, mesh, run_ranks

RANKS = 4
WORK = Workload((8_000_000,), 64, 1)  # 2.05 GB in float32
SMALL_BYTES = 2 << 20  # objects, and pages that the allocator rounds up to
MB = 1e6


def run(quick: bool) -> list[Result]:
    """Row-wise and table-wise; the figure is that of the rank with the highest peak above its own shards."""
    results = []
    allowed = BLOCK_ELEMENTS * torch.float32.itemsize + SMALL_BYTES
    for layout in ("row_wise", "table_wise"):
        close_pools()  # memory that an earlier call has freed and the allocator has kept would hide the peak
        used, shards = max(run_ranks(RANKS, peak, layout, timeout=300), key=lambda r: r[0] - r[1])
        name = f"memory above {shards / MB:.0f} MB of own shards, 2 GB {layout}"
        results.append(Result(name, "MB", allowed / MB, (used - shards) / MB, None, allowed / MB))
        print(results[-1], flush=True)
    close_pools()
    return results


def peak(layout: str) -> tuple[int, int]:
    """On each rank: peak bytes above what was there before, and bytes of its shards with their state."""
    env = dmp.ShardingEnv.from_mesh(mesh((RANKS,), ("dp",)))

    def wrap(work: Workload) -> tuple[dmp.DistributedModelParallel, int]:
        model = make_model(work, "meta")
        plan = make_plan(layout, [name for name, _ in model.named_parameters()], RANKS)
        gc.collect()
        before = reset_peak()
        made = dmp.DistributedModelParallel(model, env=env, plan=plan)
        return made, resident("VmHWM") - before

    wrap(Workload((64,), 64, 1))  # what is loaded at first use is not the table's
    made, used = wrap(WORK)
    held = list(made.state_dict().values())
    held += [t for state in made.fused_optimizer.state_dict()["state"].values() for t in state.values()]
    chunks = [c for t in held for c in (t.chunks if isinstance(t, dmp.ChunkedTensor) else [t])]
    shards = sum(c.numel() * c.element_size() for c in chunks)
    return used, shards
