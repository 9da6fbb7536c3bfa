"""A term of the loss over all weights, such as an L2 penalty, where some are DTensors: what torch says of it, in words.

It fails in the backward pass, when such a term's parts part again: the plain gradient of their sum meets DTensors. That
a pass has raised, for whatever reason, is noted here too, for others may wait in it.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import torch

from dmp.errors import ShardError
from dmp.ranks import note_left

_MIXED = "got mixed torch.Tensor and DTensor"


@cache
def explain_mixtures() -> None:
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
