"""Dry runs on meta: attention has torch's shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from sharders.tensor_parallel.structure import dry_run


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
