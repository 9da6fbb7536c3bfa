"""Tables that grow: more rows for ids that have none, before any id is evicted.

[Note: growing]
Where more new ids come than a map has empty entries, it and its table get more rows: twice as many, and again, up to a
limit. They are a block behind the others, cut between the ranks as the table was in the beginning, so that no row
moves; rows, optimizer state and entries that there are stay where they are. The last row stays that of ids which are
not in the map: its values go to the new last one. What comes out is what a module of that size would hold, so a
checkpoint is read by one that is made with as many rows, of TorchRec's too.

The parameter stays the same object and gets another shape. Only a table that is updated in the backward pass can grow:
an ordinary optimizer keeps state of a fixed shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dmp import ChunkedTensor, Layout, Shard, ShardError, ShardingEnv, data_parallel, is_replicated, rectangles
from sharders.channel import Channel
from sharders.embedding.data_path.engine import Engine
from sharders.embedding.resting import as_they_are
from sharders.embedding.table_module import TableModule
from sharders.managed_collision.id_map import IdMap, blocks_of
from sharders.managed_collision.reset import as_chunks, draw_rows

Values = Mapping[str, torch.Tensor]


class Growth:
    """Gives tables of one module more rows.

    Args:
        limits: for each table the most rows; None where it does not grow.
        layouts: of the tables in the beginning.
        init_fns: what fills rows.
        ranks: the table ranks.
    """

    def __init__(
        self,
        limits: Sequence[int | None],
        layouts: Sequence[Layout],
        init_fns: Sequence[Callable[[torch.Tensor], Any]],
        ranks: Channel,
    ) -> None:
        self.limits, self._layouts, self._init_fns, self._ranks = list(limits), list(layouts), list(init_fns), ranks

    def __deepcopy__(self, memo: object) -> Growth:
        return self

    def check(self, tables: TableModule) -> None:
        """Raise `ShardError` for a table that cannot grow, or a limit that it is beyond."""
        engine = tables._engine
        for table, limit, layout in zip(engine.tables, self.limits, self._layouts, strict=True):
            if limit is None:
                continue
            if limit < table.rows:
                raise ShardError(f"max_rows of {table.parameter!r} is {limit}; it has {table.rows} rows already")
            if table.trainable and table.optimizer is None:
                raise ShardError(
                    f"{table.parameter!r} is to grow up to {limit} rows, and an ordinary optimizer keeps state of a "
                    "fixed shape: apply_optimizer_in_backward, or fused_params, give it one that grows with it"
                )
            try:
                layout.shards((table.rows + 1, table.dim), engine.env)
            except ValueError as error:
                raise ShardError(
                    f"{table.parameter!r} is to grow, and its layout {layout} is for {table.rows} rows alone: take one "
                    "for any number of rows, as row_wise() or table_wise(rank)"
                ) from error

    def __call__(self, tables: TableModule, maps: Sequence[IdMap], index: int, rows: int) -> None:
        """Have a table and its map have so many rows. Collective."""
        old = tables._engine
        table, of = old.tables[index], maps[index]
        new = self._larger(tables, index, rows)
        first, last = table.rows - 1, rows - 1
        before, after = _values_of(old, index), _values_of(new, index)
        rows_left = {name: _row(value, first, self._ranks) for name, value in before.items()}
        fresh = {name: _row_here(value, first) for name, value in after.items()}
        with torch.no_grad():
            for i in range(len(old.tables)):
                _take(_values_of(new, i), _values_of(old, i), old.tables[i].rows)
            weight = as_chunks(after[""])
            fill = torch.arange(first, last)
            draw_rows(weight, fill, self._init_fns[index], f"{table.parameter} {table.rows} {rows}")
            for name, value in after.items():
                if name:
                    _put_row(value, first, fresh[name])
                _put_row(value, last, rows_left[name])
        new.store.keep(old.store.parameters)
        tables.run_by(new)
        tables.resize(index, rows)
        added = blocks_of(self._layouts[index], (rows - table.rows, table.dim), old.env)
        shifted = [replace(block, start=block.start + table.rows, stop=block.stop + table.rows) for block in added]
        of.append(shifted)

    def _larger(self, tables: TableModule, index: int, rows: int) -> Engine:
        """The tables, one with more rows; without values."""
        old = tables._engine
        table = old.tables[index]
        larger, layouts = [], []
        for i, (each, shards) in enumerate(zip(as_they_are(old), old.placement.shards, strict=True)):
            here = list(shards)
            if i == index:
                here = _with_more(here, self._layouts[i], table.rows, (rows - table.rows, table.dim), old.env)
            larger.append(replace(each, rows=rows if i == index else each.rows))
            layouts.append(data_parallel() if old.placement.is_local[i] else rectangles(here))
        return Engine(larger, layouts, old.env, old.device, options=old.store.options, **tables.engine_options)


def _with_more(
    shards: list[Shard], layout: Layout, start: int, shape: tuple[int, int], env: ShardingEnv
) -> list[Shard]:
    """Shards with those of a block of rows behind them; what is one rectangle on one rank is one shard."""
    more = layout.shards(shape, env)
    if is_replicated(more, shape):
        return shards
    result = list(shards)
    for shard in more:
        (row, column), rank = shard.offsets, shard.rank
        beside = next(
            (i for i, s in enumerate(result) if s.rank == rank and _goes_on(s, (row + start, column), shard.sizes[1])),
            None,
        )
        if beside is None:
            result.append(Shard((row + start, column), shard.sizes, rank))
        else:
            known = result[beside]
            result[beside] = Shard(known.offsets, (known.sizes[0] + shard.sizes[0], known.sizes[1]), rank)
    return result


def _goes_on(shard: Shard, at: tuple[int, int], width: int) -> bool:
    (row, column), (rows, own_width) = shard.offsets, shard.sizes
    return (row + rows, column) == at and own_width == width


def _values_of(engine: Engine, index: int) -> Values:
    """A table's weight, under "", and the optimizer state that has a value for each row, by name."""
    table = engine.tables[index]
    weight = engine.store.chunked_state().get(table.parameter, engine.store.parameters[index].data)
    fused = next((f for f in engine.store.fused_parameters() if f.name == table.parameter), None)
    state = fused.state() if fused is not None else {}
    by_row = {name: value for name, value in state.items() if value.dim() and value.shape[0] == table.rows}
    return {"": weight, **by_row}


