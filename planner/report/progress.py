"""A line on the terminal while planning takes longer than a moment: what it is at, the best step so far, its gap."""

from __future__ import annotations

import sys
import time

from planner.report.words import milliseconds

_AFTER_S = 1.0
_EVERY_S = 0.1
_WIDTH = 100


class Progress:
    """A line that is written over itself on the terminal's standard error, and gone at the end.

    Args:
        shows: None: where standard error is a terminal, once planning has taken a second; True: there, from the
            beginning; False: never. Nothing is ever written into a file or a log.
    """

    def __init__(self, shows: bool | None = None) -> None:
        is_terminal = shows is not False and sys.stderr is not None and sys.stderr.isatty()
        self._begin = time.monotonic()
        self._next = self._begin + (0.0 if shows else _AFTER_S) if is_terminal else float("inf")
        self._stage, self._best, self._bound = "", 0.0, 0.0
        self._is_written = False

    def stage(self, words: str) -> None:
        """What is done from now on."""
        self._stage = words
        self.tick()

    def told(self, best: float, bound: float) -> None:
        """The best step so far, in seconds, and the largest bound so far; 0 for none."""
        self._best, self._bound = best, max(bound, self._bound)
        if bound > 0:
            self._stage = "lower bound"
        self.tick()

    def tick(self) -> None:
        """Write the line anew if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next, self._is_written = now + _EVERY_S, True
        parts = [f"planning {now - self._begin:.1f} s: {self._stage}"]
        if self._best > 0:
            parts.append(f"best step of the tables {milliseconds(self._best)}")
        if self._best > 0 and self._bound > 0:
            parts.append(f"gap at most {max(0.0, self._best / self._bound - 1):.1%}")
        sys.stderr.write("\r" + ", ".join(parts)[:_WIDTH].ljust(_WIDTH))
        sys.stderr.flush()

    def end(self) -> None:
        """Take the line away."""
        if self._is_written:
            sys.stderr.write("\r" + " " * _WIDTH + "\r")
            sys.stderr.flush()
        self._next = float("inf")
