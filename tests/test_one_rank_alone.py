"""One rank evaluates, or generates, by itself: where every table is whole on every rank nobody else is needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmp
from dmp import InputError, ShardingEnv
from planner import ShardingPlanner, Topology
from tests.ranks import mesh, run_ranks

WORDS, WIDTH = 50, 16
IDS = torch.arange(12).view(3, 4)


class Words(nn.Module):
    """As many scripts have it: words, positions, layers and a head that knows the words by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(4, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layer(self.words(ids) + self.places(torch.arange(ids.shape[1]))))
        return found


class Bags(nn.Module):
    """Sums, and another's single rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.one = nn.EmbeddingBag(40, 8, mode="mean"), nn.Embedding(30, 8)
        self.top = nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.top(torch.cat([self.bag(ids), self.one(ids[:, 0])], 1))
        return found


COPIES = {"bag.weight": dmp.data_parallel(), "one.weight": dmp.data_parallel()}
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {"by default": (Words, None), "copies": (Bags, COPIES)}


def evaluates(name: str, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """Three steps; before each rank 0 alone looks at the model. The unsharded module does the same."""
    make, plan = MODELS[name]
    env = ShardingEnv.from_mesh(mesh(shape, names))
    model, plain = dmp.DistributedModelParallel(make(), env, plan=plan), make()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        if rank == 0:
            for m in (model, plain):
                m.eval()
            with torch.no_grad():
                for _ in range(step + 1):
                    torch.testing.assert_close(model(IDS), plain(IDS))
                    with pytest.raises((InputError, IndexError)):
                        model(IDS + 100)
            for m in (model, plain):
                m.train()
        batches = [(IDS + 3 * step + of) % 30 for of in range(world)]
        torch.testing.assert_close(out := model(batches[rank]), plain(batches[rank]))
        out.square().mean().backward()
        (sum(plain(batch).square().mean() for batch in batches) / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), plain(IDS))


@pytest.mark.parametrize("name", MODELS)
def test_rank_0_evaluates(name: str) -> None:
    run_ranks(2, evaluates, name, (2,), ("dp",))


def on_two_axes() -> None:
    evaluates("copies", (2, 2), ("host", "local"))


@pytest.mark.slow
def test_rank_0_evaluates_on_two_axes() -> None:
    run_ranks(4, on_two_axes)


def needs_all() -> None:
    model = dmp.DistributedModelParallel(Bags(), plan={"bag.weight": dmp.row_wise(), "one.weight": dmp.data_parallel()})
    with (
        torch.set_grad_enabled(dist.get_rank() > 0),
        pytest.raises(InputError, match=r"does not train.*data_parallel\(\)"),
    ):
        model(IDS)


def test_a_table_that_is_cut_needs_all() -> None:
    """Every rank hears why, and what to do."""
    run_ranks(2, needs_all)


def memory(gib: float) -> Topology:
    return replace(Topology.of(ShardingEnv.abstract((2,), ("dp",), "cpu")), memory_bytes=gib * 2**30)


def test_a_vocabulary_is_cut_where_its_copies_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    env = ShardingEnv.abstract((2,), ("dp",), "cpu")
    with torch.device("meta"):
        module = nn.ModuleDict({"words": nn.Embedding(1 << 17, 512), "layers": nn.Linear(8192, 8192)})
    plans = [ShardingPlanner(topology=memory(gib)).plan(module, dmp.default_sharders(), env) for gib in (16, 2.2)]
    assert plans[0]["words.weight"].layout == dmp.data_parallel()
    assert any("words.weight: copied to every rank" in note for note in plans[0].report.notes)
    assert plans[1]["words.weight"].layout != dmp.data_parallel()
    assert not any("copied to every rank" in note for note in plans[1].report.notes)