def _take(new: Values, old: Values, rows: int) -> None:
    """Copy what there was, which this rank holds in both."""
    for name, value in old.items():
        given, target = as_chunks(value), as_chunks(new[name])
        parts = [
            (chunk[: max(0, rows - offset[0])], offset)
            for chunk, offset in zip(target.chunks, target.offsets, strict=True)
            if offset[0] < rows
        ]
        size = (rows, *target.shape[1:])
        chunks, offsets = [chunk for chunk, _ in parts], [offset for _, offset in parts]
        ChunkedTensor(size, chunks, offsets, target.dtype, target.device).fill_from(given)


def _row_here(value: torch.Tensor, row: int) -> torch.Tensor:
    """One row, zero where this rank does not hold it."""
    held = as_chunks(value)
    result = torch.zeros(tuple(held.shape[1:]), dtype=held.dtype, device=held.device)
    for chunk, offset in zip(held.chunks, held.offsets, strict=True):
        if offset[0] <= row < offset[0] + chunk.shape[0]:
            _columns(result, chunk, offset).copy_(chunk[row - offset[0]])
    return result


def _row(value: torch.Tensor, row: int, ranks: Channel) -> torch.Tensor:
    """One row, on every rank; of a table that every rank has, it is everywhere."""
    result = _row_here(value, row)
    if isinstance(value, ChunkedTensor):
        flat = result.reshape(-1)
        ranks.sum(flat)
        result = flat.view(result.shape)
    return result


def _put_row(value: torch.Tensor, row: int, values: torch.Tensor) -> None:
    held = as_chunks(value)
    for chunk, offset in zip(held.chunks, held.offsets, strict=True):
        if offset[0] <= row < offset[0] + chunk.shape[0]:
            chunk[row - offset[0]] = _columns(values, chunk, offset)


def _columns(values: torch.Tensor, chunk: torch.Tensor, offset: Sequence[int]) -> torch.Tensor:
    """Of a whole row those columns that a chunk has."""
    return values if values.dim() == 0 else values[offset[1] : offset[1] + chunk.shape[1]]
