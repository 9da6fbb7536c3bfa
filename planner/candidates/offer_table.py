"""`OfferTable`: what all classes are offered, a row each. It is made once, and costed for several models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.candidates.offered import Offer
from planner.costs.protocol import Integers

Booleans = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class OfferTable:
    """Offers of all classes, and as arrays what of them is asked for all at once.

    Args:
        offers: grouped by class.
        owner: (rows,) class of each.
        size, pieces, units, least, ranks: (rows,) of their families.
        is_copied: (rows,) every rank has the whole.
        is_open: (rows,) may be chosen.
        is_own: (rows,) a sharder's own layout.
        has_row_blocks: (rows,) ranks have parts of the rows.
    """

    offers: tuple[Offer, ...]
    owner: Integers
    size: Integers
    pieces: Integers
    units: Integers
    least: Integers
    ranks: Integers
    is_copied: Booleans
    is_open: Booleans
    is_own: Booleans
    has_row_blocks: Booleans

    @classmethod
    def of(cls, offered: Sequence[Sequence[Offer]], rows: Sequence[int]) -> OfferTable:
        """Of what is offered to each class.

        Args:
            rows: of a parameter of each class.
        """
        facts: dict[int, Integers] = {}  # classes that are offered the same share one list
        for of_class in offered:
            if id(of_class) not in facts:
                facts[id(of_class)] = np.array(list(map(_facts, of_class)), dtype=np.int64).reshape(-1, 8)
        found = [facts[id(of_class)] for of_class in offered]
        size, pieces, units, least, ranks, *flags = np.concatenate([*found, np.zeros((0, 8), dtype=np.int64)]).T
        owner = np.repeat(np.arange(len(offered)), [len(of_class) for of_class in offered])
        offers = tuple(offer for of_class in offered for offer in of_class)
        is_copied, is_open, is_own = (flag.astype(bool) for flag in flags)
        has_row_blocks = size > 1
        for row in np.flatnonzero(is_own).tolist():
            own = offers[row].own
            has_row_blocks[row] = own is not None and any(prod(s.sizes[:1]) != rows[owner[row]] for s in own.shards)
        families = size, pieces, units, least, ranks
        return cls(offers, owner, *families, is_copied, is_open, is_own, has_row_blocks)


def _facts(offer: Offer) -> tuple[int, ...]:
    family = offer.family
    flags = offer.is_copied, not offer.objection, offer.own is not None
    return family.size, family.pieces, family.units, family.least, family.ranks, *flags
