"""What happens to a model, its batches and its ranks while batches are in flight: as in the plain loop, or an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dmp
from dmp import DistributedModelParallel, InputError, ShardError, TrainPipeline
from sharders.channel import over_connections
from tests.equality import env_of
from tests.ranks import run_ranks
from tests.test_parting import TOLD_S, slow
from tests.test_pipeline import AHEAD, BEGUN, ROWS, WHOLE, Batch, Counted, Net, batches_of, exchanging, same, wrapped
from tests.test_survival import mortal_ranks

Between = Callable[[int, DistributedModelParallel], None]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    if not model.training:
        model(batch)
        return
    optimizer.zero_grad()
    model(batch)[0].sum(0).backward()
    optimizer.step()


def freeze(i: int, model: DistributedModelParallel) -> None:
    for table in ("first", "second", "twice"):
        for p in model.module.get_submodule(table).parameters():
            p.requires_grad_(i not in (1, 2))


def evaluate(i: int, model: DistributedModelParallel) -> None:
    with torch.no_grad():
        model(batches_of(50 + model.env.rank, 1)[0])


def load(i: int, model: DistributedModelParallel) -> None:
    model.load_state_dict({name: value + 0.01 for name, value in dmp.full_state_dict(model).items()})


def modes(i: int, model: DistributedModelParallel) -> None:
    model.train(i not in (1, 3))
    torch.set_grad_enabled(i != 3)


def move(i: int, model: DistributedModelParallel) -> None:
    model.to(model.device)


def hook(i: int, model: DistributedModelParallel) -> None:
    if i == 2:
        model.module.second.register_forward_pre_hook(lambda module, args: ((args[0] + 1) % ROWS,))


def put_in(i: int, model: DistributedModelParallel) -> None:
    """Another forward, for two steps."""
    second: Any = model.module.second
    if i == 1:
        own = second.forward
        second.forward = lambda ids: own((ids + 1) % ROWS)
    elif i == 3:
        del second.forward


def swap(i: int, model: DistributedModelParallel) -> None:
    if i == 2:
        model.module.second = nn.Sequential(model.module.second)


BETWEEN: dict[str, Between] = {f.__name__: f for f in (freeze, evaluate, load, modes, move, hook, put_in, swap)}


def _between_steps(what: str) -> str:
    (model, optimizer), (other, its) = wrapped("dp2", "mixed"), wrapped("dp2", "mixed")
    batches, between = batches_of(model.env.rank, 6), BETWEEN[what]
    torch.manual_seed(0)
    for i, batch in enumerate(batches):
        step(other, its, batch)
        between(i, other)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    pipeline, iterator = TrainPipeline(model, optimizer), iter(batches)
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(model, patch)
        for i in range(len(batches)):
            pipeline.progress(iterator)
            between(i, pipeline.detach())  # type: ignore[arg-type]
        with pytest.raises(StopIteration):
            pipeline.progress(iterator)
    torch.set_grad_enabled(True)
    assert same(model, other)
    return counted.take()


@pytest.mark.parametrize("what", [what for what in BETWEEN if what not in ("put_in", "swap")])
@pytest.mark.sampled(12)
def test_what_happens_between_steps(what: str) -> None:
    first, second = run_ranks(2, _between_steps, what)
    assert first == second and "+first +second +twice +twice" in first


@pytest.mark.parametrize("what", ["put_in", "swap"])
def test_modules_that_run_another_way_between_steps(what: str) -> None:
    """What is begun is sought once, not in every step."""
    first, second = run_ranks(2, _between_steps, what)
    assert first == second and ("+first +twice +twice" in first) == (what == "put_in")


def _resharded() -> list[str]:
    """From copies, of which no id travels, to row blocks."""
    (model, optimizer), (other, its) = (wrapped("dp2", "data_parallel") for _ in range(2))
    batches, seen = batches_of(model.env.rank, 6), []
    pipeline, iterator = TrainPipeline(model, optimizer), iter(batches)
    torch.manual_seed(0)
    for i, batch in enumerate(batches):
        step(other, its, batch)
        if i == 2:
            other.reshard({name: dmp.row_wise() for name in other.plan}, its)
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch, exchanging(over_connections):
        counted = Counted(model, patch)
        for i in range(len(batches)):
            pipeline.progress(iterator)
            seen.append(counted.take())
            if i == 2:
                model.reshard({name: dmp.row_wise() for name in model.plan}, optimizer)
    assert same(model, other)
    return seen


def test_ids_that_travel_since_a_reshard() -> None:
    for seen in run_ranks(2, _resharded):
        assert seen == [WHOLE] * 3 + [f"{WHOLE} {AHEAD}", f"{AHEAD} {BEGUN}", BEGUN]


class Odd(Net):
    """Fails, gives its tables another input, or writes to it, for some batches."""

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        mark = float(batch.dense[0, 1])
        if mark == 7:
            raise KeyError("not this one")
        if mark in (8, 9):
            batch = Batch(batch.ids.flip(1) if mark == 8 else batch.ids, dict(batch.more), batch.dense)
            batch.more["ids"] = (batch.more["ids"] + 1) % ROWS
        if mark == 10:
            batch.more["ids"].add_(1).remainder_(ROWS)
        return super().forward(batch)


def _odd_batches(marks: tuple[int, ...], of_rank: int | None, is_near: bool = False) -> None:
    """As a plain loop that goes on after what it catches."""
    made = [wrapped("dp2", "row_wise", Odd, is_near) for _ in range(2)]
    rank = made[0][0].env.rank
    ends: list[list[str]] = []
    for which, (model, optimizer) in enumerate(made):
        batches, torch_seed = batches_of(rank, 3 + len(marks)), 0
        for i, mark in enumerate(marks):
            if of_rank in (None, rank):
                batches[i + 2].dense[0, 1] = mark
                if mark == 6:
                    batches[i + 2].ids[0] = ROWS + 5
        torch.manual_seed(torch_seed)
        pipeline, iterator, told = TrainPipeline(model, optimizer), iter(batches), []
        for batch in batches:
            try:
                if which:
                    pipeline.progress(iterator)
                else:
                    step(model, optimizer, batch)
                told.append("")
            except (KeyError, InputError) as error:
                told.append(f"{type(error).__name__} {error}")
        ends.append(told)
    assert ends[0] == ends[1] and any(ends[0]) == bool({6, 7} & set(marks)), ends
    assert same(made[0][0], made[1][0])


@pytest.mark.parametrize("marks", [(6, 0), (7, 0, 7), (8, 8, 9), (10, 0), (0, 6, 7, 8)])
@pytest.mark.sampled(6)
def test_odd_batches(marks: tuple[int, ...]) -> None:
    run_ranks(2, _odd_batches, marks, None)


@pytest.mark.parametrize("is_near", [False, True])
def test_a_bad_batch_of_one_rank(is_near: bool) -> None:
    run_ranks(2, _odd_batches, (6, 0), 1, is_near)


def _iterators() -> None:
    (model, optimizer), (other, its) = wrapped("dp2", "row_wise"), wrapped("dp2", "row_wise")
    batches = batches_of(model.env.rank, 4)

    def breaks() -> Iterator[Batch]:
        yield from batches[:3]
        raise OSError("no more of the disk")

    torch.manual_seed(0)
    for batch in [*batches, *batches[:3]]:
        step(other, its, batch)
    torch.manual_seed(0)
    pipeline = TrainPipeline(model, optimizer)
    for batch in batches:
        pipeline.progress(iter([batch]))
    iterator = breaks()
    for _ in range(3):
        pipeline.progress(iterator)
    with pytest.raises(OSError, match="no more of the disk"):
        pipeline.progress(iterator)
    with pytest.raises(StopIteration):
        pipeline.progress(iterator)
    assert same(model, other)
    with pytest.raises(InputError, match=r"as iter\(loader\) is; got list"):
        pipeline.progress(batches)  # type: ignore[arg-type]


def test_iterators() -> None:
    run_ranks(2, _iterators)


class _Stateful:
    """A loader that says how many batches it has given, and goes on from there."""

    def __init__(self, batches: list[Batch], given: int = 0) -> None:
        self.batches, self.given = batches, given

    def __iter__(self) -> Iterator[Batch]:
        while self.given < len(self.batches):
            self.given += 1
            yield self.batches[self.given - 1]


def _saved_in_between(is_near: bool) -> None:
    """What is in flight is trained before the loader's state is taken: two batches would be left out."""
    (model, optimizer), (other, its) = (wrapped("dp2", "row_wise", is_near=is_near) for _ in range(2))
    batches = batches_of(model.env.rank, 7)
    torch.manual_seed(0)
    for batch in batches:
        step(other, its, batch)
    torch.manual_seed(0)
    pipeline, loader, trained = TrainPipeline(model, optimizer), _Stateful(batches), 0
    iterator = iter(loader)
    for _ in range(2):
        pipeline.progress(iterator)
    assert loader.given == 4
    for _ in pipeline(()):
        trained += 1
    assert trained == 2 and loader.given == 4
    pipeline.progress(iterator)  # the same goes on
    trained += sum(1 for _ in pipeline(())) + 3
    for _ in TrainPipeline(model, optimizer)(_Stateful(batches, loader.given)):
        trained += 1
    assert trained == len(batches) and same(model, other)


