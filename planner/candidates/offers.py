"""`Offers`: every parameter's options with their costs, and the problem that they make for the search.

Parameters of one *class* (same sharder, shape, optimizer, features and constraint) share their options, so that a
thousand alike tables are costed once. A *slot* is what the search places as one item: a parameter, or a group of
parameters that must lie together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmp import Layout, ModuleSharder, ParameterInfo, PlanError, ShardingEnv
from planner.candidates.constraints import Constraint
from planner.candidates.options import Rejected, Sketch, options, sketch_in_place, sketches
from planner.costs.cost_model import BYTES, CostModel
from planner.costs.topology import Topology
from planner.search.problem import Choice, Item, Option, Problem


class Offer(NamedTuple):
    """A layout of a parameter and what it costs."""

    sketch: Sketch
    option: Option


@dataclass(frozen=True, eq=False)
class Menu:
    """What a class of parameters may choose from.

    Args:
        offers: at least one.
        rejected: offered by the sharder, but not to be chosen, and why.
        rejected_options: their costs.
    """

    offers: tuple[Offer, ...]
    rejected: tuple[Rejected, ...]
    rejected_options: tuple[Option, ...]


class Slot(NamedTuple):
    """Parameters that are placed as one: `rows[i][k]` is member k's offer in the item's option i."""

    members: tuple[str, ...]
    rows: tuple[tuple[Offer, ...], ...]
    item: Item


@dataclass(frozen=True, eq=False)
class Offers:
    """See the top of the file.

    Args:
        menus: of every parameter that is not pinned.
        pinned: of every parameter that is.
        slots: in the order of the problem's items.
        constraints: of every parameter.
    """

    menus: Mapping[str, Menu]
    pinned: Mapping[str, Offer]
    slots: tuple[Slot, ...]
    constraints: Mapping[str, Constraint]

    @classmethod
    def of(
        cls,
        parameters: Mapping[str, tuple[ModuleSharder, ParameterInfo]],
        constraints: Mapping[str, Constraint],
        pinned: Mapping[str, Layout],
        model: CostModel,
        env: ShardingEnv,
        topology: Topology,
        batch_size: int,
    ) -> Offers:
        """Ask the sharders, filter by the constraints, and cost everything in one evaluation of the model.

        Raises:
            PlanError: a parameter that is left without a layout, or constraints that contradict each other.
        """
        classes: dict[object, tuple[list[Sketch], list[Rejected]]] = {}
        class_of: dict[str, object] = {}
        fixed: dict[str, Sketch] = {}
        for name, (sharder, info) in parameters.items():
            constraint = constraints[name]
            if name in pinned:
                fixed[name] = sketch_in_place(name, pinned[name], info, constraint, env)
                continue
            key = (id(sharder), replace(info, init_fn=None), replace(constraint, colocate=None, spread=None))
            class_of[name] = key
            if key not in classes:
                classes[key] = sketches(name, sharder, info, constraint, env)
            if not classes[key][0]:
                reasons = "; ".join(f"{r.sketch.layout}: {r.reason}" for r in classes[key][1])
                raise PlanError(f"no layout is left for {name!r}, shape {info.shape}: {reasons}", table=name)

        drawn = [s for chosen, out in classes.values() for s in [*chosen, *(r.sketch for r in out)]]
        made = iter(options([*drawn, *fixed.values()], model, env, topology, batch_size))
        menus: dict[object, Menu] = {}
        for class_key, (chosen, out) in classes.items():
            offers = tuple(Offer(s, next(made)) for s in chosen)
            menus[class_key] = Menu(offers, tuple(out), tuple(next(made) for _ in out))
        kept = {name: Offer(s, next(made)) for name, s in fixed.items()}
        of_name = {name: menus[key] for name, key in class_of.items()}
        slots = _slots(of_name, kept, constraints, env.table_size)
        return cls(of_name, kept, slots, constraints)

    def problem(self, env: ShardingEnv, topology: Topology, model: CostModel, dense_bytes: int = 0) -> Problem:
        """What the search is to solve, beside dense weights that take `dense_bytes` on every rank."""
        base = np.zeros((env.table_size, BYTES + 1))
        taken: dict[str, NDArray[np.bool_]] = {}
        for name, offer in self.pinned.items():
            base += offer.option.loads[0] + offer.option.everywhere
            group = self.constraints[name].spread
            if group is not None:
                held = offer.option.loads[0, :, BYTES] > 0
                if (taken.get(group, np.zeros_like(held)) & held).any():
                    raise PlanError(
                        f"pinned parameters of the spread group {group!r} share a rank: {name!r}", table=name
                    )
                taken[group] = taken.get(group, np.zeros_like(held)) | held
        kinds = frozenset(k for offer in self.pinned.values() for k in offer.option.kinds)
        capacity = np.full(env.table_size, topology.usable_bytes - dense_bytes)
        setups = model.setups(env, topology)
        return Problem(tuple(s.item for s in self.slots), capacity, base, setups, kinds, taken)

    def layouts(self, choices: Sequence[Choice], env: ShardingEnv) -> dict[str, Layout]:
        """The layout of every parameter, in its place."""
        layouts = {name: offer.sketch.layout for name, offer in self.pinned.items()}
        for slot, choice in zip(self.slots, choices, strict=True):
            for name, offer in zip(slot.members, slot.rows[choice.option], strict=True):
                layouts[name] = offer.sketch.at(choice.blocks, env)
        return layouts


def _slots(
    menus: Mapping[str, Menu], pinned: Mapping[str, Offer], constraints: Mapping[str, Constraint], num_ranks: int
) -> tuple[Slot, ...]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name in menus:
        group = constraints[name].colocate
        groups.setdefault(("group", group) if group is not None else ("alone", name), []).append(name)
    anchors: dict[str, NDArray[np.bool_]] = {}
    for name, offer in pinned.items():
        group = constraints[name].colocate
        if group is not None:
            held = offer.option.loads[0, :, BYTES] > 0
            if (anchors.setdefault(group, held) != held).any():
                raise PlanError(
                    f"pinned parameters of the colocate group {group!r} are on other ranks: {name!r}", table=name
                )
    known: dict[tuple[int, ...], tuple[tuple[tuple[Offer, ...], ...], tuple[Option, ...]]] = {}
    slots = []
    for (kind, group), members in groups.items():
        key = tuple(id(menus[m]) for m in members)
        if key not in known:
            rows = tuple(_alike([menus[m] for m in members]))
            if not rows:
                offered = {m: [str(o.sketch.layout) for o in menus[m].offers] for m in members}
                raise PlanError(
                    f"colocate group {group!r} has no layout that all its members can take: {offered}", table=members[0]
                )
            known[key] = rows, tuple(_together(row) for row in rows)
        rows, made = known[key]
        spread = [s for m in members if (s := constraints[m].spread) is not None]
        if len(set(spread)) != len(spread):
            raise PlanError(
                f"colocate group {group!r} has members that a spread group keeps apart: {members}", table=members[0]
            )
        allowed = anchors.get(group) if kind == "group" else None
        for m in members:
            ranks = constraints[m].ranks
            if ranks is not None:
                mask = np.isin(np.arange(num_ranks), ranks)
                allowed = mask if allowed is None else allowed & mask
        slots.append(Slot(tuple(members), rows, Item(made, allowed, frozenset(spread))))
    return tuple(slots)


def _alike(menus: Sequence[Menu]) -> list[tuple[Offer, ...]]:
    """Offers of the first with those of the others that have the same layout."""
    found = []
    for offer in menus[0].offers:
        row = [offer]
        for menu in menus[1:]:
            same = [
                o
                for o in menu.offers
                if o.sketch.layout == offer.sketch.layout and o.option.loads.shape == offer.option.loads.shape
            ]
            row += same[:1]
        if len(row) == len(menus):
            found.append(tuple(row))
    return found


def _together(row: Sequence[Offer]) -> Option:
    if len(row) == 1:
        return row[0].option
    loads = sum((o.option.loads for o in row[1:]), row[0].option.loads)
    everywhere = sum((o.option.everywhere for o in row[1:]), row[0].option.everywhere)
    return Option(loads, everywhere, frozenset(k for o in row for k in o.option.kinds))
