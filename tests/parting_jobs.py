"""What runs on ranks that part ways: a small model on each, and for each rank something else to do."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import dmp
from dmp import DistributedModelParallel, ShardingEnv, row_wise
from dmp.ranks.stacks import place_of
from sharders import EmbeddingBagSharder
from tests.oracle import in_backward
from tests.ranks import mesh

ROWS = 20_000


class Sparse(nn.Module):
    """A table into a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sparse = nn.EmbeddingBag(ROWS, 8, mode="sum")
        self.over = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.over(self.sparse(ids))
        return out.sum()


class Dense(nn.Module):
    """Two dense layers: nothing but torch's own collectives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.under, self.over = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.over(self.under(x).tanh())
        return out.sum()


class Job:
    """One rank's model, and what it can do; each is one call, or none."""

    def __init__(self, kind: str, folder: str) -> None:
        self.env = ShardingEnv.from_mesh(mesh((dist.get_world_size(),), ("shard",) if kind == "fsdp" else ("dp",)))
        self.is_sparse = kind == "sparse"
        plan = {"sparse.weight": row_wise()} if self.is_sparse else None
        self.plain: type[nn.Module] = Sparse if self.is_sparse else Dense
        self.model = DistributedModelParallel(self.plain(), self.env, plan=plan)
        self.path = Path(folder) / "checkpoint"
        ids = torch.arange(12).view(4, 3)
        self.batch = ids if self.is_sparse else ids[:, :1] / torch.arange(1, 9)

    def step(self) -> None:
        self.model(self.batch).backward()

    def forward(self) -> None:
        self.model(self.batch)

    def forward_alone(self) -> None:
        self.model(self.batch)
        self.step()

    def backward_twice(self) -> None:
        loss = self.model(self.batch)
        loss.backward(retain_graph=True)
        loss.backward()

    def between(self) -> None:
        try:
            self.model(self.batch)
            raise ValueError("between forward and backward")
        except ValueError:
            self.step()

    def no_grad(self) -> None:
        with torch.no_grad():
            self.model(self.batch)

    def save(self) -> None:
        dmp.save_checkpoint(self.path, self.model)

    def save_in_background(self) -> None:
        pending = dmp.save_checkpoint(self.path, self.model, asynchronous=True)
        assert pending is not None
        pending.wait()

    def load(self) -> None:
        dmp.load_checkpoint(self.path, self.model)

    def gather(self) -> None:
        dmp.full_state_dict(self.model)

    def clip(self) -> None:
        dmp.clip_grad_norm_(self.model, 1.0)

    def verify(self) -> None:
        dmp.verify(self.model, self.plain(), self.batch)

    def wrap(self) -> None:
        DistributedModelParallel(self.plain(), self.env)

    def barrier(self) -> None:
        dist.barrier()

    def other_sizes(self) -> None:
        """A collective of the program's that gloo would end the process for, were it to meet one of ours."""
        dist.all_gather_object([None] * self.env.size, "x" * 5000)

    def drop(self) -> None:
        """A loss without its backward pass, as where a program passes over one that is not finite; no call after it."""
        self.model(self.batch)
        until = time.monotonic() + 20.0
        while time.monotonic() < until and dmp.ranks.call_log.Verdict.error is None:
            time.sleep(0.1)
        self.step()

    def keep(self) -> None:
        """Likewise, and the loss is there: it may come yet."""
        loss = self.model(self.batch)
        time.sleep(14.0)
        loss.backward()

    def sleep(self) -> None:
        time.sleep(4.0)
        self.step()

    def raise_in_forward(self) -> None:
        """A forward that raises behind the table, and nothing more: what was raised is kept."""
        self._raise(self.model.module.over.register_forward_pre_hook)

    def raise_in_backward(self) -> None:
        self._raise(self.model.module.over.register_full_backward_hook)

    def _raise(self, register: Callable[..., Any]) -> None:
        def fail(*_: object) -> None:
            raise ValueError("no such id")

        with register(fail):
            try:
                self.step()
            except ValueError as error:
                self.kept = error
        until = time.monotonic() + 20.0
        while time.monotonic() < until and dmp.ranks.call_log.Verdict.error is None:
            time.sleep(0.1)

    def nothing(self) -> None:
        """As it is."""

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


def part(kind: str, folder: str, by_rank: list[str]) -> tuple[str, float]:
    """Steps and a checkpoint together, then each rank what it is told, then two steps: its error, after seconds."""
    os.environ["DMP_LOST_AFTER_S"] = "4"
    job = Job(kind, folder)
    for _ in range(3):
        job.step()
    job.save()
    pids: list[int] = [0] * job.env.size
    dist.all_gather_object(pids, os.getpid())
    started = time.monotonic()
    own: Callable[[], None] = getattr(job, by_rank[dist.get_rank()])
    try:
        own()
        for _ in range(2):
            job.step()
    except Exception as error:
        told = f"{type(error).__name__}: {error}", time.monotonic() - started
        for rank, what in enumerate(by_rank):
            if what == "stop":
                os.kill(pids[rank], signal.SIGKILL)
        return told
    return "", time.monotonic() - started


