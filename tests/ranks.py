"""Real gloo processes for tests, kept alive and shared: `run_ranks(4, fn, ...)` calls `fn` on each of four ranks.

Terms. A worker is a process that has joined a gloo group; a pool is the workers of one world size, started at its first
call and used by every later one; a call is one function run once on every rank of a pool.

Why a fork server: importing torch and TorchRec costs seconds. The server imports them once, has one thread, and forks
the workers, which share its memory.

Why a pool does not outlive a failure: a rank that raised may have left the others inside a collective, or ahead of it
by one, and the next call would read their bytes. Only where every rank raised what the test expected is it kept.

Everything travels as plain pickle bytes: multiprocessing's own pickler would pass tensors as descriptors of shared
memory, which outlive the process that made them.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

START_TIMEOUT_S = 120.0
"""From the request for a pool to its last rank in the group; the first pool's includes the server's imports."""

COLLECTIVE_TIMEOUT_S = 60.0
"""Of the gloo group: a collective that waits longer raises."""

GRACE_S, EXPECTED_GRACE_S = 2.0, 20.0
"""How long the others may still take once one rank has raised; the second where a test expects every rank to."""

_ROOT = Path(__file__).resolve().parents[1]

_PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "torchrec",
    "numba",
    "scipy.optimize",
    "transformers.models.llama.modeling_llama",
    "pytest",
    *(
        ".".join(path.relative_to(_ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in ("dmp", "sharders", "planner")
        for path in sorted((_ROOT / package).rglob("*.py"))
        if path.stem != "__main__"
    ),
)
"""What the server imports; one that cannot be imported is left to the worker that needs it. Ours are imported whole:
they import one another when first used, which took each new worker a second."""


class RankError(AssertionError):
    """A rank raised, died or did not answer, or did not raise what was expected; the text shows each such rank."""


@dataclass(frozen=True)
class _Reply:
    """One rank's answer to a call."""

    value: Any = None
    error: BaseException | None = None
    trace: str | None = None
    """Text of what went wrong; None when the function returned."""


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 90.0,
    expect: type[BaseException] | tuple[type[BaseException], ...] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on every rank of the pool of `world_size`, under the calling test's warning filters.

    Args:
        fn: a function of a module's top level (it travels by name).
        args, kwargs: copied to every rank by pickle.
        timeout: seconds until every rank has answered.
        expect: the error that every rank must raise.

    Returns:
        Results in rank order, copied back by pickle; with `expect`, the errors in rank order.

    Raises:
        RankError: a rank raised (or, with `expect`, did not raise that), died, or did not answer in time.

    Example:
        >>> def total(x: float) -> float:
        ...     t = torch.tensor(x * dist.get_rank())
        ...     dist.all_reduce(t)
        ...     return t.item()
        >>> run_ranks(2, total, 3.0)  # doctest: +SKIP
        [3.0, 3.0]
    """
    request = _dumps((fn, args, kwargs, list(warnings.filters)))
    what = f"{fn.__module__}.{fn.__qualname__}"
    pool = _pool(world_size)
    pool.calls += 1
    keep = False
    try:
        replies = pool.ask([request] * world_size, timeout, GRACE_S if expect is None else EXPECTED_GRACE_S)
        errors = [reply.error for reply in replies if reply]
        if expect is None:
            good = [reply is not None and reply.trace is None for reply in replies]
        else:
            good = [reply is not None and isinstance(reply.error, expect) for reply in replies]
        keep = all(good)
        if not keep:
            raise RankError(_report(what, replies, good, pool, timeout, expect))
    finally:  # an interrupt too leaves the ranks in the middle of something
        if not keep:
            _pools.pop(world_size).close()
    return errors if expect is not None else [reply.value for reply in replies if reply]


def run_apart(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 90.0) -> list[Any]:
    """Run `fn(*args)` on ranks that part ways: a new pool, ended afterwards, and every rank's own end.

    Returns:
        For each rank its result; where it raised or died the text of that; None where it did not answer in time.
    """
    pool = _Pool(world_size)
    try:
        replies = pool.ask([_dumps((fn, args, {}, list(warnings.filters)))] * world_size, timeout, timeout)
        return [None if reply is None else reply.value if reply.trace is None else reply.trace for reply in replies]
    finally:
        pool.close()


@functools.cache
def mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """The CPU mesh of this shape, made once per worker (call it inside `fn`): process groups cannot be freed."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def close_pools() -> None:
    """End every worker; the next call starts new ones."""
    while _pools:
        _pools.popitem()[1].close()


# ---- the caller's side ----

_pools: dict[int, _Pool] = {}
atexit.register(close_pools)


