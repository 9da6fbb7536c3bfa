"""The ranks of a tensor group in one process: threads that take turns, on a mesh of their own.

[Note: turns] One thread runs at a time. In a collective a rank leaves its tensors and passes the turn on; when it has
it again, all have come, and the last has put in the results. So a run repeats exactly, random numbers among it: each
rank goes on from its own random state. Nothing of the process's groups is touched, and none need exist.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh

from dmp import RandomNumbers

T = TypeVar("T")

_here = threading.local()  # the rank that this thread is, and whose turns it takes


class SimulationError(Exception):
    """The ranks do not meet in the same collectives, or call one that is not simulated."""


def simulate(size: int, axis: str, job: Callable[[DeviceMesh], T], *, apart: bool = False) -> list[T]:
    """What each of `size` ranks returns from `job`, called with a one-dimensional CPU mesh of the axis's name.

    Args:
        apart: each rank finds out by itself what DTensor does with an operation. That is the same for all, and slow to
            find out, but for shards of different sizes.

    Raises:
        SimulationError: the ranks part ways; or torch is too old.
        Exception: what the first rank that failed raised.
    """
    if size > 1 and torch.__version__ < (2, 13):  # type: ignore[operator]
        raise SimulationError(
            f"expected torch 2.13 or later; DTensors of {torch.__version__} end a process that has them in threads"
        )
    mesh = _mesh(size, axis)
    (name,) = mesh._dim_group_names
    try:
        _resolve_process_group(name)
    except RuntimeError:  # the first time, and after `destroy_process_group`
        _register_process_group(name, mesh._pg_registry[name])
    with _known.lent():
        return _Turns(size, apart).run(lambda: job(mesh))


class _Mesh(DeviceMesh):
    """One object for all ranks: which rank it is on is the thread's."""

    # What torch sets is let go of.
    _rank: Any = property(lambda _: _rank(), lambda *_: None)
    _coordinate_on_dim: Any = property(lambda _: (_rank(),), lambda *_: None)

    def get_rank(self) -> int:
        return _rank()

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return _rank()


@cache
def _mesh(size: int, axis: str) -> _Mesh:
    with torch.device("cpu"):  # whatever the default device is
        mesh = _Mesh("cpu", torch.arange(size), mesh_dim_names=(axis,), _init_backend=False, _rank=0)
    name: Any = f"simulated ranks of {axis} ({size})"
    mesh._dim_group_names = [name]
    mesh._pg_registry[name] = _Group(size)
    mesh._thread_id = -1  # part of its hash: what torch keeps for a real mesh is not this one's
    return mesh


def _rank() -> int:
    return int(getattr(_here, "rank", 0))


class _Known:
    """While ranks are simulated, DTensor asks here what it does with an operation.

    It is the same on all ranks, slow to find out, and torch keeps it for one thread alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses = 0

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Be asked, as long as any thread simulates: a change of DTensor's own, for all threads of the process."""
        from torch.distributed.tensor import DTensor

        propagator: Any = DTensor._op_dispatcher.sharding_propagator
        with self._lock:
            self._uses += 1
            if self._uses == 1:
                find_out = propagator.propagate_op_sharding_non_cached
                propagator.propagate_op_sharding_non_cached = partial(self._ask, find_out)
        try:
            yield
        finally:
            with self._lock:
                self._uses -= 1
                if not self._uses:
                    del propagator.propagate_op_sharding_non_cached

    def _ask(self, find_out: Callable[[Any], Any], schema: Any) -> Any:
        shares = getattr(_here, "turns", None) is not None and not _here.turns.apart
        return _found(find_out, schema) if shares else find_out(schema)


_known = _Known()


@lru_cache(maxsize=4096)
def _found(find_out: Callable[[Any], Any], schema: Any) -> Any:
    return find_out(schema)


class _Ended(BaseException):
    """Ends a rank's thread because another failed."""


