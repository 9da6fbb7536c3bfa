"""`Bank`: the storage of the table rectangles that one rank holds and that can be looked up and updated together.

Terms:
    chunk: a rectangle of a table, here (rows, width), stored row by row.
    bank: all chunks of a rank with one dtype and one optimizer, in one flat tensor.
    bank row: a row of any chunk, numbered 0..total_rows in storage order; row-wise optimizer state is indexed by it.
    region: the bank seen as one matrix of a given width. Every chunk starts at a multiple of its width, so its rows
        are whole rows of the region of that width: lookups over many chunks are one lookup in a region.
    row range: the rows of a chunk that the ids of one slot of the input dist address (several features may share one).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.embedding.lookup.pages import on_large_pages, to_write
from sharders.embedding.lookup.row_optimizer import wide


@dataclass(frozen=True)
class Chunk:
    """Where a rectangle lies in its bank."""

    element_offset: int
    """First element in `Bank.weights`; a multiple of `width`."""

    row_offset: int
    """First bank row."""

    rows: int
    width: int


@dataclass(frozen=True)
class RowRange:
    """The rows `first_row .. first_row + rows` of a chunk; a feature's ids count from `first_row`."""

    chunk: Chunk
    first_row: int
    rows: int


@dataclass(frozen=True)
class Region:
    """The bank's chunks of one width, inside the bank seen as a matrix of that width.

    One entry per non-empty chunk, in storage order.
    """

    width: int
    first_rows: tuple[int, ...]
    """First row in the matrix."""

    row_shifts: tuple[int, ...]
    """Bank row less row in the matrix."""

    tables: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """A tensor shaped as `Bank.weights` as (V, width)."""
        num_rows = flat.numel() // self.width
        return flat.narrow(0, 0, num_rows * self.width).view(num_rows, self.width)

    def bank_rows(self, rows: Tensor) -> Tensor:
        """(n,) rows of the matrix as bank rows."""
        if len(set(self.row_shifts)) <= 1:
            return rows + self.row_shifts[0] if any(self.row_shifts) else rows
        return rows + self._chunk_values(rows, self.row_shifts, rows.dtype)

    def steps(self, rows: Tensor, steps: Tensor) -> Tensor:
        """Step of the table of each row: float64, 0-D on the CPU where all tables agree, else (n, 1)."""
        values = steps.tolist()
        if len({values[t] for t in self.tables}) <= 1:
            return torch.tensor(values[self.tables[0]] if self.tables else 0.0, dtype=torch.float64, device="cpu")
        return self._chunk_values(rows, [values[t] for t in self.tables], torch.float64).unsqueeze(1)

    def _chunk_values(self, rows: Tensor, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        first_rows = torch.tensor(self.first_rows, device=rows.device)
        return torch.tensor(values, dtype=dtype, device=rows.device)[torch.bucketize(rows, first_rows, right=True) - 1]


_LAID_OUT = ("spec", "chunks", "regions")
"""Attributes of a bank that never change."""


class Bank:
    """Weights and in-backward optimizer state of a rank's chunks that share a dtype and an optimizer.

    Chunks of one table are adjacent. Wide tables come first, so that padding (always zero) is rare. `copy.deepcopy`
    gives an independent bank; views taken before stay with the old one.

    Args:
        shapes: per table, (rows, width) of each chunk; possibly none. Zero rows are fine.
        dtype: of weights; state has what `wide` makes of it.
        device: of weights and state.
        spec: the in-backward optimizer, or None.

    Example:
        >>> bank = Bank([[(10, 4)], [(3, 8)]], torch.float32, "cpu", OptimizerSpec.make("rowwise_adagrad"))
        >>> bank.chunk_view(1, 0).shape, bank.state_view("sum", 1, 0).shape
        (torch.Size([3, 8]), torch.Size([3]))
    """

    weights: Tensor
    """(numel,): every chunk, row by row; never requires grad."""

    state: dict[str, Tensor]
    """Per state name (numel,) if pointwise, laid out as `weights`, or (total_rows,) if row-wise."""

    steps: Tensor
    """(num_tables,) float32 on the CPU: updates so far."""

    options: dict[str, Any]
    """The optimizer's param group; read at every update, so that a changed `lr` takes effect."""

    chunks: list[list[Chunk]]
    """Per table, in the order given."""

    regions: dict[int, Region]
    """By width."""

    def __init__(
        self,
        shapes: Sequence[Sequence[tuple[int, int]]],
        dtype: torch.dtype,
        device: torch.device | str,
        spec: OptimizerSpec | None = None,
    ) -> None:
        self.spec = spec
        self.options = spec.param_group() if spec else {}
        self.chunks, numel, self.total_rows = _lay_out(shapes)
        self.regions = _regions(self.chunks)
        self.weights = on_large_pages(torch.empty(numel, dtype=dtype, device=device)).zero_()
        self.steps = torch.zeros(len(shapes), dtype=torch.float32, device="cpu")
        self.state = {}
        for name, tensor in spec.optimizer.state.items() if spec else ():
            size = self.total_rows if tensor.is_row_wise else numel
            start = float(self.options[tensor.start]) if tensor.start else 0.0
            memory = on_large_pages(torch.empty(size, dtype=tensor.dtype or wide(dtype), device=device))
            self.state[name] = memory.fill_(start)

    def chunk_view(self, table: int, i: int) -> Tensor:
        """Chunk `i` of a table, a (rows, width) view of `weights`."""
        chunk = self.chunks[table][i]
        return self.weights.narrow(0, chunk.element_offset, chunk.rows * chunk.width).view(chunk.rows, chunk.width)

    def state_view(self, name: str, table: int, i: int) -> Tensor:
        """Optimizer state of chunk `i` of a table, a view: (rows, width) if pointwise, (rows,) if row-wise."""
        chunk = self.chunks[table][i]
        assert self.spec is not None, f"a bank without optimizer has no state {name!r}"
        tensor = self.spec.optimizer.state[name]
        first = chunk.row_offset if tensor.is_row_wise else chunk.element_offset
        shape = tensor.shape(chunk.rows, chunk.width)
        return self.state[name].narrow(0, first, prod(shape)).view(shape)

    def table_view(self, table: int, width: int, flat: Tensor | None = None) -> Tensor:
        """All chunks of a table as one contiguous matrix.

        Args:
            table: index of the table.
            width: the unsharded table's, for a table that has no chunk here.
            flat: what to view: a tensor shaped as `weights` (a gradient, say), `weights` itself by default.

        Returns:
            (span // g, g), a view, where g is the greatest common divisor of the chunks' widths: (rows, width) for a
            table of one chunk, (0, width) without chunks.
        """
        chunks = self.chunks[table]
        first = min((c.element_offset for c in chunks), default=0)
        span = max((c.element_offset + c.rows * c.width for c in chunks), default=0) - first  # with padding between
        divisor = gcd(*(c.width for c in chunks)) or width
        return (self.weights if flat is None else flat).narrow(0, first, span).view(span // divisor, divisor)

    @property
    def dtype_of_sums(self) -> torch.dtype:
        """Of a row's gradients, once they are summed."""
        return wide(self.weights.dtype)

    @property
    def clips(self) -> bool:
        """Whether the optimizer's options ask for `clipped`; they may be set at any time."""
        return bool(self.options.get("gradient_clipping"))

    def clipped(self, grad: Tensor, factor: float = 1.0) -> Tensor:
        """The gradient of a lookup's results, its elements clamped where the optimizer's options ask for it.

        As FBGEMM's `gradient_clipping`: before the gradients of a row are summed.

        Args:
            factor: by which the gradient is still to be multiplied.
        """
        if not self.clips:
            return grad
        bound = float(self.options["max_gradient"]) / factor
        return grad.clamp(-bound, bound)

    def step(self) -> None:
        """Count one update of every table; to be called once per backward pass, before the updates."""
        # Torch's operator, and numpy's, take 20 microseconds in the midst of a step.
        counts: Any = self.steps.numpy().data
        for table in range(len(counts)):
            counts[table] += 1.0

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace weights and state by `fn` of them, as `nn.Module._apply` does; take views anew after it.

        State stays `wide` where `fn` makes 16 bits of weights.
        """
        self.weights = on_large_pages(fn(self.weights))
        narrows = self.weights.dtype.itemsize < 4
        self.state = {n: on_large_pages(_past_casts(t, fn) if narrows else fn(t)) for n, t in self.state.items()}

    def is_viewed_beside(self, known: int) -> bool:
        """Whether somebody holds views of the weights' memory beside so many that are known."""
        # Of tensors, the weights themselves too, and of the object that is made to ask.
        return torch._C._storage_Use_Count(self.weights.untyped_storage()._cdata) > known + 2

    def move(self) -> None:
        """Have the weights in memory of their own; views taken before stay with the old one, and with its values."""
        self.weights = to_write(torch.empty_like(self.weights)).copy_(self.weights)

    def __deepcopy__(self, memo: dict[int, Any]) -> Bank:
        new = copy.copy(self)
        memo[id(self)] = new
        # Where chunks lie stays as it is: with a thousand tables to copy that takes longer than to copy their values.
        new.__dict__.update(copy.deepcopy({k: v for k, v in vars(self).items() if k not in _LAID_OUT}, memo))
        new.apply(lambda tensor: tensor)  # onto pages as these
        return new


def _past_casts(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """`fn` of what lies there: moved as it moves, but not cast to 16 bits, as integers are cast by no module."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 4:
        return fn(tensor)
    narrowed = tensor.to(torch.float32)
    return fn(narrowed.view(torch.int32)).view(narrowed.dtype)


def _lay_out(shapes: Sequence[Sequence[tuple[int, int]]]) -> tuple[list[list[Chunk]], int, int]:
    """Chunks, elements and rows of a bank."""
    chunks: list[list[Chunk | None]] = [[None] * len(table) for table in shapes]
    elements = rows = 0
    # Each chunk begins at a multiple of its width; after wider ones that is mostly where the last one ended.
    widest_first = sorted(range(len(shapes)), key=lambda t: -max((w for _, w in shapes[t]), default=0))
    for table in widest_first:
        for i in sorted(range(len(shapes[table])), key=lambda i: -shapes[table][i][1]):
            num_rows, width = shapes[table][i]
            elements = -(-elements // width) * width
            chunks[table][i] = Chunk(elements, rows, num_rows, width)
            elements += num_rows * width
            rows += num_rows
    return [[c for c in table if c is not None] for table in chunks], elements, rows


def _regions(chunks: Sequence[Sequence[Chunk]]) -> dict[int, Region]:
    """The regions of all widths that occur."""
    by_width: dict[int, list[tuple[int, int, int]]] = {}  # (first row in the matrix, row shift, table) of its chunks
    for table, of_table in enumerate(chunks):
        for c in of_table:
            entries = by_width.setdefault(c.width, [])
            if c.rows:
                first = c.element_offset // c.width
                entries.append((first, c.row_offset - first, table))
    return {
        width: Region(width, *zip(*sorted(entries), strict=True)) if entries else Region(width, (), (), ())
        for width, entries in by_width.items()
    }
