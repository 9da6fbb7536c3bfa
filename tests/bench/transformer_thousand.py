"""Wrapping a 70-billion-parameter Llama for 1,024 ranks, as one of them: torch's fake process group, one process.

Run as a program it does so once, in a process of its own, and prints what it took as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from time import process_time
from typing import Any

from tests.bench.report import Result

ROOT = Path(__file__).resolve().parents[2]
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "16 x 8 x 8": ((16, 8, 8), ("replicate", "shard", "tp")),
    "128 x 8": ((128, 8), ("shard", "tp")),
}
SECONDS, GIGABYTES = 20.0, 2.0


def run(quick: bool) -> list[Result]:
    """Each mesh, with and without filling what is on meta: processor seconds and peak memory."""
    results = []
    for name in MESHES:
        for fills in (True, False):
            took = wrapped(name, fills)
            what = f"70 B parameters on {name} ranks, {'filled' if fills else 'left on meta'}"
            results.append(Result(f"wrap {what}", "s", None, took["seconds"], None, SECONDS))
            held = took["shard_bytes"] if fills else 0
            above = f"memory above {held / 1e9:.2f} GB of own shards, {what}"
            results.append(Result(above, "GB", None, (took["peak_bytes"] - held) / 1e9, None, GIGABYTES))
            print(results[-2], results[-1], took["weights"], sep="\n", flush=True)
    return results


def wrapped(mesh_name: str, fills: bool) -> dict[str, Any]:
    """What `main` finds, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, mesh_name, str(int(fills))],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"wrapping on {mesh_name} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(mesh_name: str, fills: bool) -> dict[str, Any]:
    """Wrap the model on rank 0; processor seconds, peak resident bytes of the process, and weights on it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dmp import DistributedModelParallel, ShardingEnv
    from planner import ShardingPlanner, Topology
    from tests.bench.resident import resident
    from tests.transformers_zoo import Llama

    shape, names = MESHES[mesh_name]
    dist.init_process_group("fake", rank=0, world_size=1024, store=FakeStore())
    env = ShardingEnv.from_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names))
    with torch.device("meta"):
        model = Llama(vocab=128256, dim=8192, layers=80, heads=64, kv_heads=8, hidden=28672)
    topology = Topology(memory_bytes=80e9, memory_bandwidth=2e12, flops=1e14, link_bandwidth=5e10, link_latency=1e-5)
    start = process_time()
    made = DistributedModelParallel(model, env, init_parameters=fills, planner=ShardingPlanner(topology=topology))
    seconds = process_time() - start
    local = sum(p.to_local().numel() * p.to_local().element_size() for p in made.parameters())
    on_meta = {p.to_local().is_meta for p in made.parameters()}
    assert on_meta == {not fills}, on_meta
    kinds = made.plan.report.bytes_by_kind
    weights = ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in kinds.items())
    return {
        "seconds": seconds,
        "peak_bytes": resident("VmHWM"),
        "shard_bytes": local,
        "weights": f"    weights on rank 0: {local / 1e6:.1f} MB; by the plan: {weights}",
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], bool(int(sys.argv[2])))))
