"""`Candidates`: what each parameter may get, and the problem that this makes for the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from dmp import Layout, ModuleSharder, ParameterInfo, PlanError, ShardingEnv
from planner.candidates.constraints import Constraint
from planner.candidates.costed import ClassLayouts, CostedLayout, costed
from planner.candidates.groups import Group, groups_of
from planner.candidates.movable import MovableLayout, fixed
from planner.candidates.offered import offered_layouts
from planner.costs.protocol import BYTES, CostProtocol
from planner.costs.topology import Topology
from planner.search.problem import Choice, Problem


@dataclass(frozen=True, eq=False)
class Candidates:
    """The layouts of all parameters, with their costs.

    Args:
        offered: to every parameter that is not pinned.
        pinned: of every parameter that is.
        groups: in the order of the problem's items.
        constraints: of every parameter.
    """

    offered: Mapping[str, ClassLayouts]
    pinned: Mapping[str, CostedLayout]
    groups: tuple[Group, ...]
    constraints: Mapping[str, Constraint]

    @classmethod
    def of(
        cls,
        parameters: Mapping[str, tuple[ModuleSharder, ParameterInfo]],
        constraints: Mapping[str, Constraint],
        pinned: Mapping[str, Layout],
        model: CostProtocol,
        env: ShardingEnv,
        topology: Topology,
        batch_size: int,
    ) -> Candidates:
        """Ask the sharders, filter by the constraints, and cost everything in one evaluation of the model.

        Args:
            batch_size: samples per data rank.

        Raises:
            PlanError: a parameter that is left without a layout, or constraints that contradict each other.
        """
        classes: dict[object, list[tuple[MovableLayout, str]]] = {}
        class_of: dict[str, object] = {}
        in_place: dict[str, MovableLayout] = {}
        for name, (sharder, info) in parameters.items():
            constraint = constraints[name]
            if name in pinned:
                in_place[name] = fixed(name, pinned[name], info, constraint, env)
                continue
            key = (id(sharder), replace(info, init_fn=None), replace(constraint, colocate=None, spread=None))
            class_of[name] = key
            if key not in classes:
                classes[key] = offered_layouts(name, sharder, info, constraint, env)

        layouts = [layout for offered in classes.values() for layout in offered]
        layouts += [(layout, "") for layout in in_place.values()]
        found = iter(costed(layouts, model, env, topology, batch_size))
        of_class: dict[object, ClassLayouts] = {}
        for each, offered in classes.items():
            all_of_it = list(islice(found, len(offered)))
            choices = tuple(layout for layout in all_of_it if not layout.objection)
            of_class[each] = ClassLayouts(choices, tuple(layout for layout in all_of_it if layout.objection))
        kept = dict(zip(in_place, found, strict=True))
        of_name = {name: of_class[key] for name, key in class_of.items()}
        return cls(of_name, kept, groups_of(of_name, kept, constraints, env.table_size), constraints)

    def problem(self, env: ShardingEnv, topology: Topology, model: CostProtocol, dense_bytes: int = 0) -> Problem:
        """What the search is to solve, beside dense weights that take `dense_bytes` on every rank.

        Raises:
            PlanError: pinned parameters of one spread group that share a rank.
        """
        base = np.zeros((env.table_size, len(model.phases) + 1))
        taken: dict[str, NDArray[np.bool_]] = {}
        for name, layout in self.pinned.items():
            base += layout.option.loads[0] + layout.option.everywhere
            group = self.constraints[name].spread
            if group is not None:
                held = layout.option.loads[0, :, BYTES] > 0
                before = taken.get(group, np.zeros_like(held))
                if (before & held).any():
                    raise PlanError(
                        f"pinned parameters of the spread group {group!r} share a rank: {name!r}", table=name
                    )
                taken[group] = before | held
        kinds = frozenset(kind for layout in self.pinned.values() for kind in layout.option.kinds)
        capacity = np.full(env.table_size, topology.usable_bytes - dense_bytes)
        items = tuple(group.item for group in self.groups)
        return Problem(items, capacity, base, model.setups(env, topology), kinds, taken)

    def placed(self, choices: Sequence[Choice], env: ShardingEnv) -> dict[str, Layout]:
        """The layout of every parameter, in its place.

        Args:
            choices: of the problem's items.
        """
        layouts = {name: kept.movable.layout for name, kept in self.pinned.items()}
        for group, choice in zip(self.groups, choices, strict=True):
            for name, layout in zip(group.members, group.rows[choice.option], strict=True):
                layouts[name] = layout.movable.at(choice.blocks, env)
        return layouts
