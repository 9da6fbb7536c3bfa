"""What the wrapper is given: refused by name before anything is changed; and ranks that were launched together."""

from __future__ import annotations

import copy
import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dmp import DistributedModelParallel, ShardError, ShardingEnv, to_unsharded
from dmp.state.gather import full_state_dict
from planner import ShardingPlanner
from sharders import DDPWrapper
from tests.ranks import mesh, run_ranks
from tests.wrapped_net import Net, batch, loss_of, mixed, wrap


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "meta"}, ["device='meta'", "no values", "leave out device"]),
        ({"device": torch.device("meta")}, ["device='meta'"]),
        ({"device": "gpu"}, ["'gpu'", "torch.device"]),
        ({"device": 3.5}, ["3.5", "torch.device"]),
        ({"data_parallel_wrapper": DDPWrapper}, ["class DDPWrapper", "DDPWrapper(...)"]),
        ({"data_parallel_wrapper": 7}, ["wrap(module, env, device, ignored)", "int"]),
        ({"data_parallel_wrapper": nn.parallel.DistributedDataParallel}, ["class DistributedDataParallel"]),
        ({"planner": ShardingPlanner}, ["class planner", "ShardingPlanner()"]),
        ({"planner": "fast"}, ["a planner", "str"]),
    ],
)
def test_refused_before_anything_is_changed(arguments: dict[str, Any], words: list[str]) -> None:
    module = Net()
    before = {name: (id(m), type(m)) for name, m in module.named_modules()}
    with pytest.raises(ShardError) as error:
        DistributedModelParallel(module, plan=mixed(), **arguments)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert {name: (id(m), type(m)) for name, m in module.named_modules()} == before


class ListsItsOwn(Net):
    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
        return super().named_parameters(prefix, recurse)


def test_a_listing_of_parameters_as_of_older_torch() -> None:
    with pytest.raises(
        ShardError, match=r"ListsItsOwn, has a named_parameters.*remove_duplicate.*wrap the module inside"
    ):
        DistributedModelParallel(ListsItsOwn())


WRAPPED_AGAIN: dict[str, Callable[[Any], nn.Module]] = {
    "the wrapper": lambda model: model,
    "its module": lambda model: model.module,
    "a parent": lambda model: nn.ModuleDict({"inner": model, "top": nn.Linear(2, 1)}),
    "a parent of its module": lambda model: nn.Sequential(model.module),
    "a table": lambda model: model.module.users,
    "a dense part": lambda model: nn.Sequential(model.module.over),
    "a copy of its module": lambda model: copy.deepcopy(model.module),
}


def refuses_what_is_wrapped() -> None:
    model = wrap()
    before, pieces = full_state_dict(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    for kind, make in WRAPPED_AGAIN.items():
        with pytest.raises(ShardError, match=r"part of a wrapped model already or holds one: .*to_unsharded"):
            DistributedModelParallel(make(model))
        assert {n: p.detach() for n, p in model.named_parameters()}.keys() == pieces.keys(), kind
        for name, p in model.named_parameters():
            assert torch.equal(p.detach(), pieces[name]), (kind, name)
    plain = to_unsharded(model)
    again = full_state_dict(DistributedModelParallel(plain, plan=mixed()))
    assert all(torch.equal(again[name], before[name]) for name in before)


def refuses_a_shared_weight(axis: str, name: str) -> None:
    """One that is frozen, or that is in a table wrapped by itself, stays each one's own."""
    env, (first, second) = ShardingEnv.from_mesh(mesh((2,), (axis,))), (nn.Sequential(Net()), nn.Sequential(Net()))
    owner, own = first[0].get_submodule(name), second[0].get_submodule(name)
    own.weight = owner.weight
    model = DistributedModelParallel(first, env)
    with pytest.raises(ShardError, match=rf"shares '0.{name}.weight' with a wrapped model, whose '0.{name}.weight' it"):
        DistributedModelParallel(second, env)
    assert own.weight.requires_grad and len(list(model.parameters()))
    own.weight.requires_grad_(False)
    DistributedModelParallel(second, env)
    table = nn.EmbeddingBag(8, 4)
    assert len({DistributedModelParallel(table, env) for _ in range(2)}) == 2


def shares_with_one_that_is_gone(axis: str) -> None:
    env, (first, second) = ShardingEnv.from_mesh(mesh((2,), (axis,))), (Net(), Net())
    second.over.weight = first.over.weight
    model = DistributedModelParallel(first, env)
    del model, first
    if env.rank:  # as garbage is collected on some ranks alone
        gc.collect()
    DistributedModelParallel(second, env)


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_a_weight_of_a_wrapped_model_that_is_gone_is_taken(axis: str) -> None:
    """One that was never called waits for the collector, and was told of as if somebody had it."""
    run_ranks(2, shares_with_one_that_is_gone, axis)


@pytest.mark.parametrize(("axis", "name"), [("dp", "users"), ("dp", "over"), ("shard", "over")])
def test_a_weight_that_another_wrapped_model_has_is_refused(axis: str, name: str) -> None:
    """Each trained its own from then on, in silence, or DDP told of reentrant checkpoints."""
    run_ranks(2, refuses_a_shared_weight, axis, name)


def two_share_an_activation(axis: str) -> None:
    """As the default of an argument does, `activation: nn.Module = nn.SiLU()`."""
    shared, env = nn.SiLU(), ShardingEnv.from_mesh(mesh((2,), (axis,)))
    x = torch.ones(2, 4)
    for seed in range(2):
        torch.manual_seed(seed)
        plain = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 1))
        expected = plain(x)
        model = DistributedModelParallel(plain, env)
        out = model(x)
        torch.testing.assert_close(out, expected)
        out.sum().backward()


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_models_may_share_what_has_no_values(axis: str) -> None:
    run_ranks(2, two_share_an_activation, axis)


