"""`TrainPipeline` against the plain loop: the same weights to the bit, however batches end, fail and change.

Ranks of one host share memory, through which ids come with their headers, and nothing is begun ahead. So models here
exchange over connections, but for those that are said to be near.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import dmp
from dmp import DistributedModelParallel, TrainPipeline
from dmp.pipeline.in_flight import to_device
from sharders.channel import Transport, over_connections, over_group
from sharders.embedding.data_path.engine import Engine
from tests.equality import attach, env_of, layouts_for
from tests.ranks import run_ranks

ROWS, DIM = 40, 8


@dataclass
class Batch:
    """Ids of two features, and what is to be learned."""

    ids: torch.Tensor
    more: dict[str, torch.Tensor]
    dense: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.ids.to(device), {k: v.to(device) for k, v in self.more.items()}, self.dense.to(device))


class Net(nn.Module):
    """Two tables whose input is the batch's, one whose input is made here, one that is read twice; dense layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.EmbeddingBag(ROWS, DIM, mode="sum"), nn.Embedding(ROWS, DIM)
        self.made, self.twice = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
        self.over = nn.Sequential(nn.Linear(5 * DIM + 2, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch.more["ids"]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.training):
            rows = [self.first(batch.ids), self.second(ids), self.made((ids * 7 + 1) % ROWS)]
        rows += [self.twice(ids), self.twice(batch.more["others"])]
        logits = self.over(torch.cat([*rows, batch.dense], 1)).squeeze(1)
        return ((logits - batch.dense[:, 0]) ** 2), logits.detach()


def batches_of(rank: int, count: int, last: int = 3) -> list[Batch]:
    """The last one is short."""
    made = []
    for i in range(count):
        g = torch.Generator().manual_seed(100 * rank + i)
        size = 6 if i + 1 < count else last
        draw = [torch.randint(0, ROWS, shape, generator=g) for shape in ((size, 4), (size,), (size,))]
        more = {"ids": draw[1], "others": draw[2]}
        made.append(Batch(draw[0], more, torch.rand(size, 2, generator=g)))
    return made


@contextmanager
def exchanging(transport: Transport) -> Iterator[None]:
    """Tables that are sharded meanwhile exchange by it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Engine.__init__.__kwdefaults__, "transport", transport)  # type: ignore[index]
        yield


def wrapped(
    mesh: str, layout: str, kind: type[Net] = Net, is_near: bool = False
) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    env, net = env_of(mesh), kind()
    attach(net.first, "adagrad")
    attach(net.twice, "rowwise_adagrad")
    place = layouts_for(env)[layout]
    names = [f"{name}.weight" for name in ("first", "second", "made", "twice")]
    plan = {name: place(i, (ROWS, DIM), env) for i, name in enumerate(names)}
    with exchanging(over_group if is_near else over_connections):
        model = DistributedModelParallel(net, env=env, plan=plan)
    dense = [p for name, p in model.named_parameters() if name not in ("first.weight", "twice.weight")]
    return model, torch.optim.AdamW(dense, lr=0.05)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> list[torch.Tensor]:
    outputs = []
    for batch in batches:
        optimizer.zero_grad()
        losses, output = model(batch)
        losses.sum(0).backward()
        optimizer.step()
        outputs.append(output)
    return outputs


def same(mine: nn.Module, other: nn.Module) -> bool:
    states = dmp.full_state_dict(mine), dmp.full_state_dict(other)
    return list(states[0]) == list(states[1]) and all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def _as_the_plain_loop(mesh: str, layout: str, counts: tuple[int, ...], is_near: bool = False) -> None:
    model, optimizer = wrapped(mesh, layout, is_near=is_near)
    other, its = wrapped(mesh, layout, is_near=is_near)
    pipeline = TrainPipeline(model, optimizer)
    rank = model.env.table_rank if "tp" not in mesh else 0
    for epoch, count in enumerate(counts):
        batches = batches_of(10 * epoch + rank, count)
        torch.manual_seed(epoch)
        expected = plain(other, its, batches)
        torch.manual_seed(epoch)
        outputs = list(pipeline(batches))
        assert len(outputs) == count and all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert same(model, other)


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [("dp2", "mixed"), ("dp2", "row_wise"), ("dp2", "table_wise"), ("tp2", "row_wise"), ("replicate2", "row_wise")],
)
@pytest.mark.sampled(8)
def test_as_the_plain_loop(mesh: str, layout: str) -> None:
    run_ranks(2, _as_the_plain_loop, mesh, layout, (0, 1, 2, 3, 5))


@pytest.mark.parametrize(("mesh", "layout"), [("dp2", "mixed"), ("tp2", "row_wise")])
@pytest.mark.sampled(2)
def test_as_the_plain_loop_where_ranks_are_near(mesh: str, layout: str) -> None:
    run_ranks(2, _as_the_plain_loop, mesh, layout, (0, 1, 2, 5), True)


@pytest.mark.parametrize(
    ("mesh", "layout"), [("dp4", "mixed"), ("replicate2xshard2", "row_wise"), ("shard2xtp2", "table_wise")]
)
@pytest.mark.sampled(3)
def test_as_the_plain_loop_on_four_ranks(mesh: str, layout: str) -> None:
    """The second shards the dense weights too, by FSDP2."""
    run_ranks(4, _as_the_plain_loop, mesh, layout, (1, 4))


def test_as_the_plain_loop_in_one_process() -> None:
    run_ranks(1, _as_the_plain_loop, "single", "row_wise", (0, 1, 2, 3, 5))


class Counted:
    """What is begun and finished in a model, in order: "+first" for begun, "-first" for finished."""

    def __init__(self, model: DistributedModelParallel, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        kind = type(model.sharded_modules["first"])
        begin, finish = kind.begin, kind.finish

        def begun(module: Any, *args: Any, **keywords: Any) -> Any:
            self.seen.append(f"+{module.module_path}")
            return begin(module, *args, **keywords)

        def finished(module: Any, call: Any) -> Any:
            self.seen.append(f"-{module.module_path}")
            return finish(module, call)

        patch.setattr(kind.__mro__[1], "begin", begun)
        patch.setattr(kind.__mro__[1], "finish", finished)

    def take(self) -> str:
        taken, self.seen = " ".join(self.seen), []
        return taken


WHOLE = "+first -first +second -second +made -made +twice -twice +twice -twice"
AHEAD = "+first +second +twice +twice"
BEGUN = "-first -second +made -made -twice -twice"


def _order(kind: str) -> tuple[list[str], list[str]]:
    model, optimizer = wrapped("dp2", "row_wise", is_near=kind == "near")
    pipeline = (dmp.TrainPipelineBase if kind == "base" else TrainPipeline)(model, optimizer, torch.device("cpu"))
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dmp").addHandler(handler)
    iterator = iter(batches_of(model.env.rank, 4))
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(model, patch)
        for _ in range(4):
            pipeline.progress(iterator)
            seen.append(counted.take())
    logging.getLogger("dmp").removeHandler(handler)
    assert "forward" not in vars(model.sharded_modules["first"])
    return seen, told


def test_ids_of_the_next_batch_are_sent_before_the_forward() -> None:
    for seen, told in run_ranks(2, _order, "ahead"):
        assert seen == [f"{WHOLE} {AHEAD}", f"{AHEAD} {BEGUN}", f"{AHEAD} {BEGUN}", BEGUN], seen
        assert len(told) == 1 and told[0].startswith("pipeline: made: its input is made"), told


@pytest.mark.parametrize("kind", ["base", "near"])
def test_nothing_is_begun_ahead_where_nothing_travels(kind: str) -> None:
    """Or where nobody wants it."""
    for seen, told in run_ranks(2, _order, kind):
        assert (seen, told) == ([WHOLE] * 4, [])


def test_what_is_on_the_device_stays_as_it_is() -> None:
    """Types of torch and TorchRec; another's `to` is called, for it may do more."""
    from torchrec import KeyedJaggedTensor

    keyed = KeyedJaggedTensor.from_lengths_sync(["a"], torch.tensor([1, 2]), torch.tensor([1, 1]))
    own = batches_of(0, 1)[0]
    moved, _ = to_device({"keyed": keyed, "own": own, "none": None}, torch.device("cpu"))
    assert moved["keyed"] is keyed and moved["own"] is not own
    on_meta, _ = to_device(keyed, torch.device("meta"))
    assert on_meta is not keyed and on_meta.values().device.type == "meta"
