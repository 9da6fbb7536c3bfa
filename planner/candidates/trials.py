"""`Trials`: whether a change is enough, by arithmetic where that tells, else by a search; with limited work."""

from __future__ import annotations

from collections.abc import Callable

from dmp import PlanError, ShardError
from planner.candidates.request import Request, searched
from planner.candidates.shortage import shortage, surely_fits
from planner.search.problem import Infeasible, Problem

_WORK = 60_000  # about half a second
_TRIAL = 1000
_OFFER = 20  # of each item, to ask what it may get


class Trials:
    """Of one kind of change.

    Args:
        out_of_time: asked before each trial.
        searches: where arithmetic does not tell; else such a change is taken not to be enough.

    Attributes:
        problem: of the request that was tried last; None where there was none.
    """

    def __init__(self, out_of_time: Callable[[], bool], searches: bool) -> None:
        self.out_of_time, self.searches = out_of_time, searches
        self.problem: Problem | None = None
        self._work = 0

    def fits(self, request: Request) -> bool:
        """Whether these tables have a plan, with all given up that may be; False also where that is not found out."""
        self.problem = None
        if self._work >= _WORK or self.out_of_time():
            return False
        self._work += _OFFER * len(request.parameters)
        try:
            self.problem = request.most_open()
        except (PlanError, ShardError):
            return False
        return self.holds(self.problem)

    def holds(self, problem: Problem) -> bool:
        """The same of a problem."""
        if (problem.base[:, -1] > problem.capacity).any() or shortage(problem) is not None:
            return False
        if surely_fits(problem):
            return True
        work = _work(problem)
        if not self.searches or self._work + work > _WORK or self.out_of_time():
            return False
        self._work += work
        try:
            searched(problem, lambda: True)
        except Infeasible:
            return False
        return True


def is_dear(problem: Problem) -> bool:
    """Whether searching takes too much of the work to do it often."""
    return _work(problem) > _WORK / 8


def _work(problem: Problem) -> int:
    return _TRIAL + len(problem.item_class) * (16 + len(problem.capacity))
