"""Two shard axes: what a host has looked up of long bags is summed inside it first, so the outer axis carries the sums
alone; of short ones it carries the rows alone, which go straight to the ranks of the samples. Table by table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import nn

import dmp
from sharders import EmbeddingBagCollectionSharder
from sharders.channel import Channel, GroupChannel, Purpose, Sizes, Transfer, over_connections
from sharders.embedding.data_path.engine import Engine
from sharders.embedding.exchange import stages
from sharders.embedding.exchange.placement import Placement, Table
from tests.equality import attach, env_of
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


def _side_by_side(exchange: int | None, wire: torch.dtype | None) -> tuple[list[int], list[int]]:
    """Tables of bags of one id and of many, on all ranks, and one on the first rank: bytes of values across the outer
    axis, forward and backward; bags of one id of each rank's samples that have their row on each rank."""
    env = env_of("host2xlocal2")
    lengths = {"short": 1, "long": IDS, "whole": 2}
    torch.manual_seed(0)
    config = torchrec.EmbeddingBagConfig
    tables = [config(ROWS, DIM, name, feature_names=[name]) for name in lengths]
    module, plain = (torchrec.EmbeddingBagCollection(tables) for _ in range(2))
    plain.load_state_dict(module.state_dict())
    attach(module, "sgd")
    place = {"short": dmp.row_wise(), "long": dmp.row_wise(), "whole": dmp.table_wise(0)}
    plan = {f"embedding_bags.{name}.weight": layout for name, layout in place.items()}
    sharder = EmbeddingBagCollectionSharder(wire=wire)
    with pytest.MonkeyPatch.context() as patch:
        if exchange is not None:
            patch.setattr(stages, "EXCHANGE_ELEMENTS", exchange)
        patch.setitem(Engine.__init__.__kwdefaults__, "transport", _crossing)  # type: ignore[index]
        model = dmp.DistributedModelParallel(module, env, plan=plan, sharders=[sharder])
        generator = torch.Generator().manual_seed(env.rank)
        ids = [torch.randint(ROWS, (BATCH * num,), generator=generator) for num in lengths.values()]
        each = torch.tensor([*lengths.values()]).repeat_interleave(BATCH)
        batch = torchrec.KeyedJaggedTensor(list(lengths), torch.cat(ids), lengths=each)
        first, second = (model.module.begin(batch) for _ in range(2))
        Crossing.ids = Crossing.values = 0
        out = model.module.finish(first).values()
    forward = Crossing.values
    near = 1e-5 if wire is None else 0.05
    torch.testing.assert_close(out, plain(batch).values(), atol=near, rtol=near)
    out.sum().backward()
    backward = Crossing.values - forward
    plain.load_state_dict(dmp.full_state_dict(model))
    torch.testing.assert_close(model.module.finish(second).values(), plain(batch).values(), atol=near, rtol=near)
    owner = ids[0] * env.size // ROWS
    return [forward, backward], torch.bincount(owner, minlength=env.size).tolist()


@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=str)
def test_short_bags_go_straight_beside_long_ones(wire: torch.dtype | None) -> None:
    """Rows of the one, a host's sums of the other, and of the whole table what lies on its host."""
    found = run_ranks(4, _side_by_side, 0, wire)
    item = 4 if wire is None else 2
    for rank, (told, _) in enumerate(found):
        strangers = [reader for reader in range(4) if reader // LOCAL != rank // LOCAL]
        sent = sum(found[reader][1][rank] for reader in strangers) + BATCH * (1 + (rank < LOCAL))
        received = sum(found[rank][1][owner] for owner in strangers) + BATCH * (1 + (rank >= LOCAL))
        assert told == [sent * DIM * item, received * DIM * item], (rank, told)


def test_few_bytes_are_not_worth_an_exchange_more() -> None:
    for rank, (told, _) in enumerate(run_ranks(4, _side_by_side, None, None)):
        sums = BATCH * DIM * 4
        assert told == [sums * (2 + (rank < LOCAL)), sums * (2 + (rank >= LOCAL))]


def test_one_link_does_not_carry_what_a_host_would() -> None:
    """All results in one exchange are fewer bytes, but a whole table's then come by its rank's link alone."""
    env, samples = dmp.ShardingEnv.abstract((2, LOCAL), ("host", "local"), "cpu"), 1 << 20
    tables = [Table(name, ROWS, DIM, torch.float32, (name,)) for name in ("short", "whole")]
    for whole, all_go in ((dmp.table_wise(0), False), (dmp.column_wise([0, 1]), True)):
        placement = Placement(tables, [dmp.row_wise(), whole], env)
        segments = [[None if slot.table else slot.row_block for slot in slots] for slots in placement.slots]
        staged = stages.TwoStages(placement, 2, LOCAL, segments)
        assert staged.settle([samples // 4] * 4, samples, 0.7) == (all_go, [0])
