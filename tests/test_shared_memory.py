"""When ranks share memory, and when not: all of them do the same, and what was not to be had is said."""

from __future__ import annotations

import errno
import gc
import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dmp import DistributedModelParallel, RanksError, ShardError, ShardingEnv, row_wise
from dmp.ranks import PeerLost, say_once
from sharders.channel import GroupChannel, over_connections
from sharders.shared_memory import mapping, opening, waiting
from sharders.shared_memory.memory_channel import MemoryChannel
from sharders.shared_memory.segment import SLOTS
from tests.ranks import mesh, run_ranks
from tests.test_survival import mortal_ranks

SAID = "tables are exchanged through connections instead of shared memory: "


def _open() -> MemoryChannel | None:
    group = dist.group.WORLD
    return opening.memory_channel(group, "tests", lambda: over_connections(group, "tables"))


def _full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _forbidden(path: str, **_: object) -> int:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def _troubles(rank: int) -> dict[str, Callable[[], object]]:
    """What goes wrong, on rank 1 alone where nothing else is said."""
    own_host = mock.patch.object(opening, "_host", return_value=(f"host {rank}", ""))
    other = mock.patch.object(opening, "attach", lambda pid, fd, size: mapping.make(size)[0])
    return {
        "DMP_SHARED_MEMORY=0": lambda: mock.patch.dict(os.environ, DMP_SHARED_MEMORY="0"),
        "No space left on device": lambda: mock.patch.object(os, "memfd_create", _full),
        "shared memory": lambda: mock.patch.object(mapping, "_SHARED_NO_RESERVE", 0),
        "rank 1: [Errno 28] No space left": lambda: mock.patch.object(opening, "attach", _full),
        "as seen from here, is not rank 0": lambda: other,
        "this is aarch64": lambda: mock.patch.object(platform, "machine", return_value="aarch64"),
        "Permission denied: '/proc/self/ns/pid'": lambda: mock.patch.object(os, "stat", _forbidden),
        "on different hosts": lambda: own_host,
    }


def _not_to_be_had(why: str, is_forced: bool) -> list[str]:
    say_once.cache_clear()
    rank = dist.get_rank()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dmp").addHandler(handler)
    is_here = rank == 1 or why == "on different hosts"
    try:
        with _troubles(rank)[why]() if is_here else mock.patch.dict(os.environ):  # type: ignore[attr-defined]
            if is_forced and not (rank == 1 and "DMP" in why):
                os.environ["DMP_SHARED_MEMORY"] = "1"
            try:
                assert [_open(), _open()] == [None, None]
            finally:
                os.environ.pop("DMP_SHARED_MEMORY", None)
    finally:
        logging.getLogger("dmp").removeHandler(handler)
    return said


WHYS = list(_troubles(0))


@pytest.mark.parametrize("why", WHYS)
def test_where_one_rank_cannot_none_does(why: str) -> None:
    first, second = run_ranks(2, _not_to_be_had, why, False)
    assert second == []
    if why == "on different hosts":
        assert first == []
    else:
        assert len(first) == 1 and first[0].startswith(SAID) and why in first[0]


@pytest.mark.parametrize("why", [WHYS[0], "on different hosts"])
def test_it_may_be_forced(why: str) -> None:
    for error in run_ranks(2, _not_to_be_had, why, True, expect=ShardError):
        assert f"DMP_SHARED_MEMORY=1, and ranks cannot share memory: {'they are ' * (why == WHYS[-1])}{why}" in str(
            error
        )


def _nothing_left() -> None:
    """No file and no open descriptor; addresses are given back with the channel, and with the last tensor in it."""
    before, fds = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:dmp")

    gc.collect()
    others = mapped()
    channel = _open()
    assert channel is not None
    assert set(os.listdir("/dev/shm")) == before and len(os.listdir("/proc/self/fd")) <= fds + 1  # the other's process
    assert mapped() == others + 2
    kept = channel.empty(3, torch.float32, torch.device("cpu")).fill_(7.0)
    channel.sum(torch.ones(3))
    del channel
    gc.collect()
    assert mapped() == others + 1 and kept.tolist() == [7.0] * 3
    del kept
    gc.collect()
    assert mapped() == others


def test_nothing_of_it_is_left() -> None:
    run_ranks(2, _nothing_left)


def _sent_elsewhere() -> None:
    """A rank that takes what was not meant for it is told; a process that was forked has no say in it."""
    channel = _open()
    assert channel is not None
    me = channel.rank
    transfer = channel.all_to_all(torch.arange(4), [2, 2], [2, 2])
    with mock.patch.object(os, "getpid", return_value=0):
        channel.let_go(1)
    assert channel._mine.done[1] == 0
    assert transfer.wait().tolist() == [2 * me, 2 * me + 1] * 2
    transfer = channel.all_to_all(torch.arange(4.0 + (not me)), [2, 2] if me else [2, 3], [2, 2])
    if me:
        with pytest.raises(
            RanksError, match="the ranks are not in the same exchange: rank 0 sends 12 bytes in an all-"
        ):
            transfer.wait()
    else:
        transfer.wait()


def _growing() -> None:
    """Sizes that grow slowly, and small ones between: no more memory is held than a few of the largest."""
    channel = _open()
    assert channel is not None
    largest = 1 << 20

    def held() -> int:
        """Bytes of this rank's segment that the system has."""
        lines = Path("/proc/self/smaps").read_text().partition(f"{channel._mine.address:x}-")[2].splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Rss:")).split()[1])

    size = largest // 64
    while size <= largest:
        filled = torch.full((2 * size,), 7, dtype=torch.uint8)
        for each in (filled, filled[:4]):
            half = len(each) // 2
            assert channel.all_to_all(each, [half, half], [half, half]).wait().unique().tolist() == [7]
        dist.barrier()
        size += size // 4
    assert len(channel._pool._blocks) < 40 and held() < 3 * largest


