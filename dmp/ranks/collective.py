"""What all ranks do together, and how they fail together: the one place for both.

[Note: control] Saves, gathers and the like exchange small things on a group of their own, on the CPU, so that they
never meet a step's collectives or the program's: gloo ends the process where two collectives of different sizes meet.
Every exchange there begins with a header of one form, so that different calls meet in it and say so.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import re
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dmp.errors import CheckpointError, RanksError
from dmp.ranks import call_log, watchdog
from dmp.ranks.watchdog import PeerLost

__all__ = [
    "PeerLost",
    "RanksError",
    "agree",
    "control_group",
    "entry",
    "everyone",
    "explain",
    "from_first",
    "meet",
    "numbers",
    "own_group",
    "tell",
    "together",
]

_SHOWN = 5
_NAME_BYTES = 512
_BROKEN = re.compile(r"gloo|connection|socket|NCCL|broken pipe|timed out|store", re.IGNORECASE)
T = TypeVar("T")


class entry:
    """A call that all ranks of a group make together, while the block runs: see call_log.py.

    Where ranks have parted ways, or one is gone, the block raises that in place of what gloo says.

    Args:
        name: for messages, as in "rank 1 is in ...": `the forward of 'sparse'`.
        group: None for this process alone.
        is_backward: it is a backward pass, of which each rank keeps the name until `take_backwards`.

    Raises:
        RanksError: the ranks are in different calls.
        PeerLost: one of them is gone.
    """

    __slots__ = ("_entry", "_is_backward", "_name", "_sequence")

    def __init__(self, name: str, group: dist.ProcessGroup | None, *, is_backward: bool = False) -> None:
        self._name, self._is_backward = name, is_backward
        self._sequence = None if group is None else call_log.sequence_of(group)

    def __enter__(self) -> entry:
        self._entry = None if self._sequence is None else call_log.begin(self._name, self._sequence)
        if self._entry is not None and self._is_backward:
            self._entry.sequence.backwards.append(self._name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entry is None:
            return
        try:
            if isinstance(error, RuntimeError):
                explain(error)
        finally:
            call_log.end(self._entry)

    @property
    def number(self) -> int:
        """Of this entry among its ranks'; 0 without a group."""
        return 0 if self._entry is None else self._entry.number

    def take_backwards(self) -> list[str]:
        """Names of the backward passes that this rank has run since the last time."""
        if self._entry is None:
            return []
        taken = self._entry.sequence.backwards
        self._entry.sequence.backwards = []
        return taken

    def align(self, number: int) -> None:
        """Have the next entry counted from here: where all ranks have just met, the largest of their numbers."""
        if self._entry is not None and self._entry.sequence.number == self._entry.number:
            self._entry.sequence.number = self._entry.number = max(number, self._entry.number)


def explain(error: RuntimeError) -> None:
    """Raise what is behind a broken collective; return where the error is this rank's own.

    Raises:
        RanksError: the ranks are in different calls, or one of them is gone.
    """
    if isinstance(error, RanksError):
        return
    if call_log.Verdict.error is None and _is_broken(error):
        dog = watchdog.start()
        if dog is not None:
            dog.explain()
    verdict = call_log.Verdict.error
    if verdict is not None and _is_broken(error):
        raise type(verdict)(str(verdict)) from error


def _is_broken(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or bool(_BROKEN.search(str(error)))


def meet(what: str, words: Sequence[int], group: dist.ProcessGroup | None) -> list[list[int]]:
    """Every rank's two words, in rank order; one exchange of one form whatever the call is.

    Raises:
        RanksError: on every rank: the ranks are in different calls.
    """
    if group is None:
        return [list(words)]
    with entry(what, group) as here:
        control = control_group(group)
        device = _device_of(control)
        mine = torch.tensor([_digest(what), here.number, *words], dtype=torch.int64, device=device)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, mine, group=control)
        said: list[list[int]] = torch.stack(rows).tolist()
        here.align(max(row[1] for row in said))
        if any(row[0] != said[0][0] for row in said):
            _raise_parted(_outermost(what), control)
        return [row[2:] for row in said]


