"""`Candidates`: what each parameter may get, and the problem that this makes for the search."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmp import Layout, ModuleSharder, ParameterInfo, PlanError
from planner.candidates.constraints import Constraint
from planner.candidates.costed import Class, Costed, CostSetting, costed
from planner.candidates.family import UNIT, Family, layout_of
from planner.candidates.groups import Group, Row, groups_of
from planner.candidates.in_place import (
    InPlace,
    add_load,
    check_cut_alike,
    check_layouts,
    check_ranks,
    held_by_groups,
    in_place,
    ranks_held,
)
from planner.candidates.items import classes_of_groups, surely_needed, table_of
from planner.candidates.movable import Placed
from planner.candidates.offer_table import OfferTable
from planner.candidates.offered import Answered, Asked, Offer, offers
from planner.costs.protocol import CostProtocol, ShardTable, conditions_of, settled_of, setups_of, ways_of
from planner.observed.observation import Observation
from planner.observed.row_curve import RowCurve
from planner.search.cost_table import Array
from planner.search.problem import Choice, Problem

_WORTH = 1e-3
"""Part of the seconds by which another way for gradients of copies must seem quicker."""
_GUESSES = 4
"""How often it is asked anew what is copied, as that depends on what else is."""
_MOST_UNEVEN = 500
"""Of more parameters row blocks are not costed one by one: that takes time, and one among many matters less."""


class Leeway(NamedTuple):
    """What is given up, in this order, where no plan fits else.

    Args:
        narrow_columns: column blocks of four are made where no constraint says more.
        no_state: of an optimizer outside the backward pass, which nobody knows before it is made, is counted.
    """

    narrow_columns: bool = False
    no_state: bool = False


@dataclass(frozen=True, eq=False)
class Candidates:
    """The layouts of all parameters, with their costs.

    Args:
        setting: what costs depend on beside the parameters.
        infos: of every parameter.
        constraints: of every parameter.
        costed: offers of every class, and pinned layouts after them.
        class_of: parameter that is not pinned -> its class.
        pinned: of every parameter that is.
        pinned_rows: of each, its row in `costed`.
        groups: in the order of the problem's items.
        item_class: of each group.
        curves: of parameters of which sample batches told which rows ids name.
        table_rows: of the problem's cost table.
        classes: what costs depend on of each class, then of pinned parameters.
        known: what other models say, of those that were asked before.
    """

    setting: CostSetting
    infos: Mapping[str, ParameterInfo]
    constraints: Mapping[str, Constraint]
    costed: Costed
    class_of: Mapping[str, int]
    pinned: Mapping[str, InPlace]
    pinned_rows: Mapping[str, int]
    groups: tuple[Group, ...]
    item_class: NDArray[np.int64]
    curves: Mapping[str, RowCurve]
    table_rows: tuple[tuple[Row, ...], ...]
    classes: tuple[Class, ...]
    known: list[tuple[CostProtocol, Costed]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        parameters: Mapping[str, tuple[ModuleSharder, ParameterInfo]],
        constraints: Mapping[str, Constraint],
        pinned: Mapping[str, Layout],
        setting: CostSetting,
        leeway: Leeway = Leeway(),  # noqa: B008  # immutable
    ) -> Candidates:
        """Ask the sharders, filter by the constraints, and cost everything in one evaluation of the model.

        Raises:
            PlanError: a parameter that is left without a layout, or constraints that contradict each other.
        """
        env = setting.env
        infos = {name: as_constrained(info, constraints[name]) for name, (_, info) in parameters.items()}
        if leeway.no_state:
            infos = {n: replace(of, state_bytes=(0, 0)) if of.optimizer is None else of for n, of in infos.items()}
        told, samples = setting.observed, setting.batch_size * env.table_size / env.tensor_size
        seen = {} if told is None else {n: told.curve_of(n, info) for n, info in infos.items()}
        own = setting.batch_size / env.tensor_size
        named = {n: _named(n, info, told, (samples, own)) for n, info in infos.items()}
        evens = {name: seen.get(name) is None or len(infos) > _MOST_UNEVEN for name in infos}
        if env.table_size > 1:  # on one rank all layouts are the same
            check_layouts(pinned, constraints, infos, env)
        kept = {name: in_place(name, layout, infos[name], env, seen.get(name)) for name, layout in pinned.items()}
        classes: dict[object, Asked] = {}
        class_of: dict[str, int] = {}
        number: dict[object, int] = {}
        places: dict[int, tuple[Layout, Placed | None]] = {}
        answered: dict[object, Answered] = {}
        for name, (sharder, _) in parameters.items():
            if name in kept:
                continue
            constraint, info = constraints[name], infos[name]
            of_ids = seen.get(name), named[name]
            key = (id(sharder), replace(info, init_fn=None), constraint.without_groups(), *of_ids)
            class_of[name] = number.setdefault(key, len(number))
            if key not in classes:
                asked = Asked(name, sharder, info, constraint, env, places, is_even=evens[name], answered=answered)
                classes[key] = replace(asked, min_columns=UNIT) if leeway.narrow_columns else asked
        firsts = [*(asked.name for asked in classes.values()), *kept]
        every = [
            Class(infos[n], _ids_per_sample(n, infos[n], constraints[n]), seen.get(n), *named[n], evens[n])
            for n in firsts
        ]
        offered: list[list[Offer]] = [offers(asked) for asked in classes.values()]
        last = [[of.offer] for of in kept.values()]
        rows_of = [of.rows for of in every]
        found = costed(every, OfferTable.of(offered + last, rows_of), setting)
        if not found.is_affine:
            offered = [offers(replace(asked, is_affine=False)) for asked in classes.values()]
            found = costed(every, OfferTable.of(offered + last, rows_of), setting)
        rows = {name: len(found.offers) - len(kept) + i for i, name in enumerate(kept)}
        held = {name: ranks_held(of, found, rows[name], env.table_size) for name, of in kept.items()}
        check_ranks(kept, held, constraints)
        check_cut_alike(kept, constraints, infos, env)
        groups = groups_of(class_of, held_by_groups(held, constraints, "colocate"), constraints, env.table_size)
        item_class, table_rows = classes_of_groups(groups, class_of, constraints, found, len(classes))
        curves = {name: curve for name, curve in seen.items() if curve is not None}
        made = cls(
            *(setting, infos, constraints, found, class_of, kept, rows, groups, item_class, curves, table_rows),
            tuple(every),
            [(setting.model, found)],
        )
        return made.likely()

    def likely(self) -> Candidates:
        """With costs as of a plan that copies what seems quicker so, each parameter taken by itself.

        Where gradients of copies may travel in several ways, it is that of which such a plan seems quickest.
        """
        found = self
        for _ in range(_GUESSES):
            before, found = found, found.settled(found.quicker_copied())
            if found is before:
                break
        if not self.class_of:  # of a plan that is pinned whole, as to see which batches fit, there is nothing to choose
            return found
        least = found._least_seconds()
        for other in found.other_ways([found.setting.model]):
            seconds = other._least_seconds()
            if seconds < least * (1 - _WORTH) and other.settled(other.quicker_copied()) is other:
                found, least = other, seconds
        return found

    def _least_seconds(self) -> float:
        """Of all parameters, each taken by itself."""
        least = self._least().min(0)
        return float(sum(least[of] for of in self.class_of.values()))

    def quicker_copied(self) -> set[str]:
        """Parameters of which a copy costs a rank less than all else that is offered does on average."""
        copied, other = self._least()
        found = {name for name, of in self.class_of.items() if copied[of] < other[of]}
        return found | {name for name, of in self.pinned.items() if of.offer.is_copied}

    def _least(self) -> Array:
        """(2, classes) seconds of a rank on average: of a copy, and of all else that is offered."""
        costed = self.costed
        seconds = costed.wholes(self.setting.env.table_size)[1][:, :-1].sum(1)
        is_open, is_copied = costed.table.is_open, costed.table.is_copied
        best: Array = np.full((2, len(self.classes)), np.inf)
        for kind, of in enumerate((is_open & is_copied, is_open & ~is_copied)):
            np.minimum.at(best[kind], costed.owner[of], seconds[of])
        return best

    def copied(self, choices: Sequence[Choice]) -> set[str]:
        """Parameters that every rank has whole.

        Args:
            choices: of the problem's items.
        """
        found = {name for name, row, _ in self.chosen(choices) if self.costed.offers[row].is_copied}
        return found | {name for name, of in self.pinned.items() if of.offer.is_copied}

    def settled(self, copied: Collection[str]) -> Candidates:
        """With costs as of plans that copy these parameters; itself where they are so already, or none is copied."""
        if not copied:
            return self
        setting = self.setting
        return self._by(settled_of(setting.model, self._tables(copied), setting.env, setting.batch_size))

    def other_ways(self, known: Collection[CostProtocol]) -> Iterator[Candidates]:
        """With costs as of plans of each kind that there may be, but for those that are known."""
        setting = self.setting
        for model in ways_of(setting.model, self._tables(()), setting.env, setting.batch_size):
            if all(model != other for other in known):
                yield self._by(model)

    def conditions(self) -> Iterator[tuple[Array, float]]:
        """See `conditions_of`: (rows of the problem's table,) what an item adds that takes one, and the least sum."""
        setting, names = self.setting, [*self.class_of, *self.pinned]
        is_copied = self.costed.table.is_copied.tolist()
        pinned = {self.pinned_rows[name]: name for name in self.pinned}
        for adds, least in conditions_of(setting.model, self._tables(()), setting.env, setting.batch_size):
            of_name = dict(zip(names, adds.tolist(), strict=True))
            of_class = {of: of_name[name] for name, of in self.class_of.items()}
            yield (
                np.array(
                    [
                        sum(of_class[int(self.costed.owner[row])] for row in of.rows if is_copied[row])
                        for of_item in self.table_rows
                        for of in of_item
                    ]
                ),
                least - sum(of_name[name] for row, name in pinned.items() if is_copied[row]),
            )

    def _tables(self, copied: Collection[str]) -> ShardTable:
        """All parameters, each as one shard."""
        of_pinned = {name: len(self.classes) - len(self.pinned) + i for i, name in enumerate(self.pinned)}
        known = [of.known for of in self.classes]
        all_of = {**self.class_of, **of_pinned}
        return ShardTable.of([known[of]._replace(replicated=name in copied) for name, of in all_of.items()])

    def _by(self, model: CostProtocol) -> Candidates:
        """With costs of another model; itself where it is the same."""
        if model == self.setting.model:
            return self
        setting = replace(self.setting, model=model)
        found = next((known for of, known in self.known if of == model), None)
        if found is None:
            found = costed(self.classes, self.costed.table, setting)
            self.known.append((model, found))
        return replace(self, setting=setting, costed=found)

    @property
    def setups(self) -> Array:
        """(kinds, phases) seconds."""
        setting = self.setting
        return setups_of(setting.model, setting.env, setting.topology, self.infos.values())

    def problem(self, dense_bytes: int = 0) -> Problem:
        """What the search is to solve, beside dense weights that take `dense_bytes` on every rank.

        Raises:
            PlanError: pinned parameters of one spread group that share a rank.
        """
        env, model, topology = self.setting.env, self.setting.model, self.setting.topology
        spans, num_ranks = model.spans(env), env.table_size
        base = np.zeros((num_ranks, len(model.phases) + 1))
        held, kinds = {}, 0
        for name, of in self.pinned.items():
            row = self.pinned_rows[name]
            add_load(base, of, self.costed, row, np.append(spans, 1))
            held[name] = ranks_held(of, self.costed, row, num_ranks)
            kinds |= self.costed.kinds(row)
        table, room = table_of(self.costed, self.table_rows), topology.usable_bytes - dense_bytes
        kinds |= surely_needed(table, self.item_class, room)
        return Problem.of_table(
            table,
            self.item_class,
            np.full(num_ranks, room),
            base,
            self.setups,
            spans,
            base_kinds=frozenset(k for k in range(kinds.bit_length()) if kinds >> k & 1),
            taken=held_by_groups(held, self.constraints, "spread"),
            allowed={i: group.allowed for i, group in enumerate(self.groups) if group.allowed is not None},
            spread={i: group.spread for i, group in enumerate(self.groups) if group.spread},
        )

    def placed(self, choices: Sequence[Choice]) -> dict[str, Layout]:
        """The layout of every parameter, in its place.

        Args:
            choices: of the problem's items.
        """
        layouts = {name: of.layout for name, of in self.pinned.items()}
        for item, (group, choice) in enumerate(zip(self.groups, choices, strict=True)):
            row = self.table_rows[self.item_class[item]][choice.option]
            for name, member in zip(group.members, row.rows, strict=True):
                layouts[name] = self.layout(name, row.family, member, choice.blocks, choice.widths)
        return layouts

    def chosen(self, choices: Sequence[Choice]) -> Iterator[tuple[str, int, Choice]]:
        """(name, row of its offer, choice) of every parameter that is not pinned.

        Args:
            choices: of the problem's items.
        """
        for item, (group, choice) in enumerate(zip(self.groups, choices, strict=True)):
            row = self.table_rows[self.item_class[item]][choice.option]
            for name, member in zip(group.members, row.rows, strict=True):
                yield name, member, choice

    def each_cut(self, choices: Sequence[Choice]) -> Array:
        """(phases + 1,) on every rank, which the search does not count: what further pieces of columns cost.

        Args:
            choices: of the problem's items.
        """
        found = np.zeros(self.costed.each_cut.shape[1])
        for _, row, choice in self.chosen(choices):
            found += (len(choice.blocks) - 1) * self.costed.each_cut[row]
        return found

    def layout(
        self, name: str, family: Family, row: int, blocks: Sequence[int], widths: Sequence[int] | None = None
    ) -> Layout:
        """A parameter's layout of a family, with its pieces on these blocks.

        Args:
            row: of the parameter's offer.
            widths: units of each piece; None for an even cut.
        """
        own, shape = self.costed.offers[row].own, self.infos[name].shape
        if own is not None:
            return own.at(blocks if row in self.costed.ragged else sorted(blocks), self.setting.env)  # alike: in order
        return layout_of(family, blocks, widths, shape[1] if len(shape) == 2 else 0, self.setting.env)

    def ids_of(self, name: str) -> float:
        """Mean number of ids of a sample in all features of a parameter."""
        return _ids_per_sample(name, self.infos[name], self.constraints[name])

    def example(self, row: int) -> Layout:
        """A layout of an offer, on the first blocks, its columns whole where they may be."""
        return self.costed.offers[row].example(self.setting.env)

    def offers_of(self, name: str) -> range:
        """Rows of what a parameter that is not pinned is offered, in `costed`."""
        owner = self.costed.owner
        first, stop = np.searchsorted(owner, [self.class_of[name], self.class_of[name] + 1]).tolist()
        return range(first, stop)


def as_constrained(info: ParameterInfo, constraint: Constraint) -> ParameterInfo:
    """What is known of a parameter, with the kernel that a constraint gives it."""
    if constraint.kernel == "dense" and info.optimizer is not None:  # which another then takes the place of
        return replace(info, optimizer=None, state_bytes=None if info.trained else (0, 0), mixes_columns=None)
    if constraint.kernel == "fused" and info.optimizer is None:
        return replace(info, optimizer="sgd", state_bytes=(0, 0), mixes_columns=False)
    return info


def _named(
    name: str, info: ParameterInfo, told: Observation | None, samples: tuple[float, float]
) -> tuple[float, float]:
    """Rows that as many samples name, as `ShardTable` says; zeros where nobody observed any."""
    of_all, own = (0.0, 0.0) if told is None else (told.named_rows(name, info, n) for n in samples)
    return of_all, own


def _ids_per_sample(name: str, info: ParameterInfo, constraint: Constraint) -> float:
    """Mean number of ids of a sample in all features of a table."""
    factor = constraint.pooling_factor if constraint.pooling_factor is not None else info.pooling_factor
    if factor is None or isinstance(factor, (int, float)):
        return (1.0 if factor is None else float(factor)) * info.num_features
    if len(factor) != info.num_features:
        raise PlanError(
            f"{name!r} is read by {info.num_features} features; got {len(factor)} pooling factors {tuple(factor)}",
            table=name,
        )
    return float(sum(factor))