def test_sizes_may_grow() -> None:
    run_ranks(2, _growing)


def _used_after_fork() -> int:
    """A forked process that exchanges in its parent's place would be taken for it; 0 where it is told so."""
    channel = _open()
    assert channel is not None
    pid = os.fork()
    if not pid:
        try:
            channel.all_to_all(torch.zeros(2), [1, 1], [1, 1])
        except RanksError as error:
            os._exit(not ("was forked from rank" in str(error) and channel._mine.published.value == 0))
        os._exit(2)
    _, status = os.waitpid(pid, 0)
    channel.sum(torch.ones(1))
    return status


def test_a_forked_process_does_not_exchange() -> None:
    assert run_ranks(2, _used_after_fork) == [0, 0]


def _groups_in_turns(folder: Path) -> list[int]:
    """Mapped segments after groups that were made, used and destroyed one after the other; nothing is collected, and
    models are kept."""
    gc.disable()
    found, rank, kept = [], dist.get_rank(), []
    for i in range(4):
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/{i}", rank=rank, world_size=2)
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        model = DistributedModelParallel(nn.EmbeddingBag(16, 4, mode="sum"), env, plan={"weight": row_wise()})
        model(torch.tensor([[1, 2]])).sum().backward()
        found.append(Path("/proc/self/maps").read_text().count("memfd:dmp"))
        kept.append(model)
        dist.barrier()
    with pytest.raises(RanksError, match="was destroyed: wrap the module again"):
        kept[0](torch.tensor([[1, 2]]))
    dist.barrier()
    return found


@pytest.mark.slow
def test_memory_goes_with_the_group(tmp_path: Path) -> None:
    for found in mortal_ranks(2, _groups_in_turns, tmp_path):
        assert found[0] > 0 and len(set(found)) == 1, found


def _crowded() -> None:
    """One that is as far ahead as it may be is told when it may go on: it does not look up meanwhile."""
    channel = _open()
    assert channel is not None
    waiting._look.seconds = 3600
    try:
        for step in range(3 * SLOTS):
            transfer = channel.all_to_all(torch.tensor([step, step]), [1, 1], [1, 1])
            if channel.rank or step % 97 == 0:
                assert transfer.wait().tolist() == [step, step]
    finally:
        waiting._look.seconds = 0
    dist.barrier()


def test_a_rank_that_is_far_ahead_is_woken() -> None:
    run_ranks(2, _crowded)


def _awaited() -> str:
    channel = _open()
    assert channel is not None
    if channel.rank:
        dist.barrier()
        return ""
    with mock.patch.object(waiting, "_TIMEOUT_S", 0.2), pytest.raises(RuntimeError) as error:
        channel.sum(torch.ones(1))
    dist.barrier()
    return str(error.value)


@pytest.mark.slow
def test_a_rank_that_never_comes() -> None:
    assert run_ranks(2, _awaited)[0] == "timed out: rank 1, whose process lives, has sent nothing for 0.2 s"


def test_sizes_that_do_not_fit_are_named() -> None:
    run_ranks(2, _sent_elsewhere)


def _killed(victims: list[int], after_s: float) -> str:
    """Train until a signal, or what the others are told."""
    env = ShardingEnv.from_mesh(mesh((dist.get_world_size(),)))
    model = DistributedModelParallel(nn.EmbeddingBag(4096, 64, mode="sum"), env, plan={"weight": row_wise()})
    if env.rank in victims:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    generator = torch.Generator().manual_seed(env.rank)
    try:
        while True:
            batch_size = int(torch.randint(1, 2048, (), generator=generator))
            model(torch.randint(4096, (batch_size, 3), generator=generator)).sum().backward()
    except PeerLost as error:
        time.sleep(2.0)  # a program that ends would be another end
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 0.21, 0.43])
@pytest.mark.parametrize(("size", "victims"), [(2, [0]), (2, [1]), (4, [2]), (4, [0, 1, 2, 3])])
def test_ranks_killed_at_any_moment(size: int, victims: list[int], after_s: float) -> None:
    """The others are told which; nothing is left."""
    before = set(os.listdir("/dev/shm"))
    for rank, told in enumerate(mortal_ranks(size, _killed, victims, after_s)):
        assert ("exit code -9" if rank in victims else f"rank {victims[0]} is gone") in told, told
    assert set(os.listdir("/dev/shm")) <= before


def test_one_process_has_a_channel_of_its_own() -> None:
    assert isinstance(over_connections(None, "tables"), GroupChannel)


@pytest.mark.parametrize(
    ("cores", "told", "looks"), [(2, "2", True), (2, "4", False), (1, "2", False), (4, "", True), (1.5, "", False)]
)
def test_a_wait_looks_only_where_every_rank_has_a_core(cores: float, told: str, looks: bool) -> None:
    with (
        mock.patch.object(waiting, "cores", return_value=cores),
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=told),
        mock.patch.object(dist, "get_world_size", return_value=2),
    ):
        looking = waiting.Looking(2)
        assert bool(looking.seconds()) == looks


def test_after_looks_in_vain_waits_sleep_at_once() -> None:
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"),
        mock.patch.object(waiting, "cores", return_value=1),
    ):
        looking = waiting.Looking(1)
    at_once = []
    for _ in range(8):
        looking.was_in_vain(True)
        at_once.append(next(n for n in range(100) if looking.seconds()))
    assert at_once == [1, 2, 4, 8, 16, 32, 64, 64]
    looking.was_in_vain(False)
    assert all(looking.seconds() for _ in range(3))
