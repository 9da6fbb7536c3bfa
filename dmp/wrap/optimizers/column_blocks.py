"""Row-wise optimizer state of a table that is cut into column blocks.

[Note: column blocks]
Row-wise Adagrad keeps one value per row. Where a table is cut into B column blocks it keeps one per row and block, of
size (rows, B); the unsharded state, (rows,), is their mean weighted by the blocks' widths. Each form can be given where
another is wanted: a value per row is taken by every block, and other blocks by way of their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def is_blocked(value: Any, widths: Sequence[int]) -> bool:
    """Whether a state has one column per column block, rather than one per column of the parameter."""
    return isinstance(value, torch.Tensor) and is_per_block(value.shape, widths)


def is_per_block(size: Sequence[int], widths: Sequence[int]) -> bool:
    """Whether state of this size has a value for each row and each column block of such widths; none are none."""
    return len(size) == 2 and size[1] == len(widths) < sum(widths)


def merge_blocks(value: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    """(rows, B) -> (rows,), the mean weighted by the blocks' widths."""
    weights = torch.tensor(widths, dtype=torch.float64, device=value.device) / sum(widths)
    return (value.double() @ weights).to(value.dtype)


def between_blocks(
    value: torch.Tensor, given: Sequence[int] | None, like: torch.Tensor, wanted: Sequence[int] | None
) -> torch.Tensor | None:
    """State in one of these forms as another; None where the one cannot be had from the other.

    Args:
        value: a whole tensor.
        given: widths of its blocks; None where it has no blocks, or nobody says how wide they are.
        like: a tensor of the form that is wanted.
        wanted: widths of its blocks; None where it has none.
    """
    if given is not None and is_blocked(value, given) and tuple(given) != tuple(wanted or ()):
        value = merge_blocks(value, given)
    if wanted is not None and is_blocked(like, wanted) and value.shape == like.shape[:1]:
        value = value.unsqueeze(1).expand(like.shape)
    return value if value.shape == like.shape else None
