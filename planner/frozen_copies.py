"""Frozen copies of tables, as a teacher has that follows the model by means of the two: planned where the table is.

`p.mul_(m).add_(q, alpha=1 - m)` goes by the parts that a rank has. By themselves the two would be planned apart, for a
table that nobody trains is cheap where it is whole: the parts would not fit, or be of other rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import nn

from planner.candidates.constraints import Constraint

_FIRST_ROWS = 64
"""Compared before all others, which may be many."""


def with_copies(
    constraints: Mapping[str, Constraint], module: nn.Module, names: Collection[str]
) -> tuple[dict[str, Constraint], list[str]]:
    """Constraints with each trained table and its frozen copies colocated, and what the report says of them.

    Args:
        constraints: of the user; what one colocates stays as it is.
        names: of tables to plan.
    """
    own = {name: p for name, p in module.named_parameters() if name in names and not p.is_meta}
    alone = [name for name in own if constraints[name] == Constraint()]
    trained: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
    for name in alone:
        if own[name].requires_grad:
            trained.setdefault((own[name].shape, own[name].dtype), []).append(name)
    together, notes = dict(constraints), []
    for name in alone:
        p = own[name]
        candidates = [] if p.requires_grad else trained.get((p.shape, p.dtype), [])
        of = next((each for each in candidates if _is_copy(p, own[each])), None)
        if of is not None:
            for each in (of, name):
                together[each] = replace(constraints[each], colocate=f"copies of {of}")
            notes.append(f"{name} is a frozen copy of {of}, and is cut as it: means of the two are taken part by part")
    return together, notes


def _is_copy(p: torch.Tensor, of: torch.Tensor) -> bool:
    if not torch.equal(p[:_FIRST_ROWS], of[:_FIRST_ROWS]) or bool((p == p.flatten()[0]).all()):
        return False  # all zeros are everybody's
    return torch.equal(p, of)
