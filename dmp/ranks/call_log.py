"""What this process is in: notes of the calls that ranks make together, in plain variables that cost next to nothing.

[Note: entries] An *entry* is a call that all ranks of a group make together: a forward or backward exchange, a save, a
gather. Each rank numbers the entries of a set of ranks; where all goes well, number k is the same call on each of them.
Entries lie inside each other: a save has steps.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from functools import lru_cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dmp.errors import RanksError

_DROPPED = 256  # that are remembered
DESTROYED = (
    "the process group that this model was wrapped in was destroyed: wrap the module again in the one that there is "
    "now, and load its checkpoint"
)


class Sequence:
    """The entries of one set of ranks, as far as this process has come.

    Attributes:
        key: the same text for the same ranks, on all of them.
        ranks: of the default group.
        number: of the last entry that was begun.
        last: name of the last entry that has ended; "" before the first.
        backwards: names of the backward passes since the ranks last compared them, and the number of the call of each.
        awaited: number of a call -> its result, whose backward pass is yet to come.
        dropped: numbers of calls whose results were let go before that.
        turn: the last of torch's collectives of which ranks have agreed, see [Note: turns] in turns.py; and where it
            ends a pass, `num_passes`.
        num_passes: that have ended since the last step; num_steps: since the last pass.
        follows: what came after each of them the last time.
        details: of steps, how they were made the last time.
        posted: words that are on their way, see `post_words` in exchange.py; or None.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.key, self.ranks, self.number, self.last = shown(ranks), ranks, 0, ""
        self.backwards: list[tuple[str, int]] = []
        self.awaited: dict[int, weakref.ref[Any]] = {}
        self.dropped: deque[int] = deque(maxlen=_DROPPED)
        self.turn, self.num_passes, self.num_steps = ("", 0), 0, 0
        self.follows: dict[tuple[str, int], str] = {}
        self.details: dict[tuple[str, int], str] = {}
        self.posted: Any = None

    def await_backward(self, number: int, result: Any) -> None:
        """Note when a call's result is let go, and with it the backward pass that others may wait in."""

        def drop(_: Any) -> None:
            if self.awaited.pop(number, None) is not None:
                self.dropped.append(number)

        self.awaited[number] = weakref.ref(result, drop)
        made.append((self, number))


class Left:
    """How this rank has left a pass last, until it is in a call again; see [Note: left] in left.py."""

    text = ""
    since = 0.0
    calls: ClassVar[dict[str, list[int]]] = {}


made: deque[tuple[Sequence, int]] = deque(maxlen=_DROPPED)  # modules may be called without a forward of the model
"""Calls of the forward under way, or of the last one, whose backward pass is to come."""


class Entry:
    """One call under way; the backward pass of the call of number `backward_of`, or None."""

    __slots__ = ("backward_of", "name", "number", "sequence", "since", "thread")

    def __init__(self, name: str, sequence: Sequence, backward_of: int | None) -> None:
        sequence.number += 1
        self.name, self.sequence, self.number, self.backward_of = name, sequence, sequence.number, backward_of
        self.since = time.monotonic()
        self.thread = threading.get_ident()


running: dict[int, Entry] = {}
"""id -> what this process is in, outermost first."""


work: list[str] = []
"""What this process does that takes long, and in which it may stand still without waiting for another rank."""


class Verdict:
    """Why the ranks cannot go on together, once that is known; for all later entries of these ranks too."""

    error: RanksError | None = None
    ranks: frozenset[int] = frozenset()


sequences: dict[str, Sequence] = {}
"""Key -> each that there is."""


def begin(name: str, sequence: Sequence, backward_of: int | None = None) -> Entry:
    if Verdict.error is not None and not Verdict.ranks.isdisjoint(sequence.ranks):
        raise type(Verdict.error)(str(Verdict.error))
    Left.text = ""
    entry = Entry(name, sequence, backward_of)
    if backward_of is not None:
        sequence.awaited.pop(backward_of, None)
        sequence.backwards.append((name, backward_of))
    running[id(entry)] = entry
    return entry


def end(entry: Entry) -> None:
    entry.sequence.last = entry.name
    running.pop(id(entry), None)


def forget() -> None:
    """Start over, with a new default group."""
    running.clear()
    made.clear()
    Left.text = ""
    Verdict.error, Verdict.ranks = None, frozenset()
    own_groups.clear()
    parts.clear()
    sequences.clear()
    _of_group.clear()
    _sequence.cache_clear()


own_groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
"""Ranks and purpose -> our group beside the program's, see groups.py."""

parts: dict[dist.ProcessGroup, str] = {}
"""Groups that another thread uses beside the rest: their entries are a sequence of their own."""

_of_group: WeakKeyDictionary[dist.ProcessGroup, Sequence] = WeakKeyDictionary()
"""Weak, for a group that nobody refers to any more ends its connections and threads."""


def sequence_of(group: dist.ProcessGroup) -> Sequence:
    """That of the group's ranks; groups of the same ranks share one, but for `parts`.

    Raises:
        RanksError: the group was destroyed.
    """
    known = _of_group.get(group)
    if known is not None:
        return known
    try:
        ranks = tuple(dist.get_process_group_ranks(group))
    except KeyError:
        raise RanksError(DESTROYED) from None
    known = _of_group[group] = _sequence(ranks, parts.get(group, ""))
    return known


@lru_cache(maxsize=256)
def _sequence(ranks: tuple[int, ...], part: str) -> Sequence:
    made = Sequence(ranks)
    made.key += part
    sequences[made.key] = made
    return made


def shown(ranks: tuple[int, ...]) -> str:
    """Ranks as runs: `0-3,6`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
