"""A call that all ranks of a group make together, and what is behind it when it breaks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch.distributed as dist

from dmp.errors import RanksError
from dmp.ranks import call_log, watchdog

_BROKEN = re.compile(r"gloo|connection|socket|NCCL|broken pipe|timed out|store", re.IGNORECASE)


class entry:
    """A call that all ranks of a group make together, while the block runs: see call_log.py.

    Where ranks have parted ways, or one is gone, the block raises that in place of what gloo says.

    Args:
        name: for messages, as in "rank 1 is in ...": `the forward of 'sparse'`.
        group: None for this process alone.
        backward_of: it is the backward pass of the call of this number, which each rank notes until `take_backwards`.

    Raises:
        RanksError: the ranks are in different calls.
        PeerLost: one of them is gone.
    """

    __slots__ = ("_backward_of", "_entry", "_sequence", "name")

    def __init__(self, name: str, group: dist.ProcessGroup | None, *, backward_of: int | None = None) -> None:
        self.name, self._backward_of = name, backward_of
        self._sequence = None if group is None else call_log.sequence_of(group)

    def __enter__(self) -> entry:
        self._entry = None if self._sequence is None else call_log.begin(self.name, self._sequence, self._backward_of)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entry is None:
            return
        try:
            if isinstance(error, RuntimeError):
                raise_cause(error)
        finally:
            call_log.end(self._entry)

    @property
    def number(self) -> int:
        """Of this entry among its ranks'; 0 without a group."""
        return 0 if self._entry is None else self._entry.number

    def await_backward(self, result: object) -> None:
        """This call's backward pass is to come, unless this rank lets go of `result`."""
        if self._entry is not None:
            self._entry.sequence.await_backward(self._entry.number, result)

    def take_backwards(self) -> list[tuple[str, int]]:
        """Names of the backward passes that this rank has run since the last time, and of which call each was."""
        if self._entry is None:
            return []
        taken = self._entry.sequence.backwards
        self._entry.sequence.backwards = []
        return taken

    def align(self, number: int) -> None:
        """Have the next entry counted from here: where all ranks have just met, the largest of their numbers."""
        if self._entry is not None and self._entry.sequence.number == self._entry.number:
            self._entry.sequence.number = self._entry.number = max(number, self._entry.number)


@contextmanager
def at_work(what: str) -> Iterator[None]:
    """This rank does something that takes long: it waits for no other, however still it stands.

    Args:
        what: for messages: `compiling lookup kernels`.
    """
    call_log.work.append(what)
    try:
        yield
    finally:
        call_log.work.remove(what)


def calls_so_far(group: dist.ProcessGroup | None) -> int:
    """How many entries a group's ranks have begun: the same on all of them, in a call in which they have met."""
    return 0 if group is None else call_log.sequence_of(group).number


def raise_cause(error: RuntimeError) -> None:
    """Raise what is behind a broken collective; return where the error is this rank's own.

    Raises:
        RanksError: the ranks are in different calls, or one of them is gone (`PeerLost`).
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


def raise_verdict(group: dist.ProcessGroup) -> None:
    """What the watchdog has found of these ranks: every so often in a wait that is no collective of torch's, and before
    one that is.

    Raises:
        RanksError: they have parted ways, or one of them is gone (`PeerLost`).
    """
    verdict = call_log.Verdict.error
    if verdict is not None and not call_log.Verdict.ranks.isdisjoint(call_log.sequence_of(group).ranks):
        raise type(verdict)(str(verdict))


def _is_broken(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or bool(_BROKEN.search(str(error)))
