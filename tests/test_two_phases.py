"""Two phases of a call: ids of the next batch are sent before the present one's backward, and counts are read once."""

from __future__ import annotations

import copy
from functools import cache, partialmethod
from itertools import groupby, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dmp
from dmp import InputError, ShardError
from dmp.wrap.optimizers.repeated_samples import FORWARDS
from sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from sharders.channel import GroupChannel, over_group
from sharders.embedding.data_path import engine, path, pooled
from sharders.embedding.data_path.engine import Engine
from sharders.embedding.data_path.way import Way
from sharders.embedding.ids import header, input_dist
from sharders.embedding.ids.header import Handshake, Header
from sharders.embedding.lookup.torch_kernel import TorchLookup
from tests.equality import (
    attach,
    compare_state,
    env_of,
    layouts_for,
    loss_of,
    make_batch,
    make_module,
    same_result,
    unsharded,
)
from tests.exchanges import Exchanges
from tests.ranks import run_ranks

STEPS = 3


def wrapped(kind: str, layout: str, optimizer: str | None = "adagrad", **options: Any) -> dmp.DistributedModelParallel:
    env, module = env_of("dp2"), make_module(kind)
    attach(module, optimizer)
    place = layouts_for(env)[layout]
    plan = {name: place(i, tuple(p.shape), env) for i, (name, p) in enumerate(module.named_parameters())}
    return dmp.DistributedModelParallel(module, env=env, plan=plan, **options)


