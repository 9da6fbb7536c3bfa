"""Which ranks share a host, and whether they can share memory: asked once for each group and purpose."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch.distributed as dist

from dmp import ShardError, ranks
from sharders.shared_memory.mapping import attach, make
from sharders.shared_memory.memory_channel import MemoryChannel, Peer
from sharders.shared_memory.segment import TOKEN_BYTES, Segment
from sharders.shared_memory.waiting import process_of

SWITCH = "DMP_SHARED_MEMORY"
"""Environment variable: 0 sends through connections always, 1 raises where that would be necessary."""

_MOST_BYTES = 1 << 43  # of addresses, for one channel


class _Offer(NamedTuple):
    """What a rank tells the others. `refusal` says why it cannot, or will not; "" where it can."""

    host: str
    pid: int
    process: bytes
    fd: int
    size: int
    token: bytes
    refusal: str
    is_forced: bool


def memory_channel(group: dist.ProcessGroup, purpose: str, otherwise: Callable[[], Any]) -> MemoryChannel | None:
    """A channel through memory between the ranks of a group, where they share a host; collective.

    Args:
        purpose: exchanges of different purposes do not meet.
        otherwise: opens a channel over connections.

    Raises:
        ShardError: it cannot be had, and one of the ranks forces it.
    """
    if ranks.backend_of(group) != "gloo":
        return None
    what = f"opening shared memory for {purpose}"
    switch = os.environ.get(SWITCH, "")
    mine, fd, refusal = _own_segment(group, switch)
    try:
        token = b"" if mine is None else mine.token
        size = 0 if mine is None else mine.size
        host, unknown = _host()
        refusal = refusal or unknown
        offer = _Offer(host, os.getpid(), _process_token(os.getpid()), fd, size, token, refusal, switch == "1")
        offers = [_Offer(*told) for told in ranks.gather_objects(what, tuple(offer), group)]
        why = _refusal(offers)
        peers: list[Peer | None] = []
        if not why:
            try:
                peers = _attach(offers, group)
            except OSError as error:
                why = f"rank {dist.get_rank()}: {error}"
            why = next(filter(None, ranks.gather_objects(what, why, group)), "")
    finally:
        if fd >= 0:
            os.close(fd)
    if not why:
        assert mine is not None
        return MemoryChannel(group, mine, peers, otherwise)
    if any(each.is_forced for each in offers):
        raise ShardError(f"{SWITCH}=1, and ranks cannot share memory: {why}; without it they use connections")
    if why != _ELSEWHERE and dist.get_rank(group) == 0:
        ranks.say_once(f"tables are exchanged through connections instead of shared memory: {why}")
    return None


_ELSEWHERE = "they are on different hosts"


def _refusal(offers: list[_Offer]) -> str:
    """The same on all ranks."""
    refusal = next((offer.refusal for offer in offers if offer.refusal), "")
    if refusal:
        return refusal
    if len({offer.host for offer in offers}) > 1:
        return _ELSEWHERE
    return "" if len({offer.pid for offer in offers}) == len(offers) else "several ranks are one process"


def _own_segment(group: dist.ProcessGroup, switch: str) -> tuple[Segment | None, int, str]:
    """This rank's memory and its file descriptor; else why not."""
    if switch == "0":
        return None, -1, f"{SWITCH}=0"
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return None, -1, "it is made of what Linux alone has"
    if platform.machine() != "x86_64" or sys.maxsize < 1 << 40:
        return None, -1, f"it needs a processor that keeps the order of stores, x86-64; this is {platform.machine()}"
    num_ranks = dist.get_world_size(group)
    try:
        mapping, fd = make(_size(num_ranks))
    except OSError as error:
        return None, -1, str(error)
    segment = Segment(mapping, num_ranks)
    segment.sign(os.urandom(TOKEN_BYTES))
    return segment, fd, ""


def _size(num_ranks: int) -> int:
    """Of addresses: as much as the host has memory, so that what can be held can be sent."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(1 << (whole - 1).bit_length(), _MOST_BYTES >> (num_ranks - 1).bit_length())


def _attach(offers: list[_Offer], group: dist.ProcessGroup) -> list[Peer | None]:
    """The others' memory.

    Raises:
        OSError: one's cannot be seen.
    """
    numbers, me = dist.get_process_group_ranks(group), dist.get_rank(group)
    peers: list[Peer | None] = []
    for i, offer in enumerate(offers):
        if i == me:
            peers.append(None)
            continue
        process = process_of(offer.pid, offer.process)
        segment = Segment(attach(offer.pid, offer.fd, offer.size), len(offers))
        if segment.token != offer.token:
            raise OSError(f"process {offer.pid}, as seen from here, is not rank {numbers[i]}")
        peers.append(Peer(numbers[i], segment, process))
    return peers


def _host() -> tuple[str, str]:
    """A name, equal where processes run under one kernel and see each other's numbers; "" and why it is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}", ""
    except OSError as error:
        return "", f"whether ranks share a host is not known: {error}"


@lru_cache(maxsize=1)
def _process_token(pid: int) -> bytes:
    """Of this process: one that was forked has another number, and so another token."""
    return os.urandom(TOKEN_BYTES)
