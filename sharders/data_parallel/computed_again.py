"""Units that a backward pass computes again more than once: a block that is called twice, each time in a checkpoint.

A reentrant checkpoint runs a unit's forward within the backward pass, and a backward pass of its own behind it. torch
keeps for each unit whether it is in a backward pass until the whole pass has ended: at the second forward it took the
unit for one whose gradients are awaited already, and they were neither averaged nor given to the chunks, in silence.
"""

from __future__ import annotations

from typing import Any


def average_each_time(unit: Any) -> None:
    """Have each forward within a backward pass, behind which that unit's gradients were averaged, be one of its own.

    Args:
        unit: after `fully_shard`.
    """
    # Private, as what it holds: nothing public tells where a unit is in a pass.
    state = unit._get_fsdp_state()

    def begin_anew(*_: Any) -> None:
        if state._training_state.name != "PRE_BACKWARD":
            return
        if all(group._training_state.name == "POST_BACKWARD" for group in state._fsdp_param_groups):
            state._training_state = type(state._training_state).IDLE

    unit.register_forward_pre_hook(begin_anew, prepend=True)