def _pipelined(kind: str, layout: str) -> int:
    """Begins each batch before the backward of the one before it; collectives of all steps."""
    model = wrapped(kind, layout)
    rank, tables = model.env.rank, model.module
    taken = unsharded(kind, "adagrad", 2, STEPS, None)[1:]
    with Exchanges() as counter:
        call = tables.begin(*make_batch(kind, rank, 0))
        for step, expected in enumerate(taken):
            out = tables.finish(call)
            if step + 1 < STEPS:
                call = tables.begin(*make_batch(kind, rank, step + 1))
            if expected.outs[rank] is not None:
                same_result(out, expected.outs[rank])
            loss_of(out).backward()
            compare_state(model, expected, {})
    return counter.get_total_counts()


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")  # the counter puts hooks on every module
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("layout", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("kind", ["ebc", "ec", "ebc_weighted_vbe"])
@pytest.mark.sampled(4)
def test_ids_travel_while_the_batch_before_computes(kind: str, layout: str) -> None:
    forward = 3 if kind.endswith("vbe") else 2  # headers with ids, the batch sizes of the features; results
    assert run_ranks(2, _pipelined, kind, layout) == [STEPS * (forward + 1)] * 2  # as one batch after the other


def _between_the_phases() -> list[str]:
    model = wrapped("embedding", "row_wise", None)
    tables, ids = model.module, torch.tensor([1, 5])
    first = tables.begin(ids)
    told = []
    with pytest.raises(InputError) as error:  # of the second call; the first goes on
        tables.begin(torch.tensor([1, 99 if model.env.rank == 0 else 2]))
    told.append(str(error.value))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    assert tables.finish(first).eq(3.0).all()  # weights as they are now
    dropped = tables.begin(ids)
    of_copy, call = copy.deepcopy(tables), tables.begin(ids)
    with pytest.raises(ShardError) as other:
        of_copy.finish(call)
    told.append(str(other.value))
    tables.finish(call)
    moved = tables.begin(ids)
    tables.double()
    with pytest.raises(ShardError):
        tables.finish(moved)
    del dropped, moved
    assert tables(ids).dtype == torch.float64
    return told


def test_what_may_lie_between_the_phases() -> None:
    for of_batch, of_copy in run_ranks(2, _between_the_phases):
        assert "rank 0" in of_batch and "id 99" in of_batch, of_batch
        assert "has not begun" in of_copy, of_copy


class Reads(TorchDispatchMode):
    """Counts what waits for a device: numbers that are read from tensors, and results whose size only it knows."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.num += name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero")
        return func(*args, **(kwargs or {}))


def _reads(kind: str, layout: str) -> tuple[int, int]:
    batch = make_batch(kind, 0, 0)
    lists, given = [], torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        lists.append(tensor.shape)
        return given(tensor)

    with pytest.MonkeyPatch.context() as patch:
        # as on a device: what is compiled for CPUs reads their memory, and so do headers with payloads behind them
        for of, name in product((engine, header, input_dist), ("may_run", "go_along")):
            patch.setattr(of, name, lambda *_: False, raising=False)
        model = wrapped(kind, layout)
        for _ in range(FORWARDS):  # past which nobody looks whether ranks have samples of their own
            model(*batch)
        patch.setattr(torch.Tensor, "tolist", tolist)
        with Reads() as forward:
            loss = loss_of(model(*batch))
        of_forward = forward.num + len(lists)
        with Reads() as backward:
            loss.backward()
    return of_forward, backward.num + len(lists) - (of_forward - forward.num)


@pytest.mark.parametrize(("layout", "expected"), [("table_wise", 4), ("row_wise", 5)])
@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_counts_are_read_once(kind: str, layout: str, expected: int) -> None:
    """Those of the batch, of its ids' extremes, of row blocks where there are several, headers, and what came."""
    assert run_ranks(2, _reads, kind, layout) == [(expected, 0)] * 2


def _sizes_per_feature() -> list[tuple[int, ...]]:
    env = env_of("dp2")
    channel = over_group(env.group(), "headers")
    handshake = Handshake("content", ["a", "b"], channel, [0, 1], [0, 1], [])
    sizes = ((3,), (2, 5))[env.rank]
    with dmp.ranks.entry("the double", channel.group) as here:
        mine = [Header(sizes, 0, False, False, False, 0, None)] * 2
        return [header.batch_sizes for header in handshake.exchange(mine, torch.device("cpu"), here)[0]]


def test_a_header_may_have_a_batch_size_for_each_feature() -> None:
    assert run_ranks(2, _sizes_per_feature) == [[(3, 3), (2, 5)]] * 2


def _ordered(kind: str, layout: str) -> list[str]:
    """What happens in the forward, and what the update is given."""
    told: list[str] = []

    class Telling(GroupChannel):
        def all_to_all(self, *args: Any, **options: Any) -> Any:
            transfer = super().all_to_all(*args, **options)
            told.append("sent")
            first = cache(lambda: told.append("awaited"))
            return SimpleNamespace(
                wait=lambda: (first(), transfer.wait())[1],
                part=lambda rank: (first(), transfer.part(rank))[1],
                end=transfer.end,
            )

    def order(*args: Any) -> str:
        told.append("in order")
        return "the order"

    given = {name: getattr(TorchLookup, name) for name in ("update_pooled", "update_rows")}

    def update(name: str, *args: Any, order: Any) -> None:
        told.append(f"updated by {order}")
        given[name](*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Engine.__init__.__kwdefaults__, "transport", lambda group, purpose: Telling(group))  # type: ignore[index]
        for name in given:
            patch.setattr(
                TorchLookup, name, partialmethod(lambda of, *a, name, **k: update(name, of, *a, **k), name=name)
            )
            patch.setattr(TorchLookup, name.replace("update", "order"), order)
        model = wrapped(
            kind,
            layout,
            sharders=[EmbeddingBagCollectionSharder(kernel="torch"), EmbeddingCollectionSharder(kernel="torch")],
        )
        loss = loss_of(model(*make_batch(kind, model.env.rank, 0)))
        loss.backward()
        before = list(told)
        with torch.no_grad():
            model(*make_batch(kind, model.env.rank, 0))
    assert "in order" not in told[len(before) :]
    return before


@pytest.mark.parametrize("layout", ["table_wise", "row_wise"])
@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_ids_are_put_in_order_while_results_travel(kind: str, layout: str) -> None:
    expected = ["sent", "awaited", "sent", "awaited", "sent", "in order", "awaited", "sent", "awaited"]
    for told in run_ranks(2, _ordered, kind, layout):  # tables of several widths have several orders
        assert [what for what, _ in groupby(told)] == [*expected, "updated by the order"]


def _apart() -> list[str]:
    """In a backward whose sums of copied tables have an exchange of their own."""
    told: list[str] = []
    alone, send_back = path.exchange_alone, Way.send_back

    def begun(*args: Any) -> Any:
        end = alone(*args)
        told.append("sums begun")
        return lambda: (told.append("sums awaited"), end())[1]

    def sent(*args: Any) -> Any:
        come = send_back(*args)
        return lambda: (told.append("gradients awaited"), come())[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooled, "APART_BYTES", 0)
        patch.setattr(path, "exchange_alone", begun)
        patch.setattr(Way, "send_back", sent)
        loss_of(wrapped("ebc", "mixed")(*make_batch("ebc", 0, 0))).backward()
    return told


def test_sums_of_copies_travel_while_gradients_do() -> None:
    expected = ["sums begun", "gradients awaited", "sums awaited"]
    assert run_ranks(2, _apart) == [expected] * 2
