"""Rows that training batches read, told to who watches a model's tables, as for online training.

[Note: who tells]
A row is told by the rank that has its first column; of copies that share gradients, and so get the ids of all, by the
first copy. Data-parallel tables are cut evenly between the ranks for this, who send each other what their batches read
in two small exchanges: so each row is told by one rank, when any batch reads it. Rows are told in the forward, before
they are updated, with the values that they have then; one more exchange puts rows together whose columns are on several
ranks. Who does not watch pays nothing. Copies that are averaged every k updates each tell of their own batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from sharders.embedding.exchange.local_tables import TableStore
from sharders.embedding.exchange.peers import Peers
from sharders.embedding.exchange.phases import INPUT, phase
from sharders.embedding.ids.call import Call
from sharders.embedding.ids.received import Received

Watch = Any
"""What `Calls.watch` is where somebody watches: a `RowWatch` of `dmp`."""
RowBlock = tuple[int, int]
"""Table, and row block in it."""


@dataclass(frozen=True)
class _Part:
    """Columns of a row block that one rank has in one chunk, from `first_row` of that; `slots` of the rank read it."""

    rank: int
    chunk: int
    first_row: int
    width: int
    slots: list[int] = field(default_factory=list)


class ToldRows:
    """What one rank tells of a module's tables.

    Args:
        dtype: that holds the values of all tables.
        is_first: this rank is in the first copy of the tables.
    """

    def __init__(self, store: TableStore, peers: Peers, dtype: torch.dtype, is_first: bool) -> None:
        self._store, self._peers, self._dtype = store, peers, dtype
        self._tells = is_first or peers.num_replicas == 1

    @cached_property
    def _parts(self) -> Mapping[RowBlock, list[_Part]]:
        """Of each row block of trained tables, by columns; the first one's rank tells."""
        found: dict[RowBlock, dict[int, _Part]] = {}
        placement = self._store.placement
        for rank, slots in enumerate(placement.slots):
            for i, slot in enumerate(slots):
                if placement.tables[slot.table].trains:
                    of_block = found.setdefault((slot.table, slot.row_block), {})
                    part = _Part(rank, slot.chunk, slot.first_row, slot.width)
                    of_block.setdefault(slot.column, part).slots.append(i)
        return {block: [found[block][column] for column in sorted(found[block])] for block in sorted(found)}

    def _names(self, watch: Watch, module: str) -> dict[int, str]:
        """Trained tables that are watched, and their names in the model."""
        tables = enumerate(self._store.placement.tables)
        names = {i: f"{module}.{table.parameter}" for i, table in tables if table.trains}
        return {i: name for i, name in names.items() if watch.wants(name)}

    def of_call(self, watch: Watch, module: str, call: Call, received: Received) -> None:
        """Tell what a batch reads. Collective."""
        names = self._names(watch, module)
        with phase(call.spent, INPUT), torch.no_grad():
            ids: dict[RowBlock, torch.Tensor] = {}
            for block, slots in self._held(names).items():
                spans = [(s, received.span(s, range(i, i + 1))) for i in slots for s in self._peers.sources]
                rows = torch.cat([received.ids[s][span] for s, span in spans])
                # In one order on all ranks that have columns of them: each has received them in another.
                ids[block] = (rows.unique() if watch.wants_values else rows).long()
            self._tell(watch, names, ids)
            for table, rows in self._of_whole_tables(names, call).items():
                self._tell_of_whole(watch, table, names[table], rows)

    def _of_whole_tables(self, names: Mapping[int, str], call: Call) -> dict[int, torch.Tensor]:
        """Of data-parallel tables the rows in this rank's share that any rank's batch reads."""
        placement, batch, channel = self._store.placement, call.batch, self._peers.exchange
        tables = [table for table in names if placement.is_local[table] and placement.tables[table].features]
        if not tables:
            return {}
        cuts: list[list[torch.Tensor]] = [[] for _ in range(channel.size)]
        for table in tables:
            keys = {batch.key_of[f.index] for f in placement.features if f.table == table}
            read = [batch.values[batch.starts[key] : batch.starts[key + 1]] for key in sorted(keys)]
            rows = torch.cat(read).unique().long()
            bounds = [self._share(table, rank)[0] for rank in range(1, channel.size)]
            at = torch.searchsorted(rows, torch.tensor(bounds, dtype=torch.int64, device=rows.device))
            for of_rank, part in zip(cuts, rows.tensor_split(at.cpu()), strict=True):
                of_rank.append(part)
        counts = torch.tensor([len(part) for of_rank in cuts for part in of_rank], device=batch.values.device)
        each = [len(tables)] * channel.size
        told = channel.all_to_all(counts, each, each).wait().view(channel.size, -1).tolist()
        send = torch.cat([part for of_rank in cuts for part in of_rank])
        came = channel.all_to_all(send, [sum(map(len, of)) for of in cuts], [*map(sum, told)]).wait()
        parts = came.split([n for of_rank in told for n in of_rank])
        return {table: torch.cat(parts[i :: len(tables)]).unique() for i, table in enumerate(tables)}

    def _share(self, table: int, rank: int) -> tuple[int, int]:
        """Rows of a data-parallel table, first and past the last, that a rank of the exchange tells of."""
        rows, num = self._store.placement.tables[table].rows, self._peers.exchange.size
        return rank * rows // num, (rank + 1) * rows // num

    def changed(self, watch: Watch, module: str, table: int, rows: torch.Tensor) -> None:
        """Tell rows (N,), in order, that get other values without being read; the same on all ranks. Collective."""
        names, placement = self._names(watch, module), self._store.placement
        if table not in names:
            return
        if placement.is_local[table]:
            start, stop = self._share(table, self._peers.exchange.rank)
            self._tell_of_whole(watch, table, names[table], rows[(rows >= start) & (rows < stop)])
            return
        ids = {}
        for block in self._held({table: names[table]}):
            start, stop = placement.row_blocks[table][block[1]]
            ids[block] = rows[(rows >= start) & (rows < stop)] - start
        self._tell(watch, names, ids)

    @cached_property
    def _mine(self) -> Mapping[RowBlock, list[int]]:
        """Row blocks that this rank has columns of, and the slots that read some of those; none in a copy that tells
        nothing."""
        if not self._tells:
            return {}
        me = self._peers.table.rank
        slots = {block: next((p.slots for p in parts if p.rank == me), []) for block, parts in self._parts.items()}
        return {block: of for block, of in slots.items() if of}

    def _held(self, names: Mapping[int, str]) -> dict[RowBlock, list[int]]:
        """Those of these tables."""
        return {block: slots for block, slots in self._mine.items() if block[0] in names}

    def _tell_of_whole(self, watch: Watch, table: int, name: str, rows: torch.Tensor) -> None:
        values = self._store.parameters[table].data[rows] if watch.wants_values else None
        watch.take(name, rows, values)

    def _tell(self, watch: Watch, names: Mapping[int, str], ids: Mapping[RowBlock, torch.Tensor]) -> None:
        """Tell of the row blocks that this rank has the first columns of.

        Args:
            ids: of each block that it has any of, from the block's first row.
        """
        if not self._tells:
            return
        values = self._whole_rows(names, ids) if watch.wants_values else {}
        by_table: dict[int, list[RowBlock]] = {}
        for block in ids:
            if self._parts[block][0].rank == self._peers.table.rank:
                by_table.setdefault(block[0], []).append(block)
        for table, blocks in by_table.items():
            starts = self._store.placement.row_blocks[table]
            rows = torch.cat([ids[block] + starts[block[1]][0] for block in blocks])
            watch.take(names[table], rows, torch.cat([values[block] for block in blocks]) if values else None)

    def _whole_rows(
        self, names: Mapping[int, str], ids: Mapping[RowBlock, torch.Tensor]
    ) -> dict[RowBlock, torch.Tensor]:
        """(N, dim) of the blocks that this rank tells of: all ranks with columns of a block have the same ids of it."""
        table, device, of_tables = self._peers.table, self._store.tbes[0].bank.weights.device, self._store.places
        columns: dict[RowBlock, dict[int, torch.Tensor]] = {}
        sent: list[list[torch.Tensor]] = [[] for _ in range(table.size)]
        awaited: list[list[tuple[RowBlock, int, int]]] = [[] for _ in range(table.size)]
        for block, rows in ids.items():
            parts = self._parts[block]
            teller = parts[0].rank
            for i, part in enumerate(parts):
                if part.rank == table.rank:
                    bank, at = of_tables[block[0]]
                    values = bank.chunk_view(at, part.chunk)[part.first_row + rows]
                    if teller == part.rank:
                        columns.setdefault(block, {})[i] = values
                    else:
                        sent[teller].append(values.to(self._dtype).reshape(-1))
                elif teller == table.rank:
                    awaited[part.rank].append((block, i, len(rows) * part.width))
        if any(len({p.rank for p in parts}) > 1 for block, parts in self._parts.items() if block[0] in names):
            flat = torch.cat([torch.empty(0, dtype=self._dtype, device=device), *(v for of in sent for v in of)])
            sizes = [sum(n for _, _, n in of_rank) for of_rank in awaited]
            came = table.all_to_all(flat, [sum(v.numel() for v in of) for of in sent], sizes).wait().split(sizes)
            for of_rank, blocks in zip(came, awaited, strict=True):
                for (block, i, _), values in zip(blocks, of_rank.split([n for _, _, n in blocks]), strict=True):
                    columns[block][i] = values.view(-1, self._parts[block][i].width)
        dtypes = {block: self._store.parameters[block[0]].dtype for block in columns}
        return {block: torch.cat([of[i].to(dtypes[block]) for i in sorted(of)], 1) for block, of in columns.items()}
