"""Copies of weights that part: said before the first steps, and when they are saved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv, row_wise, save_checkpoint
from tests.ranks import mesh, run_ranks
from tests.test_written_inside import WIDTH, OfBatches


@contextmanager
def heard() -> Iterator[list[str]]:
    """What this rank says meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dmp").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("dmp").removeHandler(handler)


def written_by_forwards(folder: str) -> list[str]:
    """Copies on `dp`, into which each rank writes its own: what is saved is one of them."""
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    with heard() as said:
        for averages in (True, False):
            model = DistributedModelParallel(OfBatches(averages), env)
            model(torch.full((3, WIDTH), float(env.rank))).sum().backward()
            assert not said
            save_checkpoint(f"{folder}/{averages}", model)
    return said


def test_copies_that_have_drifted_are_told_when_they_are_saved(tmp_path: Path) -> None:
    of_ranks = run_ranks(2, written_by_forwards, str(tmp_path))
    assert [len(said) for said in of_ranks] == [1, 0], of_ranks
    assert of_ranks[0][0].startswith("'mean' has other values on rank 1 than on rank 0")


def _nothing(model: nn.Module) -> None:
    pass


def _drawn_anew(model: nn.Module) -> None:
    """As by `model.apply(init)`, tables too: of these each rank has the only part."""
    for p in model.parameters():
        nn.init.normal_(p)


def _on_one_rank(model: nn.Module) -> None:
    if torch.distributed.get_rank() == 1:
        model.get_submodule("module.top").bias.data.add_(1.0)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.inner, self.top = nn.EmbeddingBag(40, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.top(self.inner(self.bag(ids)).relu())


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "nothing": _nothing,
    "anew": _drawn_anew,
    "one rank": _on_one_rank,
}


def before_steps(way: str, shape: tuple[int, ...], names: tuple[str, ...]) -> list[str]:
    env = ShardingEnv.from_mesh(mesh(shape, names))
    torch.manual_seed(0)
    model = DistributedModelParallel(Bags(), env, plan={"bag.weight": row_wise()})
    torch.manual_seed(env.rank)
    WAYS[way](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with heard() as said:
        for step in range(2):
            model(torch.arange(6).view(2, 3) + step).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [text.partition(" has other values")[0] for text in said if "trained apart" in text]


@pytest.mark.parametrize(
    ("way", "shape", "names", "expected"),
    [
        ("nothing", (2, 2), ("replicate", "shard"), [[], [], [], []]),
        ("anew", (2,), ("dp",), [["'inner.weight' (and 3 more)"], []]),
        ("anew", (2,), ("shard",), [[], []]),
        ("anew", (2, 2), ("replicate", "shard"), [["'inner.weight' (and 3 more)"]] * 2 + [[], []]),
        ("one rank", (2,), ("dp",), [["'top.bias'"], []]),
    ],
)
def test_they_are_told_before_steps(
    way: str, shape: tuple[int, ...], names: tuple[str, ...], expected: list[list[str]]
) -> None:
    assert run_ranks(len(expected), before_steps, way, shape, names) == expected


def by_noisy_gradients() -> list[str]:
    """Of each rank's own: weights part in the first step, and ranks look before the second, the third, the fifth."""
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    model = DistributedModelParallel(nn.Linear(WIDTH, 2), env)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(env.rank)
    with heard() as said:
        for _ in range(6):
            model(torch.full((3, WIDTH), 1.0 + env.rank)).square().sum().backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.add_(torch.randn_like(p.grad))
            optimizer.step()
            optimizer.zero_grad()
    return said


def test_noise_of_each_rank_in_gradients() -> None:
    here, other = run_ranks(2, by_noisy_gradients)
    assert len(here) == 1 and here[0].startswith("'weight' (and 1 more) has other values on rank 1") and not other


def of_what_has_no_values() -> None:
    """A lazy layer that no forward has reached, before `init_data_parallel`."""
    module = nn.ModuleDict({"top": nn.Linear(WIDTH, 2), "later": nn.LazyLinear(2)})
    model = DistributedModelParallel(module, ShardingEnv.from_mesh(mesh((2,), ("dp",))), init_data_parallel=False)
    optimizer = torch.optim.SGD(module["top"].parameters(), lr=0.1)
    with heard() as said:
        module["top"](torch.ones(3, WIDTH)).sum().backward()
        optimizer.step()
    assert not [text for text in said if "trained apart" in text] and model.env.size == 2


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_weights_are_passed_over() -> None:
    run_ranks(2, of_what_has_no_values)


def beside_a_loss(axis: str, averages: bool) -> list[str]:
    """Its weights are trained by the model's optimizer, and lie beside the model."""
    model = DistributedModelParallel(nn.Linear(WIDTH, 2), ShardingEnv.from_mesh(mesh((2,), (axis,))))
    scales = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([{"params": model.parameters()}, {"params": [scales]}])
    x = torch.full((3, WIDTH), model.env.rank + 1.0)
    with heard() as said:
        for _ in range(5):
            ((model(x).square() * (-scales).exp()).mean() + scales.sum()).backward()
            if averages and scales.grad is not None:
                torch.distributed.all_reduce(scales.grad)
            optimizer.step()
            optimizer.zero_grad()
    return said


@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_weights_beside_the_model_that_drift_are_told(axis: str, averages: bool) -> None:
    """Each rank trained its own by its own samples, in silence."""
    of_ranks = run_ranks(2, beside_a_loss, axis, averages)
    assert [len(said) for said in of_ranks] == [0 if averages else 1, 0], of_ranks
    assert averages or of_ranks[0][0].startswith("'parameter 0 of param_groups[1] of Adam' has other values on rank 1")
