"""Local steps that fail on all ranks when they fail on one: nobody waits for a rank that has raised."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from dmp.errors import CheckpointError, DmpError, RanksError
from dmp.ranks.entry import entry
from dmp.ranks.exchange import broadcast_bytes, compare_facts, gather_objects, gather_words
from dmp.ranks.groups import wait_for_first
from dmp.ranks.watchdog import PeerLost

_SHOWN = 5
T = TypeVar("T")


def fail_together(
    step: Callable[[], T],
    group: dist.ProcessGroup | None,
    what: str,
    same: Any = None,
    kind: type[DmpError] = CheckpointError,
    as_it_is: bool = False,
) -> T:
    """Run a local step on every rank; when it fails on one, every rank raises the same. One exchange where none does.

    Args:
        step: without collectives.
        what: for the error; the same on every rank, or that is the error.
        same: likewise.
        kind: of the error.
        as_it_is: where all ranks fail alike, or there is but one, each raises what its step did.

    Returns:
        What the step returned on this rank.

    Raises:
        CheckpointError: or another of that kind, naming the ranks and what failed there.
        RanksError: the ranks are in different calls.
        PeerLost: a rank is gone.
    """
    about = _about(what, same)
    with entry(about, group):
        result, failure, cause = _attempt(step)
        mine = {} if failure is None else {"failure": failure}
        with _telling(what, failure, cause):
            theirs = compare_facts(mine, group, about)
    if as_it_is and theirs is None and cause is not None:
        raise cause
    _raise_failures(what, [of_rank.get("failure") for of_rank in theirs or [mine]], cause, kind)
    return result  # type: ignore[return-value]


def results_of_all(step: Callable[[], T], group: dist.ProcessGroup | None, what: str, same: Any = None) -> list[T]:
    """As `fail_together`; what the step returned on each rank: any object that pickle takes. Two exchanges."""
    if group is None:
        return [fail_together(step, group, what, same)]
    about = _about(what, same)
    with entry(about, group):
        data, failure, cause = _attempt(lambda: pickle.dumps(step()))
        with _telling(what, failure, cause):
            said = gather_objects(about, (data, failure), group)
    _raise_failures(what, [failure for _, failure in said], cause, CheckpointError)
    return [pickle.loads(data) for data, _ in said]


def _about(what: str, same: Any) -> str:
    return what if same is None else f"{what} ({same})"


def _attempt(step: Callable[[], T]) -> tuple[T | None, str | None, BaseException | None]:
    """What a step returns; or why it failed, in words and as it is."""
    try:
        return step(), None, None
    except RanksError:  # they know
        raise
    except BaseException as error:  # whatever it is, the other ranks must hear of it
        if not isinstance(error, Exception) and type(error).__name__ != "CheckpointException":  # torch's is none
            raise
        return None, _text(error), error


@contextmanager
def _telling(what: str, failure: str | None, cause: BaseException | None) -> Iterator[None]:
    """Where a rank is gone, say in which step, and what failed here."""
    try:
        yield
    except PeerLost as error:
        here = "" if failure is None else f"; here: {failure}"
        raise PeerLost(f"{what}: {error}{here}") from (cause or error)


def _raise_failures(
    what: str, failures: Sequence[str | None], cause: BaseException | None, kind: type[DmpError]
) -> None:
    """Raise what failed, text by text with the first rank of each, unless nothing did."""
    failed: dict[str, list[int]] = {}
    for rank, text in enumerate(failures):
        if text is not None:
            failed.setdefault(text, []).append(rank)
    if failed:
        parts = [text if len(ranks) == len(failures) else f"rank {ranks[0]}: {text}" for text, ranks in failed.items()]
        raise kind(f"{what}: " + "; ".join(parts[:_SHOWN])) from cause


def raise_on_all(error: Exception, group: dist.ProcessGroup | None, what: str) -> NoReturn:
    """Raise an error that this rank may have met alone, where the others would wait for it in collectives of torch's.

    Ranks that have all met it meet here, in one exchange, and can go on. Where others have not, the watchdog tells them
    what this rank is in, and why: nothing is exchanged as long as nobody raises.

    Args:
        what: the call that all ranks are in, for messages: `the forward pass`.

    Raises:
        Exception: the one given.
    """
    parted: RanksError | None = None
    try:
        gather_words(f"{what}, which raises {type(error).__name__}: {error}", [0, 0], group)
    except RanksError as found:
        parted = found
    raise error from parted


def numbers_of_all(what: str, make: Callable[[], float], group: dist.ProcessGroup | None) -> list[float]:
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
    said = gather_words(what, [bits, int(cause is not None)], group)
    if any(failed for _, failed in said):
        failures = gather_objects(what, None if cause is None else cause, group)
        first = next((rank, error) for rank, error in enumerate(failures) if error is not None)
        if cause is not None:
            raise cause
        raise type(first[1])(f"{what} fails on rank {first[0]}: {first[1]}") from first[1]
    return [struct.unpack("=d", struct.pack("=q", row[0]))[0] for row in said]


def from_first(make: Callable[[], T], group: dist.ProcessGroup | None, what: str) -> T:
    """What rank 0 makes, on every rank; any object that pickle takes.

    It may take as long as it likes: the others wait for it in the store, inside no collective and under no timeout.

    Raises:
        CheckpointError: on every rank: what rank 0 raised.
        RanksError: the ranks are in different calls.
        PeerLost: a rank is gone.
    """
    if group is None:
        return make()
    cause: Exception | None = None
    data = b""  # of rank 0 alone
    with entry(what, group):
        if dist.get_rank(group) == 0:
            try:
                data = pickle.dumps((make(), None))
            except Exception as error:  # of any kind: the other ranks wait for it
                cause = error
                data = pickle.dumps((None, _text(error)))
        wait_for_first(group, "from_first")
        sent = broadcast_bytes(what, data, group)
    result, problem = pickle.loads(sent)
    if problem is not None:
        raise CheckpointError(f"{what}: rank 0: {problem}") from cause
    made: T = result
    return made


def _text(error: BaseException) -> str:
    if isinstance(error, (CheckpointError, OSError)):
        return str(error)
    failures = getattr(error, "failures", None)  # of torch's CheckpointException: rank -> (error, traceback)
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"{type(inner).__name__} on rank {rank}: {inner}"
    return f"{type(error).__name__}: {error}"