def _outermost(what: str) -> str:
    """The call that this one is a step of, as a program knows it."""
    own = [e.name for e in call_log.running.values() if e.thread == threading.get_ident()]
    return what if not own or own[0] == what else f"{own[0]}, {what}"


def _raise_parted(what: str, control: dist.ProcessGroup) -> None:
    names = _gather_bytes(what.encode()[:_NAME_BYTES], _NAME_BYTES, control)
    by_name: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        by_name.setdefault(name.rstrip(b"\0").decode(errors="replace"), []).append(rank)
    shown = [
        f"rank {ranks[0]} is in {name}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are in {name}"
        for name, ranks in by_name.items()
    ]
    raise RanksError(
        f"the ranks have parted ways: {', '.join(shown[:_SHOWN])}; all ranks of a group must make the same calls in "
        "the same order"
    )


def numbers(what: str, make: Callable[[], float], group: dist.ProcessGroup | None) -> list[float]:
    """Every rank's number, in rank order; one exchange. What `make` raises on one rank is raised on all.

    Raises:
        RanksError: on every rank: the ranks are in different calls.
    """
    if group is None:
        return [make()]
    value, cause = 0.0, None
    try:
        value = make()
    except Exception as error:
        cause = error
    (bits,) = struct.unpack("=q", struct.pack("=d", value))
    said = meet(what, [bits, int(cause is not None)], group)
    if any(failed for _, failed in said):
        failures = tell(what, None if cause is None else cause, group)
        first = next((rank, error) for rank, error in enumerate(failures) if error is not None)
        if cause is not None:
            raise cause
        raise type(first[1])(f"{what} fails on rank {first[0]}: {first[1]}") from first[1]
    return [struct.unpack("=d", struct.pack("=q", row[0]))[0] for row in said]


def tell(what: str, value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's value, in rank order; any object that pickle takes. Two exchanges."""
    if group is None:
        return [value]
    data = pickle.dumps(value)
    with entry(what, group):
        sizes = [row[0] for row in meet(what, [len(data), 0], group)]
        parts = _gather_bytes(data, max(sizes), control_group(group))
        return [pickle.loads(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def _gather_bytes(data: bytes, size: int, control: dist.ProcessGroup) -> list[bytes]:
    """Every rank's bytes, filled up to `size`."""
    device = _device_of(control)
    mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(control))]
    dist.all_gather(parts, mine, group=control)
    return [_bytes(part) for part in parts]


def _bytes(data: torch.Tensor) -> bytes:
    """Without NumPy, which torch's own way needs."""
    here = data.cpu()
    return ctypes.string_at(here.data_ptr(), here.numel())


def together(step: Callable[[], T], group: dist.ProcessGroup | None, what: str, same: Any = None) -> T:
    """As `everyone`, where only this rank's own result is wanted."""
    result: list[T] = []
    everyone(lambda: result.append(step()), group, what, same)
    return result[0]


def everyone(step: Callable[[], T], group: dist.ProcessGroup | None, what: str, same: Any = None) -> list[T]:
    """Run a local step on every rank; when it fails on one, every rank raises the same.

    Args:
        step: without collectives.
        what: for the error; the same on every rank, or that is the error.
        same: likewise.

    Returns:
        What the step returned on each rank.

    Raises:
        CheckpointError: naming the ranks and what failed there.
        RanksError: the ranks are in different calls.
        PeerLost: a rank is gone.
    """
    about = what if same is None else f"{what} ({same})"
    with entry(about, group):
        result: T | None = None
        cause: BaseException | None = None
        data = b""
        try:
            result = step()
            data = pickle.dumps(result) if group is not None else b""
        except RanksError:  # they know
            raise
        except BaseException as error:  # whatever it is, the other ranks must hear of it
            if not isinstance(error, Exception) and type(error).__name__ != "CheckpointException":  # torch's is none
                raise
            cause = error
        message = None if cause is None else _text(cause)
        try:
            said = tell(about, (message, data), group)
        except PeerLost as error:
            if cause is None:
                raise PeerLost(f"{what}: {error}") from error
            raise PeerLost(f"{what}: {error}; here: {message}") from cause
    failed: dict[str, list[int]] = {}
    for rank, (text, _) in enumerate(said):
        if text is not None:
            failed.setdefault(text, []).append(rank)
    if failed:
        parts = [text if len(ranks) == len(said) else f"rank {ranks[0]}: {text}" for text, ranks in failed.items()]
        raise CheckpointError(f"{what}: " + "; ".join(parts[:_SHOWN])) from cause
    return [result] if group is None else [pickle.loads(each) for _, each in said]  # type: ignore[list-item]


def from_first(make: Callable[[], T], group: dist.ProcessGroup | None, what: str) -> T:
    """What rank 0 makes, on every rank; any object that pickle takes.

    Raises:
        CheckpointError: on every rank: what rank 0 raised.
        RanksError: the ranks are in different calls.
        PeerLost: a rank is gone.
    """
    if group is None:
        return make()
    cause: Exception | None = None
    data = b""
    with entry(what, group):
        if dist.get_rank(group) == 0:
            try:
                data = pickle.dumps((make(), None))
            except Exception as error:  # of any kind: the other ranks wait for it
                cause = error
                data = pickle.dumps((None, _text(error)))
        size = meet(what, [len(data), 0], group)[0][0]
        control = control_group(group)
        sent = torch.frombuffer(bytearray(data or bytes(size)), dtype=torch.uint8).to(_device_of(control))
        dist.broadcast(sent, group=control, group_src=0)
    result, problem = pickle.loads(_bytes(sent))
    if problem is not None:
        raise CheckpointError(f"{what}: rank 0: {problem}") from cause
    made: T = result
    return made


def agree(facts: Mapping[str, str], group: dist.ProcessGroup | None, what: str) -> list[dict[str, str]] | None:
    """Compare texts over all ranks: None where they are the same, else everyone's. One small exchange, or two."""
    if group is None:
        return None
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).digest()
    words = [int.from_bytes(digest[i : i + 8], "big", signed=True) for i in (0, 8)]
    with entry(what, group):
        said = meet(what, words, group)
        if all(row == said[0] for row in said):
            return None
        return tell(what, dict(facts), group)


