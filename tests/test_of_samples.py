"""Linears of a block that give one vector for each sample."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dmp import PlanError
from sharders.tensor_parallel.auto_plan import derive
from sharders.tensor_parallel.head_counts import ModelRuns
from tests.test_values_of_heads import WIDTH, Attention


class Block(nn.Module):
    """Its wide Linear is given what `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention, self.kind = Attention(""), kind
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {"samples": x.mean(1), "tokens": x.flatten(0, 1), "positions": x, "first": x[:1].mean(1)}[self.kind]
        out = self.wide(given)
        if self.kind != "positions":
            out = out.reshape(-1, x.shape[1] if self.kind == "tokens" else 1, 2 * WIDTH)
        scale, shift = out.chunk(2, -1)
        return x + self.attention(x) * scale + shift


@pytest.mark.parametrize("kind", ["samples", "tokens", "positions", "first"])
def test_what_gives_a_vector_for_each_sample_is_split_and_gathered(kind: str) -> None:
    """And named as whole no more; what is given more than that is left whole."""
    found = derive(ModelRuns(nn.Sequential(Block(kind), Block(kind)), 2, "tp"))
    is_of_samples = kind == "samples"
    assert found.styles.get("1.wide") == ("colwise_gather" if is_of_samples else None)
    assert any("0.wide" in note and "left whole" in note for note in found.notes) != is_of_samples
    assert any("; proved" in note for note in found.notes) and found.styles["1.attention.q"] == "colwise"


def test_sequence_parallel_does_not_run_it() -> None:
    """It is used on slices, so that each rank has a part of its gradient: gathered, it would have passed unseen."""
    model = nn.ModuleDict({"blocks": nn.ModuleList([Block("samples"), Block("samples")]), "norm": nn.LayerNorm(WIDTH)})
    model.forward = lambda *, page: page  # nobody can guess what it takes
    with pytest.raises(PlanError, match=r"'blocks.0.wide' .* would see a slice of the sequence"):
        derive(ModelRuns(model, 2, "tp"), sequence_parallel=True)
