"""Remarks: what cannot be seen from a step's numbers is said once, to the logger "dmp", by rank 0.

That is: a tensor axis on which nothing was split, whose ranks all do the same work; and which share of the weights is
whole on each of its ranks, and why. More than half of them, and no table split either, is a warning.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from torch import nn

    from dmp.env import ShardingEnv
    from dmp.plans.discovery import Resolved

_log = logging.getLogger("dmp")
_NUM_SHOWN = 8


def say_what_is_whole(resolved: Resolved, module: nn.Module, env: ShardingEnv) -> None:
    """Say what the tensor axis does not split, and why; nothing where there is none.

    Args:
        resolved: the plan, checked.
        module: before anything of it is replaced.
    """
    if env.tensor_size == 1:
        return
    axis = ", ".join(f"{name} ({env.shape[env.names.index(name)]})" for name in env.axes("tensor"))
    tables = {name for site in resolved.sites for name in site.names().values()}
    split = {name for name, e in resolved.plan.items() if e.layout.tensor_dim(2) is not None}
    sizes = {n: p.numel() * p.element_size() for n, p in module.named_parameters() if not is_lazy(p)}
    dense = {name: size for name, size in sizes.items() if name not in tables}
    total, whole = sum(dense.values()), sum(size for name, size in dense.items() if name not in split)
    is_cut = any(not resolved.plan[name].layout.is_copied for name in tables)
    reasons = _reasons(resolved)
    if not is_cut and whole == total:
        _log.warning(
            "axis %s: nothing is split, because %s. Its ranks all hold the same %s and do the same work; leave the "
            "axis out of the mesh, or name what is to be split: TensorParallelSharder({module path: style})",
            axis,
            "; ".join(reasons) or "the plan splits nothing",
            shown_bytes(sum(sizes.values())),
        )
    elif whole:
        _log.log(
            logging.WARNING if whole > total / 2 and not is_cut else logging.INFO,
            "axis %s: %.0f %% of the dense weights (%s of %s) are whole on each of its ranks: %s",
            axis,
            100 * whole / total,
            shown_bytes(whole),
            shown_bytes(total),
            "; ".join(reasons) or "the plan does not name them",
        )


def shown_bytes(size: int) -> str:
    """A size that a person reads."""
    for unit, digits in (("bytes", 0), ("KB", 3), ("MB", 6), ("GB", 9)):
        if size < 1000 ** (digits // 3 + 1):
            return f"{size / 10**digits:.{2 if digits else 0}f} {unit}"
    return f"{size / 1e12:.2f} TB"


def _reasons(resolved: Resolved) -> list[str]:
    """What the sharders noted of what they left whole."""
    if not resolved.placements:
        return ["no sharder that splits dense weights was passed (TensorParallelSharder does)"]
    notes = list(dict.fromkeys(note for p in resolved.placements for note in getattr(p, "notes", ())))
    said = [note for note in notes if "left whole" in note or "nothing to split" in note]
    return said[:_NUM_SHOWN] + [f"and {len(said) - _NUM_SHOWN} more"] * (len(said) > _NUM_SHOWN)
