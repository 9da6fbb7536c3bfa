"""`Request`: the tables to plan and what they must keep; `Answer`: the plan of them that the search found.

[Note: leeway]
Two things are given up where no plan fits else: column blocks are made narrower than usual, and the state of optimizers
outside the backward pass is left out, which nobody knows before they are made. A note says the second.

[Note: settled costs] What a copy costs depends on what else is copied (`settled_of`). The search is told costs as of a
plan that is likely. Where it finds one that these are not of, that plan is costed anew, and the search asked again with
what it is of; the quickest plan of all is taken, each costed as what it is. A search's bound is of the plans that its
costs are of; those that were never searched (`ways_of`) are asked for plans that cost less than the lowest of these,
and that copy what such plans must (`conditions_of`). The way with the lowest such bound is searched where it is well
below all that was searched: bounds are not exact, and to search every way takes as long again for each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import ceil
from operator import or_

import numpy as np

from dmp import Layout, ModuleSharder, ParameterInfo, shown_bytes
from planner.candidates.candidates import Candidates, Leeway, as_constrained
from planner.candidates.constraints import Constraint
from planner.candidates.costed import CostSetting
from planner.candidates.in_place import ranks_held
from planner.candidates.shortage import Shortage, shortage
from planner.costs.protocol import BYTES, CostProtocol
from planner.search.best import Told
from planner.search.bound import Bound, lower_bound
from planner.search.bound_held import bound_of_held
from planner.search.problem import Infeasible, Problem
from planner.search.solve import Solution, search

_log = logging.getLogger("dmp")
_SEARCHES = 3
"""At most, of one request: each with costs of a plan that the one before found."""
_CLOSE = 5e-4
"""Nobody cares how much of this part of a bound is missing."""
_WORK, _WORK_OF_MANY, _FEW = 70.0, 24.0, 650
"""Of a bound of plans of another way, see `lower_bound`: of up to so many items, and of more."""
_WORTH = 1e-2
"""By how much plans of another way must be able to cost less than those that were searched, to be searched too;"""
_BRIEF = 0.3
"""in so much of the work: many ways turn out to be no better."""
_NEARLY = 2e-3
"""Part of a bound that is not worth to look closer, where another way may be so much lower."""
_ROUNDING = 1e-12
_LEEWAYS = (Leeway(), Leeway(narrow_columns=True), Leeway(no_state=True), Leeway(True, True))


@dataclass(frozen=True, eq=False)
class Request:
    """Tables to plan.

    Args:
        parameters: every one by name: who runs it, and what is known of it.
        constraints: of every one.
        pinned: layouts that are given.
        costs: what costs depend on besides.
        dense_bytes: that dense weights take on every rank.
        effort: of the search.
    """

    parameters: Mapping[str, tuple[ModuleSharder, ParameterInfo]]
    constraints: Mapping[str, Constraint]
    pinned: Mapping[str, Layout]
    costs: CostSetting
    dense_bytes: int = 0
    effort: float = 1.0

    def candidates(self, leeway: Leeway) -> Candidates:
        """What each parameter may get.

        Raises:
            PlanError: a parameter that is left without a layout, or constraints that contradict each other.
        """
        return Candidates.of(self.parameters, self.constraints, self.pinned, self.costs, leeway)

    def most_open(self) -> Problem:
        """With all given up that may be.

        Raises:
            PlanError: see `candidates`.
        """
        return self.candidates(_LEEWAYS[-1]).problem(self.dense_bytes)


@dataclass(frozen=True, eq=False)
class Answer:
    """What the search found, and what it searched in.

    Args:
        notes: what a user must know of it.
        leeway: what was given up.
    """

    candidates: Candidates
    problem: Problem
    solution: Solution
    notes: tuple[str, ...] = ()
    leeway: Leeway = _LEEWAYS[0]


class NoPlan(Exception):
    """No placement was found, whatever was given up.

    Attributes:
        request: what was asked.
        candidates, problem: searched in, with all given up that may be.
        cause: what the search found short; its item is -1 where pinned parameters alone are too much.
    """

    def __init__(self, request: Request, candidates: Candidates, problem: Problem, cause: Infeasible) -> None:
        super().__init__(str(cause))
        self.request, self.candidates, self.problem, self.cause = request, candidates, problem, cause

    @property
    def names(self) -> tuple[str, ...]:
        """Of what does not fit: a parameter and what must lie with it; of pinned ones the largest there."""
        if self.cause.item >= 0:
            return self.candidates.groups[self.cause.item].members
        costed, rows, rank = self.candidates.costed, self.candidates.pinned_rows, self.cause.rank
        held = {
            name: ranks_held(of, costed, rows[name], len(self.problem.capacity))
            for name, of in self.candidates.pinned.items()
        }
        there = [name for name, ranks in held.items() if ranks[rank]] or list(held)
        return (min(there, key=lambda name: (-costed.fixed[rows[name], -1], name)),)


def answer(
    request: Request, out_of_time: Callable[[], bool], told: Told = lambda *_: None, *, gives_up: bool = True
) -> Answer:
    """A plan of the tables, with as little given up as may be, see [Note: leeway].

    Args:
        gives_up: anything at all.

    Raises:
        NoPlan: there is none.
        PlanError: see `Request.candidates`.
    """
    infos = {n: as_constrained(info, request.constraints[n]) for n, (_, info) in request.parameters.items()}
    unknown = [name for name, info in infos.items() if info.optimizer is None and info.trained]
    failed: NoPlan | None = None
    leeways = _LEEWAYS[: 1 if not gives_up else 2 if not unknown else None]
    for leeway in leeways:
        candidates = request.candidates(leeway)
        problem = candidates.problem(request.dense_bytes)
        try:
            solution = _counted(searched(problem, out_of_time, told, request.effort), candidates)
            candidates, problem, solution = _settled(request, (candidates, problem, solution), out_of_time, told)
        except Infeasible as error:
            failed = NoPlan(request, candidates, problem, _nearest(problem, error))
            if isinstance(error, Shortage) and leeway == leeways[0]:
                last = request.candidates(leeways[-1])
                open_problem = last.problem(request.dense_bytes)
                if (short := shortage(open_problem)) is not None:  # then less given up is too little, too
                    raise NoPlan(request, last, open_problem, short) from None
            continue
        notes = (_without_state(candidates, unknown, problem, solution),) if leeway.no_state else ()
        for note in notes:
            _log.warning(note)
        return Answer(candidates, problem, solution, notes, leeway)
    assert failed is not None
    raise failed


_Found = tuple[Candidates, Problem, Solution]


def _settled(request: Request, found: _Found, out_of_time: Callable[[], bool], told: Told) -> _Found:
    """The quickest plan that costs as it says, see [Note: settled costs].

    Raises:
        Infeasible: as it is, none fits.
    """
    plans: list[_Found] = []
    own, known, asked = found[2].lower_bound, list[CostProtocol](), list[tuple[Problem, float]]()
    for number in range(_SEARCHES):
        candidates, problem, solution = found
        own = min(own, solution.lower_bound)
        known.append(candidates.setting.model)
        asked.append((problem, solution.lower_bound))
        true = candidates.settled(candidates.copied(solution.choices))
        if true is candidates:
            plans.append(found)
            break
        as_it_is = true.problem(request.dense_bytes)
        plans += _of_costs(found, true, as_it_is)
        if (number == _SEARCHES - 1 and plans) or (plans and not len(problem.item_class)):
            break
        found = true, as_it_is, _counted(searched(as_it_is, out_of_time, told, request.effort), true)
    if not plans:
        plans.append(found)
    best = _quickest(plans)
    bound, ways = min(own, best[2].seconds), list[tuple[float, Candidates, Problem]]()
    for other in best[0].other_ways(known):
        problem_of_other = other.problem(request.dense_bytes)
        least = max(seconds - _less_by(problem_of_other, than) for than, seconds in asked)
        if least < bound * (1 - _NEARLY):
            work = _WORK if len(problem_of_other.item_class) <= _FEW else _WORK_OF_MANY
            free = lower_bound(problem_of_other, bound, out_of_time, most=work * max(1.0, request.effort))
            asked.append((problem_of_other, free.seconds))
            least = _held_bound(other, problem_of_other, free, bound, out_of_time)
        bound = min(bound, least)
        ways.append((least, other, problem_of_other))
    if bound < own * (1 - _WORTH) and bound < best[2].seconds and not out_of_time():
        _, other, problem_of_other = ways.pop(min(range(len(ways)), key=lambda i: ways[i][0]))
        more, least = _of_way(request, other, problem_of_other, out_of_time, told)
        best = _quickest([best, *more])
        bound = min(own, best[2].seconds, max(bound, least), *(least for least, *_ in ways))
    candidates, problem, solution = best
    return candidates, problem, replace(solution, lower_bound=bound)


def _quickest(plans: list[_Found]) -> _Found:
    return min(plans, key=lambda of: of[2].seconds)


def _of_costs(found: _Found, true: Candidates, as_it_is: Problem) -> list[_Found]:
    """The same plan with the costs that it is of, where it fits with them."""
    candidates, _, solution = found
    moved = _moved(solution, candidates, true, as_it_is)
    return [(true, as_it_is, moved)] if (moved.load[:, BYTES] <= as_it_is.capacity).all() else []


def _of_way(
    request: Request, way: Candidates, problem: Problem, out_of_time: Callable[[], bool], told: Told
) -> tuple[list[_Found], float]:
    """A plan that was searched with the costs of a way, as what it is, where there is one; and the way's bound."""
    try:
        found = way, problem, _counted(searched(problem, out_of_time, told, _BRIEF * request.effort), way)
    except Infeasible:
        return [], 0.0
    true = way.settled(way.copied(found[2].choices))
    plans = [found] if true is way else _of_costs(found, true, true.problem(request.dense_bytes))
    return plans, found[2].lower_bound


