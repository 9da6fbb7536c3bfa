"""`Pieces`: every rectangle of every table of a plan, as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dmp import Layout, ShardingEnv
from tests.bench.planner_cases import Table

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Rectangles, and which tables every rank has whole.

    Args:
        table: (pieces,) index of each one's table.
        row, rows, column, columns: (pieces,) where it begins, and how large it is.
        rank: (pieces,) that holds it.
        copied: (tables,) of which every rank has a copy; these have no pieces.
    """

    table: Integers
    row: Integers
    rows: Integers
    column: Integers
    columns: Integers
    rank: Integers
    copied: NDArray[np.bool_]

    @classmethod
    def of(cls, tables: Sequence[Table], layouts: Sequence[Layout], env: ShardingEnv) -> Pieces:
        """Of a plan's layouts, in the order of the tables."""
        copied = np.array([layout.is_copied for layout in layouts], dtype=bool)
        found = [
            (i, *s.offsets, *s.sizes, s.rank)
            for i, (t, layout) in enumerate(zip(tables, layouts, strict=True))
            if not layout.is_copied
            for s in layout.shards((t.rows, t.dim), env)
        ]
        table, row, column, rows, columns, rank = np.array(found, dtype=np.int64).reshape(-1, 6).T
        return cls(table, row, rows, column, columns, rank, copied)

    @classmethod
    def cut(cls, tables: Sequence[Table], placed: Iterable[Placed]) -> Pieces:
        """Of column blocks, each cut by rows over consecutive ranks."""
        parts: list[Integers] = []
        copied = np.zeros(len(tables), dtype=bool)
        for p in placed:
            if p.size == 0:
                copied[p.table] = True
                continue
            total = tables[p.table].rows
            block = -(-total // p.size)
            start = np.arange(0, total, block)
            one = np.ones(len(start), dtype=np.int64)
            rows = np.minimum(block, total - start)
            ranks = p.first + np.arange(len(start))
            parts.append(np.stack([p.table * one, start, rows, p.column * one, p.columns * one, ranks]))
        every = np.concatenate(parts, axis=1) if parts else np.zeros((6, 0), dtype=np.int64)
        return cls(*every, copied)

    def weight_bytes(self, tables: Sequence[Table], ranks: int) -> NDArray[np.float64]:
        """(ranks,) in float32."""
        held = np.bincount(self.rank, self.rows * self.columns * 4.0, ranks)
        return held + sum(t.weight_bytes for t, c in zip(tables, self.copied, strict=True) if c)


@dataclass(frozen=True)
class Placed:
    """A column block of a table, by rows over `size` ranks from `first` on; with size 0, a copy on every rank."""

    table: int
    column: int
    columns: int
    first: int
    size: int


def layouts_of(plan: Mapping[str, object], tables: Sequence[Table]) -> list[Layout]:
    """A plan's layouts in the order of the tables."""
    return [plan[f"tables.embedding_bags.t{i}.weight"].layout for i in range(len(tables))]  # type: ignore[attr-defined]