class _Turns:
    """Threads of which one runs at a time, in the order of the ranks; see [Note: turns]."""

    def __init__(self, size: int, apart: bool) -> None:
        self.size = size
        self.apart = apart
        self._may_run = [threading.Semaphore(0) for _ in range(size)]
        self._came: dict[int, tuple[str, Any]] = {}
        self._ended: set[int] = set()
        self._failure: BaseException | None = None
        self.results: list[torch.Tensor] = []
        """Of collectives."""

    def run(self, job: Callable[[], T]) -> list[T]:
        """What `job` returns on each rank, or raises on the first that fails."""
        results: dict[int, T] = {}

        def work(rank: int) -> None:
            _here.rank, _here.turns = rank, self
            self._may_run[rank].acquire()
            try:
                start.restore()
                if self._failure is None:
                    results[rank] = job()
            except _Ended:
                pass
            except BaseException as error:  # raised again by whoever waits for all
                self._failure = self._failure or error
            self._ended.add(rank)
            self._check_ended()
            self._pass(rank)

        start = RandomNumbers.now()
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.size)]
        try:
            for thread in threads:
                thread.start()
            self._may_run[0].release()
            for thread in threads:
                thread.join()
        finally:
            start.restore()
            for result in self.results:  # torch warns of those that nobody waited for
                torch.ops._c10d_functional.wait_tensor(result)
        if self._failure is not None:
            raise self._failure
        return [results[rank] for rank in range(self.size)]

    def meet(self, what: str, value: Any, finish: Callable[[list[Any]], None]) -> None:
        """Leave `value`; the last rank to come calls `finish` with all of them, in the order of the ranks.

        Raises:
            _Ended: some rank has failed: this one's thread is to end too.
        """
        rank = _rank()
        self._came[rank] = (what, value)
        if len(self._came) == self.size:
            calls, self._came = [self._came[r] for r in range(self.size)], {}
            if len({name for name, _ in calls}) > 1:
                said = "; ".join(f"rank {r} calls {name}" for r, (name, _) in enumerate(calls))
                self._failure = SimulationError(said)
            else:
                finish([value for _, value in calls])
        self._check_ended()
        if self._failure is None and self.size > 1:
            state = RandomNumbers.now()
            self._pass(rank)
            self._may_run[rank].acquire()
            state.restore()
        if self._failure is not None:
            raise _Ended

    def _check_ended(self) -> None:
        if self._failure is None and self._ended and self._came:
            (waiting, (what, _)), ended = next(iter(self._came.items())), min(self._ended)
            self._failure = SimulationError(f"rank {waiting} waits in {what}, and rank {ended} has come to its end")

    def _pass(self, rank: int) -> None:
        """To the next rank that has not ended; the last one to end passes it to nobody."""
        for other in (*range(rank + 1, self.size), *range(rank)):
            if other not in self._ended:
                self._may_run[other].release()
                return


class _Group(dist.ProcessGroup):
    """The collectives that DTensor and torch's functional ones come down to; the names are torch's."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]
        self._count = size

    def rank(self) -> int:
        return _rank()

    getRank = rank

    def getSize(self) -> int:
        return self._count

    def getBackendName(self) -> str:
        return "simulated"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        def finish(every: list[list[torch.Tensor]]) -> None:
            for same in zip(*every, strict=True):
                total = _reduced(torch.stack(same), opts.reduceOp)
                for tensor in same:
                    tensor.copy_(total)

        return self._meet("all_reduce", tensors, finish)

    allreduce_coalesced = allreduce  # type: ignore[assignment]

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        def finish(every: list[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
            for i in range(len(inputs)):
                whole = torch.cat([given[i].flatten() for _, given in every])
                for out, _ in every:
                    out[i].copy_(whole.view(out[i].shape))

        return self._meet("all_gather", outputs, finish, (outputs, inputs))

    def reduce_scatter_single_coalesced(  # type: ignore[override]
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        def finish(every: list[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
            for i in range(len(inputs)):
                total = _reduced(torch.stack([given[i] for _, given in every]), opts.reduceOp)
                for (out, _), part in zip(every, total.chunk(len(every)), strict=True):
                    out[i].copy_(part.view(out[i].shape))

        return self._meet("reduce_scatter", outputs, finish, (outputs, inputs))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        def finish(every: list[list[torch.Tensor]]) -> None:
            for received in every:
                for tensor, sent in zip(received, every[opts.rootRank], strict=True):
                    tensor.copy_(sent)

        return self._meet("broadcast", tensors, finish)

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, out_sizes: list[int], in_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        def finish(every: list[tuple[torch.Tensor, torch.Tensor, list[int]]]) -> None:
            sent = [x.split(sizes) if sizes else x.chunk(len(every)) for _, x, sizes in every]
            for rank, (out, _, _) in enumerate(every):
                out.copy_(torch.cat([cut[rank] for cut in sent]).view(out.shape))

        return self._meet("all_to_all", [output], finish, (output, given, list(in_sizes)))

    def gather_words(self, what: str, words: list[int], _: dist.ProcessGroup) -> list[list[int]]:
        """As `dmp.ranks.gather_words`."""

        def finish(every: list[tuple[list[int], list[list[int]]]]) -> None:
            for _, said in every:
                said += [of_rank for of_rank, _ in every]

        told: list[list[int]] = []
        self._meet(what, [], finish, (words, told))
        return told

    def _meet(
        self, what: str, result: list[torch.Tensor], finish: Callable[[list[Any]], None], value: Any = None
    ) -> dist.Work:
        value = result if value is None else value
        with torch.no_grad():
            _here.turns.results += result
            _here.turns.meet(f"{what} {[tuple(x.shape) for x in result]}", value, finish)
        over: torch.futures.Future[Any] = torch.futures.Future()
        over.set_result(result)
        done: dist.Work = torch._C._distributed_c10d._create_work_from_future(over)  # type: ignore[attr-defined]
        return done


def _reduced(stacked: torch.Tensor, op: Any) -> torch.Tensor:
    """Over dim 0."""
    kinds = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "mean", dist.ReduceOp.MAX: "amax", dist.ReduceOp.MIN: "amin"}
    name = next((name for kind, name in kinds.items() if op == kind), None)
    if name is None:
        raise SimulationError(f"a reduction by {op} is not simulated")
    result: torch.Tensor = getattr(stacked, name)(0)
    return result
