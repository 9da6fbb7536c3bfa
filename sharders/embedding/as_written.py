"""Whether a module does what its class says, and nothing else: a module in its place would not do what was added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def keeps_forward(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module runs the forward of `kind`: no subclass, and nobody who holds the module, put in another."""
    of_class, of_call = type(module).forward, type(module).__call__
    return of_class is kind.forward and of_call is nn.Module.__call__ and "forward" not in vars(module)


def is_plain(module: Any, kind: type[nn.Module]) -> bool:
    """Whether it is an `nn.EmbeddingBag` or `nn.Embedding` whose weight is only looked up."""
    weight = module._parameters.get("weight")
    if weight is None:  # it is computed at each call: a parametrization, weight norm
        return False
    if not weight.dtype.is_floating_point:  # codes, complex numbers: kernels and updates are of real ones
        return False
    is_own = not keeps_forward(module, kind)
    return not is_own and module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def holds_plain_tables(tables: nn.Module, kind: type[nn.Module], configs: Sequence[Any]) -> bool:
    """Whether a collection's modules of tables are as its configs say, in their order, and have no hooks of their own.

    Args:
        tables: of each config a module, by its name.
        kind: torch's class of these modules.
    """
    if [*tables._modules] != [config.name for config in configs]:
        return False
    for module, config in zip(tables._modules.values(), configs, strict=True):
        if not isinstance(module, kind) or not is_plain(module, kind) or any(getattr(module, hook) for hook in _HOOKS):
            return False
        pooling = getattr(config, "pooling", None)
        if module.padding_idx is not None or (pooling is not None and pooling.name.lower() != module.mode):
            return False
    return True