@pytest.mark.parametrize("is_near", [False, True])
def test_a_loader_that_is_saved_in_between(is_near: bool) -> None:
    run_ranks(2, _saved_in_between, is_near)


def _one_buffer() -> Iterator[torch.Tensor]:
    buffer = torch.zeros(3, 2)
    for _ in range(4):
        yield buffer.add_(1)


def test_a_buffer_that_is_filled_again() -> None:
    with pytest.raises(InputError, match="batch 0 has changed since it was read"):
        TrainPipeline(nn.Linear(2, 1), forward=lambda batch: (batch.sum(), batch)).progress(_one_buffer())


def test_a_model_that_returns_no_pair() -> None:
    with pytest.raises(InputError, match=r"pair \(losses, output\) for a batch; got Tensor"):
        TrainPipeline(nn.Linear(2, 1)).progress(iter([torch.ones(1, 2)]))


@pytest.mark.parametrize("losses", [{"a": torch.ones(1)}, [torch.ones(1)]])
def test_losses_that_are_no_tensor(losses: Any) -> None:
    model = nn.Linear(2, 1)
    pipeline = TrainPipeline(model, forward=lambda batch: (losses, batch))
    with pytest.raises(InputError, match=rf"losses as one tensor, .*; got {type(losses).__name__}\. Add them up"):
        pipeline.progress(iter([torch.ones(1, 2)]))
    model.eval()
    assert pipeline.progress(iter([torch.ones(1, 2)])) is not None


