"""Full state dicts: every tensor of a model whole."""

from __future__ import annotations

from typing import Any

from torch import nn

from dmp.calls import alone
from dmp.state.find_wrapped import env_of
from dmp.wrap.values.half_steps import say_of_half_a_step
from dmp.wrap.values.whole import gather


@alone("full_state_dict")
def full_state_dict(model: nn.Module, *, rank0_only: bool = False, cpu: bool = True) -> dict[str, Any]:
    """The state dict of the unsharded model, as plain tensors that share nothing with the model.

    Collective over `model.env` (for a plain module: over the ranks of its DTensors). Each rank holds its result
    and pieces of a few MB; with `rank0_only` the others hold pieces alone. What ranks hold in copies that differ, as
    BatchNorm's statistics of their own samples, is each rank's own; a checkpoint has rank 0's.

    Args:
        model: a `DistributedModelParallel`, or any module.
        rank0_only: only rank 0 receives; the others return `{}`.
        cpu: the result is on the CPU; else each tensor is where the model has its own.

    Raises:
        CheckpointError: on every rank, with what failed where.

    Example:
        >>> full_state_dict(DistributedModelParallel(nn.Linear(2, 1))).keys()
        dict_keys(['weight', 'bias'])
    """
    env = env_of(model)
    say_of_half_a_step(model)
    return gather(model.state_dict(), env, rank0_only=rank0_only, cpu=cpu, what="full_state_dict")
