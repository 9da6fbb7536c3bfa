"""Frozen copies of tables, as a teacher has that follows the model by means of the two: planned where the table is.

`p.mul_(m).add_(q, alpha=1 - m)` goes by the parts that a rank has. By themselves the two would be planned apart, for a
table that nobody trains is cheap where it is whole: the parts would not fit, or be of other rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from dmp import Found
from planner.candidates.constraints import Constraint


def with_copies(
    constraints: Mapping[str, Constraint], found: Found, names: Collection[str]
) -> tuple[dict[str, Constraint], list[str]]:
    """Constraints with each trained table and its frozen copies colocated, and what the report says of them.

    Args:
        constraints: of the user; a table that has one stays as it is.
        names: of tables to plan.
    """
    together, notes = dict(constraints), []
    for name, of in found.frozen_copies({name for name in names if constraints[name] == Constraint()}).items():
        for each in (of, name):
            together[each] = replace(constraints[each], colocate=f"copies of {of}")
        notes.append(f"{name} is a frozen copy of {of}, and is cut as it: means of the two are taken part by part")
    return together, notes
