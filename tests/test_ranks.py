"""The harness of tests/ranks.py: results, errors, deaths and hangs, and that the next call is none the worse."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import struct
import threading
import time
import warnings
import weakref
from contextlib import suppress
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dmp.ranks import answers, watchdog
from dmp.ranks.connections import cloned
from dmp.ranks.groups import control_group, device_of, own_group
from sharders.tensor_parallel.structure import caches
from tests import ranks
from tests.ranks import RankError, mesh, run_ranks


def where() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def total(x: torch.Tensor) -> torch.Tensor:
    x = x * (dist.get_rank() + 1)
    dist.all_reduce(x)
    return x


def fail_on(rank: int, then_wait: bool = False) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} will not")
    if then_wait:
        dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def fail_everywhere() -> None:
    dist.barrier()
    raise ValueError(f"as rank {dist.get_rank()} expected")


def warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=2)


def unpicklable() -> object:
    return lambda: None


def mesh_facts() -> tuple[list[int], bool]:
    m = mesh((2, 1), ("replicate", "shard"))
    return list(m.get_coordinate() or ()), m is mesh((2, 1), ("replicate", "shard"))


class Loop:
    """An object that only the cycle collector can free."""

    seen: weakref.ref[Loop] | None = None

    def __init__(self) -> None:
        self.me = self


def leave_a_loop() -> None:
    Loop.seen = weakref.ref(Loop())
    torch.set_default_dtype(torch.float64)
    torch.rand(1)


def find_the_loop() -> tuple[bool, torch.dtype, float]:
    return Loop.seen is not None and Loop.seen() is None, torch.get_default_dtype(), torch.rand(1).item()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order_from_processes_that_stay(world_size: int) -> None:
    first = run_ranks(world_size, where)
    assert [(rank, size) for rank, size, _ in first] == [(rank, world_size) for rank in range(world_size)]
    assert len({pid for _, _, pid in first} | {os.getpid()}) == world_size + 1
    assert run_ranks(world_size, where) == first


def test_tensors_travel_by_value_and_collectives_work() -> None:
    ones = torch.ones(3)
    a, b = run_ranks(2, total, ones)
    assert a.tolist() == b.tolist() == [3.0, 3.0, 3.0]
    assert ones.tolist() == [1.0, 1.0, 1.0]
    assert not a.is_shared()


def test_the_error_of_one_rank_is_shown_and_the_pool_recovers() -> None:
    before = run_ranks(2, where)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[1\] failed and ranks \[0\] did not answer") as info:
        run_ranks(2, fail_on, 1, then_wait=True)
    assert time.monotonic() - start < 30, "waited for gloo's own timeout"
    waiting, raised = re.split("---- rank [01] ----", str(info.value))[1:]
    assert "in fail_on" in raised
    assert "ValueError: rank 1 will not" in raised
    assert "in fail_on" in waiting, "no stack of the rank that waits"
    after = run_ranks(2, where)
    assert [r[:2] for r in after] == [(0, 2), (1, 2)]
    assert {r[2] for r in after}.isdisjoint({r[2] for r in before})
    assert run_ranks(2, total, torch.ones(1))[0].item() == 3.0


def test_a_rank_that_dies_is_told_from_one_that_raises() -> None:
    with pytest.raises(RankError, match=r"ranks \[0\] failed") as info:
        run_ranks(2, die_on, 0)
    assert f"exit code {-signal.SIGKILL}" in str(info.value)
    assert len(run_ranks(2, where)) == 2


def test_a_hang_is_found_and_the_pool_recovers() -> None:
    with pytest.raises(RankError, match=r"ranks \[1\] did not answer in 3 s; answered: \[0\]") as info:
        run_ranks(2, sleep_on, 1, timeout=3)
    assert "in sleep_on" in str(info.value)
    assert len(run_ranks(2, where)) == 2


def test_an_expected_error_comes_from_every_rank_and_keeps_the_pool() -> None:
    before = run_ranks(2, where)
    errors = run_ranks(2, fail_everywhere, expect=ValueError)
    assert [str(e) for e in errors] == ["as rank 0 expected", "as rank 1 expected"]
    assert run_ranks(2, where) == before


def test_an_expected_error_that_does_not_come_is_an_error() -> None:
    with pytest.raises(RankError, match=r"ranks \[0\] did not raise .*ValueError"):
        run_ranks(2, fail_on, 1, expect=ValueError)
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not raise .*KeyError"):
        run_ranks(2, fail_everywhere, expect=KeyError)
    with pytest.raises(RankError, match="returned"):
        run_ranks(1, where, expect=ValueError)


def test_warnings_are_errors_in_the_workers() -> None:
    errors = run_ranks(1, warn, "heed me", expect=UserWarning)
    assert str(errors[0]) == "heed me"


@pytest.mark.filterwarnings("ignore:let me pass:UserWarning")
def test_a_tests_own_warning_filters_hold_in_the_workers() -> None:
    run_ranks(1, warn, "let me pass")
    run_ranks(1, warn, "not me", expect=UserWarning)


def test_what_cannot_travel_is_said() -> None:
    with pytest.raises(TypeError, match="top-level function"):
        run_ranks(1, lambda: None)
    with pytest.raises(RankError, match="pickle"):
        run_ranks(1, unpicklable)


def test_a_mesh_is_made_once_per_worker() -> None:
    assert run_ranks(2, mesh_facts) == [([0, 0], True), ([1, 0], True)]


def test_a_call_starts_clean() -> None:
    run_ranks(1, leave_a_loop)
    first = torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
    assert run_ranks(1, find_the_loop) == [(True, torch.float32, first)]


def is_found() -> bool:
    objects = gc.get_objects()
    return any(each is caches._known for each in objects) and not any(each is objects for each in objects)


def test_functions_caches_are_found_in_what_was_imported_before() -> None:
    """As `forgetful` must: collections do not look there."""
    assert run_ranks(1, is_found) == [True]


def test_close_pools_leaves_no_process() -> None:
    pids = [pid for _, _, pid in run_ranks(2, where)]
    ranks.close_pools()
    gc.collect()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# ---- groups of accelerators, of which there is none here ----


def groups_of_an_accelerator(config: str, where: str) -> None:
    """torch is made to say that the group has that backend: CUDA's, and those of devices that torch does not know."""
    group = dist.new_group(backend="gloo")
    with (
        mock.patch.object(dist, "get_backend_config", return_value=config),
        mock.patch("torch.accelerator.current_device_index", return_value=3),
    ):
        assert device_of(group) == torch.device(where)
        own, other = control_group(group), own_group(group, "table")
    assert other is group, "its own backend's"
    assert own is not group and dist.get_backend(own) == "gloo"
    assert device_of(own) == torch.device("cpu")