def _text(error: BaseException) -> str:
    if isinstance(error, (CheckpointError, OSError)):
        return str(error)
    failures = getattr(error, "failures", None)  # of torch's CheckpointException: rank -> (error, traceback)
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"{type(inner).__name__} on rank {rank}: {inner}"
    return f"{type(error).__name__}: {error}"


# ---- groups of our own ----


def control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same ranks, on the CPU where the backend allows, for [Note: control]; collective for a new set of ranks."""
    return group if group in _own else own_group(group, "control")


_own: set[dist.ProcessGroup] = set()


@lru_cache(maxsize=64)
def own_group(group: dist.ProcessGroup, purpose: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """The same ranks with gloo connections of their own, for one purpose; collective for a new set of ranks.

    `group` itself where that would bring nothing: the data path of a backend that is not gloo, a group that is no real
    one.
    """
    backend, dog = dist.get_backend(group), watchdog.start()
    is_control = purpose in ("control", "background")
    if dog is None or dist.get_world_size(group) == 1:
        return group
    if backend != "gloo" and not (backend == "nccl" and is_control and dist.is_gloo_available()):
        return group
    ranks = dist.get_process_group_ranks(group)
    name = f"dmp/{purpose}/{call_log.shown(tuple(ranks))}"
    with entry(f"making a group for {purpose}", group):  # in torch nothing could tell it that nobody will come
        count = dog.wait_in_store(name, len(ranks))
        made = _new_group(ranks, dist.get_rank(group), f"{name}/{count}", timeout)
    if is_control:
        _own.add(made)
    if purpose == "background":
        call_log.parts[made] = ", in the background"
    return made


def _new_group(ranks: list[int], rank: int, name: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """As torch's `new_group`, whose names differ where ranks have made different numbers of groups before."""
    c10d: Any = dist.distributed_c10d
    made: dist.ProcessGroup
    made, _ = c10d._new_process_group_helper(  # private
        len(ranks),
        rank,
        ranks,
        dist.Backend("gloo"),
        c10d._get_default_store(),
        name,
        timeout=timeout or c10d.default_pg_timeout,
    )
    c10d._world.pg_group_ranks[made] = {of_all: i for i, of_all in enumerate(ranks)}
    return made


def _device_of(group: dist.ProcessGroup) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
