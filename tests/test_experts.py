"""Mixtures of experts over a tensor axis: told by the shapes of their stacks, split by the inner size, proved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmp import (
    DistributedModelParallel,
    PlanError,
    ShardingEnv,
    ShardingPlan,
    clip_grad_norm_,
    colwise,
    full_optimizer_state_dict,
    full_state_dict,
    load_checkpoint,
    local_of,
    rowwise,
    save_checkpoint,
)
from planner import ShardingPlanner
from sharders import TensorParallelSharder
from sharders.tensor_parallel.structure.experts import experts_of
from tests.ranks import mesh, run_ranks

MESHES = {"tp": ((2,), ("tp",)), "shard x tp": ((2, 2), ("shard", "tp")), "dp": ((2,), ("dp",))}
MESHES["shard"] = ((4,), ("shard",))
MESHES["tp x shard"] = ((2, 2), ("tp", "shard"))
WIDTH, INNER, EXPERTS, ROWS = 8, 12, 3, 20


class Experts(nn.Module):
    """Every expert on every token, weighed; stacks as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        shapes = {"w1": (INNER, WIDTH), "w2": (WIDTH, INNER), "w3": (INNER, WIDTH)}
        if kind != "apart":
            shapes = {"gate_up_proj": (2 * INNER, WIDTH), "down_proj": (WIDTH, INNER)}
        if kind == "transposed":
            shapes = {name: (b, a) for name, (a, b) in shapes.items()}
            self.gate_up_proj_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))
            self.down_proj_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(EXPERTS, *shape) / 3))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.kind == "apart":
            up = torch.einsum("nd,ehd->neh", x, self.w1).sigmoid() * torch.einsum("nd,ehd->neh", x, self.w3)
            out = torch.einsum("neh,edh->ned", up, self.w2)
        elif self.kind == "joint":
            gate, up = torch.einsum("nd,ehd->neh", x, self.gate_up_proj).chunk(2, -1)
            out = torch.einsum("neh,edh->ned", gate.sigmoid() * up, self.down_proj)
        else:  # gate and what it gates take turns
            both = torch.einsum("nd,edh->neh", x, self.gate_up_proj) + self.gate_up_proj_bias
            up = both[..., ::2].sigmoid() * both[..., 1::2]
            out = torch.einsum("neh,ehd->ned", up, self.down_proj) + self.down_proj_bias
        return (out * weights[..., None]).sum(1)


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        x = x + self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        tokens = x.flatten(0, 1)
        return x + self.experts(tokens, self.router(tokens).softmax(-1)).view_as(x)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS)
        self.layers = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def model_of(kind: str) -> Model:
    torch.manual_seed(0)
    return Model(kind).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, env: ShardingEnv, whole: bool, steps: range) -> None:
    for step in steps:
        ids = torch.randint(ROWS, (env.data_size, 2, 4), generator=torch.Generator().manual_seed(step))
        ids = ids.flatten(0, 1) if whole else ids[env.data_rank]
        model(ids).square().mean().backward()
        norm = clip_grad_norm_(model, 0.05) if not whole else nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05
        optimizer.step()
        optimizer.zero_grad()


def compare(model: nn.Module, optimizer: Any, whole: nn.Module, beside: torch.optim.Optimizer) -> None:
    values = full_state_dict(model)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(values[name], value, msg=lambda m, n=name: f"{n}: {m}")
    state = full_optimizer_state_dict(model, optimizer)["state"]
    for name, p in whole.named_parameters():
        torch.testing.assert_close(state[name]["exp_avg_sq"], beside.state[p]["exp_avg_sq"])


def trains_and_loads(on: str, kind: str, other: str, folder: str) -> None:
    whole = model_of(kind)
    beside = torch.optim.Adam(whole.parameters(), lr=0.01)
    env = ShardingEnv.from_mesh(mesh(*MESHES[on]))
    model = DistributedModelParallel(model_of(kind), env)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    split = {name: p for name, p in model.named_parameters() if "experts" in name and "down_proj_bias" not in name}
    assert "tp" not in on or all(2 * local_of(p).numel() <= p.numel() for p in split.values())
    # of three experts on four ranks one had nothing
    assert on != "shard" or all(4 * local_of(p).numel() == p.numel() for p in split.values())
    train(model, optimizer, env, False, range(2))
    train(whole, beside, env, True, range(2))
    compare(model, optimizer, whole, beside)
    save_checkpoint(folder, model, optimizer)
    env = ShardingEnv.from_mesh(mesh(*MESHES[other]))
    model = DistributedModelParallel(model_of(kind), env)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    load_checkpoint(folder, model, optimizer)
    compare(model, optimizer, whole, beside)
    train(model, optimizer, env, False, range(2, 3))
    train(whole, beside, env, True, range(2, 3))
    compare(model, optimizer, whole, beside)


