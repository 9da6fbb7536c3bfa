"""What the search puts on ranks: a cost table of items' classes, one for each group of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_

import numpy as np
from numpy.typing import NDArray

from planner.candidates.constraints import Constraint
from planner.candidates.costed import Costed
from planner.candidates.groups import Group, Row, costs_together, rows_together
from planner.costs.protocol import AWAY
from planner.search.cost_table import CostTable


def surely_needed(table: CostTable, item_class: NDArray[np.int64], room: float) -> int:
    """Set-ups of every plan, a bit each, so that the search need not ask whether it does without.

    They are those of all layouts of some item; and that of what is not copied, where there is no room to copy all.
    """
    counts = np.bincount(item_class)
    start = np.flatnonzero(np.diff(table.owner, prepend=-1))
    start = start[counts[table.owner[start]] > 0] if len(counts) else start[:0]
    if not len(start):
        return 0
    is_asked = np.isin(table.owner, table.owner[start])
    begin = np.flatnonzero(np.diff(table.owner[is_asked], prepend=-1))
    kinds = table.kinds[is_asked]
    of_copies = np.where(kinds & 1 << AWAY, np.inf, (table.fixed + table.everywhere)[is_asked, -1])
    copied = float(np.minimum.reduceat(of_copies, begin) @ counts[table.owner[start]])
    found = int(np.bitwise_or.reduce(np.bitwise_and.reduceat(kinds, begin)))
    return found | (1 << AWAY if copied > 1.001 * room and (kinds & 1 << AWAY).any() else 0)


def classes_of_groups(
    groups: Sequence[Group],
    class_of: Mapping[str, int],
    constraints: Mapping[str, Constraint],
    costed: Costed,
    num_classes: int,
) -> tuple[NDArray[np.int64], tuple[tuple[Row, ...], ...]]:
    """The class of each group, and the families of each class: first of single parameters, then of groups."""
    open_rows: list[list[int]] = [[] for _ in range(num_classes)]
    for row, owner in enumerate(costed.owner.tolist()):
        if owner < num_classes and not costed.offers[row].objection:
            open_rows[owner].append(row)
    found = [tuple(Row(costed.offers[row].family, (row,)) for row in rows) for rows in open_rows]
    known: dict[tuple[int, ...], int] = {}
    item_class = []
    for group in groups:
        of_members = tuple(class_of[member] for member in group.members)
        if len(of_members) == 1:
            item_class.append(of_members[0])
            continue
        if of_members not in known:
            known[of_members] = len(found)
            colocate = constraints[group.members[0]].colocate or ""
            found.append(tuple(rows_together(colocate, group.members, [open_rows[c] for c in of_members], costed)))
        item_class.append(known[of_members])
    return np.array(item_class, dtype=np.int64), tuple(found)


def table_of(of: Costed, table_rows: Sequence[Sequence[Row]]) -> CostTable:
    """The families of all classes of items, as the search wants them.

    Args:
        table_rows: of each class.
    """
    rows = [row for of_class in table_rows for row in of_class]
    owner = np.repeat(np.arange(len(table_rows)), [len(of_class) for of_class in table_rows])
    family = np.array([row.family[1:5] for row in rows], dtype=np.int64).reshape(-1, 4)
    first = np.array([row.rows[0] for row in rows], dtype=np.int64)
    costs = [values[first] for values in (of.fixed, of.slope, of.everywhere, of.lack, of.lack_slope)]
    ragged = {i: of.ragged[row.rows[0]] for i, row in enumerate(rows) if row.rows[0] in of.ragged}
    for i, row in enumerate(rows):
        if len(row.rows) > 1:
            *of_group, loads = costs_together(row, of)
            for values, value in zip(costs, of_group, strict=True):
                values[i] = value
            ragged.pop(i, None)
            if loads is not None:
                ragged[i] = loads
    kinds = np.array([reduce(or_, map(of.kinds, row.rows)) for row in rows], dtype=np.int64)
    size, pieces, units, least = family.T
    fixed, slope, everywhere, lack, lack_slope = costs
    filled = np.array([row.family.ranks for row in rows], dtype=np.int64)
    return CostTable(
        owner, size, pieces, units, least, fixed, slope, everywhere, kinds, ragged, lack, lack_slope, filled
    )