def test_what_is_wrapped_is_not_wrapped_again() -> None:
    run_ranks(2, refuses_what_is_wrapped)
    model = wrap(ShardingEnv.single())
    with pytest.raises(ShardError, match="'inner'"):
        DistributedModelParallel(WRAPPED_AGAIN["a parent"](model), ShardingEnv.single())


# ---- launched, and no group ----


def test_the_launch_makes_the_group(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", asked.append)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING, "dmp"):
        DistributedModelParallel(nn.Linear(2, 1))
    assert asked == ["gloo"] and caplog.text.count("init_process_group('gloo') for the 2 processes") == 1
    DistributedModelParallel(nn.Linear(2, 1), ShardingEnv.single())
    assert len(asked) == 1, "a model of one process alone was asked for"
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ShardError, match=r"WORLD_SIZE=2 .*\['MASTER_ADDR'\].*model of its own.*single\(\)"):
        DistributedModelParallel(nn.Linear(2, 1))


def _in_inference_mode(axes: tuple[str, ...]) -> None:
    """Wrapped there a model trains afterwards; made there it does not, which is said, but evaluates."""
    env, module = ShardingEnv.from_mesh(mesh((2,), axes)), Net()
    oracle = copy.deepcopy(module)
    with torch.inference_mode():
        model, made = DistributedModelParallel(module, env), Net()
    loss_of(model, batch(env.rank)).backward()
    for rank in range(2):
        (loss_of(oracle, batch(rank)) / 2).backward()
    mine = model.module.out.weight.grad
    torch.testing.assert_close(getattr(mine, "full_tensor", lambda: mine)(), oracle.out.weight.grad)
    with pytest.raises(ShardError, match=r"more parameters were made under torch.inference_mode\(\)"):
        DistributedModelParallel(made, env)
    DistributedModelParallel(made.requires_grad_(False), env)(batch(env.rank))


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_wrapping_in_inference_mode(axis: str) -> None:
    """It ended in torch's words, of version counters or of a node that None has not."""
    run_ranks(2, _in_inference_mode, (axis,))


SCRIPT = """
import torch, torch.distributed as dist
from tests.wrapped_net import Net, batch, loss_of
from dmp import DistributedModelParallel
torch.manual_seed(0)
model = DistributedModelParallel(Net())
assert not dist.is_initialized() or dist.get_world_size() == 2
loss_of(model, batch(model.env.rank)).backward()
print(f"size {model.env.size} gradient {float(model.out.weight.grad.sum()):.5f}\\n", end="", flush=True)
"""


@pytest.mark.slow
def test_torchrun_without_a_group_trains_one_model(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "train.py")], capture_output=True, text=True, env=env, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("size")]
    module = Net()
    for rank in range(2):
        (loss_of(module, batch(rank)) / 2).backward()
    assert module.out.weight.grad is not None
    assert lines == [f"size 2 gradient {float(module.out.weight.grad.sum()):.5f}"] * 2, done.stdout
