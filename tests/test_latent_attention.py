"""Latent attentions over a tensor axis, as DeepSeek's: told by sizes, split by heads, shared keys summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, PlanError, ShardingEnv
from sharders import TensorParallelSharder
from tests.beside_plain import trains
from tests.ranks import mesh, run_ranks

MESHES = {"tp": ((2,), ("tp",)), "shard x tp": ((2, 2), ("shard", "tp"))}
WIDTH, HEADS, OWN, SHARED, VALUE, RANK, QUERY_RANK = 16, 4, 6, 2, 5, 12, 10


class Attention(nn.Module):
    """Queries in one step or in two."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.num_heads = HEADS
        if steps == 2:
            self.q_a, self.q_norm = nn.Linear(WIDTH, QUERY_RANK), nn.LayerNorm(QUERY_RANK)
        self.q_b = nn.Linear(WIDTH if steps == 1 else QUERY_RANK, HEADS * (OWN + SHARED))
        self.kv_a, self.kv_norm = nn.Linear(WIDTH, RANK + SHARED), nn.LayerNorm(RANK)
        self.kv_b, self.out = nn.Linear(RANK, HEADS * (OWN + VALUE)), nn.Linear(HEADS * VALUE, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q_b(self.q_norm(self.q_a(x)) if hasattr(self, "q_a") else x)
        latent, shared = self.kv_a(x).split((RANK, SHARED), -1)
        kv = self.kv_b(self.kv_norm(latent)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        own, value = kv.split((OWN, VALUE), -1)
        k = torch.cat((own, shared[:, None].expand(-1, self.num_heads, -1, -1)), -1)
        q = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        out = (q @ k.transpose(-1, -2)).softmax(-1) @ value
        return self.out(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(steps)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)  # type: ignore[no-any-return]


def model_of(steps: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(steps) for _ in range(2))).double()


def trains_split(on: str, steps: int) -> None:
    env = ShardingEnv.from_mesh(mesh(*MESHES[on]))
    model = DistributedModelParallel(model_of(steps), env)
    split = [name for name, p in model.named_parameters() if any(s.is_shard() for s in tensor_placements(p))]
    assert {"1.attention.q_b.weight", "1.attention.kv_b.weight", "1.attention.out.weight"} <= set(split)
    trains(model, model_of(steps), env, lambda g: torch.randn(env.data_size, 2, 3, WIDTH, generator=g).double())


def tensor_placements(p: Any) -> tuple[Any, ...]:
    """On the tensor axis alone."""
    return (p.placements[-1],)


@pytest.mark.parametrize(("on", "steps"), [("tp", 1), ("tp", 2), pytest.param("shard x tp", 2, marks=pytest.mark.slow)])
@pytest.mark.sampled(2)
def test_latent_attentions_train_as_in_one_process(on: str, steps: int) -> None:
    """DeepSeek's attention was whole on every rank of the axis."""
    run_ranks(2 if on == "tp" else 4, trains_split, on, steps)


def test_styles_of_a_latent_attention() -> None:
    env, module = ShardingEnv.abstract((2,), ("tp",)), model_of(2)
    found = TensorParallelSharder().place(module, {}, env)
    of_first = {
        path.partition(".attention.")[2]: style for path, style in found.styles.items() if "0.attention" in path
    }
    assert of_first == {"q_b": "colwise", "kv_b": "colwise", "kv_a": "latent", "out": "rowwise"}
    assert any("proved" in note for note in found.notes)
    plan = {f"*.attention.{name}": style for name, style in of_first.items()}
    assert TensorParallelSharder(plan).place(module, {}, env).layouts.items() <= found.layouts.items()
    with pytest.raises(PlanError, match="wrong for this model"):  # the key's shared part is not summed
        TensorParallelSharder(plan | {"*.attention.kv_a": "replicate"}).place(module, {}, env)
    with pytest.raises(PlanError, match="'latent' is for the Linear of a latent attention"):
        TensorParallelSharder({"*.mlp.0": "latent"}).place(module, {}, env)


def test_deepseeks_models() -> None:
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(DeepseekV3Config(num_hidden_layers=4, first_k_dense_replace=2))
    found = TensorParallelSharder().place(model, {}, ShardingEnv.abstract((8,), ("tp",)))
    assert found.styles["model.layers.3.self_attn.kv_a_proj_with_mqa"] == "latent"
    assert found.styles["model.layers.3.mlp.experts"] == "experts"
    assert not any("not proved" in note for note in found.notes), found.notes
    whole = sum(p.numel() for name, p in model.named_parameters() if name not in found.layouts)
    assert whole < 0.01 * sum(p.numel() for p in model.parameters())
