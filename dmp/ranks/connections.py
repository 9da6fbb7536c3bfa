"""gloo's connections of this process, found from outside: whether bytes still move, and an end to all of them; and
whether a group has any. And the connection to a group's store.

torch offers no way to stop a gloo collective that waits: `abort` of its process group does nothing (2.13), and a
thread that is inside cannot be interrupted. A connection that is shut ends what waits on it at once, on both sides.

[Note: which] gloo keeps one epoll instance for each group, which watches one pipe, one listening socket and the
connections to the other ranks. Nothing else looks like this: torch's store watches an eventfd, asyncio a pair of Unix
sockets. Linux alone; elsewhere none are found.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

_FDS, _INFO = Path("/proc/self/fd"), Path("/proc/self/fdinfo")
_LONGEST_S = 86_400.0
_BYTES_AT = 120  # of tcpi_bytes_acked, tcpi_bytes_received in Linux's tcp_info


def backend_of(group: dist.ProcessGroup | None) -> str:
    """The backend of a group, None for the default one: gloo too where a program names none, or gloo for each device.

    torch calls these "undefined" and "cpu:gloo". Of several it is the first that is not gloo.

    Raises:
        ValueError: the group was destroyed.
    """
    dist.get_backend(group)  # which says so, where the next does not
    return next((backend for backend in backends_of(group).values() if backend != "gloo"), "gloo")


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Type of a device whose tensors a group exchanges -> the backend that does it."""
    each = [part.rpartition(":") for part in dist.get_backend_config(group).split(",")]
    return {kind or "cpu": backend for kind, _, backend in each}


def shut_all() -> int:
    """End every wait in a gloo collective of this process: none of its groups can be used any more.

    Returns:
        How many connections there were.
    """
    count = 0
    with _connections() as found:
        for connection in found:
            with suppress(OSError):  # the other side was first
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


class Traffic(NamedTuple):
    """Of all connections together.

    Attributes:
        num_open: connections; one goes when its other end does.
        num_bytes: what has come from the other ends, or arrived there; 0 where the system does not say.
    """

    num_open: int
    num_bytes: int


def traffic() -> Traffic:
    """What there has been so far."""
    total = 0
    with _connections() as found:
        for connection in found:
            with suppress(OSError, struct.error):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += sum(struct.unpack_from("=QQ", info, _BYTES_AT))
        return Traffic(len(found), total)


def cloned(store: Any, patience_s: float) -> Any:
    """A store's clone, which has a connection, and a lock, of its own. What asks there fails when nothing came back for
    so long: a process that is stopped does not answer, and a host that lost its power acknowledges nothing, for which
    the system would wait for 15 minutes.
    """
    before = set(_kinds())
    clone = store.clone()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    option: int = getattr(socket, "TCP_USER_TIMEOUT", 0)  # Linux's
    port, seconds = getattr(store, "port", None), min(patience_s, _LONGEST_S)
    for fd, kind in _kinds().items() if option and port else ():
        if fd in before or not kind.startswith("socket:"):
            continue
        with suppress(OSError):  # another thread's, which has closed it
            blocks = os.get_blocking(fd)
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] == port:
                    one.setsockopt(socket.IPPROTO_TCP, option, int(1000 * seconds))
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(seconds) + 1, 0))
            os.set_blocking(fd, blocks)  # which a program's default time-out changes
    return clone


@contextmanager
def _connections() -> Iterator[list[socket.socket]]:
    """Duplicates, see [Note: which]."""
    found: list[socket.socket] = []
    try:
        kinds = _kinds()
        for fd, kind in kinds.items():
            if kind == "anon_inode:[eventpoll]":
                found += _of_epoll(fd, kinds)
        yield found
    finally:
        for one in found:
            one.close()


def _kinds() -> dict[int, str]:
    kinds: dict[int, str] = {}
    with suppress(OSError):
        for fd in os.listdir(_FDS):
            with suppress(OSError):  # the one of the listing itself
                kinds[int(fd)] = os.readlink(_FDS / fd)
    return kinds


def _of_epoll(fd: int, kinds: dict[int, str]) -> list[socket.socket]:
    watched: list[int] = []
    with suppress(OSError):
        lines = (_INFO / str(fd)).read_text().splitlines()
        watched = [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
    of_kind = [kinds.get(each, "").partition(":")[0] for each in watched]
    if of_kind.count("pipe") != 1 or of_kind.count("socket") != len(watched) - 1:
        return []
    found: list[socket.socket] = []
    num_listening = 0
    for each, kind in zip(watched, of_kind, strict=True):
        if kind != "socket":
            continue
        with suppress(OSError):
            one = socket.socket(fileno=os.dup(each))
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                num_listening += 1
                one.close()
            else:
                found.append(one)
    if num_listening == 1 and all(one.family in (socket.AF_INET, socket.AF_INET6) for one in found):
        return found
    for one in found:
        one.close()
    return []
