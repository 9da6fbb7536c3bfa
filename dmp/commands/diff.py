"""`diff`: what differs between two plans, and what that changes where their reports lie beside them."""

from __future__ import annotations

import argparse
from pathlib import Path

from dmp.commands.files import read_plan, report_path, told_if_damaged

NAME = "diff"
ABOUT = "compare two plans: layouts by parameter, and modelled step and memory where reports lie beside them"


def add(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("before", type=Path, help="a plan's file")
    parser.add_argument("after", type=Path, help="another's")


def run(given: argparse.Namespace) -> int:
    """Print what changes from one to the other; 1 where they differ, as `diff` does."""
    before, after = read_plan(given.before), read_plan(given.after)
    changes = before.diff(after)
    if before.report is not None and after.report is not None:
        with told_if_damaged(report_path(given.before), report_path(given.after)):
            text = str(before.report.diff(after.report))
        print(text)
        return 1 if changes else 0
    for change in changes:
        print(change)
    if not changes:
        print(f"the same {len(before)} entries")
    return 1 if changes else 0
