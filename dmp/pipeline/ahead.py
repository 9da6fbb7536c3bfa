"""Calls of sharded modules that were begun for the next batch, so that its ids travel while this one computes.

[Note: record] Which modules can be begun is seen in a forward, not traced: the first one in each mode (training or not)
is *recorded*. For each call of a sharded module whose ids travel, by the hooks `begin`, `finish`, `can_finish` and
`travels`, it is noted where in the batch its arguments are: as the very objects, by their paths (walk.py). A call whose
arguments the model has made itself has no path, and its module runs whole, as in a plain loop. The ranks compare their
records once, and begin what is in all of them, in one order.

[Note: checked] A call that was begun is finished only in place of a call with the same objects, of which no tensor was
written to since, and where `can_finish`; else it is dropped, and the module runs whole. Where that happens on some
ranks alone, because the model goes by values of the batch, these exchange ids while the others look up: an error on
all, within seconds. So a result is the plain loop's, or there is none.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dmp.contracts import hook
from dmp.errors import RanksError
from dmp.pipeline.walk import NOTHING_THERE, PLAIN, Path, Snapshot, resolve, walk
from dmp.ranks import gather_objects

_log = logging.getLogger("dmp")


@dataclass(frozen=True)
class Plain:
    """An argument that is a plain value, as it was in the recorded forward."""

    value: Any


@dataclass(frozen=True)
class Recorded:
    """One call of a sharded module in a recorded forward.

    Args:
        name: the module's path.
        args, keywords: where its arguments are in the batch.
        kinds: their types.
        no_grad: it was under `no_grad` in a forward that was not.
    """

    name: str
    args: tuple[Path | Plain, ...]
    keywords: tuple[tuple[str, Path | Plain], ...]
    kinds: tuple[str, ...]
    no_grad: bool

    def arguments(self, batch: Any) -> tuple[list[Any], dict[str, Any]] | None:
        """The same of another batch; None where it has no such."""
        try:
            args = [_at(batch, place) for place in self.args]
            keywords = {name: _at(batch, place) for name, place in self.keywords}
        except NOTHING_THERE:
            return None
        return (args, keywords) if _kinds([*args, *keywords.values()]) == self.kinds else None


@dataclass
class Begun:
    """A call that was begun."""

    args: list[Any]
    keywords: dict[str, Any]
    call: Any
    as_begun: Snapshot = field(init=False)

    def __post_init__(self) -> None:
        # After it: who reads a batch may keep in it what it found.
        self.as_begun = Snapshot(walk((self.args, self.keywords)))

    def is_of(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
        """Whether these are its arguments, unchanged."""
        if len(args) != len(self.args) or list(keywords) != list(self.keywords):
            return False
        given, held = [*args, *keywords.values()], [*self.args, *self.keywords.values()]
        same = all(_same(a, b) for a, b in zip(given, held, strict=True))
        return same and self.as_begun.changed_in((self.args, self.keywords)) is None


@dataclass
class Ahead:
    """What was begun for one batch: calls by the module's name, in order.

    Args:
        error: of a batch that a module did not take: raised in its turn, as in a plain loop.
    """

    calls: dict[str, deque[Begun]] = field(default_factory=lambda: defaultdict(deque))
    error: Exception | None = None


class Beginner:
    """Records forwards of a model, begins calls of its sharded modules, and has its forward finish them.

    Args:
        group: of the ranks that must do alike; None for this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._records: dict[bool, tuple[Recorded, ...]] = {}
        self._said: set[str] = set()

    def looks_for(self, is_training: bool) -> bool:
        """Whether modules may be begun in this mode: some are, or none has been seen to run in it yet."""
        return self._records.get(is_training) != ()

    def look_again(self) -> None:
        """In modes in which nothing is begun: other modules may be, in the next forward."""
        self._records = {mode: records for mode, records in self._records.items() if records}

    def begin(self, modules: Mapping[str, nn.Module], batch: Any, is_training: bool) -> Ahead | None:
        """Begin the calls of a batch, as far as forwards of this mode are known; None where nothing is.

        Raises:
            RanksError: other ranks do something else.
        """
        records = self._records.get(is_training)
        if not records:
            return None
        ahead = Ahead()
        for recorded in records:
            module = modules.get(recorded.name)
            found = recorded.arguments(batch)
            if module is None or found is None:
                continue
            args, keywords = found
            try:
                with torch.no_grad() if recorded.no_grad else nullcontext():
                    call = hook(module, "begin")(*args, **keywords)
            except RanksError:
                raise
            except Exception as error:  # of the batch, and told to all ranks
                ahead.error = error
                break
            ahead.calls[recorded.name].append(Begun(args, keywords, call))
        return ahead

    @contextmanager
    def running(
        self, modules: Mapping[str, nn.Module], batch: Any, is_training: bool, ahead: Ahead | None
    ) -> Iterator[None]:
        """While the model's forward runs: its sharded modules finish what was begun; the first one is recorded."""
        recording = _Recording(batch) if is_training not in self._records else None
        calls = ahead.calls if ahead is not None else {}
        stand_ins = [
            _StandIn(self, name, module, calls.get(name, deque()), recording)
            for name, module in modules.items()
            if recording is not None or calls.get(name)
        ]
        try:
            for each in stand_ins:
                each.step_in()
            yield
        finally:
            for each in stand_ins:
                each.step_out()
        if recording is not None:
            self._records[is_training] = self._agreed(recording.found) if modules else ()

    def drop(self, name: str) -> None:
        """Begin this module no more: the model gave it something else than was begun."""
        for mode, records in self._records.items():
            self._records[mode] = tuple(each for each in records if each.name != name)
        self.say(
            name,
            "the model has called it with another input than in its first forward, or has written to that; from now "
            "on it runs whole, its ids are not sent ahead",
        )

    def say(self, name: str, what: str) -> None:
        """Once for each module."""
        if name not in self._said:
            self._said.add(name)
            _log.warning("pipeline: %s: %s", name or "the model itself", what)

    def _agreed(self, found: list[Recorded | str]) -> tuple[Recorded, ...]:
        """What all ranks have recorded, in the order of the first."""
        for each in found:
            if isinstance(each, str):
                self.say(
                    each,
                    "its input is made or written to inside the model, not taken from the batch as it is: it runs "
                    "whole, its ids are not sent ahead",
                )
        mine = [each for each in found if isinstance(each, Recorded)]
        told = gather_objects("comparing how a pipeline's model takes its batch", mine, self._group)
        return tuple(each for each in told[0] if all(each in of_rank for of_rank in told))