def test_a_process_on_the_cpu_waits_without_using_time_whatever_accelerator_is_there() -> None:
    for device in (None, torch.device("mps"), torch.device("cuda")):  # nobody has begun to use them
        with mock.patch("torch.accelerator.current_accelerator", return_value=device):
            assert not answers._spins()
    with (
        mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("xpu")),
        mock.patch("torch.xpu.is_initialized", return_value=True),
    ):
        assert answers._spins()


@pytest.mark.parametrize(
    ("config", "where"), [("cuda:nccl", "cuda:3"), ("cpu:gloo,xpu:xccl", "cpu"), ("hpu:hccl", "hpu:3")]
)
def test_small_things_of_an_accelerators_group_are_exchanged_on_the_cpu(config: str, where: str) -> None:
    run_ranks(2, groups_of_an_accelerator, config, where)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux's")
def test_a_store_whose_host_lost_its_power_or_was_stopped_is_given_up() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.PrefixStore("group", dist.TCPStore("127.0.0.1", server.port, is_master=False))
    before = _give_up_after(server.port)
    socket.setdefaulttimeout(3.0)  # then a descriptor that Python makes a socket of does not block any more
    try:
        clone = cloned(client, 7.0)
    finally:
        socket.setdefaulttimeout(None)
    added = {fd: found for fd, found in _give_up_after(server.port).items() if fd not in before}
    assert list(added.values()) == [(7000, 8)], added
    assert all(map(os.get_blocking, added))
    clone.set("key", "value")
    assert client.get("key") == b"value"


def _give_up_after(port: int) -> dict[int, tuple[int, int]]:
    """Of each connection to a port, by its descriptor: ms in which the other end may acknowledge nothing, and seconds
    in which it may say nothing; 0: long."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family != socket.AF_UNIX and one.getpeername()[1] == port:
                said = struct.unpack("@ll", one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
                found[int(name)] = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), said[0]
    return found


def test_a_look_that_fails_is_followed_by_others_until_the_store_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_IDLE_S", 0.01)
    watch = watchdog.Watchdog.__new__(watchdog.Watchdog)
    watch._failure, watch._stopped, watch._suspicious_since, watch._wake = None, False, None, threading.Event()
    found: list[Exception | None] = [KeyError("a dict of another thread's"), None, dist.DistNetworkError("reset")]
    told: list[str] = []

    def look() -> None:
        if (error := found.pop(0)) is not None:
            raise error

    def tell(error: Exception) -> None:
        told.append(type(error).__name__)
        watch._stopped = len(told) == 4

    watch._look, watch._host_is_gone = look, tell  # type: ignore[method-assign]
    watch._run()
    assert told == ["KeyError", *["DistNetworkError"] * 3] and not found
