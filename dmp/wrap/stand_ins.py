"""What of torch's is stood in for, from the first wrap on, so that it knows wrapped models; see `dmp.effects`."""

from __future__ import annotations

from dmp.wrap.asked_earlier import follow_asked
from dmp.wrap.backward_errors import watch_backward_passes
from dmp.wrap.optimizer_guard import guard_optimizers
from dmp.wrap.outer_wrappers import guard_ddp
from dmp.wrap.step_turns import agree_on_steps


def stand_in() -> None:
    """At every wrap: each sees to it that it is there once."""
    guard_optimizers()
    agree_on_steps()  # after who refuses one
    watch_backward_passes()
    follow_asked()
    guard_ddp()
