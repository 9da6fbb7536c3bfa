"""TorchRec's keyed optimizers: ours as one of them, and what theirs, and others' wrappers, are made of.

Its `CombinedOptimizer` and others tell a keyed optimizer by its class. The form (`params`, `state` by parameter,
`save_param_groups`, `post_load_state_dict`, ...) is `FusedOptimizer`'s own; here it gets the class too, once TorchRec
is imported. Ours comes first in it, and `super()` in ours would find theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from torch.optim.optimizer import Optimizer

from dmp.contracts import FusedParameter
from dmp.wrap.optimizers.fused import FusedOptimizer


def keyed(optimizer: FusedOptimizer) -> FusedOptimizer:
    """The optimizer itself, which is an instance of TorchRec's class from now on where that has been imported."""
    theirs = getattr(sys.modules.get("torchrec.optim.fused"), "FusedOptimizer", None)
    if theirs is not None and not isinstance(optimizer, theirs):
        optimizer.__class__ = _both(theirs)
    return optimizer


def part_of(optimizer: FusedOptimizer) -> Callable[[Iterable[FusedParameter]], FusedOptimizer]:
    """What gives an optimizer of what one module updates, see `FusedOptimizer.part`; TorchRec's too."""
    return lambda own: keyed(optimizer.part(own))


@cache
def _both(theirs: Any) -> type[FusedOptimizer]:
    about = {"__module__": FusedOptimizer.__module__, "__doc__": FusedOptimizer.__doc__}
    made: type[FusedOptimizer] = type(theirs)(FusedOptimizer.__name__, (FusedOptimizer, theirs), about)
    return made


_WRAPPERS = {
    "torchrec": {"CombinedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper"},
    **{of: {"LightningOptimizer", "_FabricOptimizer"} for of in ("lightning", "lightning_fabric", "pytorch_lightning")},
}
"""Package -> its optimizers that hand every step on to others, to which a look at a step comes by itself."""


def parts(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that hold state and update parameters: itself, or those that a wrapper stands for.

    Such a wrapper makes its `state` and `param_groups` anew whenever they are asked for, or holds another's.
    """
    return [part for each in inside(optimizer) for part in parts(each)] if is_wrapper(optimizer) else [optimizer]


def inside(optimizer: Any) -> list[Optimizer]:
    """Those that a wrapper of TorchRec's hands every step on to; none of any other optimizer."""
    if not is_wrapper(optimizer):
        return []
    return [each for _, each in optimizer.optimizers] if hasattr(optimizer, "optimizers") else [optimizer._optimizer]


def is_wrapper(optimizer: Optimizer) -> bool:
    """Whether it hands every step on to others."""
    return any(c.__name__ in _WRAPPERS.get(c.__module__.partition(".")[0], ()) for c in type(optimizer).__mro__)
