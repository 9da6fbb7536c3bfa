"""Gradients of some weights alone: `loss.backward(inputs=weights)`, and `torch.autograd.grad(loss, weights)`.

A forward computes with the whole of what FSDP2 has split, which is another tensor than the weight of the model. Asked
for the gradient of the latter, autograd finds nothing on its way, and `backward` says nothing: no gradient came. So
whoever asks `backward` for such a weight asks for both; FSDP2 then does the rest. `torch.autograd.grad` returns what it
has found before anything is averaged: an error for what is split, and for copies each rank's own, which is said once.
What a function asks for in its own backward, of weights that it was given (an adjoint of a differential equation), it
returns to the pass that it is in, which averages it.

[Note: asking] From the first model on every pass comes by here; those that ask for nothing go straight on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dmp import ShardError, ranks
from sharders.data_parallel.fsdp_units import name_of, units_of, weights, weights_below
from sharders.data_parallel.later_hooks import wake
from sharders.data_parallel.twice import backward_pass, keeps_graph
from sharders.data_parallel.unfinished import hearing_of_pass

RETURN_THE_LOSS = "end the forward first, return the loss from it, and call backward() on that"
"""What to do about a backward pass inside of a forward."""

_split: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
_running: list[Any] = []  # whose forward runs, the innermost last
_averaged: WeakKeyDictionary[Any, Callable[[Any], Iterable[torch.Tensor]]] = WeakKeyDictionary()


def hear_of_split(root: nn.Module) -> None:
    """A model whose weights FSDP2 has split: give what is asked for of it its gradients.

    Args:
        root: after `fully_shard`.
    """
    _split[root] = None
    ranks.around_backward(_hearing)
    own = root.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return own(*args, **kwargs)
        _running.append(root)
        try:
            return own(*args, **kwargs)
        finally:
            _running.pop()

    root.forward = forward


def hear_of_copies(of: Any, held: Callable[[Any], Iterable[torch.Tensor]]) -> None:
    """Copies of weights, whose gradients are averaged in a backward pass alone.

    Args:
        of: what has them.
        held: gives them, of that.
    """
    _averaged[of] = held
    ranks.around_backward(_hearing)


def _hearing(own: Any, *args: Any, **options: Any) -> Any:
    """A backward pass, see `ranks.around_backward`."""
    try:
        if len(args) < 5 or not (_split or args[4]):
            return own(*args, **options)
        with hearing_of_pass(_split), backward_pass(args[0], _split, bool(args[3])):
            found = _asking(own, *args, **options) if args[4] else own(*args, **options)
        if options.get("accumulate_grad"):
            _refuse_inside()
            if args[3]:
                _say_of_graphs()
        return found
    except RuntimeError as error:  # of a collective of torch's
        ranks.raise_cause(error)
        raise
    finally:
        if torch._C._current_graph_task_id() < 0:  # no pass within a pass
            wake()


def _say_of_graphs() -> None:
    """After `loss.backward(create_graph=True)`: what is made of such a `.grad` is a constant for autograd."""
    if any(keeps_graph(root) for root in _split):
        ranks.say_once(
            "loss.backward(create_graph=True): the .grad of a weight that is split over the ranks is averaged over "
            "them, and has no graph: a term of it in a loss changes no gradient. torch.autograd.grad(loss, tensors, "
            "create_graph=True) gives the gradients of inputs and of results with theirs, and on a mesh with a 'dp' "
            "axis alone those of weights, each rank's own"
        )


def _refuse_inside() -> None:
    """Raise where a pass inside of a model's forward has come to its weights: FSDP2 averages behind a forward, and has
    let go of what the rest of it computes with."""
    for root in _running if torch._C._current_graph_task_id() < 0 else ():
        has_gradient = any(_has_gradient(weight) for weight in weights_below(root))
        if has_gradient or any(unit.is_sharded for unit in units_of([root])):
            raise ShardError(
                f"a backward pass inside of the forward of {type(root).__name__} has come to its weights, which are "
                f"whole, and averaged, around a forward alone: {RETURN_THE_LOSS}"
            )


def _has_gradient(weight: Any) -> bool:
    return hasattr(weight, "_unsharded_param") and weight._unsharded_param.grad is not None


def _asking(
    own: Any, outputs: Any, gradients: Any, keeps: bool, creates: bool, asked: Any, *rest: Any, **options: Any
) -> Any:
    names = dict(_wholes(asked))
    both = (*asked, *(whole for _, whole in names.values()))
    if options.get("accumulate_grad"):
        return own(outputs, gradients, keeps, creates, both, *rest, **options)
    _refuse_in_two()
    is_inner = torch._C._current_graph_task_id() >= 0
    if is_inner:
        names = {id(each): names[id(each)] for each in asked if id(each) in names}
    if not names:
        if not creates and not is_inner:
            _say_of_copies(asked)
        return own(outputs, gradients, keeps, creates, asked, *rest, **options)
    found = own(outputs, gradients, keeps, creates, both, True, **options)
    for (name, _), gradient in zip(names.values(), found[len(asked) :], strict=True):
        if gradient is not None:
            raise ShardError(
                f"torch.autograd.grad of {name!r}: FSDP2 computes with a gathered copy of it, and gives the weight "
                "a gradient in .grad alone. Call loss.backward(inputs=[...]) and read .grad, which is the mean "
                "over the ranks; a penalty on it can be had of copies, on a mesh with a 'dp' axis alone"
            )
    if not rest[0] and any(gradient is None for gradient in found[: len(asked)]):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
            "if this is the desired behavior."
        )
    return found[: len(asked)]


def _refuse_in_two() -> None:
    """Raise where torch's pipelining asks for gradients of a wrapped stage's inputs, and later for those of its
    weights, which it would put in `.grad` unaveraged, or, of what is split, not at all."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "backward_maybe_with_nosync":
        frame = frame.f_back
    stage = None if frame is None else getattr(frame.f_locals.get("self"), "submod", None)
    ids = {id(p) for p in stage.parameters()} if isinstance(stage, nn.Module) else ()
    split = (held.sharded_param for root in list(_split) for held in weights(root))
    copies = (p for of, held in list(_averaged.items()) for p in held(of))
    if ids and any(id(p) in ids for p in chain(split, copies)):
        raise ShardError(
            "this schedule of torch.distributed.pipelining computes the gradients of a stage's inputs and of its "
            "weights apart (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV), and those of "
            "weights would be averaged by nobody: take ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B or "
            "ScheduleLoopedBFS"
        )


def _wholes(asked: Sequence[Any]) -> Iterator[tuple[int, tuple[str, torch.Tensor]]]:
    """Of each weight that is asked for and split: its id, its name, and what the forward computed with, which may be
    what is asked for: the model's attributes have it between a forward and its backward pass."""
    ids = {id(each) for each in asked}
    for root in list(_split):
        for held in weights(root):
            if hasattr(held, "_unsharded_param") and {id(held.sharded_param), id(held._unsharded_param)} & ids:
                yield id(held.sharded_param), (name_of(root, held), held._unsharded_param)


def _say_of_copies(asked: Sequence[Any]) -> None:
    ids = {id(each) for each in asked}
    if any(id(p) in ids for of, held in list(_averaged.items()) for p in held(of)):
        ranks.say_once(
            "torch.autograd.grad gives each rank the gradients of its own samples, which nobody averages: a step by "
            "them makes the copies of a weight differ. loss.backward(inputs=[...]) averages them, in .grad"
        )
