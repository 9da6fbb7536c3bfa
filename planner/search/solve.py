"""The search: which option each item takes, and on which ranks. It knows no table and no module; see `problem`.

The order of work: several starts, each an option per item (the least total work among those whose largest piece is
below a threshold) packed largest first onto the rank where it costs least; then the best is improved by moves, other
options and swaps. The amount of work is fixed, so the same problem has the same solution on every machine; a deadline
only cuts it short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from planner.search.bound import lower_bound
from planner.search.cuts import Cuts
from planner.search.improve import improve
from planner.search.packing import pack, starts, widths_of
from planner.search.placement import Placement
from planner.search.problem import Array, Choice, Infeasible, Problem


@dataclass(frozen=True, eq=False)
class Solution:
    """Result of a search.

    Args:
        choices: of each item.
        load: (ranks, phases + 1).
        phase_seconds: (phases,) slowest rank of each phase, set-ups included.
        lower_bound: no placement of these options costs less, in seconds.
        is_cut_short: the deadline came before the work was done.
    """

    choices: tuple[Choice, ...]
    load: Array
    phase_seconds: Array
    lower_bound: float
    is_cut_short: bool

    @property
    def seconds(self) -> float:
        """Cost of the solution."""
        return float(self.phase_seconds.sum())


def search(problem: Problem, out_of_time: Callable[[], bool] = lambda: False) -> Solution:
    """A good placement and a lower bound.

    Args:
        out_of_time: asked between pieces of work; True ends the search with the best so far, once there is one.

    Raises:
        Infeasible: no start could be packed.
    """
    cuts = Cuts.of(problem)
    best = None if len(problem.item_class) else Placement(problem)
    failures: list[Infeasible] = []
    is_cut = False
    for start in starts(problem, cuts):
        if best is not None and start.fill:
            break
        if best is not None and out_of_time():
            is_cut = True
            break
        try:
            placement = pack(problem, cuts, start)
        except Infeasible as error:
            failures.append(error)
            continue
        if best is None or placement.seconds() < best.seconds() * (1 - 1e-12):
            best = placement
    if best is None:
        raise _hopeless(problem, cuts) or min(failures, key=attrgetter("bytes_short"))
    is_cut = improve(best, cuts, out_of_time) or is_cut
    phases = best.phase_seconds()
    bound = lower_bound(problem, float(phases.sum()), out_of_time)
    return Solution(best.chosen(), best.load.copy(), phases, bound.seconds, is_cut)


def _hopeless(problem: Problem, cuts: Cuts) -> Infeasible | None:
    """The first item that fits nowhere even before the others are placed, with its nearest option."""
    empty = Placement(problem)
    for item, owner in enumerate(problem.item_class.tolist()):
        found = []
        for cut in range(int(cuts.start[owner]), int(cuts.start[owner + 1])):
            row = int(cuts.row[cut])
            found.append(empty.find(item, row, widths_of(problem, row, int(cuts.number[cut]))))
        short = [f for f in found if isinstance(f, Infeasible)]
        if len(short) == len(found):
            return min(short, key=attrgetter("distance"))
    return None
