"""Gradients that are cleared by hand, `p.grad = None` or `p.grad.zero_()`, while others wait for their average.

What passes under `no_sync` accumulate of weights that FSDP2 has split is where no program looks, so that one that
clears gradients by itself left it for the next average. So while it waits each such weight has a gradient of -0.0 in
`.grad`, which changes nothing where it is added; who has taken that away, or written zeros over it, has cleared what
waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from dmp import local_of


class _Seen(NamedTuple):
    """The `.grad` of a weight at the end of a pass after which others wait."""

    gradient: torch.Tensor
    version: int
    is_zero: bool
    is_ours: bool


_seen: WeakKeyDictionary[Any, _Seen] = WeakKeyDictionary()


@torch.no_grad()  # inside of torch.func a DTensor gives what is here to nobody else
def show_waiting(waiting: Iterable[Any]) -> None:
    """After a pass: have those of which gradients wait show it.

    Args:
        waiting: of FSDP2's weights.
    """
    for held in waiting:
        weight = held.sharded_param
        is_ours = weight.grad is None
        if is_ours:
            weight.grad = torch.full_like(weight.detach(), -0.0)
        _seen[held] = _Seen(weight.grad, weight.grad._version, not local_of(weight.grad).any(), is_ours)


@torch.no_grad()
def drop_cleared(waiting: Iterable[Any], drop: Callable[[Any], None]) -> None:
    """Before a pass, or a step: drop what waits of weights whose `.grad` was cleared since.

    Args:
        waiting: of FSDP2's weights.
        drop: what waits of one of them.
    """
    found = [(held, seen, held.sharded_param.grad) for held in waiting if (seen := _seen.pop(held, None)) is not None]
    there = [(held, seen, local_of(g), g._version) for held, seen, g in found if g is not None]
    zeroed = [held for held, seen, local, version in there if local.numel() and _is_zeroed(seen, local, version)]
    # Of a weight that this rank has nothing of only a write is seen: of zeros where all others were.
    if len(zeroed) == sum(local.numel() > 0 for _, _, local, _ in there):
        zeroed += [held for held, seen, local, version in there if not local.numel() and version != seen.version]
    for held in [*(held for held, _, gradient in found if gradient is None), *zeroed]:
        drop(held)
    for held, seen, gradient in found:
        if gradient is seen.gradient and seen.is_ours:
            held.sharded_param.grad = None


def _is_zeroed(seen: _Seen, now: torch.Tensor, version: int) -> bool:
    if now.any():
        return False
    if seen.is_ours:
        return not bool(torch.signbit(now).all())  # else it was scaled, as by clipping
    return not seen.is_zero or version != seen.version
