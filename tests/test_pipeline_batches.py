"""What a pipeline makes of batches of each form: what a loader fills again is copied, what was written to is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dmp
from dmp import InputError, TrainPipeline
from dmp.pipeline import in_flight
from dmp.pipeline.in_flight import to_device

CPU, STEPS = torch.device("cpu"), 5


@dataclass
class Fields:
    x: Any


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class Foreign(Slots):
    """Whose `to` makes new tensors, and does more than that."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Foreign:
        return Foreign(self.x.to(device) + 1)


class InPlace(Fields):
    """Whose `to` gives itself, as of Hugging Face's."""

    def to(self, device: torch.device, non_blocking: bool = False) -> InPlace:
        self.x = self.x.clone()
        return self


def keyed(x: torch.Tensor) -> Any:
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(["a"], values=x.flatten(), lengths=torch.tensor([x.numel()]))


MADE: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor], str]] = {
    "tensor": (lambda x: x, lambda b: b, ""),
    "list": (lambda x: [0, x], lambda b: b[1], "[1]"),
    "in a tuple": (lambda x: ("a", {"x": [x]}), lambda b: b[1]["x"][0], "[1]['x'][0]"),
    "odd key": (lambda x: {(1, "a"): x}, lambda b: b[1, "a"], "[(1, 'a')]"),
    "fields": (Fields, lambda b: b.x, ".x"),
    "inner fields": (lambda x: [Fields({"x": Fields(x)})], lambda b: b[0].x["x"].x, "[0].x['x'].x"),
    "slots": (lambda x: [Slots(x)], lambda b: b[0].x, "[0].x"),
    "keyed": (keyed, lambda b: b.values(), "._values"),
    "inner keyed": (lambda x: (x * 1, keyed(x)), lambda b: b[1].values(), "[1]._values"),
    "foreign": (lambda x: {"b": Foreign(x)}, lambda b: b["b"].x, "['b'].x"),
    "in place": (lambda x: {"b": InPlace(x)}, lambda b: b["b"].x, "['b'].x"),
    "foreign in keyed's place": (lambda x: [keyed(x), Foreign(x)], lambda b: b[1].x, "[1].x"),
}
"""How a batch is made of a tensor, how the model comes by it, and where it is."""


def pipeline_of(read: Callable[[Any], torch.Tensor]) -> dmp.TrainPipelineSparseDist:
    """Outputs are what the model has read."""
    model = nn.Linear(2, 1)
    forward = lambda batch: (model(read(batch).view(-1, 2)), read(batch).clone())  # noqa: E731
    return dmp.TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), 0.1), CPU, custom_model_fwd=forward)


def values(i: int) -> torch.Tensor:
    return torch.full((2, 2), float(i))


@pytest.mark.parametrize("form", MADE)
def test_a_batch_that_is_written_to_before_its_step(form: str) -> None:
    make, read, where = MADE[form]
    pipeline, iterator = pipeline_of(read), (make(values(i)) for i in range(STEPS))
    assert pipeline.progress(iterator) is not None
    read(pipeline.batches[1]).add_(1)
    pipeline.progress(iterator)
    with pytest.raises(InputError) as told:
        pipeline.progress(iterator)
    assert f"batch 2 has changed since it was read: its tensor batch{where} was written to or replaced" in str(
        told.value
    )
    assert len(list(pipeline(iterator))) == STEPS - 3


def _set(box: Any, key: Any, x: Any) -> None:
    setattr(box, key, x) if isinstance(key, str) and not isinstance(box, dict) else box.__setitem__(key, x)


FILLED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any, Callable[[Any], torch.Tensor]]] = {
    "list": (lambda: [None, values(9)], lambda b: b, 0, lambda b: b[0]),
    "dict": (dict, lambda b: b, "x", lambda b: b["x"]),
    "fields": (lambda: Fields(None), lambda b: b, "x", lambda b: b.x),
    "list in a tuple": (lambda: (values(9), [None]), lambda b: b[1], 0, lambda b: b[1][0]),
    "list in fields": (lambda: Fields([None]), lambda b: b.x, 0, lambda b: b.x[0]),
    "fields in a dict": (lambda: {"b": Fields(None)}, lambda b: b["b"], "x", lambda b: b["b"].x),
    "foreign": (lambda: Foreign(None), lambda b: b, "x", lambda b: b.x - 1),
}
"""What a loader yields again and again; what of it is filled, and under which key; how the model comes by that."""


