"""`TableStore`: what one rank holds of a module's tables: banks, their lookups, and one parameter for each table."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from dmp import ChunkedTensor, FusedParameter, Shard, ShardError
from sharders.embedding.exchange.placement import Placement, neighbours, of_blocks
from sharders.embedding.lookup import kernels
from sharders.embedding.lookup.bank import Bank, RowRange


@dataclass
class TBE:
    """Tables that are stored, looked up and updated together (TorchRec's table-batched embedding).

    Args:
        bank: storage.
        lookup: compiled for `slots`.
        tables: indices of the tables, in the bank's order.
        slots: of a sharded bank, the range among this rank's slots.
        features: of a local bank, the features that its lookup's slots stand for.
        is_local: whole on every rank.
        is_trainable: gets gradients.
    """

    bank: Bank
    lookup: kernels.Lookup
    tables: list[int]
    slots: range
    features: list[int]
    is_local: bool
    is_trainable: bool


_address_of = torch.Tensor.data_ptr


class SlotRun(NamedTuple):
    """Slots of this rank that share a TBE and a width, looked up together, source by source: neighbours, in pieces."""

    tbe: TBE
    pieces: list[range]
    width: int

    @property
    def slots(self) -> list[int]:
        """In their order."""
        return [i for piece in self.pieces for i in piece]


class TableStore:
    """Storage of one rank.

    Args:
        placement: all slots of all ranks.
        rank: this rank's table rank.
        device: of weights and optimizer state.
        kernel: name of the lookup kernel; see `choose_kernel`.
        options: for each table the live param group that it has already; by default those of one optimizer share one,
            whatever their layouts.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        device: torch.device,
        kernel: str | None = None,
        options: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        self.placement, self.rank, self.kernel = placement, rank, kernel
        self._groups: dict[Any, dict[str, Any]] = {}
        for table, group in zip(placement.tables, options or (), strict=False):
            self._groups[table.bank_key] = group
        keys: dict[tuple[bool, Any], list[int]] = {}
        for index in sorted(range(len(placement.tables)), key=placement.storage_order):
            keys.setdefault((placement.is_local[index], placement.storage_order(index)), []).append(index)
        self.tbes = [self._make(tables, is_local, device) for (is_local, _), tables in keys.items()]
        of_tables = zip(self._views(), placement.tables, strict=True)
        self.parameters = [nn.Parameter(view, table.trains) for view, table in of_tables]
        self._settle()

    def _settle(self) -> None:
        self._addresses = [p.data_ptr() for p in self.parameters]

    def take_back(self, name: str) -> None:
        """Take values over from what a user has put in a parameter's place by `p.data = ...`; it is a view again then.

        Where somebody keeps what was there before, to be put back as where averaged weights are tried, it is a view of
        new memory.

        Args:
            name: of the module, for the error.

        Raises:
            ShardError: another shape or dtype than the local part's; whole tables are cut.
        """
        if [*map(_address_of, self.parameters)] == self._addresses:
            return
        given = self._given(name)
        for tbe in self.tbes:
            num_given = len(given.keys() & set(tbe.tables))
            if num_given and tbe.bank.is_viewed_beside(len(tbe.tables) - num_given):
                tbe.bank.move()
        self._view_anew()
        for index, bank, i in self._places():
            if index in given:
                parameter, data = self.parameters[index], given[index]
                if data.shape == parameter.shape:
                    parameter.data.copy_(data)
                else:
                    self._chunked(index, bank, i).fill_from(data)

    def _given(self, name: str) -> dict[int, torch.Tensor]:
        """For each table whose data were replaced what is in their place."""
        given = {}
        for index, view in enumerate(self._views()):
            parameter, table = self.parameters[index], self.placement.tables[index]
            data = parameter.data
            if data.data_ptr() == view.data_ptr():
                continue
            if data.dtype != view.dtype or data.shape not in (view.shape, (table.rows, table.dim)):
                parameter.data = view
                raise ShardError(
                    f"the data of table {table.parameter!r} of {name} was replaced by {tuple(data.shape)} "
                    f"{data.dtype}; expected this rank's part {tuple(view.shape)}, or the whole table "
                    f"{(table.rows, table.dim)}, {view.dtype}; to change the dtype cast the whole module"
                )
            given[index] = data
        return given

    def _view_anew(self) -> None:
        """Have the parameters be views of the banks' memory as it is now."""
        for parameter, view in zip(self.parameters, self._views(), strict=True):
            parameter.data = view
        self._settle()

    @property
    def sharded(self) -> list[TBE]:
        """TBEs of tables that are cut."""
        return [tbe for tbe in self.tbes if not tbe.is_local]

    @property
    def local(self) -> list[TBE]:
        """TBEs of tables that are whole on every rank."""
        return [tbe for tbe in self.tbes if tbe.is_local]

    def sums_first(self) -> bool:
        """Whether the gradients of a row may be summed before its owner has them: none is clamped before."""
        return not any(tbe.bank.clips for tbe in self.tbes)

    def runs_of(self, tables: Collection[int]) -> list[SlotRun]:
        """Runs of the slots of sharded tables, in the order of slots; those of one width are adjacent in each TBE."""
        slots = self.placement.slots[self.rank]
        runs = []
        for tbe in self.sharded:
            mine = [i for i in tbe.slots if slots[i].table in tables]
            for width, run in groupby(mine, key=lambda i: slots[i].width):
                runs.append(SlotRun(tbe, neighbours(run), width))
        return runs

    def _places(self) -> Iterator[tuple[int, Bank, int]]:
        """(table, its bank, its index there) of every table, in the module's order, however they are stored."""
        places = ((index, tbe.bank, i) for tbe in self.tbes for i, index in enumerate(tbe.tables))
        yield from sorted(places, key=lambda place: place[0])

    @property
    def places(self) -> dict[int, tuple[Bank, int]]:
        """For each table its bank, and its index there."""
        return {index: (bank, i) for index, bank, i in self._places()}

    def _views(self) -> list[torch.Tensor]:
        """For each table what this rank holds of it, as one matrix."""
        views = {index: bank.table_view(i, self.placement.tables[index].dim) for index, bank, i in self._places()}
        return [views[index] for index in range(len(views))]

    @property
    def options(self) -> list[dict[str, Any]]:
        """For each table its live param group, which is empty where it has no optimizer."""
        of_tables = {index: bank.options for index, bank, _ in self._places()}
        return [of_tables[index] for index in range(len(of_tables))]

    def keep(self, parameters: list[nn.Parameter]) -> None:
        """Have these as its parameters, with the values that it has; they may have had another shape."""
        for parameter, own in zip(parameters, self.parameters, strict=True):
            parameter.data = own.data
        self.parameters = list(parameters)
        self._settle()

    def take(self, other: TableStore) -> None:
        """Take over values, state and counts of a store with the same shards, however they are grouped there."""
        of_other = other.places
        with torch.no_grad():
            for index, bank, i in self._places():
                old, at = of_other[index]
                for c in range(len(bank.chunks[i])):
                    bank.chunk_view(i, c).copy_(old.chunk_view(at, c))
                    for name in bank.state:
                        bank.state_view(name, i, c).copy_(old.state_view(name, at, c))
        self.count_as(other)

    def count_as(self, other: TableStore) -> None:
        """Take over how often each table was updated."""
        counts = {index: bank.steps[i] for index, bank, i in other._places()}
        for index, bank, i in self._places():
            bank.steps[i] = counts[index]

    def load_all(self, values: dict[int, torch.Tensor]) -> None:
        """Copy this rank's pieces out of whole tables, by table."""
        with torch.no_grad():
            for index, bank, i in self._places():
                if index in values:
                    self._chunked(index, bank, i).fill_from(values[index].detach())

    def chunked_state(self) -> dict[str, ChunkedTensor]:
        """Pieces of every table that is cut, by parameter name, as views."""
        return {
            self.placement.tables[index].parameter: self._chunked(index, bank, i)
            for index, bank, i in self._places()
            if not self.is_whole(index)
        }

    def is_whole(self, index: int) -> bool:
        """Whether every process that there is holds the whole table: an ordinary tensor then."""
        alone = len(self.placement.slots) == 1 and len(self.placement.shards[index]) == 1
        return alone or self.placement.is_local[index]

    def fused_parameters(self) -> Iterator[FusedParameter]:
        """Tables that are updated in the backward pass."""
        for index, bank, i in self._places():
            if bank.spec is not None:
                table, starts = self.placement.tables[index], self.placement.column_blocks(index)
                widths = tuple(b - a for a, b in pairwise([*starts, table.dim])) if len(starts) > 1 else None
                state = self._state_of(bank, i, index)
                yield FusedParameter(table.parameter, self.parameters[index], bank.options, state, widths)

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace all storage by `fn` of it (a move to another device); the parameters stay the same objects.

        Raises:
            ShardError: the kernel that is named cannot be used for what `fn` gives, or it goes to meta, where kernels
                would read at no address; nothing was replaced.
        """
        for tbe in self.tbes:
            moved = fn(tbe.bank.weights.new_empty(0))
            if moved.is_meta and not tbe.bank.weights.is_meta:
                raise ShardError(
                    "tables that are sharded are not moved to meta, where they have no values: dmp.to_unsharded(model) "
                    "is a plain module, which can be"
                )
            kernels.choose_kernel(moved.device, moved.dtype, tbe.bank.spec, tbe.lookup.ranges, self.kernel)
        for tbe in self.tbes:
            tbe.bank.apply(fn)
            tbe.lookup = kernels.compile_lookup(tbe.bank, tbe.lookup.ranges, self.kernel)
        self._view_anew()

    def __deepcopy__(self, memo: dict[int, Any]) -> TableStore:
        new = copy.copy(self)
        new.tbes = []
        for old in self.tbes:
            # The copy's optimizer names its own parameters, which do not exist yet.
            memo.setdefault(id(old.bank.options), {k: v for k, v in old.bank.options.items() if k != "params"})
            bank = copy.deepcopy(old.bank, memo)
            lookup = kernels.compile_lookup(bank, old.lookup.ranges, self.kernel)
            new.tbes.append(replace(old, bank=bank, lookup=lookup))
        of_tables = zip(new._views(), self.parameters, strict=True)
        new.parameters = [nn.Parameter(view, parameter.requires_grad) for view, parameter in of_tables]
        memo.update(zip(map(id, self.parameters), new.parameters, strict=True))
        new._settle()
        return new

    def _make(self, tables: list[int], is_local: bool, device: torch.device) -> TBE:
        placement, chunks = self.placement, self.placement.chunks[self.rank]
        first = placement.tables[tables[0]]
        shapes = [
            [(placement.tables[t].rows, placement.tables[t].dim)] if is_local else [s.sizes for s in chunks[t]]
            for t in tables
        ]
        spec = first.optimizer if first.trainable else None
        bank = Bank([[(s[0], s[1]) for s in of_table] for of_table in shapes], first.dtype, device, spec)
        bank.options = self._groups.setdefault(first.bank_key, bank.options)
        where = {index: i for i, index in enumerate(tables)}
        # A local table has no slots; its features stand for them.
        features = [f for f in placement.features if is_local and f.table in where]
        ranges = [RowRange(bank.chunks[where[f.table]][0], 0, placement.tables[f.table].rows) for f in features]
        mine = [(i, slot) for i, slot in enumerate(placement.slots[self.rank]) if slot.table in where]
        ranges += [RowRange(bank.chunks[where[s.table]][s.chunk], s.first_row, s.rows) for _, s in mine]
        slots = range(mine[0][0], mine[-1][0] + 1) if mine else range(0)
        assert len(slots) == len(mine), "slots of one bank must be one run"
        lookup = kernels.compile_lookup(bank, ranges, self.kernel)
        return TBE(bank, lookup, tables, slots, [f.index for f in features], is_local, first.trains)

    def _offsets(self, index: int) -> list[tuple[int, int]]:
        if self.placement.is_local[index]:
            return [(0, 0)]
        return [(s.offsets[0], s.offsets[1]) for s in self.placement.chunks[self.rank][index]]

    def _chunked(self, index: int, bank: Bank, i: int) -> ChunkedTensor:
        """What this rank holds of a table, as views."""
        table, parameter = self.placement.tables[index], self.parameters[index]
        chunks = [bank.chunk_view(i, c) for c in range(len(bank.chunks[i]))]
        offsets, places = self._offsets(index), self.placement.shards[index]
        return ChunkedTensor((table.rows, table.dim), chunks, offsets, parameter.dtype, parameter.device, places)

    def _state_of(self, bank: Bank, i: int, index: int) -> Callable[[], dict[str, torch.Tensor]]:
        """Live optimizer state of a table, in the unsharded shape.

        Row-wise state of a table whose columns are cut has shape (rows, column blocks): one column for each block.
        """

        def state() -> dict[str, torch.Tensor]:
            assert bank.spec is not None
            placement, table = self.placement, self.placement.tables[index]
            result: dict[str, torch.Tensor] = {"step": bank.steps[i]} if bank.state else {}
            blocks = placement.column_blocks(index)
            for name, tensor in bank.spec.optimizer.state.items():
                views = [bank.state_view(name, i, c) for c in range(len(bank.chunks[i]))]
                offsets: list[tuple[int, ...]] = list(self._offsets(index))
                size: tuple[int, ...] = (table.rows, table.dim)
                places: Sequence[Shard] = placement.shards[index]
                if tensor.is_row_wise and len(blocks) == 1:
                    size, offsets = (table.rows,), [o[:1] for o in offsets]
                elif tensor.is_row_wise:
                    # A rectangle's column of sums stands for every block that it spans.
                    size, spans = (table.rows, len(blocks)), zip(views, offsets, bank.chunks[i], strict=True)
                    cells = [
                        (view.unsqueeze(1), (at[0], j))
                        for view, at, chunk in spans
                        for j, start in enumerate(blocks)
                        if at[1] <= start < at[1] + chunk.width
                    ]
                    views, offsets = [view for view, _ in cells], [at for _, at in cells]
                    places = of_blocks(places, blocks)
                if self.is_whole(index):
                    result[name] = views[0]
                else:
                    dtype, device = bank.state[name].dtype, bank.weights.device
                    result[name] = ChunkedTensor(size, views, offsets, dtype, device, places)
            return result

        return state
