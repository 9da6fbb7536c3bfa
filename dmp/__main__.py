"""The command line: `python -m dmp convert`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dmp.checkpoint.convert import convert
from dmp.checkpoint.targets.target import target_names
from dmp.errors import CheckpointError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dmp", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "turn a checkpoint of any kind that load_checkpoint reads into one of another, in one process"
    command = commands.add_parser("convert", help=about, description=about)
    command.add_argument("source", type=Path, help="what load_checkpoint takes")
    command.add_argument("dest", type=Path, help="a folder, or for torch a file, that is not there yet")
    command.add_argument("--to", choices=target_names(), default="dmp", help="the kind to write (default: %(default)s)")
    command.add_argument(
        "--rename", metavar="OLD=NEW", action="append", default=[], help="of a parameter or module; NEW may be empty"
    )
    given = parser.parse_args(arguments)
    wrong = [text for text in given.rename if "=" not in text]
    if wrong:
        command.error(f"--rename takes OLD=NEW; got {wrong[0]!r}")
    rename = {text.partition("=")[0]: text.partition("=")[2] for text in given.rename}
    try:
        print(convert(given.source, given.dest, given.to, rename or None))
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
