"""`calibrate`: this machine's figures, measured, as the file that `plan --topology` takes."""

from __future__ import annotations

import argparse
from pathlib import Path

from dmp.commands.refusal import FAILED, Refusal, in_one_line
from dmp.registry import calibration

NAME = "calibrate"
ABOUT = "measure this machine with some processes: lookups, updates, exchanges; and write a topology for the planner"


def add(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the topology here")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument(
        "--device", default="cpu", metavar="TYPE", help="cuda, ...: one device for each process (default: cpu)"
    )
    parser.add_argument(
        "--rounds", type=int, default=40, metavar="N", help="how often each step is run (default: %(default)s)"
    )


def run(given: argparse.Namespace) -> int:
    """Measure, print every measurement beside what the figures say, and write the file."""
    for name in ("ranks", "rounds"):
        if getattr(given, name) < 1 + (name == "rounds"):
            raise Refusal(f"--{name} takes a number, at least {1 + (name == 'rounds')}; got {getattr(given, name)}")
    if given.out is not None and not given.out.absolute().parent.is_dir():
        raise Refusal(f"{given.out}: there is no folder {given.out.absolute().parent}")
    if given.out is not None and given.out.is_dir():
        raise Refusal(f"{given.out}: expected a file to write; it is a folder")
    calibrate, probes = calibration()
    try:
        found = calibrate(probes, given.ranks, given.device, given.rounds)
    except (RuntimeError, ValueError) as error:
        raise Refusal(in_one_line(error), FAILED) from error
    print(found)
    if given.out is not None:
        try:
            found.topology.save(given.out)
        except OSError as error:
            raise Refusal(f"{given.out}: {error.strerror or error}", FAILED) from None
        print(f"wrote {given.out}")
    return 0