def _less_by(problem: Problem, than: Problem) -> float:
    """Seconds that a plan costs less than in another problem of the same parameters; infinity: nobody knows."""
    one, other = problem.table, than.table
    fits = (one.fixed + one.everywhere)[:, BYTES] <= problem.capacity.max()
    pairs = [(problem.base, than.base)]
    pairs += [(getattr(one, name)[fits], getattr(other, name)[fits]) for name in ("fixed", "slope", "everywhere")]
    pairs += [(getattr(other, name)[fits], getattr(one, name)[fits]) for name in ("lack", "lack_slope")]
    if one.ragged or not all((more >= less - _ROUNDING * np.abs(less)).all() for more, less in pairs):
        return np.inf
    return float(np.maximum(than.setups - problem.setups, 0).sum())


def _held_bound(
    candidates: Candidates, problem: Problem, free: Bound, upper: float, out_of_time: Callable[[], bool]
) -> float:
    """Seconds that no plan goes below that copies what one with these costs must; `upper` where that is less.

    Args:
        free: what no plan goes below, whatever it copies.
    """
    least = free.seconds
    for adds, needed in candidates.conditions() if least < upper * (1 - _CLOSE) else ():
        least = max(least, bound_of_held(problem, adds, needed, free, upper, out_of_time))
    return least


