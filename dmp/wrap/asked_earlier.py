"""Gradients that are asked for of parameters that wrapping has replaced.

`loss.backward(inputs=weights)` of weights that were listed before gives the wrapped model's theirs; of
`torch.autograd.grad`, whose results would be taken for those of the whole weights, it is an error. There came none, in
silence.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from dmp.errors import ShardError
from dmp.wrap.earlier_optimizers import successors

_ours: list[Any] = []  # what stands in; before all others, who look for the wrapped model's parameters


def follow_asked() -> None:
    """From now on; at every wrap, for others may have put themselves before it."""
    # Private, but every backward pass goes by it.
    own: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    if _ours and own is _ours[-1]:
        return

    @wraps(own)
    def run(outputs: Any, *args: Any, **options: Any) -> Any:
        if len(args) < 4 or not args[3]:
            return own(outputs, *args, **options)
        asked = successors(args[3])
        changed = [old for old, new in zip(args[3], asked, strict=True) if new is not old]
        if changed and not options.get("accumulate_grad"):
            mark = changed[0]._dmp_replaced
            raise ShardError(
                f"torch.autograd.grad of {mark.name!r} as it was before {mark.when.event}, which has put another "
                "parameter in its place: ask for those of model.parameters()"
            )
        return own(outputs, *args[:3], tuple(asked), *args[4:], **options)

    _ours.append(run)
    torch.autograd._engine_run_backward = run  # type: ignore[assignment, attr-defined]
