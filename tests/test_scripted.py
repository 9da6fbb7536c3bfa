"""Modules that torch.jit has compiled, inside a model: trained where dense weights are copied, else refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardError, ShardingEnv, load_checkpoint, save_checkpoint, to_unsharded
from tests.beside_plain import trains
from tests.ranks import mesh, run_ranks


def net(is_traced: bool) -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU())
    compiled = torch.jit.trace(inner, torch.randn(2, 4)) if is_traced else torch.jit.script(inner)
    return nn.Sequential(nn.EmbeddingBag(10, 4), compiled, nn.Linear(4, 2))


def trained(is_traced: bool, path: str) -> None:
    env, whole = ShardingEnv.from_mesh(mesh((2,), ("dp",))), net(is_traced).eval()
    model = DistributedModelParallel(net(is_traced).eval(), env)
    trains(model, whole, env, lambda g: torch.randint(0, 10, (2, 3, 4), generator=g))
    save_checkpoint(path, model)
    other = DistributedModelParallel(net(is_traced).eval(), env)
    load_checkpoint(path, other)
    x = torch.tensor([[1, 2, 9]])
    for each in (model, other, to_unsharded(model), copy.deepcopy(model)):
        torch.testing.assert_close(each(x), whole(x))
        assert all(p.is_leaf and p.requires_grad for p in each.parameters())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("is_traced", [False, True])
def test_where_dense_weights_are_copied(is_traced: bool, tmp_path: object) -> None:
    run_ranks(2, trained, is_traced, str(tmp_path))


def split(later: bool) -> None:
    model = net(is_traced=False)
    names = list(model.state_dict())
    env = ShardingEnv.from_mesh(mesh((2,), ("shard",)))
    try:
        made = DistributedModelParallel(model, env, init_data_parallel=not later)
        made.init_data_parallel()
    finally:
        assert list(model.state_dict()) == names


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("later", [False, True])
def test_where_they_are_split(later: bool) -> None:
    for error in run_ranks(2, split, later, expect=ShardError):
        assert "module '1' is a RecursiveScriptModule" in str(error)
        assert "to_unsharded(model)" in str(error)


def scripted() -> None:
    model = DistributedModelParallel(net(False)[::2], ShardingEnv.from_mesh(mesh((2,), ("shard",))))
    plain = to_unsharded(model)
    assert isinstance(torch.jit.script(plain[1]), torch.jit.ScriptModule)
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(ShardError, match=r"weights are split over the ranks is not compiled by torch\.jit\.script"):
            torch.jit.script(each.module[1])  # type: ignore[index]
        with pytest.raises(ShardError, match=r"not traced by torch\.fx: .*to_unsharded\(model\)"):
            torch.fx.symbolic_trace(each)
        each(torch.tensor([[1, 2, 9]])).sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_module_of_the_model_says_what_to_compile() -> None:
    """It ended in the code of a hook of ours, as a node that is not supported."""
    run_ranks(2, scripted)
