"""How a probe ended: on one rank, and on all of them together."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dmp import DmpError

LIMIT_S = 10.0
"""A probe may take so long on a rank, where it is not a whole program."""

ERROR, RIGHT = "named error", "right numbers"
GOOD = (ERROR, RIGHT)


class Wrong(AssertionError):
    """What a probe found that must not be."""


@dataclass(frozen=True)
class Outcome:
    """The end of one probe.

    Args:
        probe: its name, which says how to repeat it.
        end: `ERROR`, `RIGHT`, or in words what is wrong.
        text: of the error.
        seconds: that it took; the slowest rank's.
    """

    probe: str
    end: str
    text: str = ""
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether it ended as it must."""
        return self.end in GOOD


def outcome_of(
    name: str,
    attempt: Callable[[], None],
    after_error: Callable[[], None],
    must: str = "",
    limit_s: float = LIMIT_S,
) -> Outcome:
    """Run a probe on this rank.

    Args:
        attempt: returns when the numbers are right, raises `Wrong` where they are not.
        after_error: raises `Wrong` where something was changed although there was an error.
        must: `ERROR` or `RIGHT` where only that end is right.
        limit_s: that it may take.
    """
    began = time.monotonic()
    text = ""
    try:
        attempt()
        end = RIGHT
    except Wrong as wrong:
        end = f"wrong: {wrong}"
    except Exception as error:
        if isinstance(error, DmpError) or _is_raised_by_us(error):
            end, text = ERROR, f"{type(error).__name__}: {error}"
        else:
            end, text = f"foreign {type(error).__name__}", "".join(traceback.format_exception(error))
    seconds = time.monotonic() - began
    if end == ERROR:
        try:
            after_error()
        except Wrong as wrong:
            end = f"wrong after the error: {wrong}"
    if end in GOOD and must and end != must:
        end = f"expected {must}, came {end}"
    if seconds > limit_s:
        end = f"took {seconds:.0f} s, then {end}"
    return Outcome(name, end, text, seconds)


def _is_raised_by_us(error: BaseException) -> bool:
    """An error of Python's own class is a named one where our own code raises it on purpose."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    last = frames[-1]
    ours = any(f"/{package}/" in last.filename for package in ("dmp", "sharders", "planner"))
    return ours and (last.line or "").startswith("raise ")


def merged(ends: Sequence[Outcome]) -> Outcome:
    """What a probe's ranks say together: the worst; ranks that end in different ways are wrong."""
    first = next((o for o in ends if not o.is_good), ends[0])
    end = first.end
    if len({o.end for o in ends}) > 1 and first.is_good:
        end = "ranks differ: " + ", ".join(f"rank {i} {o.end}" for i, o in enumerate(ends))
    text = first.text or next((o.text for o in ends if o.text), "")
    return Outcome(first.probe, end, text, max(o.seconds for o in ends))
