"""`TrainPipeline`: a training loop of which each call is one step, with the next batches on their way meanwhile.

[Note: order] A step of batch i: the ids of batch i + 1 are sent off (`begin`, see ahead.py); batch i + 2 is read and
copied to the device; then forward, backward and the optimizer's step of batch i. Tables are looked up in its forward,
after the updates of batch i - 1: weights are those of a plain loop, to the bit. A module of which nothing travels
(its ranks share memory, or it has no other ranks) is not begun ahead: what is done earlier takes as long, and to do it
earlier took another 7 % of a step of small tables. What differs from a plain loop: batches are read two steps earlier,
so an iterator that draws from torch's generator while the model does too draws other numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import is_not
from typing import Any

import torch
from torch import nn

from dmp.errors import InputError, RanksError
from dmp.foreign import type_name
from dmp.names import join_name
from dmp.pipeline.ahead import Ahead, Beginner, runs_its_own, takes_part
from dmp.pipeline.in_flight import Batch, Feed
from dmp.ranks import gather_words, raise_cause
from dmp.state.find_wrapped import env_of, wrapped_in


@dataclass
class _Waiting:
    """A batch whose turn has not come."""

    batch: Batch
    ahead: Ahead | None = None


class TrainPipeline:
    """Trains a model batch by batch while the ids of the next batch, and their exchange, are under way.

    The same numbers as `zero_grad`, forward, backward and `step` one after the other, to the bit. The model takes a
    batch and returns `(losses, output)`. Modules whose ids travel, and whose input is in the batch as it is
    (`batch.sparse_features`), are begun ahead; those whose input is not run whole, which is said once, by name. Every
    rank must have as many batches: where ids are sent ahead, one that has fewer is told before its last is trained.

    Batches are read two steps before their own, so the state of a loader that has one (torchdata's `state_dict`) is two
    batches ahead of the model. To save both, have those in flight trained first, which reads nothing:
    `for _ in pipeline(()): pass`; then go on with the same iterator.

    Args:
        model: wrapped, or with wrapped models in it; a plain one has nothing to begin ahead.
        optimizer: with `zero_grad` and `step`; None where all parameters are updated in the backward pass.
        device: to copy batches to: by their own `to`, else the parts of dicts, lists, tuples and dataclasses; the
            model's by default.
        forward: called with a batch in the model's place.
        sends_ahead: False begins nothing before its turn.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> task = lambda batch: (model(batch).sum(), model(batch).detach())
        >>> pipeline = TrainPipeline(model, torch.optim.SGD(model.parameters(), 0.1), forward=task)
        >>> [tuple(out.shape) for out in pipeline([torch.ones(3, 2), torch.ones(1, 2)])]
        [(3, 1), (1, 1)]
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        device: torch.device | str | None = None,
        *,
        forward: Callable[[Any], Any] | None = None,
        sends_ahead: bool = True,
    ) -> None:
        self._optimizer = optimizer  # under this name others find and replace it: TorchRec's gradient accumulation
        self._given_forward, self._sends_ahead = forward, sends_ahead
        self._reads_late, self._runs_last, self._trains = False, True, True
        self._waiting: deque[_Waiting] = deque()
        self._hold(model)
        first = next(iter([*model.parameters(), *model.buffers()]), None)
        default = getattr(model, "device", first.device if first is not None else "cpu")
        self._feed = Feed(torch.device(default if device is None else device))
        self._agreed_ends = 0

    def _hold(self, model: nn.Module) -> None:
        self._model = model
        self._env = env_of(model)
        self._wrapped = wrapped_in(model)
        self._plans = [wrapped.plan for wrapped in self._wrapped.values()]
        self._taking_part: dict[str, nn.Module] | None = None
        self._beginner = Beginner(self._env.everyone)
        for waiting in self._waiting:
            waiting.ahead = None

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Outputs of all steps over the batches, each made when it is asked for."""
        iterator = iter(batches)
        while True:
            try:
                output = self.progress(iterator)
            except StopIteration:
                return
            yield output

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """One step: of the oldest batch in flight. The model's output for it.

        In training mode `torch.sum(losses, dim=0)` is differentiated and the optimizer steps; else neither. What goes
        wrong with a batch, in the iterator or in `begin` too, is raised in its turn, and the next call goes on with the
        next one.

        Args:
            dataloader_iter: batches in flight come first, also where it is another one than before.

        Raises:
            StopIteration: all batches are trained; a new iterator begins anew.
            InputError: what came from the iterator has changed since; the model returns no pair, or losses that are no
                tensor.
            RanksError: ranks have different numbers of batches, or do something else.
        """
        if not callable(getattr(dataloader_iter, "__next__", None)):
            raise InputError(f"expected an iterator of batches, as iter(loader) is; got {type_name(dataloader_iter)}")
        try:
            self._read(dataloader_iter, 1)
            if not self._waiting:
                self._meet_at_end()
                raise StopIteration
            self._read(dataloader_iter, 2)
            modules = self._modules()
            self._begin_next(modules)
            if not self._reads_late:
                self._read(dataloader_iter, 3)
            if not self._runs_last and self._feed.has_ended:
                raise StopIteration
            current = self._waiting[0]
            try:
                output = self._step(current, modules)
            finally:
                if self._waiting and self._waiting[0] is current:
                    self._waiting.popleft()
            if self._reads_late:
                self._read(dataloader_iter, 2)
        except RanksError as error:
            own = next((each.batch.error for each in self._waiting if each.batch.error is not None), None)
            if own is not None:  # what has parted the ranks
                raise own from error
            raise
        return output

    def _read(self, iterator: Iterator[Any], count: int) -> None:
        """Have as many batches in flight, this one included, where the iterator has them."""
        while len(self._waiting) < count:
            batch = self._feed.read(iterator, self._next_batch)
            if batch is None:
                return
            self._waiting.append(_Waiting(batch))

    def _meet_at_end(self) -> None:
        """The ranks must come to the end of their batches at one step: else one waits for the others' ids."""
        if self._agreed_ends == self._feed.num_ends:
            return
        count = self._feed.num_of_iterator
        what = f"the end of its iterator, after {count} batches (a pipeline wants equally many on every rank)"
        gather_words(what, [count, 0], self._env.everyone)
        self._agreed_ends = self._feed.num_ends

    def _begin_next(self, modules: dict[str, nn.Module]) -> None:
        """Send off the ids of the batch after this one; at the end say so, where others would wait for them."""
        if len(self._waiting) > 1:
            self._begin(self._waiting[1], modules)
        elif modules:
            self._meet_at_end()

    def _begin(self, waiting: _Waiting, modules: dict[str, nn.Module]) -> None:
        if waiting.ahead is None and waiting.batch.error is None:
            self._feed.arrive(waiting.batch)
            waiting.ahead = self._beginner.begin(modules, waiting.batch.value, self._model.training)

    def _modules(self) -> dict[str, nn.Module]:
        """Path -> each module that is begun ahead where its input allows it. They are sought once under each plan: to
        find 26 modules and ask them takes a third of a millisecond."""
        plans = [wrapped.plan for wrapped in self._wrapped.values()]
        if any(map(is_not, plans, self._plans)):  # by which ids of other modules may travel
            self._plans, self._taking_part = plans, None
            self._beginner.look_again()
        if not self._sends_ahead or not self._beginner.looks_for(self._model.training):
            return {}
        if self._taking_part is None:
            self._taking_part = {
                join_name(path, name): module
                for path, wrapped in self._wrapped.items()
                for name, module in wrapped.sharded_modules.items()
                if takes_part(module)
            }
        return {name: module for name, module in self._taking_part.items() if runs_its_own(module)}

    def _step(self, current: _Waiting, modules: dict[str, nn.Module]) -> Any:
        batch, ahead, trains = current.batch, current.ahead, self._trains and self._model.training
        if batch.error is not None:
            raise batch.error
        if ahead is not None and ahead.error is not None:
            raise ahead.error
        if trains and self._optimizer is not None:
            self._optimizer.zero_grad()
        self._feed.arrive(batch)
        batch.check_unchanged()
        with self._beginner.running(modules, batch.value, self._model.training, ahead):
            losses, output = self._forward(batch.value)
        if len(self._waiting) > 1:  # the first time, when this forward has shown what can be begun
            self._begin(self._waiting[1], modules)
        if trains:
            if not isinstance(losses, torch.Tensor):
                raise InputError(
                    f"expected losses as one tensor, which is summed and differentiated; got {type_name(losses)}. Add "
                    "them up in the model, or in a function: forward=lambda batch: ..."
                )
            try:
                self._backward(losses)
                if self._optimizer is not None:
                    self._optimizer_step()
            except RuntimeError as error:
                raise_cause(error)
                raise
        return output

    # Parts of a step that are the same in TorchRec's pipelines, under its names: subclasses override them.

    def _next_batch(self, dataloader_iter: Iterator[Any]) -> Any:
        """The iterator's next batch, None at its end: subclasses ask the other ranks whether they have one too."""
        return next(dataloader_iter, None)

    def _backward(self, losses: torch.Tensor) -> None:
        """Of the losses of a step: subclasses scale them, or divide them, before it."""
        (torch.sum(losses, dim=0) if losses.dim() else losses).backward()

    def _optimizer_step(self) -> None:
        """Of the optimizer that was given: subclasses clip gradients before it, or leave it out."""
        self._optimizer.step()

    def _forward(self, batch: Any) -> tuple[torch.Tensor, Any]:
        returned = (self._given_forward or self._model)(batch)
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise InputError(
                "expected the model to return a pair (losses, output) for a batch; got "
                f"{type(returned).__name__}{f' of {len(returned)}' if isinstance(returned, (tuple, list)) else ''}. "
                "Give the pipeline a function that returns one: forward=lambda batch: ..."
            )
        losses, output = returned
        return losses, output

    def detach(self) -> nn.Module:
        """The model. It is never changed for longer than its forward takes, so it may be used at once, between steps
        too; batches in flight stay."""
        return self._model

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Go on with another model; what was begun for the old one is dropped, batches in flight stay.

        Args:
            model: the same by default.
            sparse_dist: without meaning here; what was begun is checked when it is used.
        """
        if model is not None and model is not self._model:
            self._hold(model)

    def reset(self) -> None:
        """Drop batches in flight, and begin anew with the next iterator, also one that has ended."""
        self._waiting.clear()
        self._feed.forget()
