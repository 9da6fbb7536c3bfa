"""Raw ids to rows: ids go to the ranks that have their part of the map, which answer with rows.

[Note: four exchanges]
A *header*, as of every call on tables: what is wrong with any rank's batch, and whether ranks are at one module. The
*sizes*: how many ids of each feature go where, and the first raw id of every block, by which senders choose: where they
have chosen by others, because a map was loaded or has changed, they choose again. The *ids*, and back come *rows*. In a
step in which a map changes ids travel twice: to be counted, and, when entries have moved, to be looked up.

All copies of the tables get all ids, so that their maps stay equal; of ranks that share a batch the first one's count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dmp import InputError, ranks
from sharders.embedding.batches.input_faults import Fault, Kind
from sharders.embedding.exchange.peers import Peers
from sharders.embedding.ids.header import Handshake, Header
from sharders.managed_collision.entries import move
from sharders.managed_collision.eviction import evict
from sharders.managed_collision.id_map import IdMap
from sharders.managed_collision.travel import Counts, RawIds, Travel


@dataclass(frozen=True)
class Remapped:
    """What became of a batch.

    Args:
        rows: (N,) of its ids.
        changed: for each map the rows that have another raw id since this step; None where it has not changed.
    """

    rows: torch.Tensor
    changed: list[torch.Tensor | None]


class Remap:
    """The maps of one module at work.

    Args:
        features: of each map, in the order in which batches have them.
        peers: who exchanges, with shared gradients.
        content: text that must be equal on all ranks.
        tensor_axes: mesh axes along which ranks have the same batch.
    """

    def __init__(
        self,
        features: Sequence[Sequence[str]],
        peers: Peers,
        content: str,
        tensor_axes: Sequence[str],
    ) -> None:
        self._map_of = [i for i, names in enumerate(features) for _ in names]
        self._travel = Travel(self._map_of, peers)
        self._peers = peers
        first_of = {data: i for i, data in reversed([*enumerate(peers.data_ranks)])}
        self._counted = [first_of[data] for data in sorted(first_of)]
        """Ranks of the exchange whose ids count: one for each batch, in the batches' order."""
        names = [name for of_map in features for name in of_map]
        channels = peers.headers, peers.data_ranks, peers.ranks
        self.handshake = Handshake(content, names, *channels, tensor_axes)
        self._firsts: list[torch.Tensor] | None = None

    def __deepcopy__(self, memo: object) -> Remap:
        """Channels and what is known of the blocks are shared: what is known is looked at anew in each call."""
        return self

    def __call__(
        self,
        maps: Sequence[IdMap],
        read: Callable[[], RawIds],
        learns: bool,
        device: torch.device,
        grow: Callable[[int, int], None],
    ) -> Remapped:
        """Rows of a batch's ids. Collective.

        Args:
            read: the batch; may raise `Fault`.
            learns: the ids are counted, and maps may change.
            grow: gives a map, and its table, so many rows.

        Raises:
            InputError: on every rank: what is wrong with one rank's batch.
        """
        travel = self._travel
        with ranks.entry(self.handshake.forward, self._peers.exchange.group) as here, torch.no_grad():
            batch = self._meet(read, learns, device, here)
            for of in maps:
                if of.blocks_to_be is not None:
                    move(of, self._peers.table, of.blocks_to_be)
                    self._firsts = None
            route = travel.route(maps, batch, self._firsts, learns)
            counting = self._counting(maps, route.totals) if learns else None
            arrived = travel.exchange(batch, route, counting)
            changed: list[torch.Tensor | None] = [None] * len(maps)
            if learns:
                for of, ids in zip(maps, travel.by_map(route, arrived, True), strict=True):
                    of.record(ids)
                changed = [
                    evict(of, self._peers.table, first, partial(grow, i)) if of.is_due else None
                    for i, (of, first) in enumerate(zip(maps, route.firsts, strict=True))
                ]
            if any(rows is not None for rows in changed):
                route = travel.route(maps, batch, None, False)
                arrived = travel.exchange(batch, route, None)
            self._firsts = route.firsts
            found = zip(maps, travel.by_map(route, arrived, False), strict=True)
            return Remapped(travel.answer(route, [of.rows_of(ids) for of, ids in found]), changed)

    def _meet(self, read: Callable[[], RawIds], learns: bool, device: torch.device, here: ranks.entry) -> RawIds:
        """This rank's batch, once it is known that every rank has one."""
        batch, problem = None, None
        try:
            batch = read()
        except Exception as error:  # the others wait in the handshake: they are told, and this error is shown here
            problem = error
        fault = problem if isinstance(problem, Fault) else None if problem is None else Fault(Kind.UNREADABLE)
        mine = [Header((0,), 0, learns, False, False, 0, fault)] * self._peers.exchange.size
        try:
            self.handshake.exchange(mine, device, here)
        except InputError as error:
            raise error from None if isinstance(problem, Fault) else problem
        assert batch is not None, "what was wrong has been raised"
        return batch

    def _counting(self, maps: Sequence[IdMap], totals: Counts) -> list[int]:
        """A step begins; how many of this rank's ids of each feature count: where there is no room for all, the first
        of the batch that all ranks' are together."""
        rank = self._peers.exchange.rank
        counting = [0] * len(self._map_of)
        for i, of in enumerate(maps):
            features = [f for f, own in enumerate(self._map_of) if own == i]
            room = of.begin_step(sum(totals[s][f] for s in self._counted for f in features))
            for f in features:
                for source in self._counted:
                    taken = min(totals[source][f], room)
                    room -= taken
                    if source == rank:
                        counting[f] = taken
        return counting
