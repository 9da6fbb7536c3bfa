"""Two shard axes: what a host has looked up is summed inside it first, so the outer axis carries the sums alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmp
from sharders.channel import Channel, GroupChannel, Purpose, Sizes, Transfer, over_connections
from sharders.embedding.engine import Engine
from tests.equality import env_of
from tests.ranks import run_ranks

BATCH, DIM, IDS = 16, 8, 32
LOCAL = 2


class Crossing(GroupChannel):
    """Counts the bytes that go to ranks of the other host: of ids, and of values."""

    ids, values = 0, 0

    def all_to_all(self, send: torch.Tensor, send_sizes: Sizes, *rest: Any, **options: Any) -> Transfer:
        if self.group is not None:
            ranks, is_ids = dist.get_process_group_ranks(self.group), send.dtype in (torch.int32, torch.int64)
            own = dist.get_rank() // LOCAL
            count = sum(n for rank, n in zip(ranks, send_sizes, strict=True) if rank // LOCAL != own)
            name = "ids" if is_ids else "values"
            setattr(Crossing, name, getattr(Crossing, name) + count * send.element_size())
        return super().all_to_all(send, send_sizes, *rest, **options)

    def all_gather(self, send: torch.Tensor) -> torch.Tensor:
        raise AssertionError("tables of a step need none")

    def sum(self, tensor: torch.Tensor) -> None:
        raise AssertionError("tables of a step need none")


def _crossing(group: dist.ProcessGroup | None, purpose: Purpose) -> Channel:
    channel = over_connections(group, purpose)
    return Crossing(channel.group) if purpose == "tables" else channel


def _bytes(layout: str) -> list[int]:
    """Bytes of values across the outer axis: forward, and backward."""
    env = env_of("host2xlocal2")
    place = dmp.table_row_wise(0) if layout == "one host" else dmp.row_wise()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Engine.__init__.__kwdefaults__, "transport", _crossing)  # type: ignore[index]
        model = dmp.DistributedModelParallel(nn.EmbeddingBag(4096, DIM, mode="sum"), env, plan={"weight": place})
    ids = torch.randint(4096, (BATCH, IDS), generator=torch.Generator().manual_seed(env.rank))
    Crossing.ids = Crossing.values = 0
    out = model(ids)
    assert Crossing.ids > 0 or layout == "one host"
    forward = Crossing.values
    out.sum().backward()
    return [forward, Crossing.values - forward]


@pytest.mark.parametrize("layout", ["all hosts", "one host"])
def test_a_host_sends_sums(layout: str) -> None:
    """To one rank of the other host each, and gradients back from it; without stages it would be as much to both."""
    sums = BATCH * DIM * 4
    for rank, told in enumerate(run_ranks(4, _bytes, layout)):
        is_owner = layout == "all hosts" or rank < LOCAL
        is_reader = layout == "all hosts" or rank >= LOCAL
        assert told == [sums * is_owner, sums * is_reader], (rank, told)
