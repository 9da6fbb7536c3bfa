"""Jagged rows, and the same in a rectangle."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dmp import InputError


class Jagged(NamedTuple):
    """A jagged tensor as a pair: `values` (N, ...), rows of sample after sample; `lengths` (B,), rows of each."""

    values: torch.Tensor
    lengths: torch.Tensor


def jagged_to_dense(values: torch.Tensor, lengths: torch.Tensor, max_length: int, padding: float = 0.0) -> torch.Tensor:
    """Rows of jagged samples in a rectangle: short samples are padded at the end, long ones lose their last rows.

    Backward: each row's gradient from its place; zero for rows that were left out.

    Args:
        values: (N, D), or (N,) or more dims: rows of sample after sample.
        lengths: (B,) integers, rows of each sample; their sum is N.
        max_length: T.
        padding: what stands in the places of no row.

    Returns:
        (B, T, D), of the dtype of `values`.

    Raises:
        InputError: lengths that are not integers of one dim, are negative, or do not sum to N; a negative `max_length`.

    Example:
        >>> jagged_to_dense(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 0, 1]), 2)
        tensor([[1., 2.],
                [0., 0.],
                [3., 0.]])
    """
    if max_length < 0:
        raise InputError(f"max_length must be >= 0; got {max_length}")
    sample, place = _places(lengths, values.shape[0])
    if values.shape[0]:
        keep = place < max_length
        sample, place, values = sample[keep], place[keep], values[keep]
    dense = values.new_full((lengths.numel() * max_length, *values.shape[1:]), padding)
    dense = dense.index_copy(0, sample * max_length + place, values)
    return dense.view(lengths.numel(), max_length, *values.shape[1:])


def dense_to_jagged(dense: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The first `lengths[b]` rows of each sample, sample after sample. Backward: zero in the places left out.

    Args:
        dense: (B, T, D), or (B, T) or more dims.
        lengths: (B,) integers, 0 to T.

    Returns:
        (N, D) with N the sum of `lengths`.

    Raises:
        InputError: lengths that are not integers of one dim, are not one for each sample, are negative, or pass T.

    Example:
        >>> dense_to_jagged(torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 0.0]]), torch.tensor([2, 0, 1]))
        tensor([1., 2., 3.])
    """
    if dense.dim() < 2:
        raise InputError(f"dense must be (B, T, ...); got shape {tuple(dense.shape)}")
    if lengths.shape != dense.shape[:1]:
        raise InputError(f"there must be one length for each of the {len(dense)} samples; got {tuple(lengths.shape)}")
    sample, place = _places(lengths, None)
    width = dense.shape[1]
    if lengths.numel() and int(lengths.max()) > width:
        raise InputError(
            f"lengths must be 0..{width}, the rows of each sample; sample {int(lengths.argmax())} has "
            f"{int(lengths.max())}: lengths.clamp(max={width}) for rows that jagged_to_dense has cut"
        )
    return dense.reshape(len(dense) * width, *dense.shape[2:]).index_select(0, sample * width + place)


def _places(lengths: torch.Tensor, count: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(N,) sample of each row, and its place in the sample; `count` is what N must be."""
    check_lengths(lengths, count, "the jagged tensor")
    if lengths.dim() != 1:
        raise InputError(f"lengths must have one dim, the samples; got shape {tuple(lengths.shape)}")
    total = int(lengths.sum())
    lengths = lengths.long()
    sample = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=total)
    starts = lengths.cumsum(0) - lengths
    return sample, torch.arange(total, device=lengths.device) - starts[sample]


def check_lengths(lengths: torch.Tensor, count: int | None, what: str) -> None:
    """Check the lengths of a jagged tensor.

    Args:
        count: what they must sum to, or None.
        what: the tensor, for messages.

    Raises:
        InputError: lengths that are not integers, are negative, or have another sum.
    """
    if lengths.dtype not in (torch.int32, torch.int64):
        raise InputError(f"lengths of {what} must be int32 or int64; got {lengths.dtype}")
    if lengths.numel() and int(lengths.min()) < 0:
        index = int(lengths.reshape(-1).argmin())
        raise InputError(f"lengths of {what} must be >= 0; number {index} is {int(lengths.min())}")
    if count is not None and int(lengths.sum()) != count:
        raise InputError(f"lengths of {what} sum to {int(lengths.sum())}, but there are {count} rows of values")
