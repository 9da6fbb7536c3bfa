"""What runs in processes that die: a small model with its data by position, and saves that end at a chosen point."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dmp import (
    CheckpointError,
    DistributedModelParallel,
    ShardingEnv,
    full_optimizer_state_dict,
    full_state_dict,
    load_checkpoint,
    row_wise,
    save_checkpoint,
)
from tests.ranks import mesh

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's of its own TorchScript
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

ROWS, DIM, IDS = {"users": 20_000, "items": 14_000}, 16, 3
"""As many rows as make the planner cut the tables, or give each rank one: small ones it would copy."""

GLOBAL_BATCH = 12
"""Samples of a step, divided over however many ranks there are."""

HALF_A_FILE = 500_000
"""Bytes; each rank of two writes more than twice that: half of two tables and of their optimizer's state."""

IN_ITS_FOLDER, METADATA = r".*/\.NAME\.saving/.*", r".*/\.NAME\.saving/\.metadata.*"
"""Patterns of what a save of the checkpoint NAME opens."""

State = dict[str, torch.Tensor]


class Model(nn.Module):
    """Two tables into two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.users = nn.EmbeddingBag(ROWS["users"], DIM, mode="sum")
        self.items = nn.EmbeddingBag(ROWS["items"], DIM, mode="sum")
        self.over = nn.Linear(2 * DIM, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Ids (B, IDS) and (B, IDS) -> (B,)."""
        pooled = torch.cat([self.users(users), self.items(items)], dim=1)
        out: torch.Tensor = self.out(self.over(pooled).tanh()).squeeze(1)
        return out


def make() -> Model:
    """The tables are updated by Adagrad in the backward pass."""
    module = Model()
    tables = [*module.users.parameters(), *module.items.parameters()]
    apply_optimizer_in_backward(torch.optim.Adagrad, tables, {"lr": 0.1})
    return module


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    dense = [p for name, p in model.named_parameters() if name.startswith(("over", "out"))]
    return torch.optim.AdamW(dense, lr=0.02)


def my_samples(position: int, env: ShardingEnv) -> range:
    """This rank's of the GLOBAL_BATCH samples from a position of the data on."""
    share = GLOBAL_BATCH // env.size
    return range(position + env.rank * share, position + (env.rank + 1) * share)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, samples: range) -> float:
    """One step on the samples at these positions of the data; the loss before it, a mean over them."""
    at = torch.tensor(samples).unsqueeze(1)
    users = (at * 3701 + torch.arange(IDS) * 101) % ROWS["users"]
    items = (at // 2 * 5303 + torch.arange(IDS) * 211) % ROWS["items"]
    loss = (model(users, items) - (at.squeeze(1) % 7) / 7).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, env: ShardingEnv) -> list[float]:
    return [train_step(model, optimizer, my_samples(step * GLOBAL_BATCH, env)) for step in steps]


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Weights and optimizer state, on every rank."""
    state = full_optimizer_state_dict(model, optimizer)["state"]
    values = {f"{name}/{key}": torch.as_tensor(v) for name, entry in state.items() for key, v in entry.items()}
    return {**full_state_dict(model), **values}


def assert_equal(got: State, expected: State) -> None:
    """To the bit."""
    assert got.keys() == expected.keys()
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []


def all_ranks() -> ShardingEnv:
    return ShardingEnv.from_mesh(mesh((dist.get_world_size(),)))


def fresh(env: ShardingEnv) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    """Both ranks hold a block of each table."""
    model = DistributedModelParallel(make(), env, plan={"users.weight": row_wise(), "items.weight": row_wise()})
    return model, dense_optimizer(model)


# ---- a process that ends in the middle of a save ----


class Death(NamedTuple):
    """Where a save ends, and for whom.

    Attributes:
        victim: the rank that dies.
        event: of Python's audit events, the one before which it dies; "" for the middle of a data file.
        argument: a pattern for one of the event's first two arguments; NAME stands for the checkpoint's name.
        by: the rank whose event it is: that one kills the victim, and goes on.
    """

    victim: int
    event: str
    argument: str = ""
    by: int | None = None


def die_at(death: Death, name: str, pids: list[int]) -> None:
    """From now on the event ends the victim at once, as the system's killer of processes would."""
    rank = dist.get_rank()
    if not death.event:
        if rank == death.victim:  # the file system's limit ends it, at a byte in the middle
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (HALF_A_FILE, resource.RLIM_INFINITY))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        return
    if rank != (death.victim if death.by is None else death.by):
        return
    pattern = re.compile(death.argument.replace("NAME", name))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == death.event and any(pattern.fullmatch(str(a)) for a in args[:2]):
            os.kill(pids[death.victim], signal.SIGKILL)

    sys.addaudithook(hook)


