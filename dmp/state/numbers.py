"""A number of Python's that a program takes of what is split: `p.grad.norm().item()`, `float(p.sum())`, `bool(...)`.

torch gives each rank its own share of the sum, in silence, and of one value that lies on one rank fails on the others
alone. The share is said once, as of parts of tables: who only logs may go on. The other is an error on every rank.
Arrays and lists torch refuses of every subclass, without a word of what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dmp.errors import ShardError
from dmp.put_around import put_around
from dmp.ranks import say_once

_WHOLE = "t.full_tensor().item(), on all ranks, is the whole's"


def say_of_shares(_tensors: Any) -> None:
    """From now on; private, but nothing else is between a DTensor and its number: torch asks no strategy of this."""
    from torch.distributed.tensor import DTensor

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _number
    put_around(DTensor, "numpy", _in_words)
    put_around(DTensor, "tolist", _in_words)


def _number(op_call: Any, args: Any, kwargs: Any) -> Any:
    of = args[0]
    split = [p for p, n in zip(of.placements, of.device_mesh.shape, strict=True) if n > 1 and not p.is_replicate()]
    if any(not p.is_partial() for p in split):
        raise ShardError(f"item() of a split weight with one value, which is on one rank alone: {_WHOLE}")
    if split:
        say_once(
            "item(), float() or bool() of a number that was made of split weights or gradients gives this rank's "
            f"share of it: {_WHOLE}; torch.nn.utils.get_total_norm(model.parameters()) is the whole model's norm"
        )
    return of._local_tensor.item()


def _in_words(own: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's own, which may be given the whole (see `read_outside`), and what to do where it refuses."""
    try:
        return own(tensor, *args, **kwargs)
    except RuntimeError as error:
        raise ShardError(
            f"{own.__name__}() of a weight, gradient or state that is split, of which each rank has a part: "
            "full_state_dict(model) and full_optimizer_state_dict(model, optimizer) give plain tensors, whole, "
            "and so does t.full_tensor(), on all ranks; t.to_local() is this rank's part"
        ) from error