def _moved(solution: Solution, before: Candidates, after: Candidates, problem: Problem) -> Solution:
    """The same plan with other costs of what is copied, which are the same on every rank.

    Args:
        problem: of the costs after.
    """
    needs = reduce(or_, (after.costed.kinds(row) for _, row, _ in after.chosen(solution.choices)), 0)
    paid = problem.base_kinds | {kind for kind in range(len(problem.setups)) if needs >> kind & 1}
    more = np.zeros(solution.load.shape[1])
    rows = [row for _, row, _ in before.chosen(solution.choices)] + [*before.pinned_rows.values()]
    for row in rows:
        if before.costed.offers[row].is_copied:
            more += after.costed.on_each_rank(row) - before.costed.on_each_rank(row)
    setups = sum(((after.setups - before.setups)[kind] for kind in paid), np.zeros(len(more) - 1))
    return replace(solution, load=solution.load + more, phase_seconds=solution.phase_seconds + more[:-1] + setups)


def _counted(solution: Solution, candidates: Candidates) -> Solution:
    """With what the search leaves out."""
    more = candidates.each_cut(solution.choices)
    return replace(solution, load=solution.load + more, phase_seconds=solution.phase_seconds + more[:-1])


def searched(
    problem: Problem, out_of_time: Callable[[], bool], told: Told = lambda *_: None, effort: float = 1.0
) -> Solution:
    """A solution in which pinned parameters fit too.

    Raises:
        Infeasible: none was found.
    """
    over = problem.base[:, -1] - problem.capacity
    if over.max() > 0:
        rank = int(over.argmax())
        raise Infeasible(-1, None, rank, int(np.ceil(over[rank])), problem.base)
    short = shortage(problem)
    if short is not None:
        raise short
    return search(problem, out_of_time, told, effort)


def _nearest(problem: Problem, cause: Infeasible) -> Infeasible:
    """What is short of an item that is too large for the ranks as they are before any is placed; else the cause."""
    if cause.item < 0 or cause.rank is None or isinstance(cause, Shortage):
        return cause
    table, of = problem.table, int(problem.item_class[cause.item])
    rows = np.arange(problem.starts[of], problem.starts[of + 1])
    most = np.minimum(table.units[rows] // np.maximum(table.least[rows], 1), len(problem.capacity) // table.size[rows])
    units = -(-table.units[rows] // np.maximum(most, 1))
    needed = table.fixed[rows, -1] + units * table.slope[rows, -1] + table.everywhere[rows, -1]
    free = problem.capacity - problem.base[:, -1]
    rank, best = int(free.argmax()), int(needed.argmin())
    short = ceil(needed[best] - free[rank])
    if short <= cause.bytes_short:
        return cause
    return Infeasible(cause.item, best, rank, short, problem.base)


def _without_state(candidates: Candidates, unknown: list[str], problem: Problem, solution: Solution) -> str:
    """What is said of a plan that fits only without the state of optimizers that nobody knows."""
    elements = np.zeros(len(problem.capacity))
    costed, chosen = candidates.costed, candidates.chosen(solution.choices)
    places = [(name, costed.offers[row], choice.blocks) for name, row, choice in chosen]
    places += [(name, of.offer, of.blocks) for name, of in candidates.pinned.items()]
    for name, offer, blocks in places:
        info, size, ranks = candidates.infos[name], offer.family.size, offer.family.ranks
        if info.optimizer is None and info.trained:
            for block in blocks:  # at most: whole columns on each
                first, rows = block * size, -(-info.shape[0] // ranks)
                elements[first : first + ranks] += rows * np.prod(info.shape[1:])
    room = problem.capacity - solution.load[:, -1]
    per_weight = float(np.min(room[elements > 0] / elements[elements > 0], initial=np.inf))
    return (
        f"{len(unknown)} tables have no optimizer in the backward pass, and no plan has room for Adam's state of them: "
        f"this one holds weights and gradients, and {per_weight:.1f} bytes of optimizer state per weight (the fullest "
        f"rank has {shown_bytes(float(room.min()))} left); Adam takes 8, SGD none"
    )
