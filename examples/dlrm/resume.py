"""A run that is stopped and goes on: where it was, and how all ranks stop at the same step.

A signal (Ctrl-C, or what a scheduler and torchrun send) may reach some ranks alone, and at any moment. So it is only
noted; the ranks tell each other with the count of rows that each step exchanges, and stop before the same step.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from logs import START, ClickLogs, Position

_TAKES_A_PATH = ("--resume", "--load")


class Stopped(Exception):
    """A signal asked a rank to stop; raised on all of them, before the same step."""


class StopAsked:
    """Notes SIGINT and SIGTERM from the moment when it is made.

    A second Ctrl-C ends a process at once where nothing else started it: torchrun sends a signal more than once.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        if number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __call__(self) -> bool:
        return self.signal is not None

    def exit_code(self) -> int:
        """Of a program that a signal ended; on a rank that got none, that of Ctrl-C."""
        return 128 + (self.signal or signal.SIGINT)


@dataclass
class Progress:
    """Where training is; saved with each checkpoint.

    Attributes:
        step: steps made in all.
        epoch: passes over the lines that are done.
        position: in the pass that is not.
        lines: of which lines, as `ClickLogs.identity` says.
    """

    step: int
    epoch: int
    position: Position
    lines: list[list[str | int]]

    def saved(self) -> dict[str, Any]:
        """As a checkpoint's `extra`."""
        return {**asdict(self), "position": list(self.position)}

    @classmethod
    def of_new(cls, lines: ClickLogs, step: int = 0) -> Progress:
        return cls(step, 0, START, lines.identity())

    @classmethod
    def of_saved(cls, extra: Any, lines: ClickLogs, path: str) -> Progress:
        """Raises ValueError where the checkpoint has none, or one of other lines."""
        if not isinstance(extra, dict) or "position" not in extra:
            raise ValueError(f"{path} does not say where in the lines it was: --load {path} starts at the first")
        here = lines.identity()
        if extra["lines"] != here:
            before, now = ({str(entry): None for entry in entries} for entries in (extra["lines"], here))
            other = next((entry for entry in [*before, *now] if entry not in before or entry not in now), "their order")
            raise ValueError(
                f"{path} was at a position of other lines; expected {len(before)} files with the same name, bytes and "
                f"bytes a step, got {len(now)}, which differ in {other}: give the same --data and --batch-size, or "
                f"--load {path}, which starts at the first line"
            )
        return cls(extra["step"], extra["epoch"], Position(*extra["position"]), here)


def check_place(path: str) -> None:
    """Whether a checkpoint may be saved there, asked before hours of training and not after.

    Raises:
        ValueError: something else lies there.
    """
    place = Path(path)
    is_free = not place.exists() or (place.is_dir() and ((place / "dmp.json").exists() or not any(place.iterdir())))
    if not is_free:
        raise ValueError(f"--save {path}: what lies there is no checkpoint, and is not replaced; give another path")


def command_to_resume(path: str, more: Sequence[str] = ()) -> str:
    """The command that goes on from a checkpoint, with further arguments, as it can be typed here."""
    words, given = [], iter(sys.argv)
    for word in given:
        if word in _TAKES_A_PATH:
            next(given, None)
        elif not word.startswith(tuple(f"{option}=" for option in _TAKES_A_PATH)):
            words.append(word)
    return command([*words, *more, "--resume", path], int(os.environ.get("LOCAL_WORLD_SIZE", 0)))


def command(words: Sequence[str], processes: int) -> str:
    """A script with its arguments as a line for a shell; under torchrun where it has several processes."""
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    return shlex.join([near(word) for word in (sys.executable, *run, *words)])


def near(word: str) -> str:
    """A path as it is seen from here, where that is shorter."""
    here = os.getcwd() + os.sep
    return word.removeprefix(here) if word.startswith(here) else word
