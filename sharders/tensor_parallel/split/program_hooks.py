"""Hooks of the program on modules that are split: they run last, and are told where they see a rank's part.

What goes in and out of a split module is converted by hooks, ours and torch's. One that the program had put there
before ran ahead of these, and saw DTensors that no other code sees. Inside a branch forward hooks are shown the whole
(`looked_at`); those on gradients see this rank's, of which a statistic is a number that looks right, so that is said.
So it is where hidden states are chunks of the sequence, of all hooks and of what the model gives out.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dmp import is_inside, ranks, tensors_of
from sharders.tensor_parallel.split.styles import ON_CHUNKS, Style, family

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("dmp")

_KINDS = ("_backward_pre_hooks", "_backward_hooks")
_EVERY = ("_forward_hooks", "_forward_pre_hooks", *_KINDS)
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
    (axis,) = mesh.mesh_dim_names or ("tensor",)

    def tell(names: str) -> None:
        logger.warning(
            "backward hooks on %s see gradients of this rank's part along axis %r (%d ranks), for these modules are "
            "split; hooks on the attention, MLP or block around them see the whole's",
            *(names, axis, mesh.size()),
        )

    _tell_of_hooks(model, _inside(dict(model.named_modules()), styles), _KINDS, tell)


def _tell_of_hooks(
    model: nn.Module, watched: Mapping[str, nn.Module], kinds: Iterable[str], tell: Callable[[str], None]
) -> None:
    """Tell, once, in a forward, which of these modules have hooks of the program; looked for when hooks have come."""
    tables = [getattr(module, kind) for module in watched.values() for kind in kinds]
    num_known = -1

    def look(*_: Any) -> None:
        nonlocal num_known
        if torch.compiler.is_compiling() or (number := sum(map(len, tables))) == num_known:
            return
        num_known = number
        found = [path for path, module in watched.items() if any(map(is_of_program, _hooks_of(module, kinds)))]
        if found:
            told.remove()
            tell(", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else ""))

    told = model.register_forward_pre_hook(look)


def tell_of_chunks(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, Style]) -> None:
    """Say, once, which hooks of the program see a chunk of the sequence, and that the model gives some out."""
    first = next((path for path, style in styles.items() if style == "split_sequence"), None)
    if first is None:
        return
    gathering = [path for path, style in styles.items() if style == "gather_input"]
    watched = {
        path: module
        for path, module in model.named_modules()
        if is_inside(path, first.rpartition(".")[0])
        and path != first.rpartition(".")[0]
        and (styles.get(path) == "rowwise_scatter" or not any(path != g and is_inside(path, g) for g in gathering))
        and family(styles.get(path, "")) != "colwise"
    }
    (axis,) = mesh.mesh_dim_names or ("tensor",)
    part = f"a rank's chunk of the sequence along axis {axis!r} ({mesh.size()} ranks)"
    shape: torch.Size | None = None

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal shape
        output = output[0] if isinstance(output, tuple) else output
        shape = None if torch.compiler.is_compiling() else getattr(output, "shape", None)

    def compare(_: nn.Module, __: Any, output: Any) -> None:
        if shape is not None and any(x.shape == shape for _, x in tensors_of(output)):
            ranks.say_once(
                f"the model gives out hidden states {tuple(shape)}, which are {part}: for the whole's, take "
                "TensorParallelSharder(sequence_parallel=False)",
                by_first=True,
            )
            kept.remove()
            compared.remove()

    see = f"see {part}: a statistic of it is another on each"
    _tell_of_hooks(model, watched, _EVERY, lambda names: ranks.say_once(f"hooks on {names} {see}", by_first=True))
    kept = model.get_submodule(first).register_forward_hook(keep)
    compared = model.register_forward_hook(compare)


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


def _hooks_of(module: nn.Module, kinds: Iterable[str]) -> Iterable[Callable[..., Any]]:
    return (hook for kind in kinds for hook in getattr(module, kind).values())


def is_of_program(hook: Callable[..., Any]) -> bool:
    """Whether neither torch nor we have put it there."""
    return module_of(hook).partition(".")[0] not in _OURS


def module_of(hook: Callable[..., Any]) -> str:
    """In which its function or class is written."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__)
