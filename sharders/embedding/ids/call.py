"""A call: one batch on its way through the data path, from `begin` to the end of its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch

from sharders.channel import Transfer
from sharders.embedding.batches.batch import Batch
from sharders.embedding.exchange.phases import Spent
from sharders.embedding.exchange.touched_rows import Touched

P = ParamSpec("P")
R = TypeVar("R")
Owner = TypeVar("Owner")


@dataclass(frozen=True)
class Sent:
    """What a batch became.

    Args:
        counts: for each destination the ids of each of its slots, as they were sent.
        spans: for each destination and slot where its ids' rows belong; see `Span`. Of unpooled lookups only.
        row_starts: first row of each feature among the results' rows of its table's dim; likewise.
        places: of the ids by key, and of those of split features; see [Note: distinct rows]. Likewise.
        weight_places: for each destination the places of its weights among the batch's; only where they get gradients.
        is_sparse: partials are far fewer bytes than all columns: this rank has all of them travel, see stages.py.
        lengths: for each destination those of its slots, (S, B).
        bags: for each destination and slot, how many have ids; of partials only, 0 elsewhere.
    """

    counts: list[list[int]]
    spans: list[list[Span]]
    row_starts: list[int]
    places: list[Places | None]
    weight_places: list[torch.Tensor]
    is_sparse: bool
    lengths: list[torch.Tensor]
    bags: list[list[int]]


class Places(NamedTuple):
    """Which ids the rows that were sent for stand for; see [Note: distinct rows].

    Args:
        of_ids: (N,) int32, row by row: of split features among the results' rows, else among the batch's ids.
        times: (R,) int32, how many ids each row has; None where one each.
        bounds: (R + 1,) int32, of the rows among `of_ids`; likewise.
    """

    of_ids: torch.Tensor
    times: torch.Tensor | None = None
    bounds: torch.Tensor | None = None


class Span(NamedTuple):
    """Rows that were sent for one slot, and their ids.

    Args:
        is_split: of the split features' `Sent.places`, else of those by key.
        rows: in the `times` there.
        ids: in the `of_ids` there; where there are no places, of the batch's ids.
        shift: from these places to those among the results' rows.
    """

    is_split: bool
    rows: range
    ids: range
    shift: int

    @property
    def result(self) -> range:
        """Of the results' rows, where there are no places."""
        return range(self.ids.start + self.shift, self.ids.stop + self.shift)


@dataclass(frozen=True)
class Call:
    """One batch on its way.

    Args:
        path: the lookup that the call was begun for; another does not finish it.
        whole: the batch, which the ranks along a tensor axis share.
        batch: this rank's part of it; the whole without a tensor axis.
        sent: what that became.
        words: of each rank's payload.
        batch_sizes: of each rank: one for all features, or one for each.
        is_training: the tables get gradients.
        wants_weight_gradient: the per-id weights do.
        by_partials: all bags over several row blocks travel as partials: see [Note: partials].
        touched: at most by each rank, where gradients of data-parallel tables travel by rows; see touched_rows.py.
        number: the same on all ranks, and higher than of calls begun before; 0 where there is one rank.
        spent: seconds and bytes, by phase.
        kept: see `once_per_call`.
        is_alone: no other rank makes this call.
    """

    path: Any
    whole: Batch
    batch: Batch
    sent: Sent
    words: list[int]
    batch_sizes: list[tuple[int, ...]]
    is_training: bool
    wants_weight_gradient: bool
    by_partials: bool = False
    touched: Sequence[Touched] | None = None
    number: int = 0
    spent: Spent = field(default_factory=Spent)
    kept: dict[Any, Any] = field(default_factory=dict)
    is_alone: bool = False

    @property
    def payload(self) -> Transfer:
        """What the ranks send here, under way, until it is received."""
        transfer: Transfer = self.kept["payload"]
        return transfer

    @cached_property
    def samples(self) -> list[int]:
        """Of each rank; asked for by every part of a step."""
        return [max(sizes) for sizes in self.batch_sizes]

    @property
    def has_sizes(self) -> bool:
        """Whether features have batch sizes of their own, on some rank."""
        return len(self.batch_sizes[0]) > 1


def once_per_call(method: Callable[Concatenate[Owner, Call, P], R]) -> Callable[Concatenate[Owner, Call, P], R]:
    """A method that works something out of a call, which the call keeps: the backward pass asks for it again."""

    @wraps(method)
    def run(self: Owner, call: Call, /, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (method.__qualname__, self, *args)
        if key not in call.kept:
            call.kept[key] = method(self, call, *args, **kwargs)
        found: R = call.kept[key]
        return found

    return run
