"""Tables from before wrapping, which torch keeps for as long as the process lives: let go of.

[Note: let go] `_apply_optimizer_in_backward` hangs its hook on a parameter's node in the graph, which it keeps in a map
whose keys are weak; but the node holds the parameter, so that neither is ever freed. Of a table that has been replaced
every rank would keep all rows. Its hook is hung on the tensor instead, where it is called at the same moment.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dmp.wrap.earlier.earlier_optimizers import stay

_WORTH_COLLECTING = 1 << 28
"""Bytes in cycles with their optimizers for which it is looked for them: with a thousand tables that costs 0.3 s."""


@contextmanager
def letting_go(model: Any, module: nn.Module) -> Iterator[None]:
    """Let go of parameters with an optimizer in backward that `module` has, and `model.module` no longer at the end.

    Of those on meta there is nothing to let go of.
    """
    updated = {id(p): p for p in module.parameters() if hasattr(p, "_in_backward_optimizers") and not p.is_meta}
    yield
    for kept in model.module.parameters() if updated else ():
        updated.pop(id(kept), None)
    size = 0
    while updated:
        _, old = updated.popitem()
        _let_go(old)
        size += old.numel() * old.element_size()
    old = None  # type: ignore[assignment]  # else the last one would be found in use
    if size >= _WORTH_COLLECTING:
        gc.collect()


def _let_go(old: nn.Parameter) -> None:
    from torch.distributed.optim.apply_optimizer_in_backward import (
        param_to_acc_grad_map,
        param_to_optim_hook_handle_map,
    )

    handles = param_to_optim_hook_handle_map.pop(old, [])
    for handle in handles:
        handle.remove()
    param_to_acc_grad_map.pop(old, None)
    for optimizer in old._in_backward_optimizers:  # type: ignore[attr-defined]  # of who else has the table
        stay(optimizer)
    if handles:
        is_trained = old.requires_grad
        old.requires_grad_(True).register_post_accumulate_grad_hook(_update)  # a frozen one takes none
        old.requires_grad_(is_trained)


def _update(parameter: torch.Tensor) -> None:
    for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
        optimizer.step()
    parameter.grad = None


_update._dmp_own = True  # type: ignore[attr-defined]  # no hook of the user's
