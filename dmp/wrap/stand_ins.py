"""What of torch's is stood in for, from the first wrap on, so that it knows wrapped models; see `dmp.effects`."""

from __future__ import annotations

from dmp.ranks import around_backward
from dmp.wrap.earlier.asked_earlier import follow_asked
from dmp.wrap.optimizers.backward_errors import say_what_left
from dmp.wrap.optimizers.optimizer_guard import guard_optimizers
from dmp.wrap.optimizers.step_turns import agree_on_steps
from dmp.wrap.outer_wrappers import guard_ddp


def stand_in() -> None:
    """At every wrap: each sees to it that it is there once."""
    guard_optimizers()
    agree_on_steps()  # after who refuses one
    around_backward(say_what_left, is_outer=True)
    around_backward(follow_asked, is_outer=True)
    guard_ddp()
