"""torch's own attention, whose query, key and value are one weight, split by heads: every way to call it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, PlanError, ShardingEnv, local_of
from sharders import TensorParallelSharder
from sharders.tensor_parallel.proof.simulated import simulate
from sharders.tensor_parallel.split.split import split
from tests.ranks import mesh as mesh_of
from tests.ranks import run_ranks
from tests.test_transformers import MESHES, B, T, V, batch, compare, end_of, loss_of

D, H, S = 16, 4, 5
STYLES = {"attn": "colwise_packed_3", "attn.out_proj": "rowwise"}


class Holder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(D, H, dtype=torch.float64, **options)
        if self.attn.in_proj_bias is not None:
            nn.init.normal_(self.attn.in_proj_bias)
            nn.init.normal_(self.attn.out_proj.bias)

    def forward(self, *args: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.attn(*args, **kwargs)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def causal(dtype: torch.dtype) -> torch.Tensor:
    mask = torch.ones(T, T, dtype=torch.bool).triu(1)
    return mask if dtype == torch.bool else torch.zeros(T, T, dtype=dtype).masked_fill(mask, float("-inf"))


PADDED = torch.zeros(B, T, dtype=torch.bool)
PADDED[1, -2:] = True
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "weights": ({"batch_first": True}, {}, True),
    "of each head": ({"batch_first": True}, {"average_attn_weights": False}, True),
    "none": ({"batch_first": True}, {"need_weights": False}, True),
    "sequence first": ({}, {"need_weights": False}, True),
    "no bias": ({"bias": False, "batch_first": True}, {"attn_mask": causal(torch.bool)}, True),
    "causal": (
        {"batch_first": True},
        {"attn_mask": causal(torch.float64), "is_causal": True, "need_weights": False},
        True,
    ),
    "padded": ({"batch_first": True}, {"key_padding_mask": PADDED, "need_weights": False}, True),
    "both": ({"batch_first": True}, {"key_padding_mask": PADDED, "attn_mask": causal(torch.bool)}, True),
    "a mask for each head": ({"batch_first": True}, {"attn_mask": random(B * H, T, T)}, True),
    "other keys": ({"batch_first": True}, {"need_weights": False}, False),
}


@pytest.mark.parametrize("case", CALLS)
def test_called_as_torch_s(case: str) -> None:
    torch.manual_seed(0)
    options, given, is_self = CALLS[case]
    whole = Holder(**options)
    shape, of_keys = ((B, T, D), (B, S, D)) if options.get("batch_first") else ((T, B, D), (S, B, D))
    query, other = random(*shape), random(*of_keys)
    weigh = random(*shape)

    def run(model: nn.Module) -> list[torch.Tensor]:
        q, k = query.clone().requires_grad_(), other.clone().requires_grad_()
        out, weights = model(*([q] * 3 if is_self else [q, k, k]), **given)
        ((out * weigh).sum() + (0 if weights is None else weights.square().sum())).backward()
        found = [out.detach(), q.grad, *([] if is_self else [k.grad]), *([] if weights is None else [weights.detach()])]
        for p in model.parameters():
            g: Any = p.grad
            found.append(g.full_tensor() if hasattr(g, "full_tensor") else g)
        return [local_of(x) for x in found if x is not None]

    def job(mesh: Any) -> list[torch.Tensor]:
        model = copy.deepcopy(whole)
        split(model, mesh, STYLES, {})
        assert model.attn.in_proj_weight.to_local().shape == (3 * D // 2, D)
        return run(model)

    expected = run(copy.deepcopy(whole))
    for rank in simulate(2, "tp", job):
        torch.testing.assert_close(rank, expected, atol=1e-12, rtol=1e-12)


def test_one_head_without_samples() -> None:
    whole = Holder(batch_first=True)
    x = random(T, D)
    expected = whole(x, x, x, key_padding_mask=PADDED[1])

    def job(mesh: Any) -> Any:
        model = copy.deepcopy(whole)
        split(model, mesh, STYLES, {})
        return model(x, x, x, key_padding_mask=PADDED[1])

    for rank in simulate(2, "tp", job):
        torch.testing.assert_close(rank, expected)


@pytest.mark.parametrize("plan", [{"layers.*.self_attn": "colwise_packed_3"}, {"layers.*.self_attn": "packed_colwise"}])
def test_half_a_plan_is_refused(plan: dict[str, str]) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 32, batch_first=True), 2)
    with pytest.raises(PlanError, match=r"nn\.MultiheadAttention.*colwise_packed_3"):
        TensorParallelSharder(plan).place(model, {}, ShardingEnv.abstract((2,), ("tp",)))


def test_unusual_forms_stay_whole() -> None:
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 8, "vdim": 8}):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 32, batch_first=True), 1)
        model.layers[0].self_attn = nn.MultiheadAttention(D, H, batch_first=True, **options)  # type: ignore[arg-type]
        found = TensorParallelSharder().place(model, {}, ShardingEnv.abstract((2,), ("tp",)))
        assert not any("self_attn" in path for path in found.styles)
        assert "layers.0.self_attn: left whole" in "\n".join(found.notes)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        layer = nn.TransformerEncoderLayer(D, H, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, ids: torch.Tensor, padded: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.encoder(self.tokens(ids), src_key_padding_mask=padded))


def encodes_as_one_process(mesh: str) -> None:
    env = ShardingEnv.from_mesh(mesh_of(*MESHES[mesh]))
    torch.manual_seed(0)
    oracle = Encoder().double()
    model = DistributedModelParallel(copy.deepcopy(oracle), env)
    assert "parts=3" in str(model.plan["encoder.layers.0.self_attn.in_proj_weight"])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (oracle, model)]
    for step in range(3):
        batches = [batch(r, step) for r in range(env.data_size)]
        (sum(loss_of(oracle, *b) for b in batches) / env.data_size).backward()  # type: ignore[union-attr]
        loss_of(model, *batches[env.data_rank]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare(model, optimizers[1], end_of(oracle, optimizers[0]), 1e-10)
    for each in (model, oracle):
        each.eval()
    ids = batch(0, 9)[0]
    with torch.no_grad():
        here, there = (each(ids, PADDED) for each in (model, oracle))
    torch.testing.assert_close(here[~PADDED], there[~PADDED])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.parametrize("mesh", ["tp2", pytest.param("fsdp2xtp2", marks=pytest.mark.slow)])
def test_torch_s_encoder_trains_as_one_process(mesh: str) -> None:
    run_ranks(4 if "x" in mesh else 2, encodes_as_one_process, mesh)


class Asking(nn.Module):
    """A block that asks for a mask, and for what may be None, as those of torchaudio's Conformer do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor, pad_mask: Any, bias: torch.Tensor | None) -> torch.Tensor:
        x = x + self.mlp(x)
        y = self.norm(x) if bias is None else self.norm(x) + bias
        out: torch.Tensor = x + self.attention(y, y, y, pad_mask, need_weights=False)[0]
        return out


class OfLengths(nn.Module):
    """Takes what nobody can guess."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Asking() for _ in range(2))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        pad = torch.arange(x.shape[1]) >= lengths[:, None]
        for block in self.blocks:
            x = block(x, pad, None)
        return x


def test_blocks_that_ask_for_a_mask_are_proved_without() -> None:
    """Their attentions stayed whole."""
    found = TensorParallelSharder().place(OfLengths(), {}, ShardingEnv.abstract((2,), ("tp",)))
    assert "blocks.1.attention.in_proj_weight" in found.layouts and "blocks.1.mlp.0.weight" in found.layouts
    assert any(n.startswith("blocks.0: verified by a dry run with hidden states") for n in found.notes)
