"""Checkpoints of every kind that is read, spoiled byte by byte or by one who knows the format."""

from __future__ import annotations

import logging
import random
import struct
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dmp import latest, load_checkpoint
from tests.fuzz.outcome import Outcome, Wrong, outcome_of
from tests.spoiled import KINDS, Net, copied, make, spoil, trained


class Probe(NamedTuple):
    """One spoiled source."""

    kind: str
    seed: int

    def __str__(self) -> str:
        return f"sources: {self.kind}, seed {self.seed}"


def probes(seed: int, count: int) -> list[Probe]:
    """Each kind in turn."""
    rng = random.Random(seed)
    kinds = sorted(KINDS)
    return [Probe(kinds[i % len(kinds)], rng.randrange(10**6)) for i in range(count)]


def run(case: Probe) -> Outcome:
    """In this process."""
    log = logging.getLogger("dmp")
    before = log.level
    log.setLevel(logging.ERROR)  # `latest` says what it passes over
    try:
        return _run(case)
    finally:
        log.setLevel(before)


def _run(case: Probe) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        good = make(case.kind, folder)
        spoiled = copied(good, folder / "runs")
        what = _spoil(spoiled, case.seed)
        net = Net(1)
        optimizer = trained(net)
        before = _values(net, optimizer)
        shapes = {n: (v.shape, v.dtype) for n, v in net.state_dict().items()}
        others = sorted(path.name for path in folder.iterdir())
        ran = spoiled.with_name("RAN")

        def load(path: Path) -> None:
            load_checkpoint(path, net, optimizer if (path / "dmp.json").exists() else None)

        def attempt() -> None:
            latest(folder / "runs")
            load(spoiled)
            if {n: (v.shape, v.dtype) for n, v in net.state_dict().items()} != shapes:
                raise Wrong("the model has other shapes or dtypes")

        def after_error() -> None:
            if _values(net, optimizer) != before:
                raise Wrong("the model was changed")
            load(good)

        outcome = outcome_of(str(case), attempt, after_error)
        if sorted(path.name for path in folder.iterdir()) != others or ran.exists():
            outcome = replace(outcome, end="wrong: something was run, written or removed")
        return replace(outcome, text=f"{what}: {outcome.text}")


def _spoil(path: Path, seed: int) -> str:
    """By this seed, or by the next for which something can be spoiled."""
    while True:
        try:
            return spoil(path, seed)
        except (OSError, ValueError, IndexError, TypeError, zipfile.BadZipFile, struct.error):
            seed += 1


def _values(net: Net, optimizer: torch.optim.Optimizer) -> list[Any]:
    states = [sorted((k, v.tolist()) for k, v in s.items()) for s in optimizer.state_dict()["state"].values()]
    return [{n: v.tolist() for n, v in net.state_dict().items()}, states, torch.get_rng_state().tolist()]
