"""Lookups that travel with all their columns, and their bags."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from sharders.embedding.exchange.local_tables import TBE, TableStore
from sharders.embedding.lookup.kernels import Lookup, compile_lookup


class Whole(NamedTuple):
    """Slots of a TBE that are looked up with all their columns."""

    tbe: TBE
    lookup: Lookup
    num_slots: int


def offsets(lengths: torch.Tensor) -> torch.Tensor:
    """(S * B + 1,) bounds of the bags whose lengths are (S, B)."""
    flat = lengths.reshape(-1)
    bounds = flat.new_zeros(flat.numel() + 1)
    torch.cumsum(flat, 0, out=bounds[1:])
    return bounds


def whole_of(store: TableStore, tbe: TBE, tables: Collection[int]) -> Whole:
    """A TBE's lookup, or another in the same bank where some of its tables go another way."""
    slots = store.placement.slots[store.rank]
    mine = [i - tbe.slots.start for i in tbe.slots if slots[i].table in tables]
    if len(mine) in (0, len(tbe.slots)):
        return Whole(tbe, tbe.lookup, len(mine))
    return Whole(tbe, compile_lookup(tbe.bank, [tbe.lookup.ranges[i] for i in mine], store.kernel), len(mine))
