"""Errors by which this rank alone may have left a pass of a model, while the others go on in it and wait.

[Note: left] A program may catch what was raised on one rank: of ids that are wrong in its batch, say. Nobody knows what
it does then. It may pass over the batch and go on, which is what copies of dense weights can bear; it may run the batch
again, in parts; or it never comes. So the others wait for it, and say why in the log. As long as it is in no call, they
are told by an error after the time of DMP_LOST_AFTER_S; and after `LEFT_S`, where what they wait in is the backward
pass of a call of a table which was made in the forward that raised: its result is gone.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any

from dmp.errors import InputError, RanksError
from dmp.ranks import call_log

LEFT_S = 10.0
_SHOWN = 200


def begin_pass() -> None:
    """This rank begins a forward."""
    call_log.Left.text = ""
    call_log.made.clear()


def note_left(what: str, error: BaseException) -> None:
    """This rank leaves `what` by an error; other ranks know of those that are raised on all."""
    if isinstance(error, Exception) and not isinstance(error, (InputError, RanksError)):
        call_log.Left.text = f"{what} raised {_shown(error)}"
        call_log.Left.since = time.monotonic()
        call_log.Left.calls = {s.key: [n for of, n in call_log.made if of is s] for s, _ in call_log.made}


def left() -> tuple[str, float, dict[str, list[int]]]:
    """How this rank has left the last pass, seconds ago, and which calls of it will have no backward pass."""
    of, text = call_log.Left, call_log.Left.text
    return (text, round(time.monotonic() - of.since, 2), of.calls) if text else ("", 0.0, {})


def handled(thread: int) -> str:
    """The error that a thread handles now: where it is in an `except`, or calls something from there; or ""."""
    found: Any = sys._current_exceptions().get(thread)
    error = found[1] if isinstance(found, tuple) else found  # the first until Python 3.11
    with suppress(Exception):  # whatever a program's own does
        return "" if error is None else _shown(error)
    return ""


def _shown(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:_SHOWN]
