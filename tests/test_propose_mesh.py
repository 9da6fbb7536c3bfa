"""Meshes proposed for a module: what a person who knows would take, with figures, and why others do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dmp import PlanError, data_parallel, table_wise
from planner import Constraint, MeshProposal, ShardingPlanner, Topology, propose_mesh
from planner.meshes.shapes import shapes
from sharders import default_sharders
from tests.planner_bags import BagSharder, bags
from tests.transformers_zoo import Llama


def mlp() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))


class Ranker(nn.Module):
    """Tables and an MLP."""

    def __init__(self, *tables: tuple[int, int]) -> None:
        super().__init__()
        self.tables, self.over = bags(*tables), mlp()


def axes(proposal: MeshProposal) -> dict[str, int]:
    return dict(zip(proposal.axes, proposal.shape, strict=True))


def test_a_small_net_is_copied() -> None:
    found = propose_mesh(mlp(), 64)
    assert axes(found[0]) == {"dp": 64} and found[0].fits
    assert found[0].step_seconds == pytest.approx(sum(found[0].dense_seconds.values()))
    assert "dp=64" in str(found).splitlines()[1]


def test_tables_are_sharded_over_hosts_and_inside_them() -> None:
    module = Ranker(*[(2_000_000, 128)] * 4)
    found = {
        str(each): each for each in propose_mesh(module, 16, sharders=[BagSharder()], batch_size=16 * 2048, top=20)
    }
    two = found["host=2, local=8"]
    report = ShardingPlanner(batch_size=2048).plan(module, [BagSharder()], two.env()).report
    assert two.table_seconds == pytest.approx(report.table_seconds, rel=1e-6)
    assert two.step_seconds == pytest.approx(report.step_seconds, rel=1e-6)
    assert two.step_seconds <= found["dp=16"].step_seconds  # which knows nothing of hosts
    assert {"replicate=2, dp=8", "replicate=2, shard=8"} <= found.keys()


def test_tables_too_large_for_a_copy_on_each_host_are_not_copied() -> None:
    found = propose_mesh(Ranker((1_000_000, 64)), 16, sharders=[BagSharder()], batch_size=512, memory_bytes=60e6)
    assert all(axes(each).get("replicate", 1) == 1 for each in found)
    assert any("does not fit" in line for line in str(found).splitlines()) and found.rejected


def test_a_transformer_is_split_where_it_does_not_fit_as_it_is() -> None:
    with torch.device("meta"):
        llama = Llama(vocab=4096, dim=1024, layers=4, heads=16, kv_heads=8, hidden=4096)
    one = propose_mesh(llama, 4, batch_size=64, sequence_length=512)
    assert axes(one[0]) == {"dp": 4} and not one[0].recomputes
    weights = 4 * sum(p.numel() for p in llama.parameters())
    small = propose_mesh(llama, 4, batch_size=4, sequence_length=512, memory_bytes=3.0 * weights)
    assert all("dp" not in axes(each) or axes(each)["tp"] > 1 for each in small)
    assert any("dp=4" in str(each) for each in small.rejected)
    few = propose_mesh(llama, 16, batch_size=2, sequence_length=512)  # two samples: two data ranks at most
    assert all(each.env().data_size <= 2 and axes(each)["tp"] == 8 for each in few)


def test_constraints_hold_on_every_mesh() -> None:
    whole = {"*": Constraint(layouts=["replicate"])}
    found = propose_mesh(mlp(), 16, constraints=whole)
    kept = 16 * sum(p.numel() for p in mlp().parameters())
    assert all(each.rank_bytes is not None and each.rank_bytes >= kept for each in found)
    ruled_out = propose_mesh(mlp(), 16, constraints={"*": Constraint(layouts=["fully_sharded"])})
    assert all("shard" in each.axes for each in ruled_out)
    assert any("has no axis" in each.why for each in ruled_out.rejected)


def test_shapes_keep_tensor_axes_and_groups_inside_hosts() -> None:
    found = shapes(32, 8, [1, 2, 8], has_tables=True)
    assert len(set(found)) == len(found)
    for shape in found:
        sizes = dict(zip(shape.names, shape.sizes, strict=True))
        assert torch.tensor(shape.sizes).prod() == 32
        assert shape.names[-1] == "tp" or "tp" not in sizes
        assert sizes.get("local", 8) == 8
    assert [str(shape) for shape in shapes(1, 8, [1], has_tables=False)] == ["dp=1"]


def test_what_nobody_can_propose_is_said() -> None:
    with pytest.raises(PlanError, match=r"no mesh of 8 devices fits.* short"):
        propose_mesh(mlp(), 8, memory_bytes=1e4)
    with pytest.raises(ValueError, match="num_devices"):
        propose_mesh(mlp(), 0)
    by_name = Topology(8e10, 1e12, 1e13, {"dp": 1e10}, {"dp": 1e-5})
    with pytest.raises(ValueError, match="axis name"):
        propose_mesh(mlp(), 8, topology=by_name)


@pytest.mark.slow
def test_a_large_llama_is_split_inside_hosts_and_sharded_across() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256}
    config = LlamaConfig(num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, **sizes)
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    found = propose_mesh(llama, 64, compute_dtype=torch.bfloat16, sequence_length=4096, batch_size=32)
    best = axes(found[0])
    assert best["shard"] * best["tp"] == 64 and 2 <= best["tp"] <= 8 and found[0].recomputes
    assert any("dp" in each.axes for each in found.rejected)
    plan = ShardingPlanner(batch_size=1, compute_dtype=torch.bfloat16).plan(llama, default_sharders(), found[0].env())
    assert plan.report.dense_bytes["weights"] == pytest.approx(4 * 70.55e9 / 64, rel=0.01)
    assert table_wise(0) not in {entry.layout for entry in plan.values()}
    assert data_parallel() not in {entry.layout for entry in plan.values()}
