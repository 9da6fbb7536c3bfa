"""Where each table's shards are, compiled once from the plan: what is sent to whom, and in which order.

[Note: slots]
A *table* is read by *features*. Its rows are cut into *row blocks* at every row boundary of its shards. A *slot* is
the smallest unit that travels: the ids of one feature that fall into one row block, for one shard on one rank. Each
rank has an ordered list of slots; its lookup's columns and the wire have that order. Slots of one shard and row block
are adjacent, whatever their features, because the kernels combine their gradients.
A *local* table is whole on every rank (data-parallel) and is looked up where its ids are.
Of a table in several row blocks what travels may be *partials*, see partials.py; such slots come last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

import torch

from dmp import Layout, Shard, ShardingEnv, is_replicated
from sharders.embedding.lookup.optimizers import OptimizerSpec


@dataclass(frozen=True)
class Table:
    """One table of a module.

    Args:
        parameter: its parameter's name, relative to the module.
        rows: number of embeddings.
        dim: elements of a row.
        dtype: of its elements.
        features: names of the inputs that read it, in the order of the module's results.
        mean: pool by mean instead of sum.
        optimizer: runs in the backward pass; None gives an ordinary `.grad`.
        trainable: False for one frozen when it was sharded, without state for its optimizer in the backward pass.
        rests: another that is frozen, when it was sharded or since; it keeps what state it has.
        group: tells tables apart that have param groups of their own already, by which they are not stored together.
    """

    parameter: str
    rows: int
    dim: int
    dtype: torch.dtype
    features: tuple[str, ...]
    mean: bool = False
    optimizer: OptimizerSpec | None = None
    trainable: bool = True
    rests: bool = False
    group: int = 0

    @property
    def trains(self) -> bool:
        """Whether it gets gradients."""
        return self.trainable and not self.rests

    @cached_property
    def bank_key(self) -> tuple[str, bool, bool, str, int]:
        """Tables with one key are stored and updated together."""
        return str(self.dtype), self.trainable, self.rests, repr(self.optimizer), self.group


@dataclass(frozen=True)
class Feature:
    """One input that reads one table: `index` counts the module's results."""

    index: int
    name: str
    table: int


@dataclass(frozen=True)
class Slot:
    """Ids of one feature in one row block, for one shard; see [Note: slots].

    Args:
        feature: index of the feature.
        table: index of the table.
        row_block: index of the row block in its table.
        chunk: index of the shard among those of the table on its rank.
        first_row: of the row block, relative to the shard.
        rows: of the row block.
        column: first column of the shard.
        width: columns of the shard.
    """

    feature: int
    table: int
    row_block: int
    chunk: int
    first_row: int
    rows: int
    column: int
    width: int


class Placement:
    """All slots of all ranks for the tables of one module.

    `row_blocks` has for each table the first row of each block and the one after its last; none for a local table.

    Args:
        tables: the module's tables.
        layouts: one for each table.
        env: the mesh.
        unpooled: results are rows; slots of one width are then adjacent, so that their rows are one matrix. Else tables
            in several row blocks may travel as partials, whose slots are ordered in the same way.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        layouts: Sequence[Layout],
        env: ShardingEnv,
        unpooled: bool = False,
    ) -> None:
        self.tables = list(tables)
        self.shards = [lay.shards((t.rows, t.dim), env) for t, lay in zip(tables, layouts, strict=True)]
        self.is_local = [is_replicated(s, (t.rows, t.dim)) for t, s in zip(tables, self.shards, strict=True)]
        self.trains_local = any(t.trains for t, local in zip(tables, self.is_local, strict=True) if local)
        read = ((name, table) for table, of in enumerate(self.tables) for name in of.features)
        self.features = [Feature(index, name, table) for index, (name, table) in enumerate(read)]
        by_table = {table: list(of_table) for table, of_table in groupby(self.features, lambda f: f.table)}
        self.row_blocks = [
            [] if local else _row_blocks(of) for of, local in zip(self.shards, self.is_local, strict=True)
        ]
        self.by_partials = [
            not unpooled and len(blocks) > 1 and bool(table.features)
            for table, blocks in zip(self.tables, self.row_blocks, strict=True)
        ]
        self.slots: list[list[Slot]] = [[] for _ in range(env.table_size)]
        self.chunks: list[list[list[Shard]]] = [[[] for _ in self.tables] for _ in range(env.table_size)]
        # Tables that are stored together are adjacent, so that a bank's slots are one run.
        for index in sorted(range(len(self.tables)), key=self.storage_order):
            if not self.is_local[index]:
                self._place(index, by_table.get(index, []))
        for slots in self.slots:
            slots.sort(
                key=lambda s: (self.storage_order(s.table), s.width if unpooled or self.by_partials[s.table] else 0)
            )

    def storage_order(self, table: int) -> tuple[bool, tuple[str, bool, bool, str, int]]:
        """Equal for tables that are stored and looked up together, unless one of them is local."""
        return self.by_partials[table], self.tables[table].bank_key

    def pieces(self, rank: int, tables: Collection[int]) -> list[range]:
        """The slots of a rank that are of these tables, neighbours taken together."""
        return neighbours(i for i, slot in enumerate(self.slots[rank]) if slot.table in tables)

    def _place(self, index: int, features: list[Feature]) -> None:
        shards, blocks = sorted(self.shards[index], key=lambda s: s.offsets), self.row_blocks[index]
        block_of = {start: block for block, (start, _) in enumerate(blocks)}
        for shard in shards:
            (row, column), (rows, width) = shard.offsets, shard.sizes
            chunk = len(self.chunks[shard.rank][index])
            self.chunks[shard.rank][index].append(shard)
            block = block_of[row]
            while block < len(blocks) and blocks[block][0] < row + rows:
                start, stop = blocks[block]
                self.slots[shard.rank] += [
                    Slot(f.index, index, block, chunk, start - row, stop - start, column, width) for f in features
                ]
                block += 1

    def column_blocks(self, table: int) -> list[int]:
        """Distinct first columns of the table's shards; one when no row is cut."""
        return sorted({s.offsets[1] for s in self.shards[table]})


def of_blocks(shards: Sequence[Shard], blocks: Sequence[int]) -> list[Shard]:
    """Where row-wise state of (rows, column blocks) is: a cell for each block that a shard spans.

    Args:
        blocks: their first columns, in order.
    """
    return [
        Shard((s.offsets[0], j), (s.sizes[0], 1), s.rank)
        for s in shards
        for j, start in enumerate(blocks)
        if s.offsets[1] <= start < s.offsets[1] + s.sizes[1]
    ]


def neighbours(numbers: Iterable[int]) -> list[range]:
    """Ascending numbers, those that follow each other as one range."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def _row_blocks(shards: Sequence[Shard]) -> list[tuple[int, int]]:
    """Between neighbouring row boundaries."""
    return list(pairwise(sorted({cut for s in shards for cut in (s.offsets[0], s.offsets[0] + s.sizes[0])})))
