"""`plan`: a plan for a mesh that is not here, from a model's factory; no process group, no accelerator."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch import nn

from dmp.commands.factory import add_model, imported, made, made_module
from dmp.commands.files import read, read_constraints, read_plan, report_path, write_plan
from dmp.commands.machine import add_machine, add_mesh, env_of, topology_of
from dmp.commands.refusal import FAILED, NO_PLAN, Refusal, in_one_line
from dmp.errors import DmpError, PlanError
from dmp.plans.plan import ShardingPlan
from dmp.registry import default_sharders, of_planner

_BATCHES = 100
NAME = "plan"
ABOUT = "plan a model on a mesh that is not here, and say why the plan is as it is"


def add(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_model(parser)
    add_mesh(parser)
    add_machine(parser)
    parser.add_argument("--batch-size", type=int, help="samples per data rank (default: the planner's)")
    parser.add_argument("--constraints", type=Path, metavar="FILE", help='JSON: {"t_*": {"layouts": ["row_wise"]}}')
    parser.add_argument("--pinned", type=Path, metavar="FILE", help="a plan whose entries are kept as they are")
    about = (
        "sample batches to plan with: what Observation.save wrote, or package.module:name of a loader or its factory"
    )
    parser.add_argument("--observe", metavar="FILE|MODULE:NAME", help=about)
    parser.add_argument("--observe-batches", type=int, metavar="N", help=f"(default: {_BATCHES})")
    about = "package.module:name of a cost model, or of its class, in the place of the planner's own"
    parser.add_argument("--cost-model", metavar="MODULE:NAME", help=about)
    parser.add_argument("--time-budget", type=float, metavar="S", help="seconds after which the best plan so far is it")
    parser.add_argument("--effort", type=float, metavar="N", help="so many times the search (default: 1)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the plan here, and its report beside it")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one page")


def run(given: argparse.Namespace) -> int:
    """Plan, print the report, and write what was asked for."""
    env = env_of(given)
    topology = topology_of(given, env)
    options = {
        "topology": topology,
        "cost_model": None if given.cost_model is None else _cost_model(given.cost_model),
        "constraints": None if given.constraints is None else read_constraints(given.constraints),
        "batch_size": given.batch_size,
        "time_budget_s": given.time_budget,
        "effort": given.effort,
    }
    pinned = None if given.pinned is None else read_plan(given.pinned, with_report=False)
    _check_paths(given)
    _check_batches(given)
    try:
        planner = of_planner("ShardingPlanner")(**{name: value for name, value in options.items() if value is not None})
    except ValueError as error:
        raise Refusal(" ".join(str(error).split())) from None
    module = made_module(given.model, given.build_on)
    if given.observe is not None:
        planner.observed = _observed(given, module)
        print(planner.observed, end="\n\n")
    try:
        plan: ShardingPlan = planner.plan(module, default_sharders(), env, pinned)
    except PlanError as error:
        raise Refusal(f"no plan: {error}", NO_PLAN) from error
    except (DmpError, ValueError) as error:
        raise Refusal(in_one_line(error), FAILED) from error
    if given.out is not None:
        write_plan(plan, given.out)
    if given.html is not None:
        try:
            plan.report.save_html(given.html)
        except (ModuleNotFoundError, OSError) as error:
            raise Refusal(f"--html: {error}", FAILED) from error
    print(plan.report)
    return 0


def _check_paths(given: argparse.Namespace) -> None:
    """Raise `Refusal` where what is written would be no file, or one over another: planning takes time."""
    for path in (given.out, given.html):
        if path is not None and not path.absolute().parent.is_dir():
            raise Refusal(f"{path}: there is no folder {path.absolute().parent}")
        if path is not None and path.is_dir():
            raise Refusal(f"{path}: expected a file to write; it is a folder")
    written = {} if given.out is None else {"plan": given.out, "report": report_path(given.out)}
    written |= {} if given.html is None else {"page": given.html}
    said: dict[Path, str] = {}
    for what, path in written.items():
        if (other := said.setdefault(path.resolve(), what)) != what:
            raise Refusal(f"{path}: both the {other} and the {what} would be written there; name another file")


def _check_batches(given: argparse.Namespace) -> None:
    """Raise `Refusal` where a number of batches is none, or nothing is read of which it could be one."""
    number = given.observe_batches
    if number is None:
        return
    if given.observe is None or _is_file(given.observe):
        raise Refusal(f"--observe-batches {number}: nothing is read; it is of a loader, --observe package.module:name")
    if number < 1:
        raise Refusal(f"--observe-batches takes a number, at least 1; got {number}")


def _cost_model(path: str) -> Any:
    """The cost model that `--cost-model` names."""
    found = made(path, "the cost model")
    if found is None:
        raise Refusal(f"the cost model: {path} gives None")
    return found


def _is_file(observed: str) -> bool:
    return ":" not in observed or Path(observed).exists()


def _observed(given: argparse.Namespace, module: nn.Module) -> Any:
    """What `--observe` names: a file, or a loader whose batches are read now."""
    if _is_file(given.observe):
        return read(Path(given.observe), "an observation", lambda _: of_planner("Observation").load(given.observe))
    found = imported(given.observe, "the loader")
    if given.observe == given.model or (isinstance(found, type) and issubclass(found, nn.Module)):
        # a loader is made for real, and so would the model be
        raise Refusal(f"the loader: expected a loader, which gives batches; {given.observe} gives the model")
    loader = made(given.observe, "the loader")
    try:
        return of_planner("observe")(loader, batches=given.observe_batches or _BATCHES, module=module)
    except Exception as error:  # of the user's loader too
        text = str(error) if isinstance(error, ValueError) else in_one_line(error)
        raise Refusal(f"the loader: {text}", FAILED) from error
