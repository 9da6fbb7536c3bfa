"""Several click logs read one after another as one, and where in them a run is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from criteo import HELD_OUT, Batch, CriteoReader


class Position(NamedTuple):
    """What is read next; the same on every rank, and for any number of ranks."""

    file: int
    """Which file, counted from 0 in the order of `ClickLogs.files`."""
    window: int
    """Which global batch of it (see `criteo.py`)."""


START = Position(0, 0)


class ClickLogs:
    """Iterates over one rank's batches of one part of several click logs, from `start` on.

    Args:
        paths: files, and folders of files.
        rows, batch_size, rank, num_ranks, part, held_out, on_error: as of `CriteoReader`.

    Raises:
        As `CriteoReader`; ValueError: a folder without a file.
    """

    def __init__(
        self,
        paths: Sequence[str],
        rows: int | Sequence[int],
        batch_size: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        part: str = "train",
        held_out: float = HELD_OUT,
        on_error: str = "error",
    ) -> None:
        self.files = files_of(paths)
        self.readers = [
            CriteoReader(
                file,
                rows,
                batch_size,
                rank=rank,
                num_ranks=num_ranks,
                part=part,
                held_out=held_out,
                on_error=on_error,
            )
            for file in self.files
        ]
        more = len(self.files) - 1
        self.path = self.files[0] + (f" and {more:,} more" if more else "")
        self.start = START
        """Where the next iteration begins; those after it begin at the first line."""
        self.position = START
        """Behind the last batch that was given out."""

    @property
    def skipped(self) -> int:
        """Malformed lines that this rank met in the last iteration."""
        return sum(reader.skipped for reader in self.readers)

    @property
    def num_steps(self) -> int | None:
        """Global batches in all files; None where one is a gzip file, which does not say how long it is."""
        steps = [reader.num_steps for reader in self.readers]
        return None if None in steps else sum(filter(None, steps))

    def steps_before(self, position: Position) -> int:
        """Global batches before a position; without those of files that do not say how long they are."""
        return sum(reader.num_steps or 0 for reader in self.readers[: position.file]) + position.window

    def identity(self) -> list[list[str | int]]:
        """By which a run that goes on knows that a position still means the same lines."""
        return [[os.path.basename(r.path), os.path.getsize(r.path), r.window_bytes] for r in self.readers]

    def __iter__(self) -> Iterator[Batch]:
        begin, self.start = self.start, START
        self.position = begin
        for reader in self.readers:
            reader.skipped = 0
        for file, reader in enumerate(self.readers):
            if file < begin.file:
                continue
            first = begin.window if file == begin.file else 0
            for window, batch in enumerate(reader.windows(first), first):
                self.position = Position(file, window + 1)
                yield batch


def files_of(paths: Sequence[str]) -> list[str]:
    """Files, and what lies directly in folders, day_2 before day_10; hidden files and those that end in .json are none.

    Raises:
        ValueError: a folder without a file.
    """
    files: list[str] = []
    for path in paths:
        if not os.path.isdir(path):
            files.append(path)
            continue
        names = [name for name in os.listdir(path) if not name.startswith(".") and not name.endswith(".json")]
        inside = [os.path.join(path, name) for name in sorted(names, key=_natural)]
        inside = [file for file in inside if os.path.isfile(file)]
        if not inside:
            raise ValueError(f"{path} is a folder without a click log in it")
        files += inside
    return files


def _natural(name: str) -> list[tuple[str, int]]:
    return [(text, int(digits or -1)) for text, digits in re.findall(r"([^0-9]*)([0-9]*)", name)]
