"""Lookups and updates in plain torch operations: any device, any dtype.

Row ranges of one width are one lookup in the bank's region of that width: ids become rows of the region. A gradient is
the same lookup turned round: ids are sorted by row, each distinct row is a bag, and what it sums are rows of the
output's gradient. So nothing of the size ids x width is made, and sums have a fixed order.

Legend: N ids, S row ranges, B bags per range, C columns of the output, D width, n distinct rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sharders.embedding.lookup.bank import Bank, Region, RowRange
from sharders.embedding.lookup.reads import Bags, Segmented, Segments
from sharders.embedding.lookup.row_optimizer import Rows

RowGradients = list[tuple[Region, Tensor, Tensor]]
"""Per width: the region, its rows (n,) int64 that have a gradient, distinct and ascending, and the gradients (n, D)."""


class Into(NamedTuple):
    """Flat memory that row gradients may be written to, as much as there are at most: one width behind the other.

    Args:
        rows: int64.
        sums: of what the bank calls its `dtype_of_sums`.
    """

    rows: Tensor
    sums: Tensor


@dataclass(frozen=True)
class _Group:
    """The row ranges of one width."""

    region: Region
    ranges: Tensor
    """(S,) their indices among all."""

    first_rows: Tensor
    """(S,) in the region."""

    columns: Tensor
    """(S * D,) in the output."""


@dataclass(frozen=True)
class _Bags:
    """The ids of one group."""

    rows: Tensor
    """(N,) int64 rows of the region."""

    lengths: Tensor
    """(ranges of the group * B,) ids per bag."""

    weights: Tensor | None
    positions: Tensor | None
    """(N,) where the ids were among all; None where they are all."""

    def bag_of_id(self) -> Tensor:
        bags = torch.arange(self.lengths.numel(), device=self.lengths.device)
        return torch.repeat_interleave(bags, self.lengths, output_size=self.rows.numel())


class TorchLookup:
    """Lookups of `ranges` of `bank`; see `sharders.embedding.lookup.kernels.Lookup`."""

    def __init__(self, bank: Bank, ranges: Sequence[RowRange]) -> None:
        self.bank = bank
        self.ranges = tuple(ranges)
        self._first_rows = [r.chunk.element_offset // r.chunk.width + r.first_row for r in ranges]
        *columns, self.num_columns = accumulate((r.chunk.width for r in ranges), initial=0)
        device = bank.weights.device
        self._groups = []
        for width in dict.fromkeys(r.chunk.width for r in ranges):
            members = [i for i, r in enumerate(ranges) if r.chunk.width == width]
            of_members = [[i, self._first_rows[i], columns[i]] for i in members]
            indices, first_rows, first_columns = torch.tensor(of_members, device=device).unbind(1)
            group_columns = (first_columns.unsqueeze(1) + torch.arange(width, device=device)).flatten()
            self._groups.append(_Group(bank.regions[width], indices, first_rows, group_columns))

    def pooled(self, read: Bags) -> Tensor:
        num_bags = self._num_bags(read.offsets)
        output_BC = self.bank.weights.new_zeros(num_bags, self.num_columns)
        if not read.ids.numel():
            return output_BC
        for group in self._groups:
            bags = self._bags(group, read)
            table_VD = group.region.view(self.bank.weights)
            offsets_SB = bags.lengths.cumsum(0) - bags.lengths
            sums = F.embedding_bag(bags.rows, table_VD, offsets_SB, mode="sum", per_sample_weights=bags.weights)
            sums_BSD = sums.view(len(group.ranges), num_bags, group.region.width).transpose(0, 1)
            if len(self._groups) == 1:
                return sums_BSD.reshape(num_bags, self.num_columns)
            output_BC.index_copy_(1, group.columns, sums_BSD.reshape(num_bags, -1))
        return output_BC

    def order_pooled(self, read: Bags) -> Any:
        return None

    def update_pooled(self, grad: Tensor, read: Bags, *, order: Any = None) -> None:
        self._update(self.pooled_row_gradients(grad, read))

    def gradient_pooled(self, grad: Tensor, read: Bags, *, order: Any = None) -> Tensor:
        return self._flat(self.pooled_row_gradients(grad, read))

    def gradient_weights(self, grad: Tensor, read: Bags) -> Tensor:
        result_N = self.bank.weights.new_zeros(read.ids.numel(), dtype=self.bank.dtype_of_sums)
        if not read.ids.numel():
            return result_N
        for group in self._groups:
            bags = self._bags(group, read)
            grads_ND = self._bag_gradients(group, grad).index_select(0, bags.bag_of_id())
            values = grads_ND.mul_(group.region.view(self.bank.weights).index_select(0, bags.rows)).sum(1)
            if bags.positions is None:
                return values
            result_N[bags.positions] = values
        return result_N

    def rows(self, read: Segmented, out: Tensor | None = None) -> Tensor:
        region = self.region_of(read.segments)
        if region is None:
            return self.bank.weights.new_zeros(0, 0)
        table_VD, rows_N = region.view(self.bank.weights), self.region_rows(read)
        if read.bags is None:
            return torch.index_select(table_VD, 0, rows_N, out=out)
        weights = None if read.weights is None else read.weights.to(table_VD.dtype)
        return F.embedding_bag(
            rows_N, table_VD, read.bags, mode="sum", per_sample_weights=weights, include_last_offset=True
        )

    def order_rows(self, read: Segmented) -> Any:
        return None

    def update_rows(self, grad: Tensor, read: Segmented, *, order: Any = None) -> None:
        self._update(self.row_gradients(grad, read))

    def gradient_rows(self, grad: Tensor, read: Segmented, *, order: Any = None) -> Tensor:
        return self._flat(self.row_gradients(grad, read))

    def gradient_row_weights(self, grad: Tensor, read: Segmented) -> Tensor:
        region = self.region_of(read.segments)
        if region is None or read.bags is None or not read.ids.numel():
            return self.bank.weights.new_zeros(read.ids.numel(), dtype=self.bank.dtype_of_sums)
        grads_ND = grad.to(self.bank.dtype_of_sums).index_select(0, _bag_of_id(read.bags, read.ids.numel()))
        rows_ND = region.view(self.bank.weights).index_select(0, self.region_rows(read))
        return grads_ND.mul_(rows_ND).sum(1)

    def region_of(self, segments: Segments) -> Region | None:
        """The region in which the segments' ranges lie; None without segments."""
        widths = {self.ranges[i].chunk.width for i, _ in segments}
        assert len(widths) <= 1, f"segments of one call have one width, not {sorted(widths)}"
        return self.bank.regions[widths.pop()] if widths else None

    def region_rows(self, read: Segmented) -> Tensor:
        """(N,) int64 rows of the segments' region."""
        device, num_ids = read.ids.device, read.ids.numel()
        first_rows = torch.tensor([self._first_rows[i] for i, _ in read.segments], device=device)
        counts = torch.tensor([count for _, count in read.segments], device=device)
        return torch.repeat_interleave(first_rows, counts, output_size=num_ids).add_(read.ids)

    def as_one_range(self, grad: Tensor, read: Bags) -> tuple[Tensor, Tensor]:
        """Ranges of one width as one range of S * B bags: (N,) rows of their region, and the gradient as (S * B, D)."""
        (group,) = self._groups
        return self._bags(group, read).rows, self._bag_gradients(group, grad)

    def _num_bags(self, offsets: Tensor) -> int:
        return (offsets.numel() - 1) // len(self.ranges) if self.ranges else 0

    def _bags(self, group: _Group, read: Bags) -> _Bags:
        """The ids of a group's ranges; there is at least one bag per range."""
        num_bags, ids = self._num_bags(read.offsets), read.ids
        weights = None if read.weights is None else read.weights.to(self.bank.weights.dtype)
        offsets = read.offsets.long()
        lengths = offsets.diff()
        bounds = offsets[::num_bags]  # (S + 1,): where each range's ids begin
        if len(self._groups) == 1:
            rows = torch.repeat_interleave(group.first_rows, bounds.diff(), output_size=ids.numel())
            return _Bags(rows.add_(ids), lengths, weights, None)
        # The ids of the group's ranges are runs among all ids: their places, run by run, are what is left of a count
        # 0, 1, 2, ... over all runs once each run is shifted to where it begins.
        counts = bounds.diff()[group.ranges]
        ends = counts.cumsum(0)
        num_ids = int(ends[-1])
        positions = torch.repeat_interleave(bounds[group.ranges] - ends + counts, counts, output_size=num_ids)
        positions += torch.arange(num_ids, device=ids.device)
        rows = torch.repeat_interleave(group.first_rows, counts, output_size=num_ids).add_(ids[positions])
        lengths = lengths.view(-1, num_bags)[group.ranges].flatten()
        return _Bags(rows, lengths, None if weights is None else weights[positions], positions)

    def _bag_gradients(self, group: _Group, grad_BC: Tensor) -> Tensor:
        """(ranges of the group * B, D)."""
        if len(self._groups) > 1:
            grad_BC = grad_BC.index_select(1, group.columns)
        grad_BSD = grad_BC.to(self.bank.dtype_of_sums).reshape(-1, len(group.ranges), group.region.width)
        return grad_BSD.transpose(0, 1).reshape(-1, group.region.width)

    def pooled_row_gradients(self, grad: Tensor, read: Bags, *, into: Into | None = None) -> RowGradients:
        result = []
        grad = self.bank.clipped(grad)
        for group in self._groups if read.ids.numel() else ():
            bags = self._bags(group, read)
            if bags.rows.numel():
                sums = combined(bags.rows, self._bag_gradients(group, grad), bags.bag_of_id(), bags.weights)
                result.append((group.region, *sums))
        return result

    def row_gradients(self, grad: Tensor, read: Segmented) -> RowGradients:
        region = self.region_of(read.segments)
        if region is None or not read.ids.numel():
            return []
        grad = self.bank.clipped(grad).to(self.bank.dtype_of_sums)
        bag_of_id = None if read.bags is None else _bag_of_id(read.bags, read.ids.numel())
        return [(region, *combined(self.region_rows(read), grad, bag_of_id, read.weights))]

    def update_touched(self, sums: Sequence[RowGradients]) -> None:
        self._update(_added(sums))

    def gradient_touched(self, sums: Sequence[RowGradients]) -> Tensor:
        return self._flat(_added(sums))

    def _update(self, gradients: RowGradients) -> None:
        for region, rows_n, grads_nD in gradients:
            update(self.bank, region, rows_n, grads_nD)

    def _flat(self, gradients: RowGradients) -> Tensor:
        """(numel,), laid out as the bank's weights."""
        flat = torch.zeros_like(self.bank.weights)
        for region, rows_n, grads_nD in gradients:
            region.view(flat).index_copy_(0, rows_n, grads_nD.to(flat.dtype))
        return flat


