"""Odd meshes, axis names and roles; each either refused, or the model runs on it with the right numbers."""

from __future__ import annotations

import functools
import random
from typing import Any, NamedTuple

import torch.distributed as dist

from dmp import DistributedModelParallel, ShardingEnv
from tests.fuzz.outcome import Outcome, outcome_of
from tests.fuzz.plans import check_step
from tests.ranks import mesh
from tests.wrapped_net import Net

_SHAPES = ((4,), (2, 2), (1, 4), (4, 1), (2, 1, 2))
_NAMES = ("dp", "data", "shard", "fsdp", "dp_shard", "replicate", "dp_replicate", "tp", "tensor", "host", "local")
_ODD_NAMES = ("pp", "cp", "ep", "model", "x", "DP", "shard ")
_ODD_MESHES = ("None", "a name", "a list", "a group", "an env", "a mesh tensor", "an object")


class Probe(NamedTuple):
    """One env."""

    kind: str
    seed: int

    def __str__(self) -> str:
        return f"meshes: {self.kind}, seed {self.seed}"


def probes(seed: int, count: int) -> list[Probe]:
    """Mostly real meshes; some that are not here, and some that are no meshes."""
    rng = random.Random(seed)
    return [
        Probe(rng.choice(("real", "real", "real", "abstract", "no mesh", "single", "env")), rng.randrange(10**6))
        for _ in range(count)
    ]


def run(case: Probe) -> Outcome:
    """On every rank."""
    rng = random.Random(case.seed)
    made = _make(case.kind, rng)

    def attempt() -> None:
        env = made()
        if case.kind == "abstract":
            sizes = [env.size, env.table_size, env.data_size, env.tensor_size, len(env.axes("shard")), len(str(env))]
            assert all(n >= 0 for n in sizes)
        else:
            check_step(DistributedModelParallel(Net(), env=env))

    def after_error() -> None:
        check_step(DistributedModelParallel(Net(), env=ShardingEnv.from_mesh(mesh((4,), ("dp",)))))

    return outcome_of(str(case), attempt, after_error)


def _make(kind: str, rng: random.Random) -> Any:
    if kind == "abstract":
        shape, names, roles = _drawn(rng, odd_sizes=True)
        return functools.partial(ShardingEnv.abstract, shape, names, rng.choice(("cpu", "cuda")), **roles)
    if kind == "single":
        return functools.partial(ShardingEnv.single, rng.choice(("cpu", "cpu", "tpu", "", None, 3, "cpu:7", "meta")))
    if kind == "env":
        odd = rng.choice((3, "dp", ("dp",), object(), ShardingEnv, {"dp": 4}))
        return lambda: odd
    if kind == "no mesh":
        name = rng.choice(_ODD_MESHES)
        return lambda: ShardingEnv.from_mesh(_odd_mesh(name))
    shape, names, roles = _drawn(rng)
    if len(set(names)) < len(names) or len(shape) != len(names):
        names = _NAMES[: len(shape)]  # torch itself refuses those
    unnamed = rng.random() < 0.1
    return lambda: ShardingEnv.from_mesh(mesh(shape, None if unnamed else names), **roles)


def _drawn(rng: random.Random, odd_sizes: bool = False) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    shape: tuple[Any, ...] = rng.choice(_SHAPES)
    if odd_sizes and rng.random() < 0.4:
        shape = tuple(rng.choice((1, 2, 8, 1000, 0, -1, 2.0, "2", None, True)) for _ in range(rng.choice((0, 1, 2, 3))))
    pool = _NAMES if rng.random() < 0.7 else (*_NAMES, *_ODD_NAMES)
    names = tuple(rng.sample(pool, len(shape)))
    if odd_sizes and rng.random() < 0.2:
        names = (*names, rng.choice(("dp", 3, None)))
    roles: dict[str, Any] = {}
    while rng.random() < 0.4:
        axis = rng.choice((*names, *names, "nowhere", 0, None, tuple(names), list(names), ("a", "b")))
        roles[rng.choice(("replicate", "shard", "tensor"))] = axis
    return shape, names, roles


def _odd_mesh(name: str) -> Any:
    real = mesh((4,), ("dp",))
    return {
        "None": None,
        "a name": "dp",
        "a list": [0, 1, 2, 3],
        "a group": dist.group.WORLD,
        "an env": ShardingEnv.single(),
        "a mesh tensor": real.mesh,
        "an object": object(),
    }[name]