def _parts(what: str) -> tuple[str, float]:
    """Ranks whose pipelines part."""
    rank = env_of("dp2").rank
    if what == "dense":
        model: nn.Module = DistributedModelParallel(nn.Linear(2, 1), env_of("dp2"))
        pipeline = TrainPipeline(
            model, torch.optim.SGD(model.parameters(), 0.1), forward=lambda b: (model(b).sum(), None)
        )
        batches: list[Any] = [torch.ones(1, 2)] * (2 + 3 * rank)
    else:
        model, optimizer = wrapped("dp2", "row_wise", Odd, is_near=what == "near")
        pipeline = TrainPipeline(model, optimizer)
        count = {"shorter": 2 + 3 * rank, "empty": 3 * rank, "other input": 6, "one less": 5 - rank, "near": 2 + rank}
        batches = batches_of(rank, count[what])
        if what == "other input" and rank:
            batches[3].dense[0, 1] = 8
    started, trained = time.monotonic(), 0
    try:
        for _ in pipeline(batches):
            trained += 1
    except Exception as error:
        told = f"{type(error).__name__}: after {trained} steps, {error}", time.monotonic() - started
        time.sleep(2.0)
        return told
    return "", 0.0


@pytest.mark.parametrize("what", ["shorter", *(pytest.param(w, marks=slow) for w in ("empty", "one less", "dense"))])
def test_ranks_with_different_numbers_of_batches(what: str) -> None:
    ends = mortal_ranks(2, _parts, what)
    for rank, (message, seconds) in enumerate(ends):
        if what == "dense" and "its iterator" not in message:  # a collective of torch's own has broken
            assert message, ends
            continue
        count = {"shorter": 2, "empty": 0, "one less": 4, "dense": 2}[what]
        assert "the ranks have parted ways" in message and seconds < TOLD_S + rank, ends
        assert (
            f"the end of its iterator, after {count} batches (a pipeline wants equally many on every rank)" in message
        )


@pytest.mark.slow
def test_near_ranks_train_what_they_have() -> None:
    """As in a plain loop: nothing of the next batch has been sent."""
    for message, seconds in mortal_ranks(2, _parts, "near"):
        assert "after 2 steps" in message and "the ranks have parted ways" in message and seconds < TOLD_S + 1


