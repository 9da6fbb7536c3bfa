"""What constraints say of dense weights: which layouts a user allows, where the mesh's axes leave a choice."""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import nn

from dmp import Layout, colwise, dense_parameters, fully_sharded, replicate, rowwise, sequence
from planner.candidates.constraints import Constraint, named_by

DENSE_LAYOUTS = frozenset(layout.name for layout in (colwise(), rowwise(), sequence(), fully_sharded(), replicate()))
Asked = Mapping[str, frozenset[str]]


def asked_of_dense(
    constraints: Mapping[str, Constraint], module: nn.Module, tables: Set[str]
) -> tuple[dict[str, frozenset[str]], dict[str, Constraint]]:
    """The layouts allowed of each dense weight of `module` that a constraint speaks of, and what is left for `tables`.

    A constraint speaks of dense weights by naming one of their layouts in `layouts` or `forbid`. Later ones win.
    """
    asked: dict[str, frozenset[str]] = {}
    rest = dict(constraints)
    for key, constraint in constraints.items():
        if not isinstance(constraint, Constraint) or not isinstance(key, str):
            continue  # said where the tables' are read
        only = DENSE_LAYOUTS.intersection(constraint.layouts or ())
        banned = DENSE_LAYOUTS.intersection(constraint.forbid or ())
        if not (only or banned):
            continue
        matched = named_by(key, dense_parameters(module, tables))[0]
        asked |= dict.fromkeys(matched, (only or DENSE_LAYOUTS) - banned)
        if matched and not named_by(key, tables)[0]:
            del rest[key]
    return asked, rest


def allows(asked: Asked, name: str, layout: Layout) -> bool:
    """Whether a weight may have a layout; without a word of it, any."""
    return layout.name in asked.get(name, DENSE_LAYOUTS)
