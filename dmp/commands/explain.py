"""`explain`: why a parameter has its layout, from a plan and the report beside it."""

from __future__ import annotations

import argparse
from pathlib import Path

from dmp.commands.files import read_plan, report_path
from dmp.commands.refusal import Refusal
from dmp.names import NameIndex

NAME = "explain"
ABOUT = "say why a parameter has its layout: what else was considered, what it costs, and why it lost"


def add(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("plan", type=Path, help="a file that `plan --out` has written, its report beside it")
    parser.add_argument("name", metavar="NAME", help="of a parameter, or a pattern: t_1, tables.*.weight")


def run(given: argparse.Namespace) -> int:
    """Print what the report says of each parameter that answers to the name."""
    plan = read_plan(given.plan)
    answering: dict[str, list[str]] = {}
    for name in plan:
        words = name.split(".")
        for key in dict.fromkeys([name, *(".".join(words[:end]) for end in range(1, len(words))), *words[-2:-1]]):
            answering.setdefault(key, []).append(name)
    index = NameIndex(answering)
    names = list(dict.fromkeys(name for key in index.matching(given.name) for name in answering[key]))
    if not names:
        raise Refusal(f"{given.plan} has no parameter {given.name!r}; {index.hint(given.name)}")
    if plan.report is None:
        print(f"(no report beside the plan: {report_path(given.plan)} is written by `plan --out`)")
    for name in names:
        try:
            print(f"{name}  {plan[name]}" if plan.report is None else plan.report.explain(name))
        except KeyError:  # a dense weight, which the report has by block
            print(f"{name}  {plan[name]}")
    return 0
