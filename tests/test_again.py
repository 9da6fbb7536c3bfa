"""A process group that is ended and made again in one process, and a model wrapped in each."""

from __future__ import annotations

import copy
import gc
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv, full_state_dict, latest, save_checkpoint
from dmp.ranks import call_log, launch
from sharders.channel import over_group
from sharders.shared_memory.memory_channel import MemoryChannel
from tests.ranks import run_apart, run_ranks


def trains(env: ShardingEnv | None = None) -> None:
    model = nn.Sequential(nn.EmbeddingBag(16, 8), nn.Linear(8, 1))
    plain = copy.deepcopy(model)
    wrapped = DistributedModelParallel(model, env)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (wrapped, plain)]
    for step in range(2):
        x = torch.randint(0, 16, (4, 3), generator=torch.Generator().manual_seed(step))
        for m, given in ((wrapped, x.chunk(2)[dist.get_rank()]), (plain, x)):
            m(given).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in full_state_dict(wrapped).items():
        torch.testing.assert_close(value, plain.state_dict()[name])


def meet(store: Any, where: str) -> None:
    store.add(where, 1)
    while store.add(where, 0) < 2:
        time.sleep(0.01)


def open_here() -> tuple[int, int]:
    """Files and threads of this process, without what waits to be collected."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def one_after_the_other(is_same: bool) -> list[tuple[int, int]]:
    """Of one store, what torch would connect to is removed before: it reads addresses of the group before by chance."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    found = []
    for turn in range(3):
        trains()
        found.append(open_here())
        dist.destroy_process_group()
        meet(store, f"ended {turn}")
        if rank == 0 and is_same:
            for key in store.list_keys():
                if "//cpu//" in key:
                    store.delete_key(key)
        meet(store, f"removed {turn}")
        given = store if is_same else dist.PrefixStore(f"group {turn}", store)
        dist.init_process_group("gloo", store=given, rank=rank, world_size=2)
    trains()
    return [*found, open_here()]


@pytest.mark.parametrize("is_same", [True, False], ids=["one store", "a store each"])
def test_a_group_made_again_trains(is_same: bool) -> None:
    """Connections of our own, and their threads, end with it; a store each is another connection."""
    for first, second, *_, last in run_apart(2, one_after_the_other, is_same):
        assert last[0] <= second[0] and last[1] <= second[1] + 1, (first, second, last)


def in_groups_of_ones_own() -> list[tuple[int, int]]:
    found = []
    for _ in range(4):
        group = dist.new_group([0, 1])
        trains(ShardingEnv.from_process_group(group))
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        found.append(open_here())
    return found


def test_groups_that_a_program_makes_and_destroys() -> None:
    """Each is the one that its model is wrapped in, though its mesh equals that of the one before; nothing is left."""
    for _, second, *_, last in run_ranks(2, in_groups_of_ones_own):
        assert last[0] <= second[0] and last[1] <= second[1], (second, last)


def without_a_name(path: str) -> list[bool]:
    """Steps and saves in the background at once; whether exchanges of each kind have their own group or channel."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(store=dist.PrefixStore("without a name", store), rank=rank, world_size=2)
    assert dist.get_backend() == "undefined"
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    model = DistributedModelParallel(nn.Sequential(nn.EmbeddingBag(16, 8), nn.Linear(8, 1)), env)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.tensor([[1, 2], [3, 4]])).sum().backward()
        optimizer.step()
        saving = save_checkpoint(f"{path}/{step}", model, optimizer, asynchronous=True)
    assert saving is not None
    saving.wait()
    own = {purpose for _, purpose in call_log.own_groups}
    return [{"control", "background"} <= own, isinstance(over_group(env.table_group, "tables"), MemoryChannel)]


def test_a_group_whose_backend_nobody_has_named(tmp_path: Path) -> None:
    """`init_process_group()`, or a mesh that makes the group: saves in the background met the steps in one group of
    gloo's, and both stood still."""
    assert run_apart(2, without_a_name, str(tmp_path)) == [[True, True]] * 2


def ends_with_a_save_under_way(path: str) -> bool:
    model = DistributedModelParallel(nn.Sequential(nn.EmbeddingBag(2000, 64), nn.Linear(64, 1)))
    save_checkpoint(path, model, asynchronous=True)
    dist.destroy_process_group()
    return latest(os.path.dirname(path)) is not None


def test_groups_end_after_the_save_that_runs(tmp_path: Path) -> None:
    """It was lost, in silence, where a script had destroy_process_group() for its last line."""
    assert run_apart(2, ends_with_a_save_under_way, str(tmp_path / "last")) == [True, True]


def lives() -> list[int]:
    """Processes that torchrun's agent has started again: how many addresses are in its store after each life."""
    store, rank, found = dist.distributed_c10d._get_default_store(), dist.get_rank(), []
    if rank == 0:
        of_agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set("port", str(of_agent.port))
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.get("port").decode()}
    for life in ("0", "1"):
        dist.destroy_process_group()
        given |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": life}
        with mock.patch.dict(os.environ, given):
            trains()
        meet(store, f"life {life}")
        if rank == 0:
            found.append(sum("//cpu//" in key for key in of_agent.list_keys()))
        meet(store, f"counted {life}")
    return found


def test_a_life_reads_no_addresses_of_the_one_before() -> None:
    """torch does, by chance."""
    first, second = run_apart(2, lives)[0]
    assert second == 2 * first


def test_restarts_in_one_store_are_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    told = {"WORLD_SIZE": "2", "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    with (
        mock.patch.dict(os.environ, told),
        mock.patch("torch.distributed.is_initialized", return_value=True),
        mock.patch("dmp.ranks.launch.backend_of", return_value="gloo"),
    ):
        launch.join_launch(None)
        launch.join_launch(None)
    (said,) = (record.message for record in caplog.records)
    assert "up to 3 times" in said and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in said
