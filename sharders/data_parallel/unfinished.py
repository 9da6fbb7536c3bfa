"""Steps after a backward pass that raised (no memory, an interrupt): its gradients are of each rank's own samples.

Averages come at the end of a pass, or unit by unit, so what one that raised has left in `.grad` is averaged in part or
not at all, and copies of weights would part by it without a word. The next pass averages what it accumulates on; until
then an optimizer that would take a step by such a gradient refuses. `zero_grad` is the way on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from logging import getLogger
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dmp import ShardError

_log = getLogger("dmp")


class _Averaged(NamedTuple):
    has_raised: Callable[[Any], bool]
    held: Callable[[Any], Iterable[torch.Tensor]]


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
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, *_: Any) -> None:
    for of, averaged in list(_known.items()):
        if averaged.has_raised(of):
            left = {id(p) for p in averaged.held(of) if p.grad is not None}
            if any(id(p) in left for group in optimizer.param_groups for p in group["params"]):
                raise ShardError(
                    f"{type(optimizer).__name__}.step() after a backward pass that raised: what it has left in "
                    "gradients is of each rank's own samples, and copies of weights would part. Call zero_grad(), or "
                    "run another forward and backward pass, which averages what is there"
                )


# Of FSDP2. Private, as what it holds: nothing public tells whether a pass has come to its end.


def has_raised(root: Any) -> bool:
    """Whether a backward pass by weights that FSDP2 has split ended before its end; not what is computed again in one.

    Args:
        root: after `fully_shard`.
    """
    is_awaited = root._get_fsdp_state()._state_ctx.post_backward_final_callback_queued
    return is_awaited and torch._C._current_graph_task_id() < 0


def split_weights(root: Any) -> Iterator[torch.Tensor]:
    """What FSDP2 has split of it."""
    return (held.sharded_param for held in _held(root))


def forget_unfinished(root: Any) -> None:
    """Before a forward, after a pass that raised: torch takes it for one that goes on, and gives no gradient of those
    after it, in silence. What was not averaged by then is lost: of that pass, and what `no_sync` had accumulated."""
    if not has_raised(root):
        return
    root.reset_iter_state()
    is_any = False
    for held in _held(root):
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


def _held(root: Any) -> Iterator[Any]:
    states = root._get_fsdp_state()._state_ctx.all_states
    return (each for state in states for unit in state._fsdp_param_groups for each in unit.fsdp_params)
