"""Gradients that are not averaged yet: what may be done with them, and what throws them away.

Averages come at the end of a pass, or unit by unit, so what one that raised (no memory, an interrupt) has left in
`.grad` is averaged in part or not at all, and copies of weights would part by it without a word. The next pass averages
what it accumulates on; until then an optimizer that would take a step by such a gradient refuses.

What passes under `no_sync` accumulate is, of copies, in `.grad`: a step by it is what local SGD does, and is said once,
as is one by gradients that are there before any pass was averaged. Of weights that FSDP2 has split it is where no
optimizer looks: a step without it is refused, and `zero_grad` of an optimizer or of the model, which left it for the
next average, clears it too; who clears by hand: see cleared.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from logging import getLogger
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import Optimizer

from dmp import ShardError, local_of, ranks
from sharders.before_steps import before_steps
from sharders.data_parallel.cleared import drop_cleared, show_waiting
from sharders.data_parallel.fsdp_units import is_idle, units, weights

_log = getLogger("dmp")


class _Averaged(NamedTuple):
    has_raised: Callable[[Any], bool]
    held: Callable[[Any], Iterable[torch.Tensor]]


_waiting: WeakSet[Any] = WeakSet()
_known: WeakKeyDictionary[Any, _Averaged] = WeakKeyDictionary()


def refuse_steps(of: Any, has_raised: Callable[[Any], bool], held: Callable[[Any], Iterable[torch.Tensor]]) -> None:
    """Have no optimizer make a step with gradients that a pass has left that raised.

    Args:
        of: what averages them; neither function may hold it.
        has_raised: whether a pass has, and none has come after it.
        held: whose gradients are averaged.
    """
    _known[of] = _Averaged(has_raised, held)
    _guard()


@cache
def _guard() -> None:
    before_steps(_check)


def _check(optimizer: Optimizer) -> None:
    for of, averaged in list(_known.items()):
        if averaged.has_raised(of) and _holds(optimizer, (p for p in averaged.held(of) if p.grad is not None)):
            raise ShardError(
                f"{type(optimizer).__name__}.step() after a backward pass that raised: what it has left in "
                "gradients is of each rank's own samples, and copies of weights would part. Call zero_grad(), or "
                "run another forward and backward pass, which averages what is there"
            )
        if getattr(of, "has_local", False) and _holds(optimizer, (p for p in averaged.held(of) if p.grad is not None)):
            ranks.say_once(
                "a step by gradients that were accumulated under no_sync and never averaged: copies of weights part, "
                "as for local SGD. Else have the last backward pass before a step outside of no_sync"
            )
        elif not getattr(of, "has_averaged", True) and _holds(optimizer, _given(averaged.held(of))):
            ranks.say_once(
                "a step by gradients that no backward pass through the model has made, as where .grad is set to what "
                "torch.func gives: each rank's are of its own samples, and copies of weights part, unless the program "
                "averages them itself: torch.distributed.all_reduce(p.grad, torch.distributed.ReduceOp.AVG)"
            )
    for root in list(_waiting):
        _drop_cleared(root)
        if _holds(optimizer, (held.sharded_param for held in _not_averaged(root))):
            raise ShardError(
                f"{type(optimizer).__name__}.step() while gradients of split weights, accumulated under no_sync, wait "
                "for their average: have the last backward pass before a step outside of no_sync"
            )


def _holds(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> bool:
    ids = {id(p) for p in parameters}
    return bool(ids) and any(id(p) in ids for group in optimizer.param_groups for p in group["params"])


def _given(held: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those with a gradient that is not 0, as torch gives all of them to have an optimizer make its state."""
    given = ((p, p.grad) for p in held if p.grad is not None)
    return [p for p, gradient in given if gradient.is_sparse or bool(local_of(gradient).any())]


# Of FSDP2. Private: nothing public tells whether a pass has come to its end.


