"""Sorting ids by row block: which block of its table each id lies in, keeping the order inside a block.

Compiled code does it on a CPU, FBGEMM where that cannot be or blocks are many; torch's own operators do it anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from sharders.embedding.lookup import fbgemm_kernel, numba_kernel
from sharders.embedding.lookup.numba_layout import address, longs
from sharders.embedding.lookup.numba_training import entry_of

_FEW_BLOCKS = 8


@dataclass
class Bucketized:
    """Ids by (block, feature, sample).

    Args:
        values: (N,) relative to their block's first row.
        lengths: (blocks * features, B).
        order: (N,) int64, where each was before; None unless asked for, or where there is `place`.
        place: (N,) int64, where each that was before is now; likewise.
        rows: (N,) int32, where each was before, shifted; None unless asked for.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    order: torch.Tensor | None = None
    place: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    def moved(self, values: torch.Tensor) -> torch.Tensor:
        """What goes with the ids, in their new order."""
        if self.place is not None:
            return torch.empty_like(values).scatter_(0, self.place, values)
        assert self.order is not None, "nobody has asked where ids go"
        return values.index_select(0, self.order)


class Bucketizer:
    """Compiled for the row boundaries of some features.

    Args:
        bounds: for each feature its blocks' boundaries, from 0 to the table's rows.
        device: of the ids.
        kernel: name of the lookup kernel that the user asked for: with "torch" nothing of FBGEMM's is used, with
            another than numba's nothing of numba.
    """

    def __init__(self, bounds: Sequence[Sequence[int]], device: torch.device, kernel: str | None = None) -> None:
        self.num_blocks = max(len(b) for b in bounds) - 1
        self.device = device
        self._waits = device.type != "cpu"  # for the device, wherever a size depends on values
        self._use_fbgemm = device.type == "cpu" and kernel != "torch" and not fbgemm_kernel.problem()
        self._compiles = self.num_blocks <= _FEW_BLOCKS and numba_kernel.may_run(kernel, device)
        # All features' rows in one line, so that one search finds the block of every id.
        first_rows = [0, *accumulate(b[-1] for b in bounds)]
        self._first_rows = self._long(first_rows[:-1])
        self._starts = self._long([r + x for r, b in zip(first_rows, bounds, strict=False) for x in b[:-1]])
        self._numbers = self._long([i for b in bounds for i in range(len(b) - 1)])
        # FBGEMM: equal blocks by division, others by a search in padded boundaries.
        sizes = [b[1] for b in bounds]
        self._sizes = self._long(sizes)
        is_even = all(
            list(b) == [min(i * n, b[-1]) for i in range(len(b))] and n * self.num_blocks >= b[-1]
            for b, n in zip(bounds, sizes, strict=True)
        )
        padded = [list(b) + [b[-1]] * (self.num_blocks + 1 - len(b)) for b in bounds]
        self._bounds = self._long(padded)
        self._positions = None if is_even else [self._long(b) for b in padded]

    def _long(self, values: Sequence[int] | Sequence[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def __call__(
        self, values: torch.Tensor, lengths: torch.Tensor, with_order: bool, shifts: Sequence[int] | None = None
    ) -> Bucketized:
        """Sort.

        Args:
            values: (N,) ids, feature-major, in range.
            lengths: (features, B) of the same dtype.
            with_order: tell where each id was.
            shifts: tell that with its feature's of these added.
        """
        values, lengths = values.contiguous(), lengths.contiguous()  # FBGEMM reads by address and does not look
        if self._compiles and values.dtype == lengths.dtype == torch.int32:
            return self._by_numba(values, lengths, with_order, shifts)
        sort = self._by_fbgemm if self._use_fbgemm and values.numel() else self._by_torch
        sorted_ids = sort(values, lengths, with_order or shifts is not None)
        if shifts is not None:
            rows = torch.arange(values.numel(), dtype=torch.int32, device=self.device)
            of_ids = torch.tensor(shifts, dtype=torch.int32, device=self.device)
            of_ids = of_ids.repeat_interleave(lengths.sum(1), output_size=values.numel())
            sorted_ids.rows = sorted_ids.moved(rows.add_(of_ids))
        return sorted_ids

    def _by_numba(
        self, values: torch.Tensor, lengths: torch.Tensor, with_order: bool, shifts: Sequence[int] | None
    ) -> Bucketized:
        features, samples = lengths.shape
        out, place = (
            torch.empty_like(values),
            torch.empty(values.numel() if with_order else 0, dtype=torch.int64, device="cpu"),
        )
        new_lengths = lengths.new_empty(self.num_blocks * features, samples)
        starts = torch.empty(len(new_lengths), dtype=torch.int64, device="cpu")
        given = values.data_ptr(), lengths.data_ptr(), features, samples, self._bounds.data_ptr(), self.num_blocks
        to = out.data_ptr(), new_lengths.data_ptr(), place.data_ptr() if with_order else 0, starts.data_ptr()
        rows, (_kept, of_features) = (None if shifts is None else torch.empty_like(values)), longs(shifts or ())
        entry_of("split_by_blocks")(*given, *to, of_features, address(rows))
        return Bucketized(out, new_lengths, place=place if with_order else None, rows=rows)

    def _by_fbgemm(self, values: torch.Tensor, lengths: torch.Tensor, with_order: bool) -> Bucketized:
        sizes = self._sizes.to(values.dtype)
        positions = None if self._positions is None else [p.to(values.dtype) for p in self._positions]
        new_lengths, new_values, _, _, place = torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths.reshape(-1), values, False, with_order, sizes, self.num_blocks, None, None, -1, positions
        )
        lengths = new_lengths.view(-1, lengths.shape[1])
        return Bucketized(new_values, lengths, place=place.long() if with_order else None)

    def _by_torch(self, values: torch.Tensor, lengths: torch.Tensor, with_order: bool) -> Bucketized:
        features, batch_size = lengths.shape
        line = values.to(torch.int64) + self._first_rows.repeat_interleave(lengths.sum(1), output_size=values.numel())
        found = torch.bucketize(line, self._starts, right=True) - 1
        block = self._numbers[found]
        if not self._waits and self.num_blocks <= _FEW_BLOCKS:
            order = torch.cat([(block == k).nonzero().view(-1) for k in range(self.num_blocks)])
        else:
            order = block.to(torch.int32).argsort(stable=True)
        bags = features * batch_size
        bag = torch.arange(bags, device=self.device).repeat_interleave(lengths.reshape(-1), output_size=values.numel())
        bag_in_block, num_bags = block * bags + bag, self.num_blocks * bags
        if not self._waits:
            new_lengths = torch.bincount(bag_in_block, minlength=num_bags).to(values.dtype)
        else:
            bounds = torch.arange(num_bags + 1, device=self.device)
            new_lengths = torch.searchsorted(bag_in_block[order], bounds).diff().to(values.dtype)
        new_values = (line - self._starts[found])[order].to(values.dtype)
        new_lengths = new_lengths.view(self.num_blocks * features, batch_size)
        return Bucketized(new_values, new_lengths, order if with_order else None)
