"""Plans and constraints from disk and to it. A plan's report lies beside it: `plan.json`, `plan.report.json`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from dmp.commands.refusal import FAILED, Refusal, in_one_line
from dmp.plans.plan import ShardingPlan
from dmp.read_values import parse_json, shown
from dmp.registry import of_planner

T = TypeVar("T")


def read_plan(path: Path, with_report: bool = True) -> ShardingPlan:
    """The plan in a file, with the report beside it where there is one.

    Raises:
        Refusal: no such file, or no plan.
    """
    plan = read(path, "a plan", ShardingPlan.from_json)
    beside = report_path(path)
    if with_report and beside.exists():
        report = read(beside, "a report", of_planner("PlanReport").from_json)
        with told_if_damaged(beside):
            said = dict(zip(report.planned.names, report.planned.layouts, strict=True))
        if all(name in plan and plan[name].layout == layout for name, layout in said.items()):
            plan.report = report
        else:
            print(f"note: {beside} is the report of another plan, and is passed over", file=sys.stderr)
    return plan


@contextmanager
def told_if_damaged(*reports: Path) -> Iterator[None]:
    """Around what uses a report that was read: its figures are not checked one by one, but fail where they are none.

    Raises:
        Refusal: in the place of what is raised inside.
    """
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        where = " or ".join(map(str, reports))
        raise Refusal(f"{where} is damaged ({in_one_line(error)}): plan again, with --out") from error


def write_plan(plan: ShardingPlan, path: Path) -> None:
    """The plan's JSON, and its report beside it.

    Raises:
        Refusal: what cannot be written.
    """
    write(path, plan.to_json() + "\n")
    write(report_path(path), plan.report.to_json() + "\n")


def report_path(path: Path) -> Path:
    """Where the report of a plan lies."""
    return path.with_name(f"{path.stem}.report.json")


def read_constraints(path: Path) -> dict[str, Any]:
    """`{"t_*": {"layouts": ["row_wise"], "pooling_factor": 3}}` as constraints by pattern.

    Raises:
        Refusal: no such file, or what is no constraint.
    """
    return read(path, "constraints", _by_pattern)


def write(path: Path, text: str) -> None:
    """Raise `Refusal` where it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror or error}", FAILED) from None


def _by_pattern(text: str) -> dict[str, Any]:
    constraint = of_planner("Constraint")
    data = parse_json(text)
    if not isinstance(data, dict) or not all(isinstance(fields, dict) for fields in data.values()):
        raise ValueError(f'expected {{"name or pattern": {{"layouts": [..], ..}}}}; got {shown(data)}')
    found = {}
    for key, fields in data.items():
        unknown = sorted(fields.keys() - constraint.__dataclass_fields__.keys())
        if unknown:
            raise ValueError(f"{key!r} has {unknown}; a constraint has {', '.join(constraint.__dataclass_fields__)}")
        found[key] = constraint(**fields)
    return found


def read(path: Path, what: str, parse: Callable[[str], T]) -> T:
    """What a file's text is parsed to.

    Raises:
        Refusal: no such file, no text, or what `parse` refuses with a `ValueError`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise Refusal(f"{path} is not {what}: it is no text") from None
    try:
        return parse(text)
    except (ValueError, TypeError) as error:
        why = str(error).removeprefix(f"not {what}: ")
        raise Refusal(f"{path} is not {what}: {why}" if str(path) not in why else why) from None
