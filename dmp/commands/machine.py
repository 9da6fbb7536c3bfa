"""The mesh and the machine that a command line describes; neither is here."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from math import prod
from typing import Any

from dmp.commands.refusal import Refusal
from dmp.env import ShardingEnv
from dmp.registry import of_planner

_DEFAULT_AXES = {1: ("dp",), 2: ("host", "local")}
_MOST_BYTES = 1e18
_MOST_RANKS = 1 << 17
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Options from which `env_of` makes the mesh."""
    parser.add_argument("--mesh", required=True, metavar="NxM", help="sizes of the mesh's axes, outer first: 512x8")
    parser.add_argument("--axes", metavar="A,B", help="their names (default: dp, or host,local for two)")
    for role in ("shard", "replicate", "tensor"):
        parser.add_argument(f"--{role}", metavar="A,B", help="axes of this role, where their names do not say it")
    parser.add_argument("--device", default="cuda", help="device type of the mesh (default: %(default)s)")


def env_of(given: argparse.Namespace) -> ShardingEnv:
    """The mesh that `add_mesh`'s options describe.

    Raises:
        Refusal: no sizes, other numbers of sizes and names, an axis without a role.
    """
    sizes = given.mesh.lower().split("x")
    if not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
        raise Refusal(f"--mesh is one size for each axis with x between them, as 512x8; got {given.mesh!r}")
    check_ranks(f"--mesh {given.mesh}", prod(map(int, sizes)))
    axes = _names(given.axes) if given.axes is not None else _DEFAULT_AXES.get(len(sizes))
    if axes is None:
        raise Refusal(f"--mesh {given.mesh} has {len(sizes)} axes; name them: --axes replicate,shard,tp")
    if len(axes) != len(sizes):
        raise Refusal(f"--mesh {given.mesh} has {len(sizes)} axes, --axes {given.axes} names {len(axes)}")
    roles = {role: _names(text) for role in ("shard", "replicate", "tensor") if (text := getattr(given, role))}
    try:
        return ShardingEnv.abstract([int(size) for size in sizes], axes, given.device, **roles)
    except ValueError as error:
        raise Refusal(f"--mesh {given.mesh} --axes {','.join(axes)}: {error}") from None


def check_ranks(what: str, number: int) -> None:
    """Raise `Refusal` of more ranks than are planned: that would take hours."""
    if number > _MOST_RANKS:
        raise Refusal(f"{what} has {number:,} ranks; at most {_MOST_RANKS:,} are planned")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Options from which `topology_of` makes the machine."""
    about = "a file that Topology.save or `calibrate` wrote, or a machine by name: h100 (default: the device's usual)"
    parser.add_argument("--topology", metavar="FILE|NAME", help=about)
    parser.add_argument("--memory", metavar="BYTES", help="of a rank, over what the topology says: 80GB")


def topology_of(given: argparse.Namespace, env: ShardingEnv) -> Any:
    """The machine that `add_machine`'s options describe.

    Raises:
        Refusal: an unknown machine, or figures that are none.
    """
    topology_type = of_planner("Topology")
    try:
        topology = topology_type.of(env) if given.topology is None else topology_type.load(given.topology)
        topology.links(env)  # it fits the mesh
    except (ValueError, OSError) as error:
        raise Refusal(f"--topology: {error}") from None
    return topology if given.memory is None else replace(topology, memory_bytes=number_of_bytes(given.memory))


def number_of_bytes(text: str) -> float:
    """`80GB`, `80 GiB`, `8e10`.

    Raises:
        Refusal: no such size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    size = 0.0
    if found is not None and (found[2] or not found[3]):
        unit = found[2].lower()
        size = float(found[1]) * (1024 ** list(_UNITS).index(unit) if found[3] else _UNITS[unit])
    if not 0 < size < _MOST_BYTES:
        raise Refusal(f"--memory is a size such as 80GB or 75GiB; got {text!r}")
    return size


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))
