"""Batches that were read ahead of the one that computes, in the order of the iterator, on their way to the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from dmp.errors import InputError
from dmp.foreign import type_name
from dmp.pipeline.walk import (
    AS_VALUE,
    BY_KEY,
    BY_NAME,
    BY_PLACE,
    MAX_OBJECTS,
    Found,
    Path,
    Snapshot,
    looks,
    shown_path,
    walk,
)


class Batch:
    """One batch on its way.

    Args:
        value: as the model takes it, on the device.
        found: what is in it.
        number: of the pipeline's batches, from 0.
        error: what the iterator raised in its place: raised in its turn.
        copied: an event after its copy to the device, until something computes from it; None without streams.
    """

    def __init__(
        self, value: Any, found: Found, number: int, error: Exception | None = None, copied: Any = None
    ) -> None:
        self.value, self.number, self.error, self.copied = value, number, error, copied
        self._as_read = Snapshot(found)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Of the batch as it was read."""
        return self._as_read.tensors()

    def check_unchanged(self) -> None:
        """Whether it is as it was read.

        Raises:
            InputError: a tensor that was written to since.
        """
        path = self._as_read.changed_in(self.value)
        if path is not None:
            raise InputError(
                f"batch {self.number} has changed since it was read: its tensor batch{shown_path(path)} was written to "
                "or replaced. A pipeline reads batches ahead, so an iterator must not fill one buffer again and again: "
                "have it yield copies, or use a plain loop"
            )


class Feed:
    """Reads batches and has them copied to a device: on a stream of their own where there are streams.

    Args:
        device: where the model takes them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: Any = None
        self._stream: Any = None
        if device.type != "cpu":
            self._streams = torch.get_device_module(device)
            self._stream = self._streams.Stream(device) if hasattr(self._streams, "Stream") else None
        self._iterator: Iterator[Any] | None = None
        self.has_ended = False
        self.num_read, self.num_of_iterator, self.num_ends = 0, 0, 0

    def read(self, iterator: Iterator[Any], next_batch: Callable[[Iterator[Any]], Any]) -> Batch | None:
        """What `next_batch(iterator)` gives, under way to the device; None, as at its end, ends the iterator."""
        if iterator is not self._iterator:
            self._iterator, self.has_ended, self.num_of_iterator = iterator, False, 0
        if self.has_ended:
            return None
        found: Found = []
        value, error, copied = None, None, None
        try:
            value = next_batch(iterator)
            if value is not None:
                (value, found), copied = self._sent(value)
        except Exception as raised:
            error = raised
        if value is None and error is None:
            self.has_ended = True
            self.num_ends += 1
            return None
        self.num_read += 1
        self.num_of_iterator += 1
        return Batch(value, found, self.num_read - 1, error, copied)

    def arrive(self, batch: Batch) -> None:
        """Have what is computed from now on wait for the batch's copy, and its memory wait for what is computed."""
        if batch.copied is None:
            return
        current = self._streams.current_stream(self.device)
        current.wait_event(batch.copied)
        batch.copied = None
        for tensor in batch.tensors():
            if tensor.device.type == self.device.type:
                tensor.record_stream(current)

    def _sent(self, value: Any) -> tuple[tuple[Any, Found], Any]:
        """On the device, with what is in it, and an event after its copy."""
        if self._stream is None:
            return to_device(value, self.device), None
        with self._streams.stream(self._stream):
            return to_device(value, self.device), self._stream.record_event()

    def forget(self) -> None:
        """Begin anew, also with an iterator that has ended."""
        self._iterator, self.has_ended = None, False


def to_device(value: Any, device: torch.device) -> tuple[Any, Found]:
    """The batch on the device, and what is in it there: by its own `to` where it has one; dicts, lists, tuples and
    dataclasses part by part, anew, for a loader may fill its own again.

    Each part is looked into as it arrives: to look at the batch once more took as long as all else that is done to it.

    Raises:
        InputError: a `to` that returns None, which would be taken for the end of the batches.
    """
    found: Found = []

    def moved(part: Any, path: Path) -> Any:
        seen: Found = []
        if callable(getattr(part, "to", None)):
            if _is_of_torch(part):
                seen = walk(part, path, MAX_OBJECTS - len(found))
            if {each.device for _, each in seen if isinstance(each, torch.Tensor)} != {device}:
                part = _sent_by_itself(part, device)
                seen = walk(part, path, MAX_OBJECTS - len(found))
            found.extend(seen)
            return part
        look = looks[type(part)]
        if look == AS_VALUE:
            return part
        if look == BY_KEY:
            return {key: moved(item, (*path, ("item", key))) for key, item in part.items()}
        if look == BY_PLACE:
            new = [moved(item, (*path, ("item", i))) for i, item in enumerate(part)]
            return type(part)(*new) if hasattr(part, "_fields") else type(part)(new)
        if look == BY_NAME and is_dataclass(part):
            part = copy.copy(part)
            for each in fields(part):
                object.__setattr__(part, each.name, to_device(getattr(part, each.name), device)[0])
        found.extend(walk(part, path, MAX_OBJECTS - len(found)))
        return part

    return moved(value, ()), found


def _sent_by_itself(part: Any, device: torch.device) -> Any:
    sent = part.to(device=device, non_blocking=True)
    if sent is None:
        raise InputError(
            f"{type_name(part)}.to returned None; expected what is on the device: end it with `return self` where it "
            "moves in place"
        )
    return sent


def _is_of_torch(part: Any) -> bool:
    """Or TorchRec's, whose batches make themselves anew in `to` where nothing moves, which takes longer than all else
    that a pipeline does. What the `to` of others' types does is theirs to know."""
    return type(part).__module__.partition(".")[0] in ("torch", "torchrec")
