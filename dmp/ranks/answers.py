"""Where each rank says it is, and what the answers of all mean: see [Note: how] in watchdog.py."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dmp.ranks import call_log
from dmp.ranks.left import LEFT_S

SUSPECT_S = 1.5  # in one entry, before others are asked
STILL_S = 4.0
_WAITS_S = 0.5
_SHOWN = 6


class Answer(NamedTuple):
    """Where a rank says it is.

    Attributes:
        asked: the question that it answers.
        come: key of a sequence -> number of its last entry, name of the last that has ended, and numbers of calls that
            will have no backward pass here.
        running: [key, number, name, seconds] of its entries.
        waits_in: see `Place`.
        line: likewise.
        still_s: for how long nothing has moved.
        left: how it has left its last pass, seconds ago, and key of a sequence -> numbers of calls made in that; see
            [Note: left] in left.py.
        handles: the error that it handles now, in code of its own.
    """

    asked: int
    come: dict[str, tuple[int, str, list[int]]]
    running: list[Any]
    waits_in: str
    line: str
    still_s: float
    left: tuple[str, float, dict[str, list[int]]]
    handles: str

    def of_sequence(self, key: str) -> list[Any]:
        return [one for one in self.running if one[0] == key]

    def shown(self, key: str = "", number: int = 0) -> str:
        """In words; the entry of this number where there are several."""
        names = [one[2] for one in self.running if not key or one[0] == key]
        match = [one[2] for one in self.running if one[0] == key and one[1] == number]
        name = match[0] if match else names[0] if names else self.waits_in or "code of its own"
        why = self.left[0] or (self.handles and f"{self.handles} was raised")
        why = f", where {why}" if self.is_idle and why else ""
        return f"in {name}" + (f" ({self.line})" if self.line else "") + why

    @property
    def is_idle(self) -> bool:
        """Whether it is in code of its own."""
        return not (self.running or self.waits_in)


def find_parted(mine: Sequence[call_log.Entry], answers: Mapping[int, Answer], rank: int) -> str | None:
    """What to say where others are in entries of the numbers of this rank's and of other names, and wait there.

    Args:
        mine: this rank's entries.
        answers: by rank, this one's too.
        rank: this one.
    """
    now = time.monotonic()
    for entry in mine:
        if now - entry.since < SUSPECT_S:
            continue
        key = entry.sequence.key
        droppers = [r for r, each in answers.items() if key in each.come and entry.backward_of in each.come[key][2]]
        if droppers and answers[rank].still_s >= _WAITS_S:
            places = {r: each.shown(key, entry.number) for r, each in answers.items()}
            dropped = f", and has let go of the result of call {entry.backward_of}, which takes its backward pass away"
            return parted_text({r: place + dropped * (r in droppers) for r, place in places.items()})
        for answer in answers.values():
            for _, number, name, seconds in answer.of_sequence(key):
                still_s = min(answers[rank].still_s, answer.still_s)
                waits = _spins() or (seconds > SUSPECT_S and still_s >= _WAITS_S)
                if number == entry.number and name != entry.name and waits:
                    return parted_text({r: each.shown(key, number) for r, each in answers.items()})
    return None


def find_all_still(ranks: Collection[int], answers: Mapping[int, Answer], asked: int) -> str | None:
    """What to say where nobody moves, and not all are in the same call.

    Args:
        ranks: the others that have to do with it.
        answers: by rank, this one's too.
        asked: number of the last question.
    """
    if any(rank not in answers or answers[rank].still_s < STILL_S for rank in ranks):
        return None
    if max(answers[rank].asked for rank in ranks) < asked - 2:
        return None
    if len({answer.shown().partition(" (")[0] for answer in answers.values()}) == 1:
        return None
    return parted_text({rank: answer.shown() for rank, answer in answers.items()})


def find_left(
    mine: Sequence[call_log.Entry], answers: Mapping[int, Answer], rank: int, patience_s: float
) -> str | None:
    """What to say where this rank waits for one that an error has taken out of a pass, and that has not come back.

    Args:
        mine: this rank's entries.
        answers: by rank, this one's too.
        rank: this one.
        patience_s: for how long it may be in code of its own.
    """
    now = time.monotonic()
    waits_s = max([answers[rank].still_s, *(now - entry.since for entry in mine)])
    passed = {(entry.sequence.key, entry.backward_of) for entry in mine if entry.backward_of is not None}
    for other, answer in answers.items():
        text, since_s, calls = answer.left
        is_known = any(number in calls.get(key, ()) for key, number in passed)
        bound_s = min(patience_s, LEFT_S) if is_known else patience_s
        if other != rank and text and answer.is_idle and min(since_s, waits_s) >= bound_s:
            return parted_text({r: each.shown() for r, each in answers.items()})
    return None


def who_is_idle(answers: Mapping[int, Answer]) -> str:
    """Where those are that are in code of their own; "" where all are in calls."""
    texts = [f"rank {rank} is {answer.shown()}" for rank, answer in sorted(answers.items()) if answer.is_idle]
    return "; ".join(texts[:_SHOWN])


def who_is_awaited(entry: call_log.Entry, answers: Mapping[int, Answer]) -> str:
    """Where those are that have not come to an entry of this rank's, and what they did last; "" where all have."""
    key, texts = entry.sequence.key, []
    for rank, answer in sorted(answers.items()):
        number, last, _ = answer.come.get(key, (0, "", []))
        if number < entry.number:
            texts.append(f"rank {rank} is {answer.shown(key)}" + (f", last in {last}" if last else ""))
    return "; ".join(texts[:_SHOWN])


def parted_text(places: Mapping[int, str]) -> str:
    """In which different calls ranks are.

    Args:
        places: rank -> `in ...`.
    """
    by_place: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        by_place.setdefault(place, []).append(rank)
    parts = [f"{ranks_are(ranks)} {place}" for place, ranks in by_place.items()]
    return (
        f"the ranks have parted ways: {', '.join(parts[:_SHOWN])}; all ranks of a group must make the same calls in "
        "the same order"
    )


def ranks_are(ranks: Sequence[int], one: str = "is", many: str = "are") -> str:
    """`rank 1 is`, `ranks 1, 2 are`."""
    return f"rank {ranks[0]} {one}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} {many}"


def _spins() -> bool:
    """Whether a thread that waits for others may use time: it does for a device's work."""
    device = torch.accelerator.current_accelerator(check_available=True)
    is_used = getattr(torch.get_device_module(device), "is_initialized", None) if device is not None else None
    return is_used is not None and bool(is_used())  # Apple's, which has no collectives, does not say
