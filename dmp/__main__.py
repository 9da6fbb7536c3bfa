"""The command line: `python -m dmp plan | explain | diff | propose-mesh | calibrate | doctor | convert`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from dmp.commands import calibrate, convert, diff, doctor, explain, plan, propose
from dmp.commands.refusal import Refusal

_COMMANDS = (plan, explain, diff, propose, calibrate, doctor, convert)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code, see `dmp.commands.refusal`."""
    parser = argparse.ArgumentParser(prog="python -m dmp", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for each in _COMMANDS:
        command = commands.add_parser(each.NAME, help=each.ABOUT, description=each.ABOUT)
        each.add(command)
        command.set_defaults(run=each.run)
    given = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # of names that the terminal has no letters for
    try:
        code: int = given.run(given)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return refusal.code
    except KeyboardInterrupt:
        return 130  # as a shell says it
    except BrokenPipeError:  # a reader such as `head` has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
