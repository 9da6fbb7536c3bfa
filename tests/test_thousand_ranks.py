"""Wrapping for a thousand ranks in one process, on torch's fake process group: nothing grows with their square."""

from __future__ import annotations

from tests.programs import run_program

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
    for plan in (True, False) if len(shape) > 1 else (True,):
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

TRANSFORMER = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from dmp import DistributedModelParallel, ShardingEnv
from planner import ShardingPlanner, Topology
from tests.transformers_zoo import Llama

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, HIDDEN = 4096, 1024, 3, 16, 8, 2048
SPLIT = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w3": 0, "w2": 1, "tok_embeddings": 0, "output": 0}

dist.init_process_group("fake", rank=0, world_size=1024, store=FakeStore())
topology = Topology(memory_bytes=80e9, memory_bandwidth=2e12, flops=1e14, link_bandwidth=5e10, link_latency=1e-5)
for shape, names in ((16, 8, 8), ("replicate", "shard", "tp")), ((128, 8), ("shard", "tp")):
    env = ShardingEnv.from_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names))
    tp, pieces = shape[-1], shape[-2]
    for fills in (True, False):
        with torch.device("meta"):
            model = Llama(VOCAB, DIM, LAYERS, HEADS, KV_HEADS, HIDDEN)
        whole = {name: tuple(p.shape) for name, p in model.named_parameters()}
        wrapped = DistributedModelParallel(
            model, env, init_parameters=fills, planner=ShardingPlanner(topology=topology)
        )
        assert {name: tuple(p.shape) for name, p in wrapped.named_parameters()} == whole
        split_bytes = kept_bytes = 0
        for name, parameter in wrapped.named_parameters():
            assert parameter.device_mesh.mesh_dim_names[-1] == "tp", name
            local = list(whole[name])
            dim = SPLIT.get(name.split(".")[-2])
            if dim is not None:
                local[dim] //= tp
            local[0] = -(-local[0] // pieces)  # rank 0 has the largest piece
            assert tuple(parameter.to_local().shape) == tuple(local), (name, parameter.to_local().shape, local)
            assert parameter.to_local().is_meta != fills, name
            if dim is None:
                kept_bytes += 4 * torch.Size(local).numel()
            else:
                split_bytes += 4 * torch.Size(local).numel()
            if fills and dim is not None:
                assert 0 < parameter.to_local().abs().max() < 10, name
        attention = wrapped.module.layers[LAYERS - 1].attention
        assert (attention.heads, attention.kv_heads) == (HEADS // tp, KV_HEADS // tp)
        kinds = wrapped.plan.report.bytes_by_kind
        assert kinds == {"tables": 0, "tensor parallel": split_bytes, "fully sharded": kept_bytes}, kinds
        assert "weights on a rank: " in str(wrapped.plan.report)
print("wrapped")
"""


def test_wraps_and_plans_for_a_thousand_ranks() -> None:
    run(PROGRAM)


def test_splits_a_transformer_over_a_thousand_ranks() -> None:
    run(TRANSFORMER)


def run(program: str) -> None:
    """In a process of its own, for the fake process group is the process's."""
    done = run_program(["-c", program])
    assert done.returncode == 0, done.stderr
    assert "wrapped" in done.stdout
