"""`Request`: the tables to plan and what they must keep; `Answer`: the plan of them that the search found.

[Note: leeway]
Two things are given up where no plan fits else: column blocks are made narrower than usual, and the state of optimizers
outside the backward pass is left out, which nobody knows before they are made. A note says the second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from dmp import Layout, ModuleSharder, ParameterInfo, shown_bytes
from planner.candidates.candidates import Candidates, Leeway
from planner.candidates.constraints import Constraint
from planner.candidates.costed import CostSetting
from planner.search.problem import Infeasible, Problem
from planner.search.solve import Solution, search

_log = logging.getLogger("dmp")
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
    """

    parameters: Mapping[str, tuple[ModuleSharder, ParameterInfo]]
    constraints: Mapping[str, Constraint]
    pinned: Mapping[str, Layout]
    costs: CostSetting
    dense_bytes: int = 0

    def candidates(self, leeway: Leeway) -> Candidates:
        """What each parameter may get.

        Raises:
            PlanError: a parameter that is left without a layout, or constraints that contradict each other.
        """
        return Candidates.of(self.parameters, self.constraints, self.pinned, self.costs, leeway)


@dataclass(frozen=True, eq=False)
class Answer:
    """What the search found, and what it searched in.

    Args:
        notes: what a user must know of it.
    """

    candidates: Candidates
    problem: Problem
    solution: Solution
    notes: tuple[str, ...] = ()


class NoPlan(Exception):
    """No placement was found, whatever was given up.

    Attributes:
        candidates, problem: searched in, of the first search.
        cause: what it found short.
    """

    def __init__(self, candidates: Candidates, problem: Problem, cause: Infeasible) -> None:
        super().__init__(str(cause))
        self.candidates, self.problem, self.cause = candidates, problem, cause


def answer(request: Request, out_of_time: Callable[[], bool]) -> Answer:
    """A plan of the tables, with as little given up as may be, see [Note: leeway].

    Raises:
        NoPlan: there is none.
        PlanError: see `Request.candidates`.
    """
    first: NoPlan | None = None
    unknown = [name for name, (_, info) in request.parameters.items() if info.optimizer is None]
    for leeway in _LEEWAYS if unknown else _LEEWAYS[:2]:
        candidates = request.candidates(leeway)
        problem = candidates.problem(request.dense_bytes)
        try:
            solution = search(problem, out_of_time)
        except Infeasible as error:
            first = first or NoPlan(candidates, problem, error)
            continue
        notes = (_without_state(candidates, unknown, problem, solution),) if leeway.no_state else ()
        for note in notes:
            _log.warning(note)
        return Answer(candidates, problem, solution, notes)
    assert first is not None
    raise first


def _without_state(candidates: Candidates, unknown: list[str], problem: Problem, solution: Solution) -> str:
    """What is said of a plan that fits only without the state of optimizers that nobody knows."""
    elements = np.zeros(len(problem.capacity))
    for name, row, choice in candidates.chosen(solution.choices):
        info, size = candidates.infos[name], candidates.costed.offers[row].family.size
        if info.optimizer is None:
            for block in choice.blocks:  # at most: whole columns on each
                elements[block * size : (block + 1) * size] += -(-info.shape[0] // size) * np.prod(info.shape[1:])
    room = problem.capacity - solution.load[:, -1]
    per_weight = float(np.min(room[elements > 0] / elements[elements > 0], initial=np.inf))
    return (
        f"{len(unknown)} tables have no optimizer in the backward pass, and no plan has room for Adam's state of them: "
        f"this one holds weights and gradients, and {per_weight:.1f} bytes of optimizer state per weight (the fullest "
        f"rank has {shown_bytes(float(room.min()))} left); Adam takes 8, SGD none"
    )
