"""A model that one rank changes otherwise than the others: told on all of them within seconds, and no process ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dmp import DistributedModelParallel, PlanError, RanksError, ShardError, ShardingEnv
from tests.ranks import mesh, run_ranks
from tests.test_attributes import Grown
from tests.test_parting import TOLD_S, slow
from tests.test_survival import mortal_ranks


def _grow(module: Any) -> None:
    module.gain = nn.Parameter(torch.ones(1))


def _replace(module: Any) -> None:
    module.layer.weight = nn.Parameter(torch.ones(1, 2))


def _freeze(module: Any) -> None:
    module.layer.bias.requires_grad_(False)


def _cast(module: Any) -> None:
    module.double()


CHANGES: dict[str, Callable[[Any], None]] = {"grow": _grow, "replace": _replace, "freeze": _freeze, "cast": _cast}
IN = {  # what the rank that changed its model is said to be in
    ("dp", "grow"): "averaging gradients anew, as 'gain' was added",
    ("dp", "replace"): "averaging gradients anew, as 'layer.weight' was replaced",
    ("dp", "freeze"): "averaging gradients anew, as 'layer.bias' was frozen",
    ("dp", "cast"): "averaging gradients anew, as 'layer.weight' was cast to torch.float64",
    ("shard", "grow"): "the forward pass, which raises ShardError: 'gain' was added after wrapping",
    ("shard", "replace"): "the forward pass, which raises ShardError: 'layer.weight' was replaced after wrapping",
    ("shard", "freeze"): "the forward pass, as 'layer.bias' was frozen",
    ("shard", "cast"): "the forward pass, which raises ShardError: 'layer.weight' was cast from",
}
IN_EVERY_RUN = (("shard", "freeze"),)


def _model(axis: str) -> tuple[DistributedModelParallel, torch.Tensor]:
    env = ShardingEnv.from_mesh(mesh((dist.get_world_size(),), (axis,)))
    model, x = DistributedModelParallel(Grown(), env), torch.full((1, 2), 1.0 + env.rank)
    model(x).sum().backward()
    return model, x


def _changed_on_rank_0(axis: str, what: str) -> tuple[str, float]:
    model, x = _model(axis)
    if model.env.rank == 0:
        CHANGES[what](model.module)
    started = time.monotonic()
    try:
        for _ in range(2):
            model(x.to(model.layer.weight.dtype)).sum().backward()
    except Exception as error:
        told = f"{type(error).__name__}: {error}", time.monotonic() - started
        time.sleep(2.0)  # a program that ends would be another end
        return told
    return "", 0.0


@pytest.mark.parametrize(
    ("axis", "what"), [pytest.param(*case, marks=() if case in IN_EVERY_RUN else slow) for case in IN]
)
def test_changed_on_one_rank(axis: str, what: str) -> None:
    """The others waited in torch's collectives for its timeout, or gloo ended the process."""
    (first, *_), (other, _) = ends = mortal_ranks(2, _changed_on_rank_0, axis, what)
    assert f"rank 0 is in {IN[axis, what]}" in other and other.startswith("RanksError: the ranks have parted"), other
    expected = IN[axis, what].rpartition("which raises ")[2] if "raises" in IN[axis, what] else "RanksError: the ranks"
    assert first.startswith(expected), first
    assert all(seconds < TOLD_S for _, seconds in ends), ends


def _changed_otherwise(axis: str) -> list[str]:
    """Ranks that meet in telling each other go on."""
    said = []
    for first, second in (("grow", "replace"), ("freeze", "grow"), ("grow", "grow"), ("freeze", "freeze")):
        model, x = _model(axis)
        CHANGES[second if model.env.rank else first](model.module)
        try:
            model(x).sum().backward()
            said.append("")
        except (PlanError, RanksError, ShardError) as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_changed_otherwise(axis: str) -> None:
    first, second = run_ranks(2, _changed_otherwise, axis)
    assert [bool(text) for text in first] == [True, True, axis == "shard", False]
    for one, other, text in zip(("grow", "freeze"), ("replace", "grow"), first[:2], strict=True):
        if axis == "dp":
            assert f"rank 0 is in {IN[axis, one]}" in text and f"rank 1 is in {IN[axis, other]}" in text, text
    if axis == "dp":
        assert first == second
    else:
        assert "'gain' was added" in first[0] and "'layer.weight' was replaced" in second[0], (first, second)
        assert "as 'layer.bias' was frozen" in first[1] and "'gain' was added" in second[1], (first, second)


def _of_other_shapes() -> None:
    model, x = _model("dp")
    model.module.gain = nn.Parameter(torch.ones(1 + model.env.rank))
    model(x)


def test_what_is_added_is_compared() -> None:
    for error in run_ranks(2, _of_other_shapes, expect=PlanError):
        assert "ranks disagree on parameter 'gain': rank 0 has '(1,) torch.float32, trained'" in str(error), error
