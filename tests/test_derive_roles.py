"""Derived tensor-parallel plans where names mislead or are rare: which Linear does what, how many heads there are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sharders.tensor_parallel.auto_plan import derive
from sharders.tensor_parallel.head_counts import ModelRuns
from tests.test_derive import of_block
from tests.transformers_zoo import GPT


class OwnHeads(nn.Module):
    """Keeps its number of heads to itself, as FT-Transformer's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._n_heads = 4
        self.W_q, self.W_k, self.W_v, self.W_out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [m(x) for m in (self.W_q, self.W_k, self.W_v)]
        q, k, v = (p.view(*p.shape[:2], self._n_heads, p.shape[2] // self._n_heads).transpose(1, 2) for p in parts)
        out: torch.Tensor = self.W_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


def test_heads_that_an_attention_keeps_to_itself() -> None:
    model = GPT(layers=1)
    model.h[0].attn = OwnHeads(model.wte.embedding_dim)
    found = derive(ModelRuns(model, 2, "tp"))
    wanted = {"W_q": "colwise", "W_k": "colwise", "W_v": "colwise", "W_out": "rowwise"}
    assert of_block(found.styles, "h.0.attn") == wanted, found.notes
    assert found.divided["h.0.attn", "_n_heads"] == 2 and any("proved: outputs" in n for n in found.notes)


class Gated(nn.Module):
    """As litgpt's, whose second Linear is named like one that leads back."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc_1, self.fc_2 = nn.Linear(width, inner), nn.Linear(width, inner)
        self.proj = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.proj(F.silu(self.fc_1(x)) * self.fc_2(x))
        return out


def test_shapes_that_do_not_tell_which_linear_leads_back() -> None:
    """The one that is proved; it was left whole where its likeliest was wrong, by its name."""
    model = GPT(layers=2)
    width = model.wte.embedding_dim
    for block in model.h:
        block.mlp = Gated(width, width)
    found = derive(ModelRuns(model, 2, "tp"), sequence_parallel=True)
    for i in range(2):
        assert found.styles[f"h.{i}.mlp"] == "gather_input"
        mlp = {"fc_1": "colwise", "fc_2": "colwise", "proj": "rowwise_scatter"}
        assert of_block(found.styles, f"h.{i}.mlp") == mlp, found.notes
