"""Where raw ids go, and the exchanges in which they travel: see [Note: four exchanges] of remap.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from sharders.embedding.exchange.peers import Peers
from sharders.managed_collision.id_map import IdMap, block_of

Counts = list[list[int]]
"""For each rank of the exchange the ids of each feature."""


@dataclass(frozen=True)
class RawIds:
    """Ids of one batch.

    Args:
        values: (N,) feature by feature, features of one map beside each other.
        counts: of each feature.
    """

    values: torch.Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """Where the ids of a batch go.

    Args:
        firsts: for each map the first raw id of every block, by which they were dealt out.
        order: (N,) places of the batch's ids in the order of table ranks, and there of features.
        key: (N,) table rank and feature of each id, as one number.
        counts: (table ranks, features) of this rank's ids.
        sent: to each rank of the exchange.
        totals: that each rank has, wherever they go.
        came: that each rank sends here.
    """

    firsts: list[torch.Tensor]
    order: torch.Tensor
    key: torch.Tensor
    counts: Counts
    sent: list[int]
    totals: Counts
    came: Counts


@dataclass(frozen=True)
class Arrived:
    """Ids from each rank: feature by feature, and how many of each feature's, the first ones, count in training."""

    ids: list[torch.Tensor]
    counting: Counts


class Travel:
    """The exchanges of one module's raw ids.

    Args:
        map_of: for each feature its map.
        peers: who exchanges, with shared gradients.
    """

    def __init__(self, map_of: Sequence[int], peers: Peers) -> None:
        self.map_of, self._peers = list(map_of), peers
        self._num = len(self.map_of)
        self.of_copy = [i in peers.by_table_rank for i in range(peers.exchange.size)]
        """Whether a rank of the exchange has to do with the same copy of the tables."""

    def route(self, maps: Sequence[IdMap], batch: RawIds, known: list[torch.Tensor] | None, to_all: bool) -> Route:
        """Deal ids out by the first ids of blocks; one exchange, or two where `known` is not what the blocks have now.

        Args:
            known: first ids of the last time, the same on all ranks.
            to_all: to all copies of the tables, not only to this rank's own.
        """
        device = batch.values.device
        firsts = known or [torch.zeros(len(of.blocks), dtype=torch.int64, device=device) for of in maps]
        own = [first for of in maps for first in of.firsts()]
        for _ in range(2):
            route, told = self._route_by(maps, batch, firsts, own, to_all)
            if told is None:
                return route
            firsts = told
        raise AssertionError("the copies of a map differ")

    def _route_by(
        self, maps: Sequence[IdMap], batch: RawIds, firsts: list[torch.Tensor], own: list[int], to_all: bool
    ) -> tuple[Route, list[torch.Tensor] | None]:
        """A route by these first ids of blocks; and what they really are, where that is another."""
        peers, device, num = self._peers, batch.values.device, self._num
        num_ranks = len(peers.by_table_rank)
        key = self._keys(maps, batch, firsts)
        counts = torch.bincount(key, minlength=num_ranks * num).view(num_ranks, num).tolist()
        to = [
            counts[rank] if to_all or same else [0] * num
            for rank, same in zip(peers.table_ranks, self.of_copy, strict=True)
        ]
        words = [word for of_rank in to for word in (*batch.counts, *of_rank, *own)]
        num_blocks = Counter(block.owner for of in maps for block in of.blocks)
        sizes = [2 * num + num_blocks[rank] for rank in peers.table_ranks]
        send = torch.tensor(words, dtype=torch.int64, device=device)
        came = peers.exchange.all_to_all(send, [2 * num + len(own)] * peers.exchange.size, sizes).wait()
        told = [of_rank.tolist() for of_rank in came.split(sizes)]
        real = [self._firsts_of(maps, [told[i][2 * num :] for i in members], device) for members in self._copies()]
        wrong = next((each for each in real if not all(map(torch.equal, each, firsts))), None)
        route = Route(
            firsts,
            torch.argsort(key, stable=True),
            key,
            counts,
            [sum(of_rank) for of_rank in to],
            [of_rank[:num] for of_rank in told],
            [of_rank[num : 2 * num] for of_rank in told],
        )
        return route, wrong

    def _copies(self) -> list[list[int]]:
        """Ranks of the exchange, by table rank, of each copy of the tables."""
        size = len(self._peers.by_table_rank)
        by_rank: list[list[int]] = [[] for _ in range(size)]
        for i, rank in enumerate(self._peers.table_ranks):
            by_rank[rank].append(i)
        return [list(copy) for copy in zip(*by_rank, strict=True)]

    def _firsts_of(self, maps: Sequence[IdMap], told: list[list[int]], device: torch.device) -> list[torch.Tensor]:
        """First ids of all blocks of each map, from what each table rank has told of its own."""
        given = [iter(of_rank) for of_rank in told]
        return [
            torch.tensor([next(given[block.owner]) for block in of.blocks], dtype=torch.int64, device=device)
            for of in maps
        ]

    def _keys(self, maps: Sequence[IdMap], batch: RawIds, firsts: list[torch.Tensor]) -> torch.Tensor:
        device = batch.values.device
        counts = torch.tensor(batch.counts, dtype=torch.int64, device=device)
        feature = torch.arange(self._num, device=device).repeat_interleave(counts, output_size=sum(batch.counts))
        owners = []
        for of, of_blocks, ids in zip(maps, firsts, batch.values.split(self._of_maps(batch.counts)), strict=True):
            owner = torch.tensor([block.owner for block in of.blocks], dtype=torch.int64, device=device)
            owners.append(owner[block_of(ids, of_blocks)])
        return torch.cat(owners) * self._num + feature

    def _of_maps(self, counts: Sequence[int]) -> list[int]:
        """Ids of each map, from those of each feature."""
        sums = [0] * (max(self.map_of) + 1)
        for of, count in zip(self.map_of, counts, strict=True):
            sums[of] += count
        return sums

    def exchange(self, batch: RawIds, route: Route, counting: Sequence[int] | None) -> Arrived:
        """Send ids where they belong; one exchange.

        Args:
            counting: of each feature the first so many ids count in training; None where none do.
        """
        peers, num = self._peers, self._num
        values = batch.values[route.order].split([sum(of_rank) for of_rank in route.counts])
        head = 0 if counting is None else num
        heads = batch.values[:0] if counting is None else self._counting(batch, route, counting)
        parts = []
        for rank, size in zip(peers.table_ranks, route.sent, strict=True):
            parts += [heads[rank * num : (rank + 1) * num], values[rank][:size]]
        sizes = [head + sum(of_rank) for of_rank in route.came]
        came = peers.exchange.all_to_all(torch.cat(parts), [head + n for n in route.sent], sizes).wait().split(sizes)
        return Arrived([of_rank[head:] for of_rank in came], [of_rank[:head].tolist() for of_rank in came])

    def _counting(self, batch: RawIds, route: Route, counting: Sequence[int]) -> torch.Tensor:
        """(table ranks * features,) of this rank's ids those that count."""
        if list(counting) == list(batch.counts):
            counted = route.key
        else:
            starts = accumulate(batch.counts, initial=0)
            counted = torch.cat([route.key[a : a + n] for a, n in zip(starts, counting, strict=False)])
        return torch.bincount(counted, minlength=len(route.counts) * self._num)

    def by_map(self, route: Route, arrived: Arrived, counting: bool) -> list[torch.Tensor]:
        """Ids that came, of each map.

        Args:
            counting: those that count in training, else those of this copy of the tables.
        """
        result: list[list[torch.Tensor]] = [[] for _ in range(max(self.map_of) + 1)]
        of_ranks = zip(arrived.ids, route.came, self.of_copy, strict=True)
        for rank, (ids, came, of_copy) in enumerate(of_ranks):
            if counting:
                of_features = ids.split(came)
                for of, here, n in zip(self.map_of, of_features, arrived.counting[rank], strict=True):
                    result[of].append(here[:n])
            elif of_copy:
                for of, here in enumerate(ids.split(self._of_maps(came))):
                    result[of].append(here)
        return [torch.cat(of) for of in result]

    def answer(self, route: Route, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """(N,) rows of this rank's ids; one exchange.

        Args:
            rows: of each map, of the ids that `by_map` gave for look-ups.
        """
        sizes = [self._of_maps(came) if same else [] for came, same in zip(route.came, self.of_copy, strict=True)]
        cut = [iter(of.split([n[i] for n in sizes if n])) for i, of in enumerate(rows)]
        parts = [next(of) for n in sizes if n for of in cut]
        send, receive = [sum(n) for n in sizes], [n if s else 0 for n, s in zip(route.sent, self.of_copy, strict=True)]
        came = self._peers.exchange.all_to_all(torch.cat(parts), send, receive).wait()
        by_peer = came.split(receive)
        by_rank = [by_peer[i] for i in self._peers.by_table_rank]
        result = torch.empty_like(route.order)
        result[route.order] = torch.cat(by_rank)
        return result
