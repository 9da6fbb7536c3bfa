"""Dry runs on meta: what is remembered shows the same, and attention has torch's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sharders.tensor_parallel.head_counts import ModelRuns
from sharders.tensor_parallel.structure import dry_run
from sharders.tensor_parallel.structure.meta_copies import MetaCopies
from sharders.tensor_parallel.structure.transformer import Transformer
from tests.transformers_zoo import GPT, Bert, Llama


@pytest.mark.parametrize("make", [Llama, GPT, Bert])
def test_remembered_operations_show_the_same(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    runs = ModelRuns(make(), 2, "tp")
    feed, first = runs.unsplit().feed, runs.unsplit().whole
    assert runs.copies.known
    again = dry_run.dry_run(runs.copies, feed)
    monkeypatch.setattr(dry_run, "_NEW", frozenset())
    plain = dry_run.dry_run(MetaCopies(runs.model, runs.transformer), feed)
    for name in ("result", "outputs", "inputs", "order", "contractions", "reductions"):
        assert getattr(again, name) == getattr(first, name) == getattr(plain, name)


def test_remembered_operations_keep_strides_and_dtypes() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                made = [x.transpose(0, 1) * 2, x.bfloat16() + 1.0, x.long() / 2, x.long() * True, x.mean(0, True)]
                seen.append([(y.shape, y.stride(), y.dtype) for y in made])
            return x

    seen: list[list[Any]] = []
    copies = MetaCopies(Odd(), Transformer((), 0, None, None))
    dry_run.dry_run(copies, dry_run.Feed("", (torch.zeros(3, 5, device="meta"),)))
    assert len(copies.known) == 5
    x = torch.zeros(3, 5)
    real = [x.transpose(0, 1) * 2, x.bfloat16() + 1.0, x.long() / 2, x.long() * True, x.mean(0, True)]
    assert seen == [[(y.shape, y.stride(), y.dtype) for y in real]] * 2


@pytest.mark.parametrize(
    ("q", "k", "mask", "is_grouped"),
    [
        ((2, 4, 8, 16), (2, 4, 6, 16), None, False),
        ((2, 4, 8, 16), (2, 2, 8, 16), None, True),
        ((2, 4, 8, 16), (2, 2, 8, 16), None, False),
        ((2, 4, 8, 16), (2, 3, 8, 16), None, True),
        ((2, 4, 8, 16), (2, 4, 8, 8), None, False),
        ((4, 8, 16), (4, 8, 16), (8, 8), False),
        ((2, 4, 8, 16), (2, 4, 8, 16), (2, 1, 8, 8), False),
        ((2, 4, 8, 16), (2, 4, 8, 16), (2, 2, 8, 8), False),
        ((2, 4, 8, 16), (2, 4, 8, 16), (8, 6), False),
    ],
)
def test_attention_has_torchs_shape_or_fails_where_torch_does(
    q: tuple[int, ...], k: tuple[int, ...], mask: tuple[int, ...] | None, is_grouped: bool
) -> None:
    query, key, value = torch.zeros(q), torch.zeros(k), torch.zeros(*k[:-1], 12)
    of_mask = None if mask is None else torch.zeros(mask)

    def shape_of(attention: Callable[..., torch.Tensor]) -> tuple[int, ...] | None:
        try:
            return tuple(attention(query, key, value, of_mask, enable_gqa=is_grouped).shape)
        except (RuntimeError, ValueError):
            return None

    assert shape_of(dry_run.attended) == shape_of(F.scaled_dot_product_attention)
