"""What constraints say of dense weights: which layouts a user allows, where the mesh's axes leave a choice."""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import nn

from dmp import Layout, PlanError, colwise, dense_parameters, fully_sharded, replicate, rowwise, sequence
from planner.candidates.constraints import Answering, Constraint

DENSE_LAYOUTS = frozenset(layout.name for layout in (colwise(), rowwise(), sequence(), fully_sharded(), replicate()))
Asked = Mapping[str, frozenset[str]]


def asked_of_dense(
    constraints: Mapping[str, Constraint], module: nn.Module, tables: Set[str]
) -> tuple[dict[str, frozenset[str]], dict[str, Constraint]]:
    """The layouts allowed of each dense weight of `module` that a constraint speaks of, and what is left for `tables`.

    A constraint speaks of dense weights by naming one of their layouts in `layouts` or `forbid`, or by a key that no
    table answers to. Later ones win.

    Raises:
        PlanError: it asks for what they have not, and is of no table.
    """
    asked: dict[str, frozenset[str]] = {}
    rest, of_tables, of_dense = dict(constraints), Answering(tables), None
    for key, constraint in constraints.items():
        if not isinstance(constraint, Constraint) or not isinstance(key, str):
            continue  # said where the tables' are read
        only = DENSE_LAYOUTS.intersection(constraint.layouts or ())
        banned = DENSE_LAYOUTS.intersection(constraint.forbid or ())
        is_of_tables = bool(of_tables.named(key))
        if is_of_tables and not (only or banned):
            continue
        of_dense = of_dense or Answering(dense_parameters(module, tables))
        matched = of_dense.named(key)
        if matched and not is_of_tables:
            _check(key, constraint, matched[0])
            del rest[key]
        asked |= dict.fromkeys(matched, (only or DENSE_LAYOUTS) - banned)
    return asked, rest


def _check(key: str, constraint: Constraint, example: str) -> None:
    """Raise `PlanError` where a constraint asks for what dense weights have not."""
    points = constraint.given()
    unknown = [name for name in (*points.pop("layouts", ()), *points.pop("forbid", ())) if name not in DENSE_LAYOUTS]
    if points or unknown or (constraint.layouts is None and constraint.forbid is None):
        wrong = f"names {unknown[0]!r}" if unknown else f"says {', '.join(points) or 'nothing'}"
        raise PlanError(
            f"the constraint on {key!r} {wrong}; {example!r} is a dense weight, not a table: of those `layouts` and "
            f"`forbid` may name {sorted(DENSE_LAYOUTS)}, and nothing else is asked",
            table=example,
        )


def allows(asked: Asked, name: str, layout: Layout) -> bool:
    """Whether a weight may have a layout; without a word of it, any."""
    return layout.name in asked.get(name, DENSE_LAYOUTS)
