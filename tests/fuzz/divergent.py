"""Ranks that do different things: each pair of entries, a rank that dies or raises in each, one that is merely slow.

Both ranks run the same program, but for one place where rank 1 does something else. They must not wait for each other:
every rank that lives raises a named error within seconds. A rank that is slow is waited for.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

import dmp
from dmp import DistributedModelParallel
from tests.equality import env_of
from tests.fuzz.outcome import ERROR, LIMIT_S, RIGHT, Outcome, Wrong, outcome_of
from tests.wrapped_net import Net, batch, loss_of, mixed


class Probe(NamedTuple):
    """What rank 0 and rank 1 do at the place where they part."""

    first: str
    second: str

    def __str__(self) -> str:
        return f"divergent: rank 0 {self.first}, rank 1 {self.second}"


class _Run(NamedTuple):
    model: DistributedModelParallel
    optimizer: torch.optim.Optimizer
    folder: Path

    def step(self) -> None:
        rank = self.model.env.data_rank
        loss_of(self.model, batch(rank)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _forward(run: _Run) -> None:
    run.model(batch(run.model.env.data_rank))


def _no_grad(run: _Run) -> None:
    with torch.no_grad():
        _forward(run)


def _twice(run: _Run) -> None:
    loss = loss_of(run.model, batch(run.model.env.data_rank))
    loss.backward(retain_graph=True)
    loss.backward()


def _save(run: _Run) -> None:
    dmp.save_checkpoint(run.folder / "saved", run.model, run.optimizer)


def _save_behind(run: _Run) -> None:
    pending = dmp.save_checkpoint(run.folder / "behind", run.model, run.optimizer, asynchronous=True)
    assert pending is not None
    pending.wait()


def _wrap(run: _Run) -> None:
    DistributedModelParallel(Net(), env=run.model.env, plan=mixed())


def _verify(run: _Run) -> None:
    dmp.verify(run.model, Net(), (batch(run.model.env.data_rank),))


def _die(run: _Run) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_forward(run: _Run) -> None:
    run.model.out.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    _forward(run)


def _leave(run: _Run) -> None:
    os._exit(3)


ENTRIES: dict[str, Callable[[_Run], None]] = {
    "takes a step": lambda run: run.step(),
    "runs a forward without a backward": _forward,
    "runs a forward without gradients": _no_grad,
    "runs a backward twice": _twice,
    "saves": _save,
    "saves in the background": _save_behind,
    "loads": lambda run: dmp.load_checkpoint(run.folder / "good", run.model, run.optimizer),
    "gathers": lambda run: dmp.full_state_dict(run.model),
    "clips": lambda run: dmp.clip_grad_norm_(run.model, 1.0) and None,
    "verifies": _verify,
    "wraps another": _wrap,
}
"""What both ranks must do together; the model has taken a step before, and takes two after."""

DEATHS: dict[str, Callable[[_Run], None]] = {
    "is killed": _die,
    "is killed in a forward": _die_in_forward,
    "exits": _leave,
}
SLOW = "rests for 4 s, then does the same"


def probes(seed: int, count: int) -> list[Probe]:
    """Ordered pairs, deaths of either rank, rests; all of them where `count` is large enough."""
    pairs = [Probe(a, b) for a, b in itertools.permutations(ENTRIES, 2)]
    deaths = [Probe(*pair) for d in DEATHS for e in ENTRIES for pair in ((e, d), (d, e))]
    slow = [Probe(e, SLOW) for e in ENTRIES]
    rng = random.Random(seed)
    every = pairs + deaths + slow
    return every if count >= len(every) else rng.sample(every, count)


def run(case: Probe) -> Outcome:
    """On every rank of a pool that is not used again."""
    env = env_of("dp2")
    with tempfile.TemporaryDirectory() as name:
        shared = [name]
        torch.distributed.broadcast_object_list(shared, src=0)
        model = DistributedModelParallel(Net(), env=env, plan=mixed())
        state = _Run(model, torch.optim.SGD(model.parameters(), lr=0.1), Path(shared[0]))
        state.step()
        dmp.save_checkpoint(state.folder / "good", model, state.optimizer)
        mine, other = case if env.rank == 0 else (case.second, case.first)
        is_same = SLOW in case

        def attempt() -> None:
            if mine == SLOW:
                time.sleep(4)
            {**ENTRIES, **DEATHS}[other if mine == SLOW else mine](state)
            state.step()
            state.step()
            if not is_same:
                raise Wrong("no error")

        told = _Told()
        logging.getLogger("dmp").addHandler(told)
        logging.getLogger("dmp").propagate = False  # this pool is not used again; the outcome says it
        outcome = outcome_of(str(case), attempt, lambda: None, RIGHT if is_same else ERROR)
        if outcome.end.startswith("foreign") and "loss.backward()" in outcome.text:
            # It came up in torch's own backward, which nobody is around: the log has said what it is.
            outcome = replace(outcome, end=ERROR if told.within(LIMIT_S - outcome.seconds) else outcome.end)
        return outcome


class _Told(logging.Handler):
    """What the log has said of ranks."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "rank" in record.getMessage():
            self._came.set()

    def within(self, seconds: float) -> bool:
        return self._came.wait(seconds)
