"""Results of bags over several row blocks on two shard axes: straight to the ranks of the samples, or in two stages.

In two stages every bag has a sum from each row block, which are added inside a host: one sum of each host crosses the
outer axis. Straight go partials alone, see [Note: partials] of partials.py: with short bags fewer, and single rows
where bags have one id; with long ones a host would send as many of a bag as it has row blocks.

[Note: settled table by table] Each rank counts, of its own samples, what either way of each table sends it, and says
with its ids which tables may go straight: those that it gets fewer bytes of, and none more from other hosts. Those go
that all ranks have named, the others beside them in two stages. Where all bags together are fewer, the header says so:
then all results go straight, those of tables in one row block too, in one exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from sharders.embedding.placement import Placement, Slot

EXCHANGE_ELEMENTS = 1 << 18
"""What a rank sends in about the time that one exchange more takes, however little travels in it: a megabyte."""
_BITS = 31  # of a word, the narrowest of which have a sign


class TwoStages:
    """What one rank gets of each table in either way.

    Elements: of tables in several row blocks near, from its own host, and far; straight for each bag of a segment that
    has ids, in two stages for each sample. Of whole tables what the busiest rank sends, which straight is one rank, and
    between hosts in two stages all of its host.

    Args:
        placement: all slots of all ranks.
        me: the rank's table rank.
        inner_size: ranks along the inner axis: of a host.
        segments: of each rank's slots its (row block, feature), numbered, where its table is in several row blocks.
    """

    def __init__(
        self, placement: Placement, me: int, inner_size: int, segments: Sequence[Sequence[int | None]]
    ) -> None:
        self.tables = [
            t for t, is_split in enumerate(placement.by_partials) if is_split and placement.tables[t].features
        ]
        """Those in several row blocks."""
        self.num_words = -(-len(self.tables) // _BITS)
        """Of what each rank tells the others."""
        place = {table: i for i, table in enumerate(self.tables)}
        num = len(place)
        self._straight: dict[int, list[int]] = {}  # segment -> table's place, near, far
        self._staged = [[0, 0] for _ in range(num)]
        hosts = len(placement.slots) // inner_size
        busiest, busiest_host = 0, 0
        for host in range(hosts):
            is_far, split, of_host = host != me // inner_size, list[Slot](), 0
            for rank in range(host * inner_size, (host + 1) * inner_size):
                of_rank = 0
                for slot, segment in zip(placement.slots[rank], segments[rank], strict=True):
                    if segment is None:
                        of_rank += slot.width
                        continue
                    split.append(slot)
                    straight = self._straight.setdefault(segment, [place[slot.table], 0, 0])
                    straight[1 + is_far] += slot.width * (rank != me)
                    self._staged[place[slot.table]][0] += slot.width * (rank % inner_size != me % inner_size)
                busiest, of_host = max(busiest, of_rank), of_host + of_rank
            busiest_host = max(busiest_host, of_host)
            for table, width in _joined_widths(split).items():
                self._staged[place[table]][1] += width * is_far
        ranks = hosts * inner_size
        self._has_whole = busiest > 0
        self._whole = busiest * (ranks - 1), busiest * hosts * (inner_size - 1) + busiest_host * (hosts - 1)
        self._whole_more = busiest * (ranks - inner_size) - busiest_host * (hosts - 1)

    def settle(self, bags: Sequence[int], samples: int, most: float) -> tuple[bool, list[int]]:
        """Whether all results may go straight; and the places of the tables that may if not all do.

        Args:
            bags: with ids, of each segment.
            samples: of this rank.
            most: partials are worth it where they are at most so much of two stages' elements.
        """
        found = [[0, 0] for _ in self.tables]
        for segment, (table, near, far) in self._straight.items():
            found[table][0] += bags[segment] * near
            found[table][1] += bags[segment] * far
        straight = [near + far for near, far in found]
        staged = [(near + far) * samples * most for near, far in self._staged]
        fits = [far <= of[1] * samples for (_, far), of in zip(found, self._staged, strict=True)]
        chosen = [i for i, is_no_more in enumerate(fits) if is_no_more and straight[i] < staged[i]]
        exchange = EXCHANGE_ELEMENTS * most
        whole_straight, whole_staged = (n * samples * most for n in self._whole)
        of_none = sum(staged) + whole_staged + 2 * exchange
        num_more = 1 if self._has_whole or len(chosen) < len(staged) else -1
        of_some = of_none - sum(staged[i] - straight[i] for i in chosen) + num_more * exchange
        of_all = sum(straight) + whole_straight + exchange
        is_no_more = sum(far for _, far in found) <= sum(far for _, far in self._staged) * samples
        can_all = is_no_more and self._whole_more * samples <= EXCHANGE_ELEMENTS
        return can_all and of_all <= min(of_some, of_none), chosen if of_some < of_none else []

    def words(self, tables: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What is told of these, by their places."""
        marks = [0] * self.num_words
        for i in tables:
            marks[i // _BITS] |= 1 << i % _BITS
        return torch.tensor(marks, dtype=dtype, device=device)

    def agreed(self, parts: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], frozenset[int]]:
        """What comes before the words of each rank, and the tables that all have named."""
        before, told = zip(*(part.tensor_split([part.numel() - self.num_words]) for part in parts), strict=True)
        marks = [(1 << _BITS) - 1] * self.num_words
        for of_rank in torch.stack(told).tolist():
            marks = [a & b for a, b in zip(marks, of_rank, strict=True)]
        return list(before), frozenset(t for i, t in enumerate(self.tables) if marks[i // _BITS] >> i % _BITS & 1)


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
