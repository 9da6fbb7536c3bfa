"""What a sharder might have taken and does not, said once with its bytes: a step's numbers do not show it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from dmp.contracts import ModelSharder, ModuleSharder
from dmp.env import ShardingEnv
from dmp.plans.discovery import Resolved
from dmp.registry import by_module_type, sharder_for

LARGE_BYTES = 64 << 20  # what a warning is worth: copies on every rank
_log = logging.getLogger("dmp")


def say_what_is_left(
    resolved: Resolved, module: nn.Module, sharders: Iterable[ModuleSharder | ModelSharder], env: ShardingEnv
) -> None:
    """Tell the logger "dmp" which modules of a kind that is sharded are data-parallel, and how much is whole in all."""
    by_type = by_module_type(sharders)
    names: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    inside = {id(m) for site in resolved.sites for m in site.module.modules()}
    known = resolved.plan.keys() | resolved.read.keys()
    for path, each in module.named_modules():
        if id(each) in inside or sharder_for(each, by_type) is None:
            continue
        for p in each.parameters(recurse=False):
            if is_lazy(p) or known & set(names[id(p)]):
                continue
            others = [n for n in names[id(p)] if n.rpartition(".")[0] != path]
            num_bytes = p.numel() * p.element_size()
            is_large = num_bytes >= LARGE_BYTES and not env.fully_sharded_axes
            _log.log(
                logging.WARNING if is_large else logging.INFO,
                "%r (%s bytes) is no table but part of the data-parallel weights, %s: %s",
                names[id(p)][0],
                f"{num_bytes:,}",
                "split with them" if env.fully_sharded_axes else "whole on every rank",
                f"tied to {others[0]!r}" if others else _reason(each),
            )
    if not env.fully_sharded_axes:
        of_tables = {id(p) for site in resolved.sites for p in site.module.parameters()}
        dense = [p for p in module.parameters() if id(p) not in of_tables and not is_lazy(p)]
        total = sum(p.numel() * p.element_size() for p in dense)
        _log.info("%d dense parameters of %s bytes are whole on every data rank", len(dense), f"{total:,}")


def _reason(module: Any) -> str:
    """What of the module no sharder runs."""
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, name, None):
            return f"{name}={getattr(module, name)}"
    if getattr(module, "mode", None) == "max":
        return "mode='max'"
    if hasattr(module, "parametrizations"):
        return "its weight is parametrized"
    if not type(module).forward.__module__.startswith(("torch.", "torchrec.")):
        return f"{type(module).__name__} has a forward of its own"
    return f"its sharder takes nothing of this {type(module).__name__}"
