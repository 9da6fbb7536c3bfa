"""`Speeds`: what the parts of the embedding data path take on a device, beside the bytes that links carry. Seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from dmp import shown
from planner.arguments import is_number


class Rate(NamedTuple):
    """Seconds of one thing however wide, and seconds per byte of it."""

    each: float
    byte: float


NOTHING = Rate(0, 0)


@dataclass(frozen=True)
class Speeds:
    """One thread's, or one device's. `Speeds.of_memory` says them where nothing was measured.

    A *row* is a distinct row of a table that a batch names, an *id* each time that it does; a *bag* is a sum that comes
    out. Bytes of a row count its optimizer state where it is updated. Optimizers are told apart by their state: none
    (`plain`), a value for each row (`rowwise`), or for each element (`pointwise`).
    """

    lookup_row: Rate = NOTHING
    lookup_id: Rate = NOTHING
    lookup_bag: Rate = NOTHING
    """Of the forward lookup."""

    plain_row: Rate = NOTHING
    plain_id: Rate = NOTHING
    """Of the update in the backward pass, by the kind of optimizer, as the four below."""
    rowwise_row: Rate = NOTHING
    rowwise_id: Rate = NOTHING
    pointwise_row: Rate = NOTHING
    pointwise_id: Rate = NOTHING
    lookup_first: Rate = NOTHING
    """Of a bag whose first row is read for the first time in a batch: nothing else is done meanwhile."""
    update_bag: Rate = NOTHING
    """Of a bag's gradient read, in the backward pass."""

    gradient: Rate = NOTHING
    """Of a row of a table whose gradient is made whole: data-parallel, or without such an optimizer."""
    whole_row: Rate = NOTHING
    whole_id: Rate = NOTHING
    """Of a data-parallel table that is updated from its whole gradient."""
    touched_row: Rate = NOTHING
    """Of a row's gradient from one rank, of a data-parallel table whose copies are updated by rows."""

    place: float = 0.0
    place_bag: float = 0.0
    """Of a byte, and of a bag however wide, of results put where they belong, forward."""
    pack: float = 0.0
    pack_bag: float = 0.0
    """Of the same of gradients made ready to be sent, backward."""
    place_part: float = 0.0
    pack_part: float = 0.0
    """Of a byte of partial bags besides: they are added up, and gradients picked for them."""
    take: float = 0.0
    """Of a byte of gradients of copied tables, which are read where the model left them."""
    fetch: float = 0.0
    """Of a byte that there is room for, for rows of copied tables that come among other gradients: it is copied."""

    step: float = 0.0
    step_results: float = 0.0
    step_gradients: float = 0.0
    """Of a step, however small: with its ids, results, and gradients."""
    group: float = 0.0
    group_results: float = 0.0
    group_gradients: float = 0.0
    """Of each group of tables besides, of whole rows and of row blocks: they are looked up and travel apart."""
    split: float = 0.0
    split_results: float = 0.0
    split_gradients: float = 0.0
    """Of that of row blocks besides."""
    copies: float = 0.0
    copies_results: float = 0.0
    copies_gradients: float = 0.0
    """Of the group of copies."""

    width: float = 0.0
    width_results: float = 0.0
    width_gradients: float = 0.0
    """Of each further width of row blocks: those of one are looked up and travel together."""
    copies_width: float = 0.0
    """Of each further width of copies, with the gradients."""

    send_slot: float = 0.0
    receive_slot: float = 0.0
    update_slot: float = 0.0
    """Of one feature in one row block: where samples are; where rows are, forward and backward."""
    send_id: float = 0.0
    send_bag: float = 0.0
    split_id: float = 0.0
    """Of an id and a length checked and put in a buffer, where samples are; of an id sorted by row block there."""
    receive_id: float = 0.0
    receive_bag: float = 0.0
    """Of an id and a length put in order, where rows are."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            is_rate = f.type == "Rate"
            if is_rate and isinstance(value, (list, tuple)) and len(value) == 2:
                object.__setattr__(self, f.name, Rate(*value))
            parts = (value if is_rate else (value,)) if isinstance(value, (int, float, list, tuple)) else (None,)
            if not isinstance(parts, (list, tuple)) or len(parts) != 1 + is_rate or not all(map(_is_time, parts)):
                wanted = "[seconds, seconds per byte]" if is_rate else "seconds"
                raise ValueError(f"Speeds.{f.name} must be {wanted}, none below 0; got {value!r}")

    @classmethod
    def of_figures(cls, figures: Mapping[str, Any]) -> Speeds:
        """From a dict of some of them.

        Raises:
            ValueError: a name of none, or what is no time.
        """
        known = [f.name for f in fields(cls)]
        unknown = sorted(shown(name) for name in figures if name not in known)
        if unknown:
            raise ValueError(f"speeds has {', '.join(unknown)}; expected some of {', '.join(known)}")
        return cls(**figures)

    @classmethod
    def of_memory(cls, bandwidth: float, flops: float) -> Speeds:
        """Everything moves at the memory's bandwidth (or is added up, if that is slower); nothing else counts."""
        byte = 1 / bandwidth
        read = Rate(8 * byte, max(byte, 0.25 / flops))
        updated, added = Rate(0, 2 * byte), Rate(0, byte)
        by_kind: dict[str, Any] = {f"{kind}_row": updated for kind in ("plain", "rowwise", "pointwise", "whole")}
        by_kind |= {f"{kind}_id": added for kind in ("plain", "rowwise", "pointwise", "whole")}
        of_copies: dict[str, Any] = {"gradient": updated, "touched_row": Rate(0, 3 * byte)}
        return cls(lookup_id=read, lookup_bag=added, **by_kind, **of_copies, place=2 * byte, pack=2 * byte, take=byte)


def _is_time(value: Any) -> bool:
    return is_number(value, or_zero=True)
