"""*Oddities*: what a module of a kind that is sharded has, with which no sharder takes it for tables."""

from __future__ import annotations

from typing import Any

import torch


def why_no_table(module: Any) -> str:
    """What of a module of a kind that is sharded no sharder runs."""
    found = oddity(module)
    if found is not None:
        return found
    inside = ((path, oddity(m) or _hooks_or_padding(m)) for path, m in module.named_modules() if path)
    odd = next((f"{path}: {what}" for path, what in inside if what is not None), None)
    return odd or f"its sharder takes nothing of this {type(module).__name__}"


def oddity(module: Any) -> str | None:
    """What of it no sharder of tables runs, wherever it is; None where that is nothing."""
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, name, None):
            return f"{name}={getattr(module, name)}"
    if getattr(module, "mode", None) == "max":
        return "mode='max'"
    if hasattr(module, "parametrizations"):
        return "its weight is parametrized"
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and not weight.is_floating_point():
        return f"its weight is of {weight.dtype}"
    if not type(module).forward.__module__.startswith(("torch.", "torchrec.")):
        return f"{type(module).__name__} has a forward of its own"
    return "its forward was replaced" if "forward" in vars(module) else None


def _hooks_or_padding(module: Any) -> str | None:
    """What a table may have by itself, but not inside a collection."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "it has hooks"
    return f"padding_idx={module.padding_idx}" if getattr(module, "padding_idx", None) is not None else None
