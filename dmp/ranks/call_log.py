"""What this process is in: notes of the calls that ranks make together, in plain variables that cost next to nothing.

[Note: entries] An *entry* is a call that all ranks of a group make together: a forward or backward exchange, a save, a
gather. Each rank numbers the entries of a set of ranks; where all goes well, number k is the same call on each of them.
Entries lie inside each other: a save has steps.
"""

from __future__ import annotations

import threading
import time
from functools import lru_cache

import torch.distributed as dist

from dmp.errors import RanksError


class Sequence:
    """The entries of one set of ranks, as far as this process has come.

    Attributes:
        key: the same text for the same ranks, on all of them.
        ranks: of the default group.
        number: of the last entry that was begun.
        backwards: names of the backward passes since the ranks last compared them, and the number of the call of each.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.key, self.ranks, self.number = shown(ranks), ranks, 0
        self.backwards: list[tuple[str, int]] = []


class Entry:
    """One call under way."""

    __slots__ = ("name", "number", "sequence", "since", "thread")

    def __init__(self, name: str, sequence: Sequence) -> None:
        sequence.number += 1
        self.name, self.sequence, self.number = name, sequence, sequence.number
        self.since = time.monotonic()
        self.thread = threading.get_ident()


running: dict[int, Entry] = {}
"""id -> what this process is in, outermost first."""


class Verdict:
    """Why the ranks cannot go on together, once that is known; for all later entries of these ranks too."""

    error: RanksError | None = None
    ranks: frozenset[int] = frozenset()


def begin(name: str, sequence: Sequence) -> Entry:
    if Verdict.error is not None and not Verdict.ranks.isdisjoint(sequence.ranks):
        raise type(Verdict.error)(str(Verdict.error))
    entry = Entry(name, sequence)
    running[id(entry)] = entry
    return entry


def end(entry: Entry) -> None:
    running.pop(id(entry), None)


def forget() -> None:
    """Start over, with a new default group."""
    running.clear()
    Verdict.error, Verdict.ranks = None, frozenset()
    parts.clear()
    sequence_of.cache_clear()
    _sequence.cache_clear()


parts: dict[dist.ProcessGroup, str] = {}
"""Groups that another thread uses beside the rest: their entries are a sequence of their own."""


@lru_cache(maxsize=256)
def sequence_of(group: dist.ProcessGroup) -> Sequence:
    """That of the group's ranks; groups of the same ranks share one, but for `parts`."""
    return _sequence(tuple(dist.get_process_group_ranks(group)), parts.get(group, ""))


@lru_cache(maxsize=256)
def _sequence(ranks: tuple[int, ...], part: str) -> Sequence:
    made = Sequence(ranks)
    made.key += part
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