@pytest.mark.parametrize(
    ("on", "other", "kind"),
    [
        ("tp", "dp", "joint"),
        ("dp", "tp", "apart"),
        ("tp", "tp", "transposed"),
        ("shard x tp", "tp x shard", "joint"),
        ("shard x tp", "shard x tp", "transposed"),
        ("shard", "shard x tp", "joint"),
    ],
)
@pytest.mark.sampled(6)
def test_experts_train_as_in_one_process(on: str, other: str, kind: str, tmp_path: Path) -> None:
    ranks = 4 if "shard" in on else 2
    run_ranks(ranks, trains_and_loads, on, kind, other, str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("kind", "style", "layouts"),
    [
        ("apart", "experts", {"w1": colwise(1), "w2": rowwise(2), "w3": colwise(1)}),
        ("joint", "experts", {"gate_up_proj": colwise(1, 2), "down_proj": rowwise(2)}),
        (
            "transposed",
            "experts_interleaved",
            {"gate_up_proj": colwise(2), "gate_up_proj_bias": colwise(1), "down_proj": rowwise(1)},
        ),
    ],
)
def test_plans_of_experts(kind: str, style: str, layouts: dict[str, Any]) -> None:
    env, module = ShardingEnv.abstract((2,), ("tp",)), model_of(kind)
    found = TensorParallelSharder().place(module, {}, env)
    assert found.styles["layers.1.experts"] == style
    of_experts = {n.rpartition(".")[2]: layout for n, layout in found.layouts.items() if "layers.0.experts" in n}
    assert of_experts == layouts
    text = ShardingPlan(found.layouts).to_json()
    assert json.loads(text)
    again = TensorParallelSharder().place(module, {n: e.layout for n, e in ShardingPlan.from_json(text).items()}, env)
    assert again.layouts == found.layouts and again.styles == found.styles


def test_a_plan_of_experts_that_is_wrong_is_refused() -> None:
    env, module = ShardingEnv.abstract((2,), ("tp",)), model_of("transposed")
    with pytest.raises(PlanError, match="wrong for this model"):
        TensorParallelSharder({"layers.*.experts": "experts"}).place(module, {}, env)
    with pytest.raises(PlanError, match=r"router.*cannot split.*stacks of matrices"):
        TensorParallelSharder({"layers.*.router": "experts"}).place(module, {}, env)
    with pytest.raises(PlanError, match=r"inner size 12 .* over the 8 ranks of mesh axis 'tp'"):
        TensorParallelSharder({"layers.*.experts": "experts_interleaved"}).place(
            module, {}, ShardingEnv.abstract((8,), ("tp",))
        )
    with pytest.raises(PlanError, match=r"no entry for its \['down_proj', 'gate_up_proj_bias'\]"):
        TensorParallelSharder().place(module, {"layers.0.experts.gate_up_proj": colwise(2)}, env)


UP, DOWN, TURNED = {"up": 1}, {"down": 2}, ({"up": 2}, {"down": 1})


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"up": (4, 6, 8), "down": (4, 8, 6)}, {"experts": (6, UP, DOWN), "experts_transposed": (8, *TURNED)}),
        ({"up": (4, 8, 8), "down": (4, 8, 8)}, {"experts": (8, UP, DOWN), "experts_transposed": (8, *TURNED)}),
        ({"up": (4, 12, 8), "down": (4, 8, 6)}, {"experts": (6, UP, DOWN), "experts_interleaved": (6, UP, DOWN)}),
        ({"up": (4, 8, 12), "down": (4, 6, 8)}, {"experts": (6, *TURNED), "experts_interleaved": (6, *TURNED)}),
        (
            {"up": (4, 6, 8), "up_bias": (4, 6), "down": (4, 8, 6), "down_bias": (4, 8)},
            {"experts": (6, {"up": 1, "up_bias": 1}, DOWN)},
        ),
        ({"up": (4, 6, 8), "other": (4, 8, 6)}, {}),  # either may be the way down
        ({"up": (4, 6, 8), "down": (3, 8, 6)}, {}),
        ({"up": (1, 6, 8), "down": (1, 8, 6)}, {}),
        ({"up": (4, 6, 8), "down": (4, 8, 6), "norm": (8,)}, {}),
        ({"up": (4, 6, 8), "down": (4, 8, 6), "scale": (4, 8)}, {}),
    ],
)
def test_what_experts_are(shapes: dict[str, tuple[int, ...]], expected: Any) -> None:
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))
    assert {style: (w.inner, dict(w.up), dict(w.down)) for style, w in experts_of(module).items()} == expected


def test_hugging_faces_experts_by_their_own_plan() -> None:
    """Of 46 billion weights 95 of 100 are experts, which lay whole on every rank of the axis."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MixtralConfig())
    found = TensorParallelSharder().place(model, {}, ShardingEnv.abstract((4,), ("tp",)))
    assert found.styles["model.layers.31.mlp.experts"] == "experts"
    assert any("proved" in note for note in found.notes) and not any("not proved" in note for note in found.notes)
    whole = sum(p.numel() for name, p in model.named_parameters() if name not in found.layouts)
    assert whole < 0.005 * sum(p.numel() for p in model.parameters())


def test_the_planner_counts_one_sum_for_all_experts() -> None:
    """Whichever dim of their stacks is split: what leads up was taken for a sum over ranks, too."""
    env, seconds = ShardingEnv.abstract((2,), ("tp",)), {}
    for kind in ("apart", "joint"):
        planner = ShardingPlanner(sequence_length=4)
        planner.plan(model_of(kind), [TensorParallelSharder()], env)
        assert planner.report is not None
        (layers,) = (block for block in planner.report.dense if block.count == 2)
        seconds[kind] = layers.seconds["tensor collectives"]
    assert seconds["apart"] == pytest.approx(seconds["joint"]) and seconds["joint"] > 0
