"""A load or a forward that fails: on all ranks alike, and the model is as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dmp import (
    CheckpointError,
    DistributedModelParallel,
    InputError,
    ShardingEnv,
    full_optimizer_state_dict,
    full_state_dict,
    load_checkpoint,
    row_wise,
    save_checkpoint,
)
from tests.ranks import mesh, run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(8, 4, mode="sum")
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor, fails: bool = False) -> torch.Tensor:
        x = self.layer(self.table(ids))
        if fails:
            raise ArithmeticError("the model's own")
        out: torch.Tensor = self.head(x)
        return out


def wrapped(axis: str) -> DistributedModelParallel:
    return DistributedModelParallel(
        Net(), ShardingEnv.from_mesh(mesh((2,), (axis,))), plan={"table.weight": row_wise()}
    )


def load(axis: str, what: str, in_a_parent: bool) -> list[str]:
    model = wrapped(axis)
    before = full_state_dict(model)
    given = {name: value + 1 for name, value in before.items()}
    if model.env.rank == 1 and what == "shape":
        given["head.weight"] = torch.zeros(1, 5)
    if model.env.rank == 1 and what == "missing":
        del given["layer.bias"]
    if model.env.rank == 0 and what == "unexpected":
        given["other"] = torch.zeros(1)
    if model.env.rank == 1 and what in given:
        given[what] = given[what] + 1
    target: nn.Module = nn.ModuleDict({"inner": model}) if in_a_parent else model
    given = {f"inner.{name}": value for name, value in given.items()} if in_a_parent else given
    try:
        target.load_state_dict(given, strict=what == "shape")
        raised = ""
    except (CheckpointError, RuntimeError) as error:
        raised = str(error)
    after = full_state_dict(model)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    return [raised, *changed]


@pytest.mark.parametrize("in_a_parent", [False, True])
@pytest.mark.parametrize(
    ("axis", "what", "text"),
    [
        ("dp", "shape", "rank 1: .*head.weight has shape (1, 5), expected (1, 4)"),
        ("shard", "shape", "rank 1: .*head.weight has shape (1, 5), expected (1, 4)"),
        ("dp", "missing", "rank 1 (['PREFIXlayer.bias'], [])"),
        ("dp", "unexpected", "rank 0 has (missing, unexpected) ([], ['PREFIXother'])"),
        ("dp", "layer.bias", "'layer.bias' has other values on rank 1 than on rank 0"),
        ("dp", "table.weight", "'table.weight' has other values on rank 1"),
        ("shard", "head.weight", "'head.weight' has other values on rank 1"),
    ],
)
@pytest.mark.sampled(2)
def test_what_does_not_fit_on_one_rank_is_loaded_on_none(axis: str, what: str, text: str, in_a_parent: bool) -> None:
    for raised, *changed in run_ranks(2, load, axis, what, in_a_parent):
        assert not changed
        assert all(part in raised for part in text.replace("PREFIX", "inner." if in_a_parent else "").split(".*")), (
            raised
        )


def load_nothing() -> str:
    model = wrapped("dp")
    whole = full_state_dict(model)
    try:
        model.load_state_dict(None if model.env.rank else whole)  # type: ignore[arg-type]
    except CheckpointError as error:
        return str(error)
    return ""


def save_and_load_without_an_optimizer(folder: str) -> list[str]:
    """On rank 0; then with what is none."""
    model, said = wrapped("dp"), []
    optimizer = torch.optim.Adam(model.parameters())
    own: Any = optimizer if model.env.rank else None
    calls: list[Callable[[], Any]] = [
        lambda: save_checkpoint(f"{folder}/a", model, own),
        lambda: save_checkpoint(f"{folder}/b", model, optimizer),
        lambda: load_checkpoint(f"{folder}/b", model, own),
        lambda: full_optimizer_state_dict(model, own),
        lambda: save_checkpoint(f"{folder}/c", model, [optimizer]),  # type: ignore[arg-type]
    ]
    for call in calls:
        try:
            call()
            said.append("")
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_no_state_dict_on_one_rank() -> None:
    for said in run_ranks(2, load_nothing):
        assert said == "load_state_dict: rank 1: expected a state dict, name -> tensor; got NoneType"


def test_an_optimizer_on_one_rank_alone(tmp_path: Path) -> None:
    """What that rank had was saved, or loaded, and the rest left out, without a word."""
    for saved, both, loaded, gathered, listed in run_ranks(2, save_and_load_without_an_optimizer, str(tmp_path)):
        for said, what in ((saved, "saving"), (loaded, "loading"), (gathered, "full_optimizer_state_dict")):
            assert "rank 0 is in" in said and what in said, said
            assert "optimizer=None" in said and "optimizer=Adam" in said, said
        assert not both and "expected a torch.optim.Optimizer over the model's parameters; got list" in listed


def fail(kind: type[Exception]) -> bool:
    model = wrapped("shard")
    ids = torch.tensor([[1, 2]])
    bad = torch.tensor([[1, 99]]) if model.env.rank == 0 and kind is InputError else ids
    with pytest.raises(kind):
        model(bad, kind is ArithmeticError)
    before = full_state_dict(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ids).sum().backward()
    optimizer.step()
    plain = Net()
    (plain(ids).sum()).backward()
    after = full_state_dict(model)
    steps = {name: before[name] - 0.1 * p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return all(torch.allclose(after[name], value, atol=1e-6) for name, value in steps.items())


@pytest.mark.parametrize("kind", [InputError, ArithmeticError])
def test_an_optimizer_made_after_a_failed_forward_trains(kind: type[Exception]) -> None:
    assert run_ranks(2, fail, kind) == [True, True]


class Interrupted(KeyboardInterrupt):
    pass


def interrupted(axis: str, kind: type[BaseException]) -> bool:
    """A backward pass that raises after it has begun, then two steps."""
    model, plain = wrapped(axis), Net()
    ids = torch.tensor([[1, 2], [3, model.env.rank]])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]

    def refuse(_: torch.Tensor) -> None:
        raise kind("in the backward pass")

    handle = model.module.table.register_forward_hook(lambda module, args, out: out.register_hook(refuse) and None)
    with pytest.raises(kind):
        model(ids).sum().backward()
    handle.remove()
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(ids).square().sum().backward()
        for rank in range(2):
            (plain(torch.tensor([[1, 2], [3, rank]])).square().sum() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
    after = full_state_dict(model)
    return all(torch.allclose(after[name], value, atol=1e-5) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("kind", [Interrupted, MemoryError])
def test_steps_after_a_backward_pass_that_raised(kind: type[BaseException]) -> None:
    """FSDP2 waited for its end ever after: no gradient came, in silence."""
    assert run_ranks(2, interrupted, "shard", kind) == [True, True]


def checkpointed(axis: str) -> None:
    model, whole = wrapped(axis), Net()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, whole))
    for step in range(2):
        batches = [torch.randint(0, 8, (3, 2), generator=torch.Generator().manual_seed(2 * step + r)) for r in (0, 1)]
        checkpoint(model, batches[model.env.data_rank], use_reentrant=False).square().sum().backward()
        sum((whole(ids).square().sum() / 2 for ids in batches), torch.zeros(())).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in full_state_dict(model).items():
        torch.testing.assert_close(value, whole.state_dict()[name])


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_a_forward_that_is_computed_again_stops_by_an_error_that_is_none(axis: str) -> None:
    run_ranks(2, checkpointed, axis)
