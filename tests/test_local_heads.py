"""Attentions that call their numbers of heads local, as code that was written to be split does: Meta's Llama, whose
`n_local_heads` are of the queries, and gpt-fast, whose are of keys and values. Or `head_size` what all heads are
together, as LXMERT does, and `num_attn_heads` their number, as ProphetNet does. Or a module splits them, which holds
their number under the name of an axis, as einops' `Rearrange` does in x-transformers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv, to_unsharded
from tests.ranks import mesh, run_ranks

HEADS, GROUPS, SIZE = 4, 2, 4
WIDTH = HEADS * SIZE


class SplitHeads(nn.Module):
    """Of both forms, the second is what is read."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.sizes, self._sizes = sizes, tuple(sizes.items())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (dict(self._sizes)["h"], -1)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.head_dim = style, SIZE
        if style == "meta":
            self.n_local_heads, self.n_local_kv_heads = HEADS, GROUPS
        elif style == "joined":
            self.num_attn_heads, self.num_kv_heads, self.head_size = HEADS, GROUPS, WIDTH
        elif style == "named":
            self.split, self.split_groups = SplitHeads(h=HEADS, w=WIDTH), SplitHeads(h=GROUPS)
        else:
            self.n_head, self.n_local_heads = HEADS, GROUPS
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, GROUPS * SIZE, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.style == "named":
            q, k, v = self.split(self.wq(x)), *(self.split_groups(w(x)) for w in (self.wk, self.wv))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return self.wo(out.transpose(1, 2).flatten(2))
        if self.style == "joined":
            heads, groups = self.num_attn_heads, self.num_kv_heads
        else:
            is_meta = self.style == "meta"
            heads = self.n_local_heads if is_meta else self.n_head
            groups = self.n_local_kv_heads if is_meta else self.n_local_heads
        parts = ((self.wq, heads), (self.wk, groups), (self.wv, groups))
        q, k, v = (w(x).view(*x.shape[:2], n, self.head_dim).transpose(1, 2) for w, n in parts)
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        width = self.head_size if self.style == "joined" else -1
        return self.wo(out.transpose(1, 2).reshape(*x.shape[:2], width))


class Block(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.attention, self.norm = Attention(style), nn.LayerNorm(WIDTH)
        self.w1, self.w2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.w2(F.silu(self.w1(x)))


class Model(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, WIDTH)
        self.layers = nn.ModuleList(Block(style) for _ in range(2))
        self.output = nn.Linear(WIDTH, 24, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def check(style: str) -> None:
    torch.manual_seed(0)
    plain, module = Model(style).double(), Model(style).double()
    module.load_state_dict(plain.state_dict())
    model = DistributedModelParallel(module, ShardingEnv.from_mesh(mesh((2,), ("tp",))))
    assert all(layer.attention.wk.weight.to_local().shape[0] == GROUPS * SIZE // 2 for layer in module.layers)
    ids = torch.randint(24, (4, 6))
    for m in (plain, model):
        m(ids).square().mean().backward()
    torch.testing.assert_close(model(ids), plain(ids))
    expected = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), expected[name].grad, msg=lambda m, name=name: f"{name}: {m}")
    for layer in (*model.module.layers, *plain.layers):
        layer.kept = {"rows": [1, 2]}
    model.module.layers[0].kept["rows"].append(3)
    for copied in (copy.deepcopy(model).module, to_unsharded(model)):
        torch.testing.assert_close(copied(ids), plain(ids))
        assert [layer.kept["rows"] for layer in copied.layers] == [[1, 2, 3], [1, 2]]


@pytest.mark.parametrize("style", ["meta", "gpt-fast", "joined", "named"])
@pytest.mark.sampled(4)
def test_they_are_divided(style: str) -> None:
    run_ranks(2, check, style)