def update(bank: Bank, region: Region, rows_n: Tensor, grads_nD: Tensor) -> None:
    """Apply the bank's optimizer to distinct rows of a region, in place, given their gradients of any dtype."""
    assert bank.spec is not None, "a bank without optimizer is not updated in the backward pass"
    optimizer = bank.spec.optimizer
    by_row = {name for name, tensor in optimizer.state.items() if tensor.is_row_wise}
    state = {name: t if name in by_row else region.view(t) for name, t in bank.state.items()}
    bank_rows_n = region.bank_rows(rows_n) if by_row else rows_n
    step = region.steps(rows_n, bank.steps)
    grads_nD = grads_nD.to(bank.dtype_of_sums)
    optimizer.update(Rows(region.view(bank.weights), rows_n, grads_nD, state, bank_rows_n, bank.options, step))


def spread(bank: Bank, gradients: RowGradients) -> tuple[Tensor, Tensor]:
    """Rows' gradients where their rows are, and which these are.

    Returns:
        (numel,) laid out as `bank.weights`, of its `dtype_of_sums`, and (total_rows,) bool by bank row.
    """
    flat = torch.zeros_like(bank.weights, dtype=bank.dtype_of_sums)
    touched = torch.zeros(bank.total_rows, dtype=torch.bool, device=flat.device)
    for region, rows_n, grads_nD in gradients:
        region.view(flat).index_copy_(0, rows_n, grads_nD.to(flat.dtype))
        touched[region.bank_rows(rows_n)] = True
    return flat, touched