def has_raised(root: Any) -> bool:
    """Whether a backward pass by weights that FSDP2 has split ended before its end; not what is computed again in one.

    Args:
        root: after `fully_shard`.
    """
    is_awaited = root._get_fsdp_state()._state_ctx.post_backward_final_callback_queued
    return is_awaited and torch._C._current_graph_task_id() < 0


def split_weights(root: Any) -> Iterator[torch.Tensor]:
    """What FSDP2 has split of it."""
    return (held.sharded_param for held in weights(root))


def forget_unfinished(root: Any) -> None:
    """Before a forward, after a pass that raised: torch takes it for one that goes on, and gives no gradient of those
    after it, in silence. What was not averaged by then is lost: of that pass, and what `no_sync` had accumulated."""
    if not has_raised(root):
        return
    root.reset_iter_state()
    is_any = False
    for held in weights(root):
        is_any |= held.unsharded_accumulated_grad is not None or held.sharded_param.grad is not None
        held.unsharded_accumulated_grad = None
        if hasattr(held, "_unsharded_param"):
            is_any |= held._unsharded_param.grad is not None
            held._unsharded_param.grad = None
    if is_any:
        _log.warning(
            "a backward pass raised before its end: gradients of split weights that it had not averaged yet are "
            "dropped, those accumulated under no_sync too. What it had averaged is in .grad: call zero_grad() to begin "
            "anew"
        )


@contextmanager
def hearing_of_pass(roots: Collection[Any]) -> Iterator[None]:
    """Around a backward pass: whether it may leave gradients of split weights that wait for their average.

    torch averages in a pass that comes by what a unit has returned. One that begins within, at what a hook or an
    attribute has kept of an embedding's output, came to weights that stay whole all the same: nobody averaged their
    gradients, and no optimizer saw them, in silence. They are averaged when it has ended.
    """
    if torch._C._current_graph_task_id() >= 0:  # a pass within a pass
        yield
        return
    for root in list(_waiting):
        _drop_cleared(root)
    for root in roots:
        if not all(unit.reduce_grads for unit in units(root)):
            _waiting.add(root)
    yield
    for root in roots:
        begun_inside = is_idle(root) and root not in _waiting and _not_averaged(root)
        if begun_inside and any(held._unsharded_param.grad is not None for held in begun_inside):
            root._get_fsdp_state()._root_post_backward_final_callback()  # which has run at the end of others
    for root in list(_waiting):
        if waiting := _not_averaged(root):
            show_waiting(waiting)
        elif all(unit.reduce_grads for unit in units(root)):
            _waiting.discard(root)


def _drop_cleared(root: Any) -> None:
    drop_cleared(_not_averaged(root), _drop)


def _drop(held: Any) -> None:
    held.unsharded_accumulated_grad = held._unsharded_param.grad = None


def clear_by_zero_grad(root: Any) -> None:
    """Have `zero_grad` of optimizers and of the model clear what waits for its average too.

    Args:
        root: after `fully_shard`.
    """
    own = root.zero_grad

    @wraps(own)
    def zero_grad(set_to_none: bool = True) -> None:
        own(set_to_none)
        _clear(root, {id(p) for p in split_weights(root)})

    root.zero_grad = zero_grad
    _look_at_zero_grad()


@cache
def _look_at_zero_grad() -> None:
    own = Optimizer.zero_grad

    @wraps(own)
    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        own(self, set_to_none)
        for root in list(_waiting):
            _clear(root, {id(p) for group in self.param_groups for p in group["params"]})

    Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def _clear(root: Any, ids: Collection[int]) -> None:
    left = [held for held in _not_averaged(root) if id(held.sharded_param) not in ids]
    for held in _not_averaged(root):
        if id(held.sharded_param) in ids:
            _drop(held)
    if not left:
        _waiting.discard(root)


def _not_averaged(root: Any) -> list[Any]:
    held = [each for each in weights(root) if hasattr(each, "_unsharded_param")]
    return [x for x in held if x.unsharded_accumulated_grad is not None or x._unsharded_param.grad is not None]