class _Pool:
    """Workers 0..n-1 of one gloo group, each with a pipe and a file for its stack."""

    def __init__(self, world_size: int) -> None:
        context = _fork_server()
        self.calls = 0
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes: list[multiprocessing.process.BaseProcess] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, self.stack_file(rank)), daemon=True, name=f"rank {rank}"
            )
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self.pipes.append(ours)
            self.processes.append(process)
        joins = [_dumps((_join, (rank, world_size, self.store.port), {}, [])) for rank in range(world_size)]
        replies = self.ask(joins, START_TIMEOUT_S, GRACE_S)
        good = [reply is not None and reply.trace is None for reply in replies]
        if not all(good):
            text = _report(f"starting {world_size} ranks", replies, good, self, START_TIMEOUT_S, None)
            self.close()
            raise RankError(text)

    def ask(self, requests: Sequence[bytes], timeout: float, grace: float) -> list[_Reply | None]:
        """Send each rank its request; the replies in rank order, None for a rank that did not answer in time."""
        for pipe, request in zip(self.pipes, requests, strict=True):
            pipe.send_bytes(request)
        replies: list[_Reply | None] = [None] * len(requests)
        deadline = time.monotonic() + timeout
        while open_pipes := [pipe for pipe, reply in zip(self.pipes, replies, strict=True) if reply is None]:
            ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self.pipes.index(pipe)
                reply = self._receive(rank)
                replies[rank] = reply
                if reply.trace is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        return replies

    def _receive(self, rank: int) -> _Reply:
        try:
            return pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionError):
            self.processes[rank].join(5)
            stack = Path(self.stack_file(rank)).read_text()
            return _Reply(trace=f"the process ended with exit code {self.processes[rank].exitcode}\n{stack}")

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def stack_file(self, rank: int) -> str:
        return os.path.join(self.folder.name, f"rank{rank}")

    def stack(self, rank: int) -> str:
        """Where a rank that does not answer is now."""
        pid = self.processes[rank].pid
        if pid is None or not self.processes[rank].is_alive():
            return "the process has ended"
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)  # the handler writes in another process; nothing tells when it has
        return Path(self.stack_file(rank)).read_text() or "no stack to be had"

    def close(self) -> None:
        for process in self.processes:
            process.kill()  # nothing in a worker is worth an orderly end, and gloo's may wait for a peer
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            process.close()
            pipe.close()
        self.folder.cleanup()


def _pool(world_size: int) -> _Pool:
    pool = _pools.get(world_size)
    if pool is not None and not pool.alive():
        _pools.pop(world_size).close()
        pool = None
    if pool is None:
        pool = _pools[world_size] = _Pool(world_size)
    return pool


@functools.cache
def _fork_server() -> Any:
    """The context whose processes are forked from a server with `_PRELOAD` imported."""
    context = multiprocessing.get_context("forkserver")
    # Tests that are collected are called: each rank would import each of their files, and look through it for garbage.
    tests = [name for name in sys.modules if name.startswith("tests.") and name != "tests.conftest"]
    context.set_forkserver_preload(["tests.importing", *_PRELOAD, "tests.ranks", *tests, "tests.imported"])
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        settings["GLOO_SOCKET_IFNAME"] = "lo"  # needs no name resolution, and no network
    with mock.patch.dict(os.environ, settings):
        forkserver.ensure_running()
    return context


def _dumps(request: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(request)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"expected a top-level function and arguments that pickle; got {request[0]!r}: {error}"
        ) from error


def _report(
    what: str, replies: Sequence[_Reply | None], good: Sequence[bool], pool: _Pool, timeout: float, expect: Any
) -> str:
    """One headline, then a block for each rank that did not do as it should."""
    answered = [rank for rank, reply in enumerate(replies) if reply]
    silent = [rank for rank, reply in enumerate(replies) if not reply]
    failed = [rank for rank, ok in enumerate(good) if not ok and replies[rank]]
    head = f"{what} on {len(replies)} ranks (call {pool.calls} of this pool):"
    if failed:
        head += f" ranks {failed} " + ("failed" if expect is None else f"did not raise {expect}")
    if silent:
        head += f"{' and' if failed else ''} ranks {silent} did not answer " + (
            f"while the others failed; answered: {answered}" if failed else f"in {timeout:g} s; answered: {answered}"
        )
    blocks = [head]
    for rank, reply in enumerate(replies):
        if good[rank]:
            continue
        if reply is None:
            text = "no answer; it is here:\n" + pool.stack(rank)
        elif reply.trace is None:
            text = f"returned {reply.value!r}"
        else:
            text = reply.trace
        blocks.append(f"---- rank {rank} ----\n{text.rstrip()}")
    return "\n".join(blocks)


# ---- the worker's side ----


def _serve(pipe: Connection, stack_file: str) -> None:
    """Answer requests until the caller closes the pipe or ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the caller's to handle
    from tests import imported  # the server's last

    with open(stack_file, "w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file)
        while True:
            _reset()
            imported.freeze()  # what calls have left stays: looking at it after each cost more than many a call
            try:
                request = pipe.recv_bytes()
            except EOFError:
                os._exit(0)
            pipe.send_bytes(_answer(request))


def _answer(request: bytes) -> bytes:
    try:
        fn, args, kwargs, filters = pickle.loads(request)
        with _warning_filters(filters):
            return pickle.dumps(_Reply(value=fn(*args, **kwargs)))
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            reply = pickle.dumps(_Reply(error=error, trace=trace))
            pickle.loads(reply)
        except Exception as why:
            reply = pickle.dumps(_Reply(trace=f"{trace}\n(and the error itself does not survive pickle: {why!r})"))
        return reply


def _reset() -> None:
    """What one call leaves behind and the next must not see: garbage with reducers and hooks in it, seeds, defaults."""
    gc.collect()
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)


@contextmanager
def _warning_filters(filters: Sequence[tuple[Any, ...]]) -> Iterator[None]:
    """Have the caller's `warnings.filters`, first match first."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, line in filters:
            text, where = (getattr(pattern, "pattern", pattern) or "" for pattern in (message, module))
            warnings.filterwarnings(action, text, category, where, line, append=True)
        yield


def _join(rank: int, world_size: int, port: int) -> None:
    """Become `rank` of the group, with the environment that torchrun would have given."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    torch.set_num_threads(1)
    torch.set_warn_always(True)
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
