"""What of a model is running now, and in which thread.

A model is one conversation between its ranks: a forward in a second thread, or a save while another thread trains,
would mix two of them, and write pieces of different steps. That is an error here, not a lock to wait at: the ranks'
threads need not come to it in one order.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from threading import Lock, current_thread, get_ident
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from dmp.errors import DmpError, ShardError
from dmp.inference_mode import outside_inference_mode

P = ParamSpec("P")
R = TypeVar("R")


class RowWatch(Protocol):
    """Is told which rows of a model's tables training forwards read, before those are updated."""

    wants_values: bool
    """Whether it is told their values too."""

    def wants(self, name: str) -> bool:
        """Whether it watches the table of that parameter; the same on all ranks."""
        ...

    def take(self, name: str, rows: Tensor, values: Tensor | None) -> None:
        """Rows (N,) int64 of the whole table, in any order and perhaps again, which this rank alone tells, and their
        values (N, dim) as they are before the update."""
        ...


class Calls:
    """The calls of one model that are under way: all of one thread, one inside the other.

    Attributes:
        model: the same text for the same model on all ranks, and another for every other: for a copy too.
        steps: of optimizers, the last, see step_turns.py in wrap/.
        num_steps: of those.
        fused: of what is updated in the backward pass, the groups of options.
        part: what a module updates so -> an optimizer of that; None outside of a model.
        num_updates: steps of optimizers, and updates in backward passes.
        taken: by a mark of their values, when state dicts were given out, see taken.py in wrap/.
        samples: marks of what the first forwards were called with, before any of those.
        num_compared: ranks that compare `digest` in front of every lookup.
        watch: is told of rows that are read, by modules with the hook `tells_rows`; None where nobody watches.
    """

    def __init__(self, model: str = "") -> None:
        self.model, self._num_copies = model, 0
        self._lock = Lock()
        self._owner = 0
        self._thread = ""
        self._names: list[str] = []
        self._forwards = 0
        self.steps: deque[str] = deque(maxlen=3)
        self._digest = self.num_steps = self.num_updates = 0
        self.samples: list[int] = []
        self.taken: dict[int, frozenset[int]] = {}
        self._updated_at = -1
        self.fused: Sequence[Mapping[str, Any]] = ()
        self.part: Callable[[Any], Any] | None = None
        self.num_compared = 0
        self.watch: RowWatch | None = None
        self.number = 0
        """Of the last forward that was begun."""
        self.forward, self.backward = Call(self, "the forward", 1), Call(self, "the backward")

    @property
    def is_forward(self) -> bool:
        """Whether this thread is in the model's forward."""
        return self._forwards > 0 and self._owner == get_ident()

    def __deepcopy__(self, memo: dict[int, Any]) -> Calls:
        """A copy of the model runs by itself."""
        self._num_copies += 1
        return Calls(f"copy {self._num_copies} of {self.model}")

    def note_step(self, text: str) -> None:
        """An optimizer makes a step on what the model holds."""
        self.steps.append(text)
        self.num_steps += 1
        self.num_updates += 1
        self._digest += zlib.crc32(text.encode())  # a sum, for ranks may have their optimizers in different orders

    def note_update(self) -> None:
        """A backward pass comes by tables, and updates those that are updated in it."""
        self._updated_at = self.num_steps
        self.num_updates += 1

    @property
    def is_in_a_step(self) -> bool:
        """Whether tables were updated since the last step of an optimizer; of a program that makes none, no."""
        return bool(self.fused) and 0 < self.num_steps == self._updated_at

    def digest(self) -> int:
        """Of the steps so far, and of the learning rates in the backward pass: the same number on all ranks."""
        return (self._digest + 3 * hash(tuple(float(group.get("lr", 0.0)) for group in self.fused))) % (1 << 32)

    def facts(self) -> str:
        """What that is of, in words."""
        rates = dict.fromkeys(float(group.get("lr", 0.0)) for group in self.fused)
        within = f"; in the backward pass lr={', '.join(map(str, rates))}" if rates else ""
        return f"{', '.join(self.steps) or 'none'}{within}"

    def so_far(self) -> str:
        """Likewise, for what is compared before a save; "" where there were none."""
        last = self.steps[-1] if self.steps else ""
        return last and f"steps of optimizers={self.num_steps} ({self._digest % (1 << 32):08x}), the last {last}"

    def enter(self, what: str, forwards: int) -> None:
        """Begin a call.

        Raises:
            DmpError: another thread is in one.
        """
        me = get_ident()
        if self._owner != me:
            if not self._lock.acquire(blocking=False):
                raise DmpError(
                    f"thread {current_thread().name!r} begins {what} while thread {self._thread!r} is in "
                    f"{self._names[0] if self._names else 'another call'} of the same model, which runs in one thread "
                    "at a time: wait for the other to end. To save while training goes on: "
                    "save_checkpoint(..., asynchronous=True)"
                )
            self._owner, self._thread = me, current_thread().name
        self._names.append(what)
        self.number += forwards > 0 == self._forwards
        self._forwards += forwards

    def leave(self, forwards: int) -> None:
        """End the call that was begun last."""
        self._names.pop()
        self._forwards -= forwards
        if not self._names:
            self._owner = 0
            self._lock.release()


class Call:
    """`with` it, the call is under way."""

    def __init__(self, calls: Calls, what: str, forwards: int = 0) -> None:
        self._of, self._what, self._forwards = calls, what, forwards

    def __enter__(self) -> None:
        self._of.enter(self._what, self._forwards)

    def __exit__(self, *_: object) -> None:
        self._of.leave(self._forwards)


def calls_of(module: nn.Module) -> list[Calls]:
    """Of the wrapped models in a module, itself included."""
    return [calls for m in module.modules() if (calls := vars(m).get("_calls"))]


def alone(what: str, *, at_rest: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function one of the calls of the models in its arguments.

    Args:
        at_rest: not inside a forward or backward, as hooks and handlers of signals are: a part of what the step changes
            is changed then, and parameters are not where they are between steps.

    Raises:
        DmpError: another thread is in a call of one of them.
        ShardError: one of them is not at rest.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            given = [each for each in (*args, *kwargs.values()) if isinstance(each, nn.Module)]
            with ExitStack() as stack:
                stack.enter_context(outside_inference_mode())
                for calls in dict.fromkeys(c for each in given for c in calls_of(each)):
                    if at_rest:
                        _check_at_rest(calls, what)
                    stack.enter_context(Call(calls, what))
                return function(*args, **kwargs)

        return run

    return decorate


def _check_at_rest(calls: Calls, what: str) -> None:
    # Private: whether torch's engine is in a backward pass on this thread.
    if calls.is_forward or torch._C._current_graph_task_id() != -1:
        where = "forward" if calls.is_forward else "backward pass"
        raise ShardError(
            f"{what} was called inside the model's {where}, in the middle of a step: call it between two steps. Where "
            "it is called by the handler of a signal, note the signal there, and have the loop ask all ranks for their "
            "notes after each step (all_reduce)"
        )