@pytest.mark.parametrize(
    ("form", "filled"),
    [(form, filled) for form in FILLED for filled in ("tensors", "keyed", "numbers")[: 1 if form == "foreign" else 3]],
)
def test_what_a_loader_fills_again(form: str, filled: str) -> None:
    make, part, key, come_by = FILLED[form]
    fill: dict[str, Callable[[int], Any]] = {
        "tensors": values,
        "keyed": lambda i: keyed(values(i)),
        "numbers": lambda i: [float(i), i],
    }
    read: dict[str, Callable[[Any], torch.Tensor]] = {
        "tensors": come_by,
        "keyed": lambda b: come_by(b).values(),  # type: ignore[operator]
        "numbers": lambda b: torch.tensor(come_by(b)),
    }

    def loader() -> Iterator[Any]:
        box = make()
        for i in range(STEPS):
            _set(part(box), key, fill[filled](i))
            yield box

    outputs = list(pipeline_of(read[filled])(loader()))
    assert [out.flatten()[0].item() for out in outputs] == list(range(STEPS))


def test_a_list_of_numbers_that_is_filled_again() -> None:
    def loader() -> Iterator[Any]:
        box, numbers = values(0), [0.0, 0.0]
        for i in range(STEPS):
            numbers[:] = [float(i), 0.0]
            yield box, numbers

    outputs = list(pipeline_of(lambda b: torch.tensor(b[1]))(loader()))
    assert [out[0].item() for out in outputs] == list(range(STEPS))


def test_a_foreign_batch_that_is_filled_again_is_told() -> None:
    """Its `to` gives itself, with other tensors in it than were read."""
    box = InPlace(values(0))

    def loader() -> Iterator[Any]:
        for i in range(STEPS):
            box.x = values(i)
            yield box

    with pytest.raises(InputError, match=r"its tensor batch\.x was written to or replaced"):
        pipeline_of(lambda b: b.x).progress(loader())


class Silent(Fields):
    """Whose `to` forgets to return."""

    def to(self, device: torch.device, non_blocking: bool = False) -> None:
        self.x = self.x.to(device)


def test_a_to_that_returns_nothing_is_not_the_end() -> None:
    pipeline, iterator = pipeline_of(lambda b: b), iter([values(0), Silent(values(1)), values(2)])
    pipeline.progress(iterator)
    with pytest.raises(InputError, match=r"Silent\.to returned None; expected what is on the device"):
        pipeline.progress(iterator)
    assert len(list(pipeline(iterator))) == 1


def test_a_batch_of_more_than_is_looked_into() -> None:
    """Is on its device all the same, every part of it."""
    batch = [keyed(values(i)) for i in range(4)]
    with mock.patch.object(in_flight, "MAX_OBJECTS", 6):
        moved, found = to_device((batch, values(5)), torch.device("meta"))
        stays, _ = to_device(batch, CPU)
    assert all(each.values().is_meta and each.lengths().is_meta for each in moved[0]) and moved[1].is_meta
    assert len(found) == 6
    assert all(torch.equal(a.values(), b.values()) for a, b in zip(stays, batch, strict=True))


def test_what_is_partly_elsewhere() -> None:
    """Parts that are there stay, those beside them move."""
    there, elsewhere = keyed(values(0)), torch.ones(2, 2, device="meta")
    moved, found = to_device({"there": there, "elsewhere": elsewhere}, torch.device("meta"))
    assert moved["elsewhere"] is elsewhere and moved["there"].values().is_meta
    assert {each.device.type for _, each in found if isinstance(each, torch.Tensor)} == {"meta"}


def test_one_batch_is_made_once() -> None:
    """What is there is neither made anew nor looked into twice."""
    batch = (values(0), keyed(values(1)), values(2))
    seen: list[Any] = []
    walk = in_flight.walk
    with mock.patch.object(in_flight, "walk", lambda part, *of: seen.append(part) or walk(part, *of)):
        TrainPipeline(nn.Linear(2, 1).eval(), forward=lambda b: (b[0].sum(), b)).progress(iter([batch]))
    assert [id(each) for each in seen] == [id(each) for each in batch]
