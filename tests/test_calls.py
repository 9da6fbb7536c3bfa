"""One model runs in one thread at a time: a second thread's forward, or a save while another trains, is an error."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dmp
from dmp import DmpError, ShardError
from dmp.calls import alone


class Slow(nn.Module):
    """A forward or backward that stands still inside until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 4)
        self.inside, self.go = threading.Event(), threading.Event()
        self.go.set()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.emb(ids)
        self.inside.set()
        assert self.go.wait(20)
        return out

    def __deepcopy__(self, memo: Any) -> Slow:  # events cannot be copied
        new = Slow()
        new.load_state_dict(self.state_dict())
        return new


def wrapped() -> dmp.DistributedModelParallel:
    return dmp.DistributedModelParallel(Slow(), plan={"emb.weight": dmp.row_wise()})


IDS = torch.tensor([1, 2])
OTHERS: dict[str, Callable[[Any, Path], Any]] = {
    "the forward": lambda model, path: model(IDS),
    "save_checkpoint": lambda model, path: dmp.save_checkpoint(path / "c", model),
    "load_checkpoint": lambda model, path: dmp.load_checkpoint(path / "c", model),
    "full_state_dict": lambda model, path: dmp.full_state_dict(model),
    "clip_grad_norm_": lambda model, path: dmp.clip_grad_norm_(model, 1.0),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_second_thread_is_told(what: str, tmp_path: Path) -> None:
    model = wrapped()
    dmp.save_checkpoint(tmp_path / "c", model)
    model.module.go.clear()
    first = threading.Thread(target=lambda: model(IDS), name="trainer")
    first.start()
    assert model.module.inside.wait(20)
    with pytest.raises(DmpError) as error:
        OTHERS[what](model, tmp_path)
    assert "'trainer'" in str(error.value) and "the forward" in str(error.value), str(error.value)
    model.module.go.set()
    first.join()
    OTHERS[what](model, tmp_path)  # and all is well again


def test_one_threads_calls_may_lie_in_each_other() -> None:
    model = wrapped()

    seen = []

    def look(*_: Any) -> None:
        seen.append(dmp.full_state_dict(model).keys())

    model.module.emb.register_forward_hook(look)
    model(IDS).sum().backward()
    assert seen == [model.state_dict().keys()]


AT_REST: dict[str, Callable[[Any, Path], Any]] = {
    **{what: OTHERS[what] for what in ("save_checkpoint", "load_checkpoint")},
    "full_optimizer_state_dict": lambda model, path: dmp.full_optimizer_state_dict(model),
    "reshard": lambda model, path: model.reshard({"emb.weight": dmp.table_wise(0)}),
}


@pytest.mark.parametrize("what", AT_REST)
def test_what_needs_a_model_at_rest_is_refused_inside_a_step(what: str, tmp_path: Path) -> None:
    """As from a handler of a signal: an optimizer's parameters were not found inside a forward."""
    model = wrapped()
    dmp.save_checkpoint(tmp_path / "c", model)
    inside = model.module.emb.register_forward_hook(lambda *_: AT_REST[what](model, tmp_path) and None)
    with pytest.raises(ShardError, match=f"{what} was called inside the model's forward.*between two steps"):
        model(IDS)
    inside.remove()
    out = model(IDS)
    out.register_hook(lambda grad: AT_REST[what](model, tmp_path) and None)
    with pytest.raises(ShardError, match=f"{what} was called inside the model's backward"):
        out.sum().backward()
    AT_REST[what](model, tmp_path)


def test_an_error_ends_the_call() -> None:
    model = wrapped()
    with pytest.raises(dmp.InputError):
        model(IDS + 100)
    thread = threading.Thread(target=lambda: model(IDS))
    thread.start()
    thread.join()
    assert model.module.inside.is_set()


def test_a_copy_runs_by_itself() -> None:
    model = wrapped()
    other = copy.deepcopy(model)
    model.module.go.clear()
    first = threading.Thread(target=lambda: model(IDS))
    first.start()
    assert model.module.inside.wait(20)
    other(IDS).sum().backward()
    model.module.go.set()
    first.join()


def test_a_save_while_a_backward_runs(tmp_path: Path) -> None:
    """The backward finds the save, or the save the backward: neither writes pieces of two steps."""
    model = wrapped()
    out = model(IDS)
    inside, go = threading.Event(), threading.Event()

    @alone("a long save")
    def save(model: nn.Module) -> None:
        inside.set()
        assert go.wait(20)

    thread = threading.Thread(target=save, args=(model,), name="saver")
    thread.start()
    assert inside.wait(20)
    with pytest.raises(DmpError, match="'saver' is in a long save"):
        out.sum().backward()
    go.set()
    thread.join()
    model(IDS).sum().backward()
