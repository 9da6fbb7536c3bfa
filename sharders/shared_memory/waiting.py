"""A wait for another process: by futex, so that it takes no processor time, and with an end when that process has one.

[Note: looking] To sleep and be woken takes a tenth of a millisecond, on virtual machines more, and he who wakes pays as
much. So where every rank of the host has a core a wait looks for about that long before it sleeps. Where that was in
vain, the next ones sleep at once, twice as many each time: the others take longer, or have no core while other programs
run. Where ranks share cores, another one needs this one's now, and no wait looks.

[Note: deaths] Nothing in memory tells that who should write there is dead. So a wait looks up every so often: whether
the other process lives (a descriptor that becomes readable at its end), and whether the watchdog has found that the
ranks have parted ways. What a process has published before its end is still there, and is read.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
import time
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from dmp import ranks
from sharders.shared_memory.cores import cores

_FUTEX, _WAIT, _WAKE, _ALL = 202, 0, 1, 0x7FFFFFFF  # x86-64's numbers
_SPINS = 20
"""Looks before it asks the system: a few microseconds."""

_LOOKS_S = 200e-6
"""For so long it looks where each rank has a core."""
_MOST_AT_ONCE = 64
"""Waits that sleep at once between two that look, in vain."""

_LOOK_S = 0.05
_TIMEOUT_S = default_pg_timeout.total_seconds()
"""As of the connections of the data path."""

if sys.platform == "linux":
    _syscall = ctypes.CDLL(None).syscall
    _syscall.restype = ctypes.c_long
    _syscall.argtypes = (
        *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int),
        *(ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
    )


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_look = _Timespec(0, int(_LOOK_S * 1e9))
_look_address = ctypes.addressof(_look)


class Process:
    """Another process of this host, from now on: a number that is given anew later is another.

    Raises:
        OSError: there is none of this number, or the system cannot watch it.
    """

    def __init__(self, pid: int) -> None:
        fd = os.pidfd_open(pid)
        weakref.finalize(self, os.close, fd)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def has_ended(self) -> bool:
        """Whether it has, waited for by its parent or not."""
        return bool(self._poll.poll(0))


@lru_cache(maxsize=1024)
def process_of(pid: int, token: bytes) -> Process:
    """One for all channels to a process.

    Args:
        token: of the process, so that a later one of the same number is not taken for it.
    """
    return Process(pid)


class Looking:
    """For how long each of a channel's waits looks; see [Note: looking].

    Args:
        num_ranks: of the channel; the launcher may tell of more on this host.
    """

    def __init__(self, num_ranks: int) -> None:
        told = os.environ.get("LOCAL_WORLD_SIZE", "")
        here = max(num_ranks, int(told) if told.isdecimal() else dist.get_world_size())
        self._most_s = _LOOKS_S if here <= cores() else 0.0
        self._at_once, self._left = 0, 0

    def seconds(self) -> float:
        """Of the next wait."""
        self._left -= 1
        return self._most_s if self._left < 0 else 0.0

    def was_in_vain(self, is_so: bool) -> None:
        """How looking has ended."""
        self._at_once = min(max(2 * self._at_once, 1), _MOST_AT_ONCE) if is_so else 0
        self._left = self._at_once


def poll_memory(
    is_there: Callable[[], bool],
    word: ctypes.c_uint32,
    address: int,
    process: Process,
    rank: int,
    group: dist.ProcessGroup,
    looking: Looking | None = None,
) -> None:
    """Return when what another rank is to write is there.

    Args:
        word: changes when something is; `wake` follows.
        address: of the word.
        process: of that rank.
        rank: its number, for messages.
        looking: of the channel.

    Raises:
        RanksError: it will not come.
        RuntimeError: likewise, for a reason that the watchdog does not know.
    """
    looks_s = looking.seconds() if looking is not None else 0.0
    until = time.monotonic() + looks_s
    while True:
        for _ in range(_SPINS):
            if is_there():
                if looks_s and looking is not None:
                    looking.was_in_vain(False)
                return
        since = looked = time.monotonic()
        if since >= until:
            break
    if looks_s and looking is not None:
        looking.was_in_vain(True)
    while True:
        seen = word.value
        if is_there():
            return
        _syscall(_FUTEX, address, _WAIT, seen, _look_address, None, 0)
        if is_there():
            return
        if time.monotonic() - looked < _LOOK_S:
            continue
        looked = time.monotonic()
        ranks.raise_verdict(group)
        if process.has_ended() and not is_there():
            _raise(f"the connection to rank {rank} is closed: its process has ended")
        if looked - since > _TIMEOUT_S:
            _raise(f"timed out: rank {rank}, whose process lives, has sent nothing for {_TIMEOUT_S:g} s")


def _raise(text: str) -> NoReturn:
    error = RuntimeError(text)
    ranks.raise_cause(error)
    raise error


def wake(address: int) -> None:
    """Wake all that wait on a word."""
    _syscall(_FUTEX, address, _WAKE, _ALL, None, None, 0)
