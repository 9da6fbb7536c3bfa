"""Errors that leave a backward pass: noted, for other ranks may wait in it, and one of torch's put into words.

That is of a term of the loss over all weights, such as an L2 penalty, where some are DTensors: it fails when the term's
parts part again, and the plain gradient of their sum meets DTensors.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import torch

from dmp.errors import ShardError
from dmp.ranks import note_left

_MIXED = "got mixed torch.Tensor and DTensor"


@cache
def watch_backward_passes() -> None:
    """From now on the error says what to do."""
    # Private, but every backward pass goes by it.
    own: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @wraps(own)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return own(*args, **options)
        except Exception as error:
            if torch._C._current_graph_task_id() < 0:  # not of a pass within a pass
                note_left("the backward pass", error)
            if not isinstance(error, RuntimeError) or _MIXED not in str(error):
                raise
            raise ShardError(
                "the backward pass met plain tensors beside DTensors, as of a loss with a term over all weights, "
                "sum(p.square().sum() for p in model.parameters()): there read p.full_tensor() where p is a DTensor. "
                "An optimizer's weight_decay= is such a term without that"
            ) from error

    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
