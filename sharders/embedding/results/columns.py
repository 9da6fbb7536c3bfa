"""Columns of several matrices that are placed in one: results of ranks in a rank's result, gradients in what goes back.

Where several give the same columns these are summed. It is settled once which columns go where, in few runs of equal
steps; a call makes one pass over the rows by compiled code, or by torch's operators one over each source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple

import torch

from sharders.embedding.lookup import numba_kernel, threads
from sharders.embedding.lookup.numba_layout import int64, longs, scalar
from sharders.embedding.lookup.numba_training import ELEMENTS, entry_of
from sharders.embedding.results.ragged import Columns

ELEMENTS_OF_AN_ID = 16  # take as long as an id's part in a lookup: work on fewer rows is not shared among threads
_FEW_ELEMENTS, _FEW_SOURCES = 1 << 14, 4  # torch has placed them by the time that compiled code is called
_LINE_BYTES, _STREAMED_BYTES = 64, 1 << 18  # as the lookup's, see `numba_kernel`


class Source(NamedTuple):
    """Columns of one matrix, the number of which it has: from `column` on, each `step` behind the last."""

    number: int
    column: int
    step: int = 0


@dataclass(frozen=True)
class Run:
    """`num` times `width` columns, each `step` behind the last: sums of what the sources have there, in their order."""

    column: int
    width: int
    sources: tuple[Source, ...]
    num: int = 1
    step: int = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the sources' matrices."""
        return tuple(source.number for source in self.sources)

    def view(self, matrix: torch.Tensor, column: int, step: int) -> torch.Tensor:
        """Its columns of a matrix: (rows, width), or (rows, num, width)."""
        if self.num == 1:
            return matrix[:, column : column + self.width]
        row, each = matrix.stride()
        shape, strides = (len(matrix), self.num, self.width), (row, step * each, each)
        return matrix.as_strided(shape, strides, matrix.storage_offset() + column * each)

    def onto(self, number: int) -> Run:
        """The same, where what the matrix of that number has lies in the target already."""
        placed = Source(number, self.column, self.step)
        return replace(self, sources=tuple(placed if of.number == number else of for of in self.sources))

    def back(self, source: Source) -> Run:
        """What goes the other way, to one source, from this run's matrix, number 0."""
        return replace(self, column=source.column, step=source.step, sources=(Source(0, self.column, self.step),))


def cut_columns(sources: Sequence[Sequence[Columns]]) -> list[Columns]:
    """Disjoint columns, by feature, that all the given ones are unions of."""
    cuts: dict[int, set[int]] = {}
    spans: dict[int, set[tuple[int, int]]] = {}
    for of_source in sources:
        for feature, column, width in of_source:
            cuts.setdefault(feature, set()).update((column, column + width))
            spans.setdefault(feature, set()).add((column, column + width))
    return [
        (feature, a, b - a)
        for feature in sorted(cuts)
        for a, b in pairwise(sorted(cuts[feature]))
        if any(start <= a and b <= stop for start, stop in spans[feature])
    ]


def runs_of(sources: Mapping[int, Sequence[Columns]], target: Sequence[Columns]) -> list[Run]:
    """Runs that write every source's columns into the target's; sums are made in the order of `sources`."""
    by_feature: dict[int, list[Columns]] = {}
    for smallest in cut_columns([*sources.values(), target]):
        by_feature.setdefault(smallest[0], []).append(smallest)
    given: dict[tuple[int, int], list[Source]] = {}
    for number, of_source in sources.items():
        for feature, column, _, at in _placed(of_source, by_feature):
            given.setdefault((feature, column), []).append(Source(number, at))
    by_numbers: dict[tuple[int, ...], list[Run]] = {}
    for feature, column, width, at in _placed(target, by_feature):
        run = Run(at, width, tuple(given.get((feature, column), ())))
        if run.sources:
            by_numbers.setdefault(run.numbers, []).append(run)
    return [run for of_numbers in by_numbers.values() for run in _in_steps(_joined(of_numbers))]


def first_columns(columns: Sequence[Columns], target: Sequence[Columns]) -> list[int]:
    """Of each the first column in the target; what lies there in several pieces has them side by side."""
    pieces: dict[int, list[tuple[int, int]]] = {}
    at = 0
    for feature, column, width in target:
        pieces.setdefault(feature, []).append((column, at))
        at += width
    places = []
    for feature, column, _ in columns:
        first, start = max(piece for piece in pieces[feature] if piece[0] <= column)
        places.append(start + column - first)
    return places


def _placed(columns: Sequence[Columns], by_feature: Mapping[int, Sequence[Columns]]) -> list[tuple[int, int, int, int]]:
    """The smallest columns (feature, first column, width) that these ones are cut into, and their place in the row."""
    starts = accumulate((width for _, _, width in columns), initial=0)
    return [
        (feature, first, of_cut, at + first - column)
        for (feature, column, width), at in zip(columns, starts, strict=False)
        for _, first, of_cut in by_feature[feature]
        if column <= first < column + width
    ]


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Single ones of the same sources; one that goes on right behind the last, everywhere, becomes a part of it."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and set(_steps(last, run)) == {last.width}:
            joined[-1] = replace(last, width=last.width + run.width)
        else:
            joined.append(run)
    return joined


