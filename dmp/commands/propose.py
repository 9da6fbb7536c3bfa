"""`propose-mesh`: which mesh of so many devices a model would do best on."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from dmp.commands.factory import add_model, made_module
from dmp.commands.files import read_constraints
from dmp.commands.machine import add_machine, check_ranks, number_of_bytes
from dmp.commands.refusal import FAILED, NO_PLAN, Refusal, in_one_line
from dmp.errors import DmpError, PlanError
from dmp.registry import of_planner

NAME = "propose-mesh"
ABOUT = "rank the meshes of so many devices for a model: axes of copies, of shards, and a tensor axis"


def add(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_model(parser)
    parser.add_argument("--devices", type=int, required=True, metavar="N", help="in all")
    parser.add_argument("--device", default="cuda", help="their type (default: %(default)s)")
    add_machine(parser)
    parser.add_argument("--batch-size", type=int, help="samples of a step, of all devices together")
    parser.add_argument("--constraints", type=Path, metavar="FILE", help="as of `plan`")
    parser.add_argument("--top", type=int, default=8, metavar="N", help="meshes to show (default: %(default)s)")


def run(given: argparse.Namespace) -> int:
    """Print the meshes, best first."""
    check_ranks("--devices", given.devices)
    topology = None
    memory = None if given.memory is None else number_of_bytes(given.memory)
    try:
        if given.topology is not None:
            topology = of_planner("Topology").load(given.topology)
            topology = topology if memory is None else replace(topology, memory_bytes=memory)
    except (ValueError, OSError) as error:
        raise Refusal(f"--topology: {error}") from None
    constraints = None if given.constraints is None else read_constraints(given.constraints)
    module = made_module(given.model, given.build_on)
    try:
        found = of_planner("propose_mesh")(
            module,
            given.devices,
            batch_size=given.batch_size,
            topology=topology,
            device_type=given.device,
            memory_bytes=memory,
            constraints=constraints,
            top=given.top,
        )
    except PlanError as error:
        raise Refusal(f"no mesh: {error}", NO_PLAN) from error
    except ValueError as error:
        raise Refusal(str(error)) from error
    except DmpError as error:
        raise Refusal(in_one_line(error), FAILED) from error
    print(found)
    return 0
