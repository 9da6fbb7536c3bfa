"""Two shard axes: what a host has looked up of long bags is summed inside it first, so the outer axis carries the sums
alone; of short ones it carries the rows alone, which go straight to the ranks of the samples."""

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

ROWS, BATCH, DIM, IDS = 4096, 16, 8, 32
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


def _bytes(layout: str, num_ids: int) -> tuple[list[int], list[int]]:
    """Bytes of values across the outer axis: forward, and backward. Bags that have rows on each rank."""
    env = env_of("host2xlocal2")
    place = dmp.table_row_wise(0) if layout == "one host" else dmp.row_wise()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Engine.__init__.__kwdefaults__, "transport", _crossing)  # type: ignore[index]
        model = dmp.DistributedModelParallel(nn.EmbeddingBag(ROWS, DIM, mode="sum"), env, plan={"weight": place})
    ids = torch.randint(ROWS, (BATCH, num_ids), generator=torch.Generator().manual_seed(env.rank))
    Crossing.ids = Crossing.values = 0
    out = model(ids)
    assert Crossing.ids > 0 or layout == "one host"
    forward = Crossing.values
    out.sum().backward()
    owner = ids * (LOCAL if layout == "one host" else env.size) // ROWS
    with_rows = [int((owner == rank).any(1).sum()) for rank in range(env.size)]
    return [forward, Crossing.values - forward], with_rows


@pytest.mark.parametrize("layout", ["all hosts", "one host"])
def test_a_host_sends_sums(layout: str) -> None:
    """To one rank of the other host each, and gradients back from it; without stages it would be as much to both."""
    sums = BATCH * DIM * 4
    for rank, (told, _) in enumerate(run_ranks(4, _bytes, layout, IDS)):
        is_owner = layout == "all hosts" or rank < LOCAL
        is_reader = layout == "all hosts" or rank >= LOCAL
        assert told == [sums * is_owner, sums * is_reader], (rank, told)


@pytest.mark.parametrize(("layout", "num_ids"), [("all hosts", 1), ("all hosts", 2), ("one host", 1)])
def test_short_bags_send_rows(layout: str, num_ids: int) -> None:
    """To the ranks of the samples, and gradients back: a row block's sum of each bag that has ids there, and no more
    than hosts' sums of all bags."""
    found = run_ranks(4, _bytes, layout, num_ids)
    for rank, (told, _) in enumerate(found):
        strangers = [reader for reader in range(4) if reader // LOCAL != rank // LOCAL]
        sent = sum(found[reader][1][rank] for reader in strangers)
        received = sum(found[rank][1][owner] for owner in strangers)
        assert told == [sent * DIM * 4, received * DIM * 4], (rank, told)
        assert received <= BATCH
    assert sum(told[0] for told, _ in found) <= 4 * BATCH * DIM * 4 // (2 if num_ids == 1 else 1)