@slow
def test_another_input_on_one_rank() -> None:
    for message, seconds in mortal_ranks(2, _parts, "other input"):
        assert "rank 0 is in the lookup of 'first'" in message and "rank 1 is in the forward of 'first'" in message
        assert seconds < TOLD_S


def test_what_torchrecs_pipelines_are_made_of() -> None:
    model, device = nn.Linear(2, 1), torch.device("cpu")
    pipeline = dmp.TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), 0.1), device)
    with pytest.raises(AttributeError, match="'fill_pipeline' is a part of TorchRec's pipelines"):
        pipeline.fill_pipeline(iter([]))
    with pytest.raises(TypeError, match="Mine overrides fill_pipeline"):
        type("Mine", (dmp.TrainPipelineSparseDist,), {"fill_pipeline": None})
    with pytest.raises(AttributeError, match="no attribute 'none_such'"):
        _ = pipeline.none_such


class Halved(dmp.TrainPipelineSparseDist[torch.Tensor, torch.Tensor]):
    """By its types, as TorchRec's is subclassed: it was \"not subscriptable\"."""

    def _backward(self, losses: torch.Tensor) -> None:
        super()._backward(losses / 2)


class AgreedEnds(dmp.TrainPipelineSparseDist):
    """As of published scripts: who has no batch left goes on with the one in flight while others have some."""

    def _next_batch(self, dataloader_iter: Iterator[Any]) -> Any:
        if dataloader_iter is not self._dataloader_iter:
            self._dataloader_iter, self._dataloader_exhausted = dataloader_iter, False
        if self._dataloader_exhausted:
            return None
        batch = next(dataloader_iter, None)
        counts = torch.tensor(batch is not None, dtype=torch.int64)
        torch.distributed.all_reduce(counts)
        self._dataloader_exhausted = not counts
        return self.batches[0] if batch is None and counts else batch


class Clipped(AgreedEnds):
    """And whose steps are clipped, by a share that the batch of the step tells."""

    def _optimizer_step(self) -> None:
        dmp.clip_grad_norm_(self._model, float(self.batches[0].dense.sum()) / 100)
        super()._optimizer_step()


def _overridden(is_near: bool) -> None:
    (model, optimizer), (other, its) = (wrapped("dp2", "mixed", is_near=is_near) for _ in range(2))
    batches = batches_of(model.env.rank, 5)[: 5 - 2 * model.env.rank]
    pipeline = Clipped(model, optimizer, torch.device("cpu"))
    iterator = iter(batches)
    if model.env.rank:  # the one that was in flight when the end was seen, two steps before the end
        batches = [*batches, batches[1], batches[2]]
    torch.manual_seed(0)
    for batch in batches:
        its.zero_grad()
        other(batch)[0].sum(0).backward()
        dmp.clip_grad_norm_(other, float(batch.dense.sum()) / 100)
        its.step()
    torch.manual_seed(0)
    for _ in batches:
        pipeline.progress(iterator)
    with pytest.raises(StopIteration):
        pipeline.progress(iterator)
    assert same(model, other)


def test_steps_of_a_subclass() -> None:
    run_ranks(2, _overridden, False)
    run_ranks(2, _overridden, True)


def test_a_backward_of_a_subclass_is_called() -> None:
    """By which scripts scale the loss or divide it, as they do with TorchRec's."""
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    models[1].load_state_dict(start := {k: v.clone() for k, v in models[0].state_dict().items()})
    x = torch.randn(3, 2)
    for model, kind, lr in zip(models, (Halved, dmp.TrainPipelineSparseDist), (0.2, 0.1), strict=True):
        pipeline = kind(
            model,
            torch.optim.SGD(model.parameters(), lr),
            torch.device("cpu"),
            custom_model_fwd=lambda b, m=model: (m(b), b),
        )
        pipeline.progress(iter([x]))
    assert same(*models)
    assert not torch.equal(models[0].weight, start["weight"])


def _interval() -> None:
    model = DistributedModelParallel(nn.EmbeddingBag(8, 4, mode="sum"), env_of("replicate2"))
    with pytest.raises(ShardError, match="sync_interval"):
        dmp.TrainPipelineSparseDist(model, None, torch.device("cpu"), dmp_collection_sync_interval_batches=4)  # type: ignore[arg-type]


def test_an_interval_that_the_tables_do_not_have() -> None:
    run_ranks(2, _interval)