def part_and_listen(*args: Any) -> tuple[str, list[str]]:
    """As `part`: the error, and what was logged."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dmp").addHandler(handler)
    try:
        return part(*args)[0], said
    finally:
        logging.getLogger("dmp").removeHandler(handler)


def meet_elsewhere(folder: str, by_rank: list[str]) -> str:
    """What meets in a header: the error; then all go on together, on the same groups."""
    job = Job("sparse", folder)
    job.save()
    message = ""
    try:
        getattr(job, by_rank[dist.get_rank()])()
    except dmp.RanksError as error:
        message = str(error)
    job.step()
    job.clip()
    job.save()
    return message


def wrap_with(change: str) -> None:
    """Rank 1 wraps with another argument."""
    env = ShardingEnv.from_mesh(mesh((dist.get_world_size(),)))
    arguments: dict[str, object] = {"plan": {"sparse.weight": row_wise()}, "env": env}
    if dist.get_rank() == 1:
        if change == "plan":
            del arguments["plan"]
        elif change == "role":
            arguments["env"] = ShardingEnv.from_mesh(mesh((dist.get_world_size(),)), replicate="dp")
        elif change == "device":
            arguments["device"] = "meta"
        elif change == "init_parameters":
            arguments["init_parameters"] = False
        elif change == "sharders":
            arguments["sharders"] = []
        elif change.startswith("options"):
            _, name, value = change.split()
            options = {name: {"2": 2, "False": False}.get(value, value)}
            arguments["sharders"] = [EmbeddingBagSharder(**options)]  # type: ignore[arg-type]
    elif change.startswith("options"):
        arguments["sharders"] = [EmbeddingBagSharder()]
    model = Sparse()
    if change.endswith("in the backward pass"):
        in_backward(torch.optim.SGD, model.sparse.parameters(), lr=0.1 * (1 + dist.get_rank()))
    DistributedModelParallel(model, **arguments)  # type: ignore[arg-type]


def compile_for_long(is_said: bool) -> str:
    """In its backward pass rank 1 waits for what some other process compiles; rank 0 is at the next forward."""
    env = ShardingEnv.from_mesh(mesh((dist.get_world_size(),)))
    model = DistributedModelParallel(Sparse(), env, plan={"sparse.weight": row_wise()})
    ids = torch.arange(12).view(4, 3)
    model(ids).backward()
    dist.barrier()
    try:
        with dmp.ranks.entry("the backward of 'sparse'", env.everyone):
            if env.rank == 1:
                with dmp.ranks.at_work("compiling lookup kernels") if is_said else nullcontext():
                    time.sleep(9.0)
        model(ids).backward()
    except dmp.RanksError as error:
        return str(error)
    return ""


class Planner:
    """Raises on rank 1, before it asks the others."""

    def collective_plan(self, *arguments: object) -> object:
        from planner import ShardingPlanner

        if dist.get_rank() == 1:
            raise ValueError("no plan today")
        return ShardingPlanner().collective_plan(*arguments)  # type: ignore[arg-type]


def wrap_with_a_planner_that_raises() -> None:
    env = ShardingEnv.from_mesh(mesh((dist.get_world_size(),)))
    DistributedModelParallel(Sparse(), env, planner=Planner())


def together_where_one_raises() -> str:
    """A local error is shown as itself, also where it looks like a lost connection."""

    def step() -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("Connection closed by the database")

    try:
        dmp.ranks.fail_together(step, dist.group.WORLD, "asking")
    except dmp.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Two(nn.Module):
    """Two tables alike, of which each batch's loss takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.EmbeddingBag(40, 8, mode="sum"), nn.EmbeddingBag(40, 8, mode="sum")

    def forward(self, ids: torch.Tensor, takes_first: bool) -> torch.Tensor:
        first, second = self.first(ids), self.second(ids)
        return (first if takes_first else second).sum()


def losses_of_different_tables() -> None:
    """The gradients fit each other's places; the next forward must not go on."""
    env = ShardingEnv.from_mesh(mesh((dist.get_world_size(),)))
    plan = {"first.weight": row_wise(), "second.weight": row_wise()}
    model = DistributedModelParallel(Two(), env, plan=plan)
    ids = torch.arange(12).view(4, 3)
    model(ids, True).backward()
    model(ids, env.rank == 0).backward()
    model(ids, True)


def wait_in_full_tensor(folder: str) -> str:
    """Where rank 0 is said to be, which asks for the whole of a DTensor before the others do."""
    over, seen = mesh((2,), ("shard",)), Path(folder) / "seen"
    whole = distribute_tensor(torch.ones(4), over, [Shard(0)])
    if dist.get_rank():
        while not seen.exists():
            time.sleep(0.01)
        whole.full_tensor()
        return ""
    thread = threading.Thread(target=whole.full_tensor)
    thread.start()
    marks, said = list[tuple[int, int]](), ""
    while len(marks) < 30 or len({*marks[-30:]}) > 1:  # until it stands still
        time.sleep(0.01)
        place = place_of(thread.ident or 0)
        said = place.waits_in
        marks.append(place.mark)
    seen.touch()
    thread.join()
    return said
