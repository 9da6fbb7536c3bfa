"""Results of bags over several row blocks on two shard axes: straight to the ranks of the samples, or in two stages.

In two stages every bag has a sum from each row block, which are added inside a host: one sum of each host crosses the
outer axis. Straight go partials alone, see [Note: partials] of partials.py: with short bags fewer, and single rows
where bags have one id; with long ones a host would send as many of a bag as it has row blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from sharders.embedding.placement import Placement, Slot


class TwoStages:
    """Elements that the samples of one rank get in either way.

    Args:
        placement: all slots of all ranks.
        me: the rank's table rank.
        inner_size: ranks along the inner axis: of a host.
        segments: of each rank's slots its (row block, feature), numbered, where its table is in several row blocks.
        num: of these.
    """

    def __init__(
        self, placement: Placement, me: int, inner_size: int, segments: Sequence[Sequence[int | None]], num: int
    ) -> None:
        self._near, self._far = [0] * num, [0] * num
        self._staged_near = self._staged_far = 0
        for host in range(len(placement.slots) // inner_size):
            is_mine = host == me // inner_size
            split: list[Slot] = []
            for rank in range(host * inner_size, (host + 1) * inner_size):
                for slot, segment in zip(placement.slots[rank], segments[rank], strict=True):
                    if segment is None:
                        continue
                    split.append(slot)
                    if rank != me:
                        to = self._near if is_mine else self._far
                        to[segment] += slot.width
                    if rank % inner_size != me % inner_size:
                        self._staged_near += slot.width
            self._staged_far += 0 if is_mine else _joined_width(split)

    def partials_are_fewer(self, bags: Sequence[int], samples: int, most: float) -> bool:
        """Whether partials are at most `most` of the elements of two stages, and no more than these between hosts.

        Args:
            bags: with ids, of each segment.
            samples: of this rank.
        """
        near, far = (sum(n * width for n, width in zip(bags, of, strict=True)) for of in (self._near, self._far))
        staged = (self._staged_near + self._staged_far) * samples
        return far <= self._staged_far * samples and near + far <= most * staged


def _joined_width(slots: Sequence[Slot]) -> int:
    """Columns of each feature's results that some slot has."""
    total = 0
    for _, of_feature in groupby(sorted(slots, key=lambda s: (s.feature, s.column)), lambda s: s.feature):
        stop = 0
        for slot in of_feature:
            total += max(0, slot.column + slot.width - max(stop, slot.column))
            stop = max(stop, slot.column + slot.width)
    return total