def _in_steps(runs: Sequence[Run]) -> list[Run]:
    """Neighbours of one width at even distances taken together."""
    found: list[Run] = []
    last: Run | None = None  # of the single ones
    for run in runs:
        steps = _steps(last, run) if last is not None else (0,)
        whole = found[-1] if found else run
        so_far = (whole.step, *(source.step for source in whole.sources))
        if run.width == whole.width and min(steps) >= run.width and (whole.num == 1 or steps == so_far):
            of_sources = zip(whole.sources, steps[1:], strict=True)
            sources = tuple(source._replace(step=step) for source, step in of_sources)
            found[-1] = replace(whole, sources=sources, num=whole.num + 1, step=steps[0])
        else:
            found.append(run)
        last = run
    return found


def _steps(last: Run, run: Run) -> tuple[int, ...]:
    """How far one begins behind the other: in the target, and in each source."""
    of_sources = (b.column - a.column for a, b in zip(last.sources, run.sources, strict=True))
    return (run.column - last.column, *of_sources)


class Placing:
    """Some runs, to be placed call by call.

    Args:
        runs: of one target.
        kernel: name of the lookup kernel that the user asked for: another than numba's uses nothing of numba.
    """

    def __init__(self, runs: Sequence[Run], kernel: str | None = None) -> None:
        self.runs, self._kernel = list(runs), kernel
        self.numbers = sorted({number for run in runs for number in run.numbers})
        """Of the matrices that are read."""
        place = {number: i for i, number in enumerate(self.numbers, 1)}  # the target is the first
        ends = [*accumulate((len(run.sources) for run in runs), initial=0)]
        bounds = zip(runs, pairwise(ends), strict=True)
        self._runs = int64([[run.column, run.step, run.num, run.width, *of] for run, of in bounds])
        self._num_sources = ends[-1]
        self._elements_together = gcd(*(n for run in runs for n in (run.column, run.width, run.step)))
        self._sources = int64([[place[of.number], of.column, of.step] for run in runs for of in run.sources])

    def __call__(self, matrices: Mapping[int, torch.Tensor], out: torch.Tensor, scale: float = 1.0) -> None:
        """Write the runs' columns of `out`.

        Args:
            matrices: by number, with as many rows and of the same dtype. One of them may be `out`, whose columns are
                then the first that are added, where they are.
            scale: multiplies what is placed.
        """
        if not out.numel() or not self.runs:
            return
        read = [matrices[number] for number in self.numbers]
        rows, dtype = out.shape[0], out.dtype
        assert all(matrix.shape[0] == rows and matrix.dtype is dtype for matrix in read)
        pays = out.numel() >= _FEW_ELEMENTS or self._num_sources > _FEW_SOURCES
        in_rows = pays and all(of.stride(1) == 1 for of in (out, *read))
        if in_rows and numba_kernel.may_run(self._kernel, out.device, dtype):
            self._place_compiled(read, out, scale)
        else:
            self._place(matrices, out, scale)

    def _place(self, matrices: Mapping[int, torch.Tensor], out: torch.Tensor, scale: float) -> None:
        for run in self.runs:
            target = run.view(out, run.column, run.step)
            for i, (number, column, step) in enumerate(run.sources):
                if i == 0 and len(run.sources) > 1 and matrices[number] is out:
                    continue
                source = run.view(matrices[number], column, step)
                if len(run.sources) == 1:
                    torch.mul(source, scale, out=target) if scale != 1.0 else target.copy_(source)
                else:
                    target.add_(source) if i else target.copy_(source)
            if scale != 1.0 and len(run.sources) > 1:
                target.mul_(scale)

    def _place_compiled(self, read: Sequence[torch.Tensor], out: torch.Tensor, scale: float) -> None:
        place = entry_of("place_columns", ELEMENTS[out.dtype])
        _kept, matrices = longs([word for of in (out, *read) for word in (of.data_ptr(), of.stride(0))])
        fixed = self._runs.data_ptr(), len(self.runs), self._sources.data_ptr(), matrices
        to = scalar(scale).data_ptr(), int(streams(out, out.stride(0), self._elements_together))
        rows, parts = out.shape[0], threads.num_parts(out.numel() // ELEMENTS_OF_AN_ID)
        threads.run(lambda i: place(*fixed, rows * i // parts, rows * (i + 1) // parts, *to), parts)


def streams(out: torch.Tensor, apart: int, together: int) -> bool:
    """Whether a target is written past the caches: it does not stay there, and whole lines are written.

    Args:
        apart: elements from one row to the next.
        together: elements that all columns and widths which are written are a multiple of.
    """
    size = out.element_size()
    is_large = out.numel() // max(out.shape[-1], 1) * apart * size >= _STREAMED_BYTES
    return is_large and not any(of % _LINE_BYTES for of in (out.data_ptr(), apart * size, together * size))