def save_and_die(folder: str, name: str, death: Death, asynchronous: bool = False) -> tuple[str, float]:
    """A whole save to `last`, then one to `name` that a rank does not survive; both states, by step, beside the folder.

    Returns:
        What the other rank sees, and after how many seconds.
    """
    env = all_ranks()
    model, optimizer = fresh(env)
    train(model, optimizer, range(2), env)
    save_checkpoint(Path(folder) / "last", model, optimizer, {"step": 2})
    states = {2: whole(model, optimizer)}
    train(model, optimizer, range(2, 4), env)
    states[4] = whole(model, optimizer)
    if env.rank == 0:
        torch.save(states, Path(folder).with_suffix(".pt"))
    pids: list[Any] = [None] * env.size
    dist.all_gather_object(pids, os.getpid())
    die_at(death, name, pids)
    started = time.monotonic()
    try:
        pending = save_checkpoint(Path(folder) / name, model, optimizer, {"step": 4}, asynchronous=asynchronous)
        if pending is not None:
            pending.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "", time.monotonic() - started


def load_and_save_again(folder: str, name: str) -> tuple[State, int, State]:
    """New ranks load `last`, train on and save to `name`: what was loaded, its step, and what was saved."""
    env = all_ranks()
    model, optimizer = fresh(env)
    extra = load_checkpoint(Path(folder) / "last", model, optimizer)
    loaded = whole(model, optimizer)
    train(model, optimizer, range(extra["step"], 6), env)
    save_checkpoint(Path(folder) / name, model, optimizer, {"step": 6})
    return loaded, extra["step"], whole(model, optimizer)


# ---- a disk that takes no more ----


@contextmanager
def full_disk(after: int = HALF_A_FILE) -> Iterator[None]:
    """Files of this process cannot grow beyond so many bytes: writing fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder without the right to write; where this is root, whom no right stops, as another user."""
    root = os.geteuid() == 0
    dist.barrier()
    folder.chmod(0o555)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        dist.barrier()
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


@contextmanager
def no_room_for_metadata() -> Iterator[None]:
    """The disk is full when everything but `.metadata` is written. Leaves a hook behind: for processes that end."""
    on = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if on and event == "open" and re.fullmatch(METADATA.replace("NAME", ".*"), str(args[0])):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))

    sys.addaudithook(hook)
    yield
    on = False


TROUBLES: dict[str, Callable[[Path, int], AbstractContextManager[None]]] = {
    "full for rank 0": lambda folder, rank: full_disk() if rank == 0 else nullcontext(),
    "full for rank 1": lambda folder, rank: full_disk() if rank == 1 else nullcontext(),
    "full for both": lambda folder, rank: full_disk(),
    "full at the end": lambda folder, rank: no_room_for_metadata() if rank == 0 else nullcontext(),
    "read-only": lambda folder, rank: read_only(folder),
    "below a file": lambda folder, rank: nullcontext(),
}


def save_in_trouble(folder: str, path: str, trouble: str, asynchronous: bool) -> tuple[list[str], str]:
    """A whole save to `last`, then one to `path` that fails: what it leaves behind, and its error.

    `last` and the model must be as before, and a save after the trouble is over must work.
    """
    env = all_ranks()
    model, optimizer = fresh(env)
    train(model, optimizer, range(2), env)
    last, target = Path(folder) / "last", Path(folder) / path
    save_checkpoint(last, model, optimizer, {"step": 2})
    states = {2: whole(model, optimizer)}
    train(model, optimizer, range(2, 3), env)
    states[3] = whole(model, optimizer)

    message = ""
    with TROUBLES[trouble](Path(folder), env.rank):
        try:
            pending = save_checkpoint(target, model, optimizer, asynchronous=asynchronous)
            if pending is not None:
                pending.wait()
        except CheckpointError as error:
            message = str(error)
    dist.barrier()  # rank 0 tidies up
    left = sorted(os.listdir(folder))
    assert_equal(whole(model, optimizer), states[3])
    dist.barrier()

    for place, step in ((last, 2), (last, 3), (Path(folder) / "later", 3)):
        if step == 3:
            save_checkpoint(place, model, optimizer, {"step": 3})
        other, its_optimizer = fresh(env)
        assert load_checkpoint(place, other, its_optimizer) == {"step": step}
        assert_equal(whole(other, its_optimizer), states[step])
    return left, message
