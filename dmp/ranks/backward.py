"""What is done around every backward pass of this process.

All of torch's functions for passes, under every name that they were imported by, call one function of torch's, which
this file stands in for: once, so that the order of those who are around it does not depend on which came first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch._compile import _disable_dynamo

from dmp.put_around import put_around

_inner: list[Callable[..., Any]] = []
_outer: list[Callable[..., Any]] = []


def around_backward(around: Callable[..., Any], *, is_outer: bool = False) -> None:
    """Have `around(own, outputs, gradients, keeps, creates, asked, ...)` called in the place of each pass, once.

    Args:
        around: calls `own` with the other arguments, which is the pass with what is around it already.
        is_outer: it is around all that are not.
    """
    _stand_in()
    if around not in (*_inner, *_outer):
        (_outer if is_outer else _inner).append(around)


@cache
def _stand_in() -> None:
    # Private, but every backward pass goes by it.
    put_around(torch.autograd, "_engine_run_backward", _run)


@_disable_dynamo  # who compiles a whole step would have it trace what is done here, and hooks on gradients
def _run(own: Callable[..., Any], *args: Any, **options: Any) -> Any:
    for around in (*_inner, *_outer):
        own = partial(around, own)
    return own(*args, **options)
