"""Gradients of the few weights that lie whole on each rank, where the others are split: averaged in one exchange.

A loss may read such a weight, a temperature or a coefficient, past every forward: `alpha = model.log_alpha.exp()`. Then
no output of the model is in the pass, and the weight itself begins the average; before it is agreed on that all ranks
are in such a pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dmp import ranks
from sharders.data_parallel.asked import hear_of_copies
from sharders.data_parallel.later_hooks import LaterHooks
from sharders.data_parallel.pass_end import PassEnd
from sharders.data_parallel.thawed import AfterGradient, hear_thawed
from sharders.data_parallel.unfinished import refuse_steps
from sharders.data_parallel.unreached import average_gradients, with_graph
from sharders.data_parallel.updated import Updated

_Turn = Callable[[], AbstractContextManager[None]]


def average_whole(
    module: nn.Module, names: Sequence[str], group: dist.ProcessGroup, everyone: dist.ProcessGroup | None
) -> None:
    """Average the gradients of these few parameters in one exchange at the end of each backward pass.

    A mean of means is itself, so that it may repeat while gradients accumulate.

    Args:
        module: the root; parameters are looked up when it has run, for those on meta are replaced.
        names: of parameters that nothing else averages.
        everyone: who begins a pass through no forward together.
    """
    # A weight holds its hooks where Python's collector does not look: one that held the module would keep it for ever.
    root = weakref.ref(module)
    end, later = PassEnd(), LaterHooks()
    turn = _turn_of("the average of whole weights", everyone)

    def begin(_: torch.Tensor) -> None:
        if not end.is_queued:
            end.queue(complete)
            later.open()

    def begin_past(p: torch.Tensor) -> None:
        if not end.is_queued:
            with turn():
                begin(p)

    def complete() -> None:
        trained = [p for p in _of_names(root(), names) if p.requires_grad]
        given = average_gradients(trained, group)
        end.clear()
        later.run(given)

    def hear() -> None:
        for p in _of_names(root(), names):
            hooks: dict[int, Any] = getattr(p, "_post_accumulate_grad_hooks", None) or {}
            if p.requires_grad and begin_past not in hooks.values():
                p.register_post_accumulate_grad_hook(begin_past)

    def hook(_: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            hear()
            later.take(_of_names(root(), names), begin_past)
            for tensor in with_graph(output):
                tensor.register_hook(begin)

    hear()
    module.register_forward_hook(hook)
    held = partial(_of_names, names=names)
    hear_of_copies(module, held)
    refuse_steps(module, lambda _: end.has_raised, held)


class _AverageThawed(AfterGradient):
    """See `average_thawed`."""

    __slots__ = ("_end", "_group", "_turn", "_weak")

    def __init__(self, frozen: Sequence[torch.Tensor], group: dist.ProcessGroup, turn: _Turn) -> None:
        self._weak = [*map(weakref.ref, frozen)]  # which hold it, where Python's collector does not look
        self._group, self._turn, self._end = group, turn, PassEnd()

    def __call__(self, _: torch.Tensor) -> None:
        if not self._end.is_queued:
            with self._turn():
                self._end.queue(self._complete)

    def _complete(self) -> None:
        thawed = [p for ref in self._weak if (p := ref()) is not None and p.requires_grad]
        average_gradients(thawed, self._group)
        self._end.clear()
        Updated(thawed).step()


def average_thawed(
    frozen: Sequence[torch.Tensor], group: dist.ProcessGroup, everyone: dist.ProcessGroup | None
) -> None:
    """Average the gradients of parameters that are all frozen, should some be trained before the next forward."""
    Updated(frozen)  # not at once, by this rank's own gradient
    average = _AverageThawed(frozen, group, _turn_of("the average of unfrozen weights", everyone))
    hear_thawed(frozen, average)


def _turn_of(what: str, everyone: dist.ProcessGroup | None) -> _Turn:
    """What all ranks begin a pass with together."""
    if everyone is None:
        return nullcontext
    what = f"{what} of the model that was wrapped at call {ranks.calls_so_far(everyone)}"
    return partial(ranks.take_turn, what, everyone, ends_pass=True)


def _of_names(module: nn.Module | None, names: Sequence[str]) -> list[torch.Tensor]:
    if module is None:
        return []
    # Not by attribute: beside split weights a backward pass reads these as plain tensors.
    places = [(module.get_submodule(path), name) for path, _, name in (n.rpartition(".") for n in names)]
    return [p for owner, name in places if (p := owner._parameters[name]) is not None]
