"""A look at the gradients that an optimizer's step is made by, before it is: of a step with a closure, which makes
them, as Lightning has it of every step, after each of the closure's calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook


def before_steps(look: Callable[[Optimizer], None]) -> None:
    """Call `look` so, of every optimizer, from now on."""

    def before(optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        own = options["closure"] if "closure" in options else next(iter(args[1:]), None)
        if not callable(own):
            return look(optimizer)

        @wraps(own)
        def closure(*given: Any, **named: Any) -> Any:
            loss = own(*given, **named)
            look(optimizer)
            return loss

        if "closure" in options:
            return args, {**options, "closure": closure}
        return (args[0], closure, *args[2:]), options

    register_optimizer_step_pre_hook(before)
