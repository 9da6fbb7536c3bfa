"""A save between a backward pass, which has updated tables, and the optimizer's step: it has half of that step."""

from __future__ import annotations

from torch import nn

from dmp import live_models as live
from dmp.calls import Calls, calls_of
from dmp.ranks import say_once


def say_of_half_a_step(model: nn.Module) -> None:
    """Say so once. What waits for the step are gradients, which the tables that are updated do not have."""
    if any(calls.is_in_a_step for calls in calls_of(model)) and any(p.grad is not None for p in model.parameters()):
        say_once(
            "a model was saved, or its whole state taken, between a backward pass and the optimizer's step: tables "
            "with an optimizer from apply_optimizer_in_backward have the update of that step, and the other weights do "
            "not, so that who goes on from there makes half of it twice. Save after optimizer.step()",
            by_first=True,
        )


def say_of_half_by(calls: Calls | None) -> None:
    """Likewise, of the model whose calls these are; of one table's, where None, nobody knows."""
    if calls is not None and calls.is_in_a_step:
        for model in [model for model in live.models if model._calls is calls]:
            say_of_half_a_step(model)
