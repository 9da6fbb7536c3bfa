"""Peak memory of putting a Llama on a 2 x 2 mesh and training two steps, ours and by hand, in fresh processes."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace
from math import prod

import torch

from tests.bench.memory import MB
from tests.bench.report import Result
from tests.bench.resident import reset_peak, resident
from tests.bench.transformer_by_hand import by_hand, by_hand_from_meta, optimizer_of
from tests.bench.transformer_workload import MESHES, Side, Workload, env_of, wrap_ours
from tests.ranks import close_pools, mesh, run_ranks

WORK = Workload(dim=512, layers=8, heads=8, kv_heads=4, hidden=1536, vocab=8192)
MESH = "shard 2 x tp 2"
ALLOWED, SMALL_BYTES = 1.02, 4 << 20  # objects, and pages that the allocator rounds up to
STEPS = 2
_MALLOPT = {"M_MMAP_THRESHOLD": -3, "M_TOP_PAD": -2, "M_TRIM_THRESHOLD": -1}


def run(quick: bool) -> list[Result]:
    """From values and from meta; the highest peak of a rank."""
    results = []
    for device, what in (("cpu", "with values"), ("meta", "on meta")):
        used = []
        for is_ours in (False, True):
            close_pools()  # memory that an earlier call has freed and the allocator has kept would hide the peak
            used.append(max(run_ranks(prod(MESHES[MESH][0]), peak, is_ours, device, timeout=300)))
        allowed = (ALLOWED * used[0] + SMALL_BYTES) / MB
        name = f"memory of wrapping a transformer {what}, 2 steps: {MESH}"
        results.append(Result(name, "MB", used[0] / MB, used[1] / MB, None, allowed))
        print(results[-1], flush=True)
    close_pools()
    return results


def peak(is_ours: bool, device: str) -> int:
    """On each rank: peak bytes above what was there before the model was split.

    What is freed goes back at once: else holes that the allocator leaves decide, 50 MB more in one run than in another.
    """
    for option in _MALLOPT.values():
        ctypes.CDLL(None).mallopt(option, 128 << 10)
    train(replace(WORK, dim=32, layers=1, hidden=64, vocab=64), is_ours, device)  # what is loaded at first use
    return train(WORK, is_ours, device)


def train(work: Workload, is_ours: bool, device: str) -> int:
    """Peak bytes of splitting and training, above what was there with the model made."""
    env, on = env_of(MESH), mesh(*MESHES[MESH])
    model = work.model(device)
    gc.collect()
    before = reset_peak()
    if is_ours:
        made = wrap_ours(model, env)
        side = Side(made, torch.optim.AdamW(made.parameters(), lr=1e-3))
    else:
        made = (by_hand if device == "cpu" else by_hand_from_meta)(model, on)
        side = Side(made, optimizer_of(made))
    for step in range(STEPS):
        side.backward(*work.batch(env.data_rank, step))
        side.update()
    return resident("VmHWM") - before
