"""The search: which option each item takes, and on which ranks. It knows no table and no module; see `problem`.

The order of work: some starts, each a cut for every item (`starts`), put down largest first where they add least to a
smooth form of the cost (`potential`), all items twice; then the best is improved by passing units between ranks and by
taking a few items up and putting them down anew. Where that does not fit, the same with a price on memory, then by
memory alone (`tight`). The amount of work is fixed, so the same problem has the same solution on every machine; a
deadline only cuts it short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.search.bound import lower_bound
from planner.search.cuts import Cuts
from planner.search.guided import guided
from planner.search.hosts import can_pack, pack_hosts
from planner.search.improve import Improver
from planner.search.packing import Packer, menus
from planner.search.placement import Part, Placement
from planner.search.potential import Potential
from planner.search.problem import Array, Choice, Problem
from planner.search.starts import Start, everywhere_bytes, floor, starts, with_rest
from planner.search.tight import pour

_WORK = 750e3
"""In all, in about microseconds."""
_BUILDING = 350e3
"""Of it for starts; the first is packed in any case."""
_FEW = 650
"""Items up to which starts that are packed in two levels are packed in one as well."""
_GUIDED = 450e3
"""Work up to which a start like the optimum is packed."""
_ON_HOSTS = 430e3
_PACKED = 6
"""Starts that are packed in two levels."""
_POWERS = (8, 32)
"""Of the potential while starts are packed, in turn."""
_TRIES = 3
"""Starts after which memory gets a higher price where none fits."""
_AGAIN = 8
"""How often a start is packed, each time with the item that did not fit before the others."""
_ENOUGH = 1e-4
"""Share of the cost for which no work is done."""
_WIDE_MENU = 40
_MENU = 12
"""Cuts of an item that is put down anew."""
_WEIGHTS = (0.1, 1.0, 10.0)
"""Of memory, where it is tight."""
_PROGRAMMES = 20.0
"""Solved for a start like the relaxed optimum, a large one counting as several."""
_PROGRAMME = 4e3
"""Work of one."""
_ROOMY = 0.25
"""Share of the memory up to which nobody minds it."""


Told = Callable[[float, float], object]


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


class _Best:
    """The best placement of all items so far."""

    def __init__(self, problem: Problem, told: Told) -> None:
        self.problem = problem
        self.told = told
        self.seconds = np.inf
        self.parts: list[Part | None] | None = None
        self.memory = 0.0
        self.floor = 0.0

    @property
    def is_enough(self) -> bool:
        """Whether nothing much better can be."""
        return self.seconds <= self.floor * (1 + _ENOUGH)

    def offer(self, placement: Placement, memory: float) -> None:
        seconds = placement.seconds()
        if seconds < self.seconds * (1 - 1e-12) and placement.fits():
            self.seconds, self.parts, self.memory = seconds, list(placement.parts), memory
            self.told(seconds, 0.0)

    def placement(self) -> Placement:
        """Made anew, so that nothing is left of what was taken up."""
        found = Placement(self.problem)
        for item, part in enumerate(self.parts or []):
            assert part is not None
            found.add(item, part)
        return found


def search(problem: Problem, out_of_time: Callable[[], bool] = lambda: False, told: Told = lambda *_: None) -> Solution:
    """A good placement and a lower bound.

    Args:
        out_of_time: asked between pieces of work; True ends the search with the best so far, once there is one.
        told: called with the best cost so far and the bound so far (0 before there is one) whenever one is better.

    Raises:
        Infeasible: no start could be packed.
    """
    best, is_cut = _Best(problem, told), False
    if len(problem.item_class):
        cuts = Cuts.of(problem)
        best.floor = floor(problem, cuts)
        with np.errstate(over="ignore"):  # what is far above the slowest rank costs infinitely much
            work, is_cut = _build(problem, cuts, best, out_of_time)
            if best.parts is None:
                best.parts = pour(problem, cuts)
                best.memory = _WEIGHTS[-1]
                best.seconds = best.placement().seconds()
            if work < _GUIDED and not best.is_enough:
                work += _guide(problem, cuts, best, out_of_time)
            is_cut = _improve(problem, cuts, best, _WORK - work, out_of_time) or is_cut
    placement = best.placement()
    phases = placement.phase_seconds()
    seconds = float(phases.sum())
    bound = lower_bound(problem, seconds, out_of_time, lambda value: told(seconds, value))
    return Solution(placement.chosen(), placement.load, phases, bound.seconds, is_cut)


def _build(problem: Problem, cuts: Cuts, best: _Best, out_of_time: Callable[[], bool]) -> tuple[float, bool]:
    """Pack starts until the work is used up, with more weight on memory as long as nothing fits.

    Returns:
        The work, and whether the time was up before.
    """
    begun = starts(problem, cuts)
    is_long = len(problem.item_class) > _FEW
    on_hosts = _on_hosts(problem, cuts, begun[:_PACKED], best)
    work = on_hosts if is_long else 0.0  # of few items it is little beside the rest
    turns = [(i + 1.5 * k, s, m) for i, s in enumerate(begun) for k, m in enumerate(s.most)]
    in_turn = [(start, most) for _, start, most in sorted(turns, key=lambda turn: turn[0])]
    for memory in (0.0, *_WEIGHTS):
        for number, (start, most) in enumerate(in_turn):
            if best.parts is not None and out_of_time():
                return work, True
            if best.parts is not None and is_long:
                return work, False
            weight = max(memory, _WEIGHTS[0] * (start.fill > _ROOMY))
            power = _POWERS[number % len(_POWERS)]
            last = _pack(problem, cuts, start, most, (weight, power), best, out_of_time)
            work += last
            if best.is_enough or work + last >= _BUILDING or (best.parts is None and number >= _TRIES):
                break
        if best.parts is not None:
            break
    return work, False


def _on_hosts(problem: Problem, cuts: Cuts, begun: list[Start], best: _Best) -> float:
    """Pack starts in two levels where that can be done; returns the work."""
    work = 0.0
    for start in begun if can_pack(problem) else []:
        placement, last = pack_hosts(problem, cuts, start)
        work += last
        if placement is not None:
            best.offer(placement, 0.0)
        if best.is_enough or work > _ON_HOSTS:
            break
    return work


def _guide(problem: Problem, cuts: Cuts, best: _Best, out_of_time: Callable[[], bool]) -> float:
    """Pack a start like the relaxed optimum; returns the work, that of finding the optimum among it."""
    optimum = lower_bound(problem, best.seconds, out_of_time, most=_PROGRAMMES).relaxed
    work = _PROGRAMMES * _PROGRAMME
    if optimum is None or out_of_time():
        return work
    start = guided(problem, cuts, optimum)
    work += _on_hosts(problem, cuts, [start], best)
    weights = _WEIGHTS[0] * (start.fill > _ROOMY), _POWERS[0]
    for most in start.most:
        work += _pack(problem, cuts, start, most, weights, best, out_of_time)
        if work > _BUILDING:
            break
    return work


def _pack(
    problem: Problem,
    cuts: Cuts,
    start: Start,
    most: int,
    weights: tuple[float, int],
    best: _Best,
    out_of_time: Callable[[], bool],
) -> float:
    """One start: all items put down, largest first, then again one by one; returns the work that it took.

    Args:
        weights: of memory, and the power to begin with.
    """
    memory, power = weights
    size = cuts.piece[start.first, :-1].sum(1) / start.target.sum()
    if memory:
        size = np.maximum(size, cuts.mean[start.first, -1] / problem.capacity.max())
    order = np.argsort(-size[problem.item_class], kind="stable").tolist()
    kept = everywhere_bytes(problem, cuts, start.first)[problem.item_class]
    narrow, spent = menus(problem, cuts, start.cost, most), 0.0
    for _ in range(_AGAIN):
        placement = Placement(problem)
        potential = Potential(placement, start.target, memory)
        packer = Packer(potential, narrow, lambda: menus(problem, cuts, with_rest(cuts, start.cost), _WIDE_MENU))
        failed = packer.build(order, kept, power, lambda: best.parts is not None and out_of_time())
        if failed is None:
            break
        spent += potential.work
        if spent > _BUILDING / (4 if best.parts is None else 16) or (best.parts is not None and out_of_time()):
            return spent
        order.remove(failed)
        order.insert(0, failed)
    else:
        return spent
    potential.work += spent
    every = 16 * (1 + len(problem.capacity) // 512)
    best.offer(placement, memory)
    if best.is_enough or potential.work > _BUILDING / 2:
        return potential.work
    potential.aim(32)
    for number, item in enumerate(order):
        if out_of_time():
            break
        part = placement.remove(item)
        if number % every == 0:
            potential.weigh()
        if not packer.insert(item):
            placement.add(item, part)
    best.offer(placement, memory)
    return potential.work


def _improve(problem: Problem, cuts: Cuts, best: _Best, work: float, out_of_time: Callable[[], bool]) -> bool:
    """Better the best placement until the work is used up; returns whether the time was up before."""
    random = np.random.default_rng(0)
    placement = best.placement()
    target = placement.phase_seconds()
    own = cuts.piece[:, :-1] + problem.table.everywhere[cuts.row, :-1]
    cost = cuts.mean[:, :-1].sum(1) + 3 * np.maximum(0, own - target).sum(1)
    for part in placement.parts:
        assert part is not None
    used = int(np.bitwise_or.reduce(problem.table.kinds[[part.row for part in placement.parts if part]]))
    cost[problem.table.kinds[cuts.row] & ~used != 0] = np.inf
    potential = Potential(placement, target, best.memory)
    packer = Packer(potential, menus(problem, cuts, cost, _MENU))
    for power, share in ((16, 0.5), (64, 0.8), (256, 1.0)):
        potential.aim(power)
        improver = Improver(packer)
        step = 0
        while potential.work < share * work and not best.is_enough:
            if out_of_time():
                return True
            improver.step(step, random)
            best.offer(placement, best.memory)
            step += 1
            if step % 64 == 0:
                potential.aim(power)
                improver.value = potential.weigh()
    return False
