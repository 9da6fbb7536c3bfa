"""`explain`: why a parameter has its layout, from a plan and the report beside it."""

from __future__ import annotations

import argparse
from pathlib import Path

from dmp.commands.files import read_plan, report_path, told_if_damaged
from dmp.commands.refusal import Refusal

NAME = "explain"
ABOUT = "say why a parameter has its layout: what else was considered, what it costs, and why it lost"


def add(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("plan", type=Path, help="a file that `plan --out` has written, its report beside it")
    parser.add_argument("name", metavar="NAME", help="of a parameter or table, or a pattern: t_1, tables.*.weight")


def run(given: argparse.Namespace) -> int:
    """Print what the report says of the parameters that answer to the name."""
    plan = read_plan(given.plan)
    if plan.report is None:
        if given.name not in plan:
            where = f"{given.plan} has no report beside it ({report_path(given.plan)}, which `plan --out` writes)"
            raise Refusal(f"{where}, and no entry {given.name!r}")
        print(f"{given.name}  {plan[given.name]}")
        print(f"(no report beside the plan: `plan --out` writes {report_path(given.plan)})")
        return 0
    with told_if_damaged(report_path(given.plan)):
        try:
            text = plan.report.explain(given.name)
        except KeyError as error:
            if given.name not in plan:
                raise Refusal(f"{given.plan}: {error.args[0]}") from None
            text = f"{given.name}  {plan[given.name]}  (a dense weight, which the report has by block)"
    print(text)
    return 0
