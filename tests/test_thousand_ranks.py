"""Wrapping for a thousand ranks in one process, on torch's fake process group: nothing grows with their square."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROGRAM = """
import warnings; warnings.simplefilter("ignore")  # TorchRec's imports; this process is not about warnings
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from dmp import DistributedModelParallel, ShardingEnv, row_wise
from planner import ShardingPlanner, Topology

dist.init_process_group("fake", rank=0, world_size=1000, store=FakeStore())
topology = Topology(memory_bytes=80e9, memory_bandwidth=2e12, flops=1e14, link_bandwidth=5e10, link_latency=1e-5)
for shape, names in ((1000,), ("dp",)), ((125, 8), ("host", "local")), ((10, 100), ("replicate", "shard")):
    env = ShardingEnv.from_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names))
    for plan in (True, False):
        tables = [
            EmbeddingBagConfig(name=f"t{i}", embedding_dim=64, num_embeddings=100_000 + i, feature_names=[f"f{i}"])
            for i in range(26)
        ]
        module = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        names_of_parameters = [n for n, _ in module.named_parameters()]
        if plan:
            model = DistributedModelParallel(module, env, plan={n: row_wise() for n in names_of_parameters})
            rows = -(-100_000 // env.table_size)
            assert model.get_parameter("embedding_bags.t0.weight").shape == (rows, 64)
        else:
            model = DistributedModelParallel(module, env, planner=ShardingPlanner(topology=topology))
        assert [n for n, _ in model.named_parameters()] == names_of_parameters
        assert list(model.plan) == sorted(names_of_parameters)
print("wrapped")
"""


def test_wraps_and_plans_for_a_thousand_ranks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "wrapped" in done.stdout
