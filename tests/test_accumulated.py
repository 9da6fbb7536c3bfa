"""What passes under `no_sync` have accumulated: cleared by `zero_grad`, and no step without its average."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from dmp import ShardError
from tests.ranks import run_ranks
from tests.test_asked import Said
from tests.test_unreached import branches, differences, made


def by_hand(model: Any) -> None:
    for p in model.parameters():
        p.grad = None


def by_zeros(model: Any) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()


CLEARS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "hand": lambda model, optimizer: by_hand(model),
    "zeros by hand": lambda model, optimizer: by_zeros(model),
}


def cleared(axis: str, way: str, after_average: bool = False) -> list[str]:
    """A group of micro-batches that is thrown away, and one that is not."""
    model, plain = made(axis)
    rank, optimizer = model.env.data_rank, torch.optim.SGD(model.parameters(), lr=0.1)
    if after_average:
        branches(model, rank, 0).backward()
    with model.no_sync():
        branches(model, rank, 0).backward()
        branches(model, rank, 4).backward()
    CLEARS[way](model, optimizer)
    with model.no_sync():
        branches(model, rank, 2).backward()
    branches(model, rank, 3).backward()
    for other in range(2):
        ((branches(plain, other, 2) + branches(plain, other, 3)) / 2).backward()
    found = list(differences(model, plain))
    optimizer.step()
    return [text for text in found if "zeros" not in way or "for None" not in text]  # those may be zeros


@pytest.mark.parametrize("way", [*CLEARS])
@pytest.mark.parametrize("axis", ["dp", "shard"])
@pytest.mark.sampled(6)
def test_what_was_accumulated_is_cleared(axis: str, way: str) -> None:
    """Of weights split over `shard` it stayed, and was in the next average, in silence."""
    assert run_ranks(2, cleared, axis, way) == [[], []]
    assert run_ranks(2, cleared, axis, way, True) == [[], []]


def kept(axis: str) -> list[str]:
    """Clipping between passes is no clearing, and an average after them has all of them."""
    model, plain = made(axis)
    rank = model.env.data_rank
    with model.no_sync():
        for step in (2, 3):
            branches(model, rank, step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    branches(model, rank, 0).backward()
    for other in range(2):
        (sum((branches(plain, other, step) for step in (2, 3, 0)), torch.zeros(())) / 2).backward()
    return list(differences(model, plain))


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_what_nobody_clears_is_kept(axis: str) -> None:
    assert run_ranks(2, kept, axis) == [[], []]


def discarded() -> None:
    """After what waits was cleared a step is a step without gradients."""
    model, _ = made("shard")
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    optimizer, before = torch.optim.SGD(split, lr=0.1), [p.full_tensor().clone() for p in split]
    with model.no_sync():
        branches(model, model.env.data_rank, 0).backward()
    by_hand(model)
    optimizer.step()
    assert all(torch.equal(was, p.full_tensor()) for was, p in zip(before, split, strict=True))


def test_a_step_after_clearing_is_one_without_gradients() -> None:
    run_ranks(2, discarded)


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


def stepped_by_closure(axis: str) -> list[str]:
    """As Lightning makes all steps: the last pass of a group, with the average, is inside of the step."""
    model, plain = made(axis)
    ours, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))
    rank = model.env.data_rank

    def closure() -> torch.Tensor:
        loss = branches(model, rank, 3)
        loss.backward()
        return loss

    with model.no_sync():
        branches(model, rank, 2).backward()
    with Said() as said:
        ours.step(closure)
        assert all(type(state["momentum_buffer"]) in (torch.Tensor, DTensor) for state in ours.state.values())
        ours.zero_grad()
        ours.step(closure=closure)
    for steps in ((2, 3), (3,)):
        other.zero_grad()
        (sum((branches(plain, data_rank, k) for data_rank in range(2) for k in steps), torch.zeros(())) / 2).backward()
        other.step()
    return [*said.texts, *differences(model, plain)]


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_a_closure_makes_what_its_step_is_looked_at_for(axis: str) -> None:
    assert run_ranks(2, stepped_by_closure, axis) == [[], []]
