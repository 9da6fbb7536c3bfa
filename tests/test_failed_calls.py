"""A load or a forward that fails: on all ranks alike, and the model is as it was."""

from __future__ import annotations

import copy
import logging
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
    ShardError,
    ShardingEnv,
    full_optimizer_state_dict,
    full_state_dict,
    load_checkpoint,
    row_wise,
    save_checkpoint,
)
from sharders import DDPWrapper
from tests.ranks import RankError, mesh, run_ranks


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


def wrapped(axis: str, **options: bool) -> DistributedModelParallel:
    return DistributedModelParallel(
        Net(),
        ShardingEnv.from_mesh(mesh((2,), (axis,))),
        plan={"table.weight": row_wise()},
        data_parallel_wrapper=DDPWrapper(**options) if any(options.values()) else None,
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
@pytest.mark.sampled(4)
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


def refused(part: nn.Module, kind: type[BaseException], loss: Callable[[], torch.Tensor]) -> None:
    """A backward pass that raises when it comes by the output of a part."""

    def refuse(_: torch.Tensor) -> None:
        raise kind("in the backward pass")

    handle = part.register_forward_hook(lambda module, args, out: out.register_hook(refuse) and None)
    with pytest.raises(kind):
        loss().backward()
    handle.remove()


def interrupted(axis: str, kind: type[BaseException], part: str, way: str) -> bool:
    """A backward pass that raises after it has begun, then two steps."""
    model, plain = wrapped(axis, gradient_as_bucket_view=way == "views"), Net()
    net = model.module if way == "past" else model
    ids = torch.tensor([[1, 2], [3, model.env.rank]])
    batches = [torch.tensor([[1, 2], [3, rank]]) for rank in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    two = [net(ids).square().sum() for _ in range(2)] if way == "two" else []
    refused(getattr(model.module, part), kind, lambda: net(ids).sum())
    for batch in batches:
        refused(getattr(plain, part), kind, lambda batch=batch: plain(batch).sum() / 2)  # type: ignore[misc]
    for step in range(2):
        if step == 0 if way == "two" else way != "accumulates" or step:
            for optimizer in optimizers:
                optimizer.zero_grad()
        (two[step] if two else net(ids).square().sum()).backward()
        for batch in batches:
            (plain(batch).square().sum() / 2).backward()
        if step or way != "two":
            for optimizer in optimizers:
                optimizer.step()
    after = full_state_dict(model)
    return all(torch.allclose(after[name], value, atol=1e-5) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("kind", [Interrupted, MemoryError])
def test_steps_after_a_backward_pass_that_raised(kind: type[BaseException]) -> None:
    """FSDP2 waited for its end ever after: no gradient came, in silence."""
    assert run_ranks(2, interrupted, "shard", kind, "table", "zeros") == [True, True]


@pytest.mark.parametrize("part", ["table", "layer"])
@pytest.mark.parametrize("way", ["zeros", "accumulates", "views", "past", "two"])
@pytest.mark.sampled(4)
def test_steps_of_copies_after_a_backward_pass_that_raised(part: str, way: str) -> None:
    """DDP waited for its end: an assertion of its own, or wrong means; past the wrapper, none, in silence."""
    assert run_ranks(2, interrupted, "dp", MemoryError, part, way) == [True, True]


def raised_apart(way: str) -> None:
    """A backward pass that raises at different points, or over gradients that DDP has divided."""
    model = wrapped("dp", gradient_as_bucket_view=way == "views")
    ids, part = torch.tensor([[1, 2]]), "table" if way == "points" and model.env.rank else "layer"
    refused(getattr(model.module, part), MemoryError, lambda: model(ids).sum())
    model(ids)


def test_a_backward_pass_that_raised_over_gradients_that_are_divided() -> None:
    for error in run_ranks(2, raised_apart, "views", expect=ShardError):
        assert "call zero_grad()" in str(error)


def test_a_backward_pass_that_raised_at_different_points() -> None:
    with pytest.raises(
        RankError, match=r"ranks \[0, 1\] failed(?s:.)*not at the same point"
    ):  # the pool is of no more use
        run_ranks(2, raised_apart, "points")


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


def stepped_at_once(axis: str) -> tuple[str, bool]:
    """A step after a backward pass that raised: at once, and when gradients were cleared."""
    model = wrapped(axis)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor([[1, 2], [3, model.env.rank]])
    model(ids).sum().backward()
    before = full_state_dict(model)
    refused(model.module.table, MemoryError, lambda: model(ids).sum())
    with pytest.raises(ShardError) as found:
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    after = full_state_dict(model)
    model(ids).sum().backward()
    optimizer.step()
    return str(found.value), all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_a_step_by_gradients_of_a_backward_pass_that_raised_is_refused(axis: str) -> None:
    """Each rank took its own by its own samples, and copies of weights parted, in silence."""
    for text, is_same in run_ranks(2, stepped_at_once, axis):
        assert "SGD.step() after a backward pass that raised" in text
        assert is_same


def dropped() -> list[str]:
    """What `no_sync` had accumulated before a pass that raised."""
    model, texts = wrapped("shard"), []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dmp").addHandler(handler)
    ids = torch.tensor([[1, 2]])
    with model.no_sync():
        model(ids).sum().backward()
    refused(model.module.table, MemoryError, lambda: model(ids).sum())
    model(ids)
    logging.getLogger("dmp").removeHandler(handler)
    return texts


def test_gradients_that_are_dropped_are_spoken_of() -> None:
    for texts in run_ranks(2, dropped):
        assert len(texts) == 1
        assert "accumulated under no_sync" in texts[0]


def keeps_the_best(axis: str, form: str) -> None:
    """By a loss of each rank's own samples, as of one process; then by one that all ranks have."""
    model = wrapped(axis)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    kept = []
    for _ in range(3):
        kept.append(FORMS[form](model.state_dict()))
        model(torch.arange(8).view(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(CheckpointError, match=r"of one state dict.*: rank 0 after 0, rank 1 after [1-9].*all_reduce"):
        model.load_state_dict(kept[2 * model.env.rank])
    before = full_state_dict(model)
    model.load_state_dict(kept[1])
    after = full_state_dict(model)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    model.load_state_dict(FORMS[form](model.state_dict()))


FORMS: dict[str, Callable[[Any], Any]] = {
    "copied": copy.deepcopy,
    "cloned": lambda state: {name: value.detach().cpu().clone() for name, value in state.items()},
}


@pytest.mark.parametrize("form", [*FORMS])
@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_parts_of_several_times_are_not_loaded(axis: str, form: str) -> None:
    run_ranks(2, keeps_the_best, axis, form)