class _Recording:
    """Of one forward."""

    def __init__(self, batch: Any) -> None:
        found = walk(batch)
        self._places = {id(each): path for path, each in found}
        self._before = Snapshot(found)
        self._batch = batch
        self._grad = torch.is_grad_enabled()
        self.found: list[Recorded | str] = []

    def take(self, name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Note a call: where its arguments are, or its name alone where some are not in the batch as it was."""
        given = [*args, *keywords.values()]
        is_known = all(isinstance(each, PLAIN) or id(each) in self._places for each in given)
        if not is_known or self._before.changed_in(self._batch) is not None:
            self.found.append(name)
            return
        self.found.append(
            Recorded(
                name,
                tuple(self._place(each) for each in args),
                tuple((key, self._place(each)) for key, each in keywords.items()),
                _kinds(given),
                self._grad and not torch.is_grad_enabled(),
            )
        )

    def _place(self, value: Any) -> Path | Plain:
        return Plain(value) if isinstance(value, PLAIN) else self._places[id(value)]


class _StandIn:
    """In the place of a module's forward, while the model's runs."""

    def __init__(
        self, of: Beginner, name: str, module: nn.Module, begun: deque[Begun], recording: _Recording | None
    ) -> None:
        self._of, self._name, self._module, self._begun, self._recording = of, name, module, begun, recording
        self._forward = module.forward

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self._recording is not None:
            self._recording.take(self._name, args, keywords)
        if self._begun:
            begun = self._begun.popleft()
            if begun.is_of(args, keywords):
                if hook(self._module, "can_finish")(begun.call):
                    return hook(self._module, "finish")(begun.call)
            else:
                self._begun.clear()
                self._of.drop(self._name)
        return self._forward(*args, **keywords)

    def step_in(self) -> None:
        vars(self._module)["forward"] = self

    def step_out(self) -> None:
        vars(self._module).pop("forward", None)


def takes_part(module: nn.Module) -> bool:
    """Whether ids of a module's calls travel, in the first of two phases, and its forward is these two: no subclass has
    put in another."""
    if hook(module, "travels") is False:
        return False
    if not all(callable(hook(module, name)) for name in ("begin", "finish", "can_finish")):
        return False
    own = [name for kind in type(module).__mro__ for name in ("begin", "forward") if name in vars(kind)]
    return own[:1] == ["begin"]


def runs_its_own(module: nn.Module) -> bool:
    """Whether its forward is its class's: programs put in others, between any two steps."""
    return "forward" not in vars(module)


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, PLAIN) and type(a) is type(b) and a == b)


def _at(batch: Any, place: Path | Plain) -> Any:
    return place.value if isinstance(place, Plain) else resolve(batch, place)


def _kinds(values: list[Any]) -> tuple[str, ...]:
    return tuple(f"{type(each).__module__}.{type(each).__qualname__}" for each in values)
