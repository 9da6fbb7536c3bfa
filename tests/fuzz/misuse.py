"""Habits and mistakes around a wrapped model, as strangers' scripts have them: refused by name, or right."""

from __future__ import annotations

import os
import random
import tempfile
from typing import NamedTuple

from dmp import ShardingEnv
from tests.fuzz.habits import HABITS
from tests.fuzz.outcome import Outcome, outcome_of
from tests.fuzz.stepped import check, wrapped
from tests.ranks import mesh


class Probe(NamedTuple):
    """One habit on one mesh."""

    habit: str
    mesh: str

    def __str__(self) -> str:
        return f"misuse: {self.habit} on {self.mesh}"


def probes(seed: int, count: int) -> list[Probe]:
    """Every habit on every mesh, in an order of the seed's."""
    every = [Probe(habit, where) for habit in HABITS for where in ("dp2", "replicate2", "shard2")]
    random.Random(seed).shuffle(every)
    return every[:count]


def run(case: Probe) -> Outcome:
    """On every rank."""
    env = ShardingEnv.from_mesh(mesh((2,), (case.mesh.rstrip("2"),)))
    here = os.getcwd()
    must, habit = HABITS[case.habit]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return outcome_of(str(case), lambda: habit(env), lambda: check(wrapped(env)), must)
        finally:
            os.chdir(here)
