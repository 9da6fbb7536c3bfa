"""Results of bags over several row blocks on two shard axes: straight to the ranks of the samples, or in two stages.

In two stages every bag has a sum from each row block, which are added inside a host: one sum of each host crosses the
outer axis. Straight go partials alone, see [Note: partials] of partials.py: with short bags fewer, and single rows
where bags have one id; with long ones a host would send as many of a bag as it has row blocks.

[Note: settled table by table] Each rank counts, of its own samples, what either way of each table sends it, and says
with its ids which tables may go straight: those that it gets fewer bytes of, none more from other hosts, and hardly
more from any rank there than that one would send of its host's sums. Those go that all ranks have named, the others
beside them in two stages, at the same time. Where all bags together are fewer, the header says so: then all results go
straight, those of tables in one row block too, in one exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from sharders.embedding.exchange.placement import Placement, Slot

EXCHANGE_ELEMENTS = 1 << 18
"""What a rank sends in about the time that one exchange more takes, however little travels in it: a megabyte."""
ANOTHER_WAY = 4
"""Exchanges whose time another way beside takes, with lookups and updates of its own: 1.9 ms of CPU time on each of
four ranks with 26 tables of 512 samples, half of them of one id, where two stages for all were a tenth quicker."""
EVEN = 1.25
"""So much more than its share one rank may send: ids are not spread evenly to the last."""
_BITS = 31  # of a word, the narrowest of which have a sign


class TwoStages:
    """What one rank gets of each table in either way, in elements; tables in one row block count as one, the last.

    Args:
        placement: all slots of all ranks.
        me: the rank's table rank.
        inner_size: ranks along the inner axis: of a host.
        segments: of each rank's slots its (row block, feature), numbered, where its table is in several row blocks.
    """

    def __init__(
        self, placement: Placement, me: int, inner_size: int, segments: Sequence[Sequence[int | None]]
    ) -> None:
        self.tables = [t for t, is_split in enumerate(placement.by_partials) if is_split]
        """Those in several row blocks."""
        self.num_words = -(-len(self.tables) // _BITS)
        """Of what each rank tells the others."""
        self._inner, self._num_ranks, self._num = inner_size, len(placement.slots), len(self.tables) + 1
        place = {table: i for i, table in enumerate(self.tables)}
        # Of each slot; bags of whole tables are all samples, which stand behind those of segments.
        found = [
            (-1 if segment is None else segment, place.get(slot.table, -1) % self._num, rank, slot.width)
            for rank, (slots, of_rank) in enumerate(zip(placement.slots, segments, strict=True))
            for slot, segment in zip(slots, of_rank, strict=True)
        ]
        self._segment, self._table, self._rank, width = np.array(found, dtype=np.int64).reshape(-1, 4).T
        is_far = self._rank // inner_size != me // inner_size
        self._near, self._far = np.where(is_far | (self._rank == me), 0, width), np.where(is_far, width, 0)
        self._staged_near = np.bincount(
            self._table, np.where(self._rank % inner_size != me % inner_size, width, 0), self._num
        )
        self._of_hosts = np.zeros((len(placement.slots) // inner_size, self._num))
        for host, of_host in enumerate(self._of_hosts):
            slots = placement.slots[host * inner_size : (host + 1) * inner_size]
            for table, joined in _joined_widths([slot for of_rank in slots for slot in of_rank]).items():
                of_host[place.get(table, -1)] += joined
        self._of_hosts[me // inner_size] = 0

    def settle(self, bags: Sequence[int], samples: int, most: float) -> tuple[bool, list[int]]:
        """Whether all results may go straight; and the places of the tables that may if not all do.

        Args:
            bags: with ids, of each segment.
            samples: of this rank.
            most: partials are worth it where they are at most so much of two stages' elements.
        """
        of_slots = np.array([*bags, samples])[self._segment]
        near, far = (np.bincount(self._table, of_slots * of, self._num) for of in (self._near, self._far))
        places = self._table * self._num_ranks + self._rank
        loads = np.bincount(places, of_slots * self._far, self._num * self._num_ranks).reshape(self._num, -1)
        of_hosts = self._of_hosts * samples
        straight, staged = near + far, (self._staged_near * samples + of_hosts.sum(0)) * most
        straight[-1] *= most  # these are not partials in either way
        is_even = self._inner * loads.max(1) <= EVEN * of_hosts.max(0)
        fewer = is_even & (far <= of_hosts.sum(0)) & (straight < staged)
        chosen = np.flatnonzero(fewer[:-1])
        exchange = EXCHANGE_ELEMENTS * most
        of_none = staged.sum() + 2 * exchange
        num_more = ANOTHER_WAY if staged[-1] or len(chosen) < self._num - 1 else -1
        of_some = of_none - (staged - straight)[chosen].sum() + num_more * exchange
        of_all = straight.sum() + exchange
        chosen = chosen if of_some < of_none else chosen[:0]
        # The busiest link in either way: a host's sums are sent by all its ranks.
        sums = np.delete(of_hosts, chosen, 1).sum(1).repeat(self._inner)
        busiest, otherwise = self._inner * loads.sum(0).max(), (sums + self._inner * loads[chosen].sum(0)).max()
        more = (len(of_hosts) - 1) * (busiest - otherwise)
        can_all = far.sum() <= of_hosts.sum() and (busiest <= EVEN * otherwise or more <= EXCHANGE_ELEMENTS)
        return bool(can_all and of_all <= min(of_some, of_none)), chosen.tolist()

    def words(self, tables: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What is told of these, by their places."""
        marks = [0] * self.num_words
        for i in tables:
            marks[i // _BITS] |= 1 << i % _BITS
        return torch.tensor(marks, dtype=dtype, device=device)

    def agreed(self, came: torch.Tensor, ends: Sequence[int]) -> frozenset[int]:
        """The tables that all have named.

        Args:
            came: from all ranks, flat.
            ends: of each one's words there, which come last.
        """
        marks = [(1 << _BITS) - 1] * self.num_words
        for of_rank in torch.stack([came[end - self.num_words : end] for end in ends]).tolist():
            marks = [a & b for a, b in zip(marks, of_rank, strict=True)]
        return frozenset(t for i, t in enumerate(self.tables) if marks[i // _BITS] >> i % _BITS & 1)


def _joined_widths(slots: Sequence[Slot]) -> dict[int, int]:
    """Of each table the columns of its features' results that some slot has."""
    widths: dict[int, int] = {}
    ordered = sorted(slots, key=lambda s: (s.table, s.feature, s.column))
    for (table, _), of_feature in groupby(ordered, lambda s: (s.table, s.feature)):
        stop = 0
        for slot in of_feature:
            new = max(0, slot.column + slot.width - max(stop, slot.column))
            widths[table] = widths.get(table, 0) + new
            stop = max(stop, slot.column + slot.width)
    return widths
