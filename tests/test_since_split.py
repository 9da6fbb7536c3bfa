"""What is done to a model after wrapping is in its copies and its plain form, split weights or not."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv, to_unsharded
from sharders import TensorParallelSharder
from tests.ranks import mesh, run_ranks

MESHES = {"dp": ((2,), ("dp",)), "shard": ((2,), ("shard",)), "tp": ((2,), ("tp",))}
PLAN = {"first": "colwise", "last": "rowwise"}


class Net(nn.Module):
    """What its forward does depends on attributes of every kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last, self.rows = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), nn.EmbeddingBag(8, 4)
        self.power, self.config, self.bounds = 1.0, SimpleNamespace(scale=1.0), [0.0]
        self.done: Any = lambda x: x
        self.extra: nn.Module | None = nn.Tanh()
        self.times = 0.5
        self.register_buffer("offset", torch.ones(2))
        self.register_buffer("grown", torch.empty(0), persistent=False)
        self.last.register_forward_hook(lambda *call: call[-1] * 2)

    def undo(self, _: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output - self.power

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "shift"):
            self.register_buffer("shift", torch.full((2,), 0.5), persistent=False)
            self.grown = torch.full((2,), 0.25)
        out = self.last(self.act(self.first(self.rows(ids))))
        out = out.abs() ** self.power * self.config.scale + self.bounds[0] + self.shift + self.grown
        out = out * getattr(self, "times", 1.0) + getattr(self, "offset", 0.0)
        return self.done(out if self.extra is None else self.extra(out))  # type: ignore[no-any-return]


def doubled(_: nn.Module, args: Any) -> Any:
    return (args[0] * 2,)


def named(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    state[f"{prefix}name"] = torch.ones(1)


def change(module: Any) -> None:
    module.power, module.config.scale, module.bounds, module.done = 2.0, 3.0, [5.0], torch.sin
    module.act, module.extra = nn.Sequential(nn.Tanh(), module.act), None
    module.shift = torch.ones(2)
    module.seen = [module.first, module.power]
    module.last.register_forward_pre_hook(doubled)
    module.act.register_forward_hook(module.undo)
    module.first.register_state_dict_post_hook(named)
    module.last._forward_hooks.clear()
    del module.times, module.offset


def changed(on: str) -> None:
    env, ids = ShardingEnv.from_mesh(mesh(*MESHES[on])), torch.arange(6).view(3, 2)
    sharders = None if on != "tp" else [TensorParallelSharder(PLAN)]  # type: ignore[arg-type]
    model, whole = DistributedModelParallel(Net(), env, sharders=sharders), Net()
    for ran in (False, True):
        for twin in (copy.deepcopy(model), to_unsharded(model), copy.deepcopy(copy.deepcopy(model))):
            torch.testing.assert_close(twin(ids), whole(ids))
            assert set(twin.state_dict()) == set(whole.state_dict())
        if ran:
            break
        torch.testing.assert_close(model(ids), whole(ids))
        change(model.module)
        change(whole)
    twin = to_unsharded(model)
    assert twin.seen[0] is twin.first and twin.config is not model.module.config  # type: ignore[index]


@pytest.mark.parametrize("on", MESHES)
@pytest.mark.sampled(2)
def test_copies_and_the_plain_form_have_it(on: str) -> None:
    """Where weights are split they were as the model had been when it was wrapped, and gave other numbers."""
    run_ranks(2, changed, on)


def not_copied() -> None:
    env, ids = ShardingEnv.from_mesh(mesh((2,), ("shard",))), torch.arange(6).view(3, 2)
    model = DistributedModelParallel(Net(), env)
    model.module.lock, model.module.outputs = threading.Lock(), [model(ids)]
    model.module.last_output = model(ids)
    for twin in (to_unsharded(model), copy.deepcopy(model).module):
        assert twin.lock is model.module.lock and not {"outputs", "last_output"} & set(twin.__dict__)
        torch.testing.assert_close(twin(ids), Net()(ids))


def test_what_cannot_be_copied_stays_out() -> None:
    run_ranks(2, not_copied)


class Keeps(Net):
    """Keeps its last results, as attentions keep their weights to be looked at."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = super().forward(ids)
        self.last_result, self.results = out, {"all": [out.exp()]}
        return out


def results_kept(on: str) -> None:
    ids, whole = torch.arange(6).view(3, 2), Net()
    given = Keeps()
    given(ids)
    model = DistributedModelParallel(given, ShardingEnv.from_mesh(mesh(*MESHES[on])))
    model(ids).sum().backward()
    torch.testing.assert_close(to_unsharded(model)(ids), whole(ids))


@pytest.mark.parametrize("on", ["dp", "shard"])
def test_a_plain_form_of_what_keeps_its_last_results(on: str) -> None:
    run_ranks(2, results_kept, on)
