"""New values for rows whose raw id was evicted, the same on every plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dmp import ChunkedTensor
from sharders.embedding.table_module import TableModule
from sharders.managed_collision.id_map import IdMap

_ROWS = 1024  # that are drawn at once: a rank draws those blocks of the rows to be reset of which it has any


class Reset:
    """Rows of evicted ids get initial values, and their optimizer state is zero again.

    A row's values depend on its table, the step, and the rows that are reset in it: on no plan.

    Args:
        init_fns: for each table what fills its rows.
    """

    def __init__(self, init_fns: Sequence[Callable[[torch.Tensor], Any]]) -> None:
        self._init_fns = list(init_fns)

    def __call__(self, tables: TableModule, maps: Sequence[IdMap], changed: Sequence[torch.Tensor | None]) -> None:
        """Reset the rows that `changed` has for each table."""
        if all(rows is None for rows in changed):
            return
        engine = tables._engine
        chunks = tables.chunked_state()
        fused = {each.name: each for each in tables.fused_parameters()}
        of_tables = zip(engine.tables, engine.store.parameters, self._init_fns, maps, changed, strict=True)
        watch = engine.calls.watch
        with torch.no_grad():
            for index, (table, parameter, init_fn, of, rows) in enumerate(of_tables):
                if rows is None or not len(rows):
                    continue
                rows = rows.sort().values
                if watch is not None:
                    engine.told.changed(watch, engine.name, index, rows)
                weight = chunks.get(table.parameter, parameter.data)
                draw_rows(as_chunks(weight), rows, init_fn, f"{table.parameter} {of.step}")
                state = fused[table.parameter].state() if table.parameter in fused else {}
                for value in state.values():
                    if value.dim() and value.shape[0] == table.rows:
                        for chunk, _, at, _ in _overlaps(as_chunks(value), rows):
                            chunk[at] = 0


def draw_rows(weight: ChunkedTensor, rows: torch.Tensor, init_fn: Callable[[torch.Tensor], Any], what: str) -> None:
    """Give rows (N,) of a table initial values, as much of them as is here; they depend on `what` and on the rows."""
    with torch.random.fork_rng(devices=[]):
        for number, some in enumerate(rows.split(_ROWS)):
            here = list(_overlaps(weight, some))
            if not here:
                continue
            torch.manual_seed(int.from_bytes(hashlib.sha256(f"{what} {number}".encode()).digest()[:7], "big"))
            values = torch.empty(len(some), weight.shape[1], dtype=weight.dtype)
            init_fn(values)
            for chunk, offset, at, places in here:
                columns = values[:, offset[1] : offset[1] + chunk.shape[1]]
                chunk[at] = columns[places.to(columns.device)].to(chunk.device)


def _overlaps(weight: ChunkedTensor, rows: torch.Tensor) -> Any:
    """(chunk, its offset, rows in it, their places in `rows`) of every local chunk that has some of the rows."""
    for chunk, offset in zip(weight.chunks, weight.offsets, strict=True):
        places = ((rows >= offset[0]) & (rows < offset[0] + chunk.shape[0])).nonzero().view(-1)
        if len(places):
            yield chunk, offset, rows[places] - offset[0], places


def as_chunks(tensor: torch.Tensor) -> ChunkedTensor:
    """Itself, or a whole tensor as one chunk."""
    return (
        tensor if isinstance(tensor, ChunkedTensor) else ChunkedTensor(tensor.size(), [tensor], [(0,) * tensor.dim()])
    )
