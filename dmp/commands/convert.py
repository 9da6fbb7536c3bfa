"""`convert`: a checkpoint of one kind into one of another."""

from __future__ import annotations

import argparse
from pathlib import Path

from dmp.checkpoint.convert import convert
from dmp.checkpoint.targets.target import target_names
from dmp.commands.refusal import FAILED, Refusal
from dmp.errors import CheckpointError

NAME = "convert"
ABOUT = "turn a checkpoint of any kind that load_checkpoint reads into one of another, in one process"


def add(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("source", type=Path, help="what load_checkpoint takes")
    parser.add_argument("dest", type=Path, help="a folder, or for torch a file, that is not there yet")
    parser.add_argument("--to", choices=target_names(), default="dmp", help="the kind to write (default: %(default)s)")
    about = "of a parameter or module; NEW may be empty"
    parser.add_argument("--rename", metavar="OLD=NEW", action="append", default=[], help=about)


def run(given: argparse.Namespace) -> int:
    """Convert, and print what was done."""
    wrong = [text for text in given.rename if "=" not in text]
    if wrong:
        raise Refusal(f"--rename takes OLD=NEW; got {wrong[0]!r}")
    rename = {text.partition("=")[0]: text.partition("=")[2] for text in given.rename}
    try:
        print(convert(given.source, given.dest, given.to, rename or None))
    except (CheckpointError, OSError) as error:
        raise Refusal(str(error), FAILED) from error
    return 0
