"""Attentions whose key and value are one Linear beside the query's, as Perceiver's and PVT's, in models whose inputs
nobody guesses and whose layers are lists, which do not run: each attention and MLP is proved alone. One that takes rows
of sequences alone, (B, R, N, D), is given some."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv
from sharders import TensorParallelSharder
from tests.ranks import mesh, run_ranks


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, of_keys: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.to_q, self.to_kv = nn.Linear(width, width), nn.Linear(of_keys, 2 * width, bias=False)
        self.to_out = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.0))

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        x = self.norm(x)
        keys, values = self.to_kv(x if context is None else context).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.to_q(x), keys, values))
        out: torch.Tensor = self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class Interleaved(Attention):
    """Not halves: key and value of each head lie side by side."""

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        keys = self.to_kv(x if context is None else context).unflatten(-1, (self.heads, 2, -1))
        k, v = keys.transpose(1, 2).unbind(3)
        q = self.to_q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        out: torch.Tensor = self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, x = self.up(x).chunk(2, -1)
        out: torch.Tensor = self.down(F.gelu(gate) * x)
        return out


class Latents(nn.Module):
    """Of a few positions, that attend to all of a sequence's and then to each other."""

    def __init__(self, kind: type[Attention] = Attention) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.latents = nn.Parameter(torch.randn(3, 16))
        self.layers = nn.ModuleList(
            nn.ModuleList((kind(16, 2, 5), Gated(16), nn.ModuleList((kind(16, 4, 16), Gated(16))))) for _ in range(2)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, positions: dict[str, torch.Tensor]) -> torch.Tensor:
        of = positions["values"]
        x = self.latents.expand(len(of), -1, -1)
        for across, mlp, (among, last) in self.layers:
            x = x + across(x, of)
            x = x + mlp(x)
            x = x + among(x)
            x = x + last(x)
        out: torch.Tensor = self.head(x.mean(1))
        return out


def check(kind: type[Attention]) -> None:
    plain = Latents(kind).double()
    model = DistributedModelParallel(copy.deepcopy(plain), ShardingEnv.from_mesh(mesh((2,), ("tp",))))
    among = model.module.layers[0][2][0]
    assert among.to_kv.weight.to_local().shape == ((16, 16) if kind is Attention else (32, 16))
    x = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(1)).double()
    for m in (plain, model):
        m({"values": x}).square().mean().backward()
    torch.testing.assert_close(model({"values": x}), plain({"values": x}))
    expected = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        found = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        torch.testing.assert_close(found, expected[name].grad, msg=lambda m, name=name: f"{name}: {m}")


def test_they_are_split() -> None:
    run_ranks(2, check, Attention)


@pytest.mark.parametrize("kind", [Attention, Interleaved])
def test_what_is_split(kind: type[Attention]) -> None:
    """All of it stayed whole: such attentions were not known, and MLPs with a gate in one were not proved."""
    placed = TensorParallelSharder().place(Latents(kind), {}, ShardingEnv.abstract((2,), ("tp",)))
    mlps = {
        f"layers.{i}.{name}.weight" for i in range(2) for mlp in ("1", "2.1") for name in (f"{mlp}.up", f"{mlp}.down")
    }
    attentions = {
        f"layers.{i}.{name}.weight"
        for i in range(2)
        for of in ("0", "2.0")
        for name in (f"{of}.to_q", f"{of}.to_kv", f"{of}.to_out.0")
    }
    split = {name for name in placed.layouts if name.endswith("weight")}
    assert mlps <= split
    assert attentions <= split if kind is Attention else attentions.isdisjoint(split)


class OfRows(Attention):
    """As ESM's of aligned sequences; it ran split by its source, and raised in the first step."""

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        B, R, N, D = x.shape
        k, v = self.to_kv(x).chunk(2, -1)
        q, k, v = (t.view(B, R, N, self.heads, D // self.heads).transpose(2, 3) for t in (self.to_q(x), k, v))
        out: torch.Tensor = self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(B, R, N, D))
        return out


class Aligned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OfRows(16, 4, 16) for _ in range(2))

    def forward(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        x = rows["values"]
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_an_attention_of_rows_is_proved() -> None:
    placed = TensorParallelSharder().place(Aligned(), {}, ShardingEnv.abstract((2,), ("tp",)))
    assert {"layers.0.to_q.weight", "layers.1.to_kv.weight", "layers.1.to_out.0.weight"} <= placed.layouts.keys()
    assert any("hidden states (2, 3, 8, 16)" in note and "proved" in note for note in placed.notes)


class AcrossHeads(nn.Module):
    """What it gives of a head depends on all, as Autoformer's delays do; nobody guesses that it takes three."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        parts = zip((self.to_q, self.to_k, self.to_v), (a, b, c), strict=True)
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f, x in parts)
        heads = (q @ k.transpose(-2, -1)).softmax(-1).mean(1, keepdim=True) @ v
        out: torch.Tensor = self.to_out(heads.transpose(1, 2).flatten(2))
        return out


class Encoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = AcrossHeads(), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(x + self.attention(x, x, x))
        return out


class Decoding(Encoding):
    def forward(self, x: torch.Tensor, cross: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        out: torch.Tensor = self.mlp(x + self.attention(x, cross["x"], cross["x"]))
        return out


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Encoding() for _ in range(2))
        self.decoder = nn.ModuleList(Decoding() for _ in range(2))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError


def test_what_is_wrong_where_it_runs_is_split_nowhere() -> None:
    """Attentions of Autoformer's and Informer's decoders were split as their source says, and gave wrong numbers."""
    placed = TensorParallelSharder().place(Both(), {}, ShardingEnv.abstract((2,), ("tp",)))
    assert not any("attention" in name for name in placed.layouts)
    assert "decoder.0.mlp.0.weight" in placed.layouts
    assert any("decoder.0.attention" in note and "another of these classes is wrong" in note for note in placed.notes)