def touched_of(bank: Bank, flat_grad: Tensor, touched_rows: Tensor) -> RowGradients:
    """What `spread` gives, summed over batches, as `Lookup.update_touched` takes it.

    Args:
        bank: whose rows these are.
        flat_grad: (numel,), laid out as `bank.weights`.
        touched_rows: (total_rows,) bool, by bank row.
    """
    # Bank rows that were touched become rows of the region of their chunk's width.
    chunks = sorted((c for table in bank.chunks for c in table if c.rows), key=lambda c: c.row_offset)
    touched = touched_rows.nonzero().squeeze(1)
    if not touched.numel():
        return []
    ends = torch.tensor([c.row_offset + c.rows for c in chunks], device=touched.device)
    shifts = torch.tensor([c.element_offset // c.width - c.row_offset for c in chunks], device=touched.device)
    widths = torch.tensor([c.width for c in chunks], device=touched.device)
    chunk_of_row = torch.bucketize(touched, ends, right=True)
    rows, widths_n = touched + shifts[chunk_of_row], widths[chunk_of_row]
    found = [(region, rows[widths_n == width]) for width, region in bank.regions.items()]
    return [(region, rows_n, region.view(flat_grad).index_select(0, rows_n)) for region, rows_n in found if len(rows_n)]


def _bag_of_id(bags: Tensor, count: int) -> Tensor:
    """(N,) the bag of each id, from the bags' bounds (n + 1,)."""
    numbers = torch.arange(bags.numel() - 1, device=bags.device)
    return torch.repeat_interleave(numbers, bags.diff(), output_size=count)


def _added(sums: Sequence[RowGradients]) -> RowGradients:
    """The sum of several, in their order."""
    by_width: dict[int, RowGradients] = {}
    for of_width in (of_width for part in sums for of_width in part if of_width[1].numel()):
        by_width.setdefault(of_width[0].width, []).append(of_width)
    result = []
    for parts in by_width.values():
        regions, rows, gradients = zip(*parts, strict=True)
        added = parts[0][1:] if len(parts) == 1 else combined(torch.cat(rows), torch.cat(gradients), None, None)
        result.append((regions[0], *added))
    return result


def combined(
    rows_N: Tensor, grads: Tensor, sources_N: Tensor | None, weights_N: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Distinct rows, ascending, and for each the sum of `grads[sources] * weights` over its ids; in the ids' order."""
    # Each distinct row is a bag of what the ids that name it stand for: the sort brings them side by side.
    sorted_rows, order = rows_N.sort(stable=True)
    rows_n, counts_n = torch.unique_consecutive(sorted_rows, return_counts=True)
    sources = order if sources_N is None else sources_N[order]
    weights = None if weights_N is None else weights_N[order].to(grads.dtype)
    offsets_n = counts_n.cumsum(0) - counts_n
    return rows_n, F.embedding_bag(sources, grads, offsets_n, mode="sum", per_sample_weights=weights)
