"""What passes under `no_sync` have accumulated: cleared by `zero_grad`, and no step without its average."""

from __future__ import annotations

import logging

import pytest
import torch

from dmp import ShardError
from tests.ranks import run_ranks
from tests.test_asked import Said
from tests.test_unreached import branches, differences, made


def cleared(axis: str, by_model: bool) -> list[str]:
    """A group of micro-batches that is thrown away, and one that is not."""
    model, plain = made(axis)
    rank, optimizer = model.env.data_rank, torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        branches(model, rank, 0).backward()
        branches(model, rank, 4).backward()
    (model if by_model else optimizer).zero_grad()
    with model.no_sync():
        branches(model, rank, 2).backward()
    branches(model, rank, 3).backward()
    for other in range(2):
        ((branches(plain, other, 2) + branches(plain, other, 3)) / 2).backward()
    optimizer.step()
    return list(differences(model, plain))


@pytest.mark.parametrize("by_model", [False, True], ids=["optimizer", "model"])
@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_zero_grad_clears_what_was_accumulated(axis: str, by_model: bool) -> None:
    """Of weights split over `shard` it stayed, and was in the next average, in silence."""
    assert run_ranks(2, cleared, axis, by_model) == [[], []]


def stepped_without(axis: str) -> list[str]:
    model, _ = made(axis)
    optimizers = [torch.optim.SGD([p], lr=0.1) for name, p in model.named_parameters() if name != "table.weight"]
    said = Said()
    logging.getLogger("dmp").addHandler(said)
    with model.no_sync():
        branches(model, model.env.data_rank, 0).backward()
    try:
        for optimizer in optimizers:
            optimizer.step()
    finally:
        logging.getLogger("dmp").removeHandler(said)
    return said.texts


def test_a_step_without_the_average_of_split_weights_is_refused() -> None:
    """They were not trained, and what had come was in the next average."""
    for error in run_ranks(2, stepped_without, "shard", expect=ShardError):
        assert "SGD.step() while gradients of split weights, accumulated under no_sync" in str(error)


def test_a_step_without_the_average_of_copies_is_said() -> None:
    for texts in run_ranks(2, stepped_without, "dp"):
        assert len(texts) == 1
        assert "copies of weights part" in texts[0]
