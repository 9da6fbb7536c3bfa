"""Hooks of the program on modules that are split: they run last, and are told where they see a rank's part.

What goes in and out of a split module is converted by hooks, ours and torch's. One that the program had put there
before ran ahead of these, and saw DTensors that no other code sees. Inside a branch forward hooks are shown the whole
(`looked_at`); those on gradients see this rank's, of which a statistic is a number that looks right, so that is said.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sharders.tensor_parallel.split.styles import ON_CHUNKS, Style, family

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("dmp")

_KINDS = ("_backward_pre_hooks", "_backward_hooks")
_OURS = ("torch", "dmp", "sharders", "planner")
_WHOLE = ("colwise_gather", "colwise_loss_parallel")
"""What these take and give is whole, or says what it is."""


def forward_hooks(model: nn.Module) -> dict[nn.Module, list[int]]:
    """Keys of those that modules have, where they have any."""
    return {module: list(module._forward_hooks) for module in model.modules() if module._forward_hooks}


def run_last(hooks: Mapping[nn.Module, list[int]]) -> None:
    """Have these hooks run behind all that have come since, in their own order."""
    for module, keys in hooks.items():
        for key in keys:
            module._forward_hooks[key] = module._forward_hooks.pop(key)


def tell_of_parts(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, Style]) -> None:
    """Say, once, in a forward, which modules have hooks on gradients that see a rank's part."""
    watched = _inside(dict(model.named_modules()), styles)
    tables = [getattr(module, kind) for module in watched.values() for kind in _KINDS]
    num_known = -1

    def look(*_: Any) -> None:
        nonlocal num_known
        if torch.compiler.is_compiling() or (number := sum(map(len, tables))) == num_known:
            return
        num_known = number
        found = [path for path, module in watched.items() if any(is_of_program(of) for of in _hooks_of(module))]
        if found:
            told.remove()
            (axis,) = mesh.mesh_dim_names or ("tensor",)
            logger.warning(
                "backward hooks on %s%s see gradients of this rank's part along axis %r (%d ranks), for these modules "
                "are split; hooks on the attention, MLP or block around them see the whole's",
                ", ".join(found[:3]),
                f" and {len(found) - 3} more" if len(found) > 3 else "",
                axis,
                mesh.size(),
            )

    told = model.register_forward_pre_hook(look)


def _inside(modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> dict[str, nn.Module]:
    """Those that take or give a part: split Linears and what runs on chunks, and what has no weights beside one."""
    found = {
        path: modules[path]
        for path, style in styles.items()
        if style not in _WHOLE
        and not isinstance(modules[path], nn.Embedding)
        and (family(style) in ("colwise", "rowwise", "norm") or style in (*ON_CHUNKS[:1], "sum_gradients"))
    }
    around = {path.rpartition(".")[0] for path in found if family(styles[path]) == "colwise"}
    for path, module in modules.items():
        if path.rpartition(".")[0] in around and not any(True for _ in module.parameters()):
            found.setdefault(path, module)
    return found


def _hooks_of(module: nn.Module) -> Iterable[Callable[..., Any]]:
    return (hook for kind in _KINDS for hook in getattr(module, kind).values())


def is_of_program(hook: Callable[..., Any]) -> bool:
    """Whether neither torch nor we have put it there."""
    return module_of(hook).partition(".")[0] not in _OURS


def module_of(hook: Callable[..., Any]) -> str:
    """In which its function or class is written."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__)
