"""Gradients that are asked for of parameters that wrapping has replaced.

`loss.backward(inputs=weights)` of weights that were listed before gives the wrapped model's theirs; of
`torch.autograd.grad`, whose results would be taken for those of the whole weights, it is an error. There came none, in
silence.
"""

from __future__ import annotations

from typing import Any

from dmp.errors import ShardError
from dmp.wrap.earlier.earlier_optimizers import successors


def follow_asked(own: Any, outputs: Any, *args: Any, **options: Any) -> Any:
    """A backward pass, see `around_backward`; outside of all others, who look for the wrapped model's parameters."""
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
