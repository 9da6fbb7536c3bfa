"""The search: which option each item takes, and on which ranks. It knows no table and no module; see `problem`.

The order of work: some starts, each a cut for every item (`starts`), put down largest first where they add least to a
smooth form of the cost (`potential`), all items twice. The bound comes next, for its relaxed optimum is a start too
(`guided`). Where there are hosts, starts that say beforehand how long ranks may take follow (`slots`). Then the best of
all these are improved beside each other (`rivals`) by passing units between ranks and by taking a few items up and
putting them down anew. Where nothing fits, the same with a price on memory, then by memory alone (`tight`). The amount
of work is fixed, so the same problem has the same solution on every machine; a deadline only cuts it short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from planner.search.best import Best, Told
from planner.search.bound import PROGRAMMES, Optimum, Tree
from planner.search.cuts import Cuts
from planner.search.guided import LIKE, guided, ways
from planner.search.hosts import MANY_HOSTS, SEVERAL_HOSTS, SOME_HOSTS, can_pack, pack_hosts
from planner.search.packing import Packer, menus
from planner.search.placement import Placement
from planner.search.potential import Potential, ranks_together
from planner.search.problem import Array, Choice, Problem
from planner.search.rivals import SHAKEN, compete
from planner.search.slots import Loads, slots
from planner.search.slotted import pack_slots
from planner.search.starts import Start, everywhere_bytes, floor, least_fill, starts, with_rest
from planner.search.tight import pour

_WORK = 740e3
"""In all but the bound, in about microseconds,"""
_MORE, _MOST = 130e3, 200e3
"""and so much more for few items, whose options are soon made, and for very few;"""
_OPTIONS = 130.0
"""and so much less for each of more than few, whose options take time to be made;"""
_UNUSED = 5.2e3
"""and so much more on many ranks for each programme that the bound had no use for."""
_BUILDING = 120e3
"""Of it for starts; the first is packed in any case."""
_FEW = 650
"""Items up to which more than one start is packed."""
_PROGRAMMES = 100.0
"""Of the bound in all, of few items."""
_GUIDED = 450e3
"""Work up to which starts like the optimum are packed,"""
_GUIDING, _GUIDING_MANY = 270e3, 150e3
"""in about so much of it: of few items, and of more."""
_ON_HOSTS = 60e3
_SLOTTED = 130e3
"""Work up to which starts with slots are packed,"""
_IN_VAIN, _IN_VAIN_OF_MANY = 7, 4
"""or until so many are no better than all before: of few items, and of more."""
_PACKED = 6
"""Starts that are packed in two levels."""
_POWERS = (8, 32)
"""Of the potential while starts are packed, in turn."""
_TRIES = 3
"""Starts after which memory gets a higher price where none fits."""
_AGAIN = 8
"""How often a start is packed, each time with the item that did not fit before the others."""
_WIDE_MENU = 40
_WEIGHTS = (0.1, 1.0, 10.0)
"""Of memory, where it is tight, one after the other as long as nothing fits;"""
_SLACK = (0.25, 0.12, 0.03)
"""and share that starts may take then of what there is beyond the least that is needed: the less, the easier it is."""
_TIGHT = 0.9
"""Share of the memory from which on items are put down in the order of what they take of it, where one did not fit."""
_ROOMY = 0.25
"""Share of the memory up to which nobody minds it."""


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


def search(
    problem: Problem,
    out_of_time: Callable[[], bool] = lambda: False,
    told: Told = lambda *_: None,
    effort: float = 1.0,
) -> Solution:
    """A good placement and a lower bound.

    Args:
        out_of_time: asked between pieces of work; True ends the search with the best so far, once there is one.
        told: called with the best cost so far and the bound so far (0 before there is one) whenever one is better.
        effort: so many times the work is done, but for starts.

    Raises:
        Infeasible: no start could be packed.
    """
    best, is_cut, bound = Best(problem, told), False, None
    if len(problem.item_class):
        cuts = Cuts.of(problem)
        best.floor = floor(problem, cuts)
        with np.errstate(over="ignore"):  # what is far above the slowest rank costs infinitely much
            work, is_cut = _build(problem, cuts, best, out_of_time)
            if best.parts is None:
                best.parts = pour(problem, cuts)
                best.memory = _WEIGHTS[-1]
                best.seconds = best.placement().seconds()
            tree = Tree(problem, best.seconds)
            bound = tree.grown(best.seconds, out_of_time, lambda value: told(best.seconds, value))
            best.least, best.floor = bound.seconds, max(best.floor, bound.seconds)
            if bound.relaxed is not None and work < _GUIDED and not best.is_enough and not out_of_time():
                work += _guide(problem, cuts, best, bound.relaxed, out_of_time)
                work += _with_slots(problem, cuts, best, bound.relaxed, out_of_time)
            most = effort * (_WORK + _more(problem) + _unused(problem, tree))
            is_cut = compete(problem, cuts, best, most - work, out_of_time) or is_cut
            more = effort * (_PROGRAMMES if len(problem.item_class) <= _FEW else PROGRAMMES)
            if more > PROGRAMMES and not best.is_enough:  # a better placement is known: less is to be looked at
                bound = tree.grown(best.seconds, out_of_time, lambda value: told(best.seconds, value), more)
    placement = best.placement()
    phases = placement.phase_seconds()
    seconds = float(phases.sum())
    least = min(bound.seconds, seconds) if bound is not None else seconds
    return Solution(placement.chosen(), placement.load, phases, least, is_cut)


def _build(problem: Problem, cuts: Cuts, best: Best, out_of_time: Callable[[], bool]) -> tuple[float, bool]:
    """Pack starts until the work is used up, with more weight on memory as long as nothing fits.

    Returns:
        The work, and whether the time was up before.
    """
    in_turn = can_pack(problem, ranks_together(problem), _hosts(problem))
    begun = starts(problem, cuts, in_turn=in_turn)
    is_long = len(problem.item_class) > _FEW
    work = on_hosts = _on_hosts(problem, cuts, begun[:_PACKED], best, out_of_time)
    for memory, slack in zip((0.0, *_WEIGHTS), (1.0, *_SLACK), strict=True):
        if memory:
            least = least_fill(problem, cuts)
            begun = starts(problem, cuts, in_turn=in_turn, free=least + slack * max(1 - least, 0.0))
        turns = [(i + 1.5 * k, s, m) for i, s in enumerate(begun) for k, m in enumerate(s.most)]
        for number, (_, start, most) in enumerate(sorted(turns, key=lambda turn: turn[0])):
            if best.parts is not None and out_of_time():
                return work, True
            if best.parts is not None and (is_long or on_hosts):
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


def _on_hosts(problem: Problem, cuts: Cuts, begun: list[Start], best: Best, out_of_time: Callable[[], bool]) -> float:
    """Pack starts in two levels where that can be done; returns the work."""
    work, group = 0.0, ranks_together(problem)
    for start in begun if can_pack(problem, group, _hosts(problem)) else []:
        placement, last = pack_hosts(problem, cuts, start, group, best.seconds)
        work += last
        if placement is not None:
            best.rival(placement, 0.0)
        is_enough = best.is_enough or work > _ON_HOSTS or len(problem.item_class) > _FEW
        if is_enough or (best.parts is not None and out_of_time()):
            break
    return work


def _more(problem: Problem) -> float:
    """Work that there is time for besides, as options are soon made, or that there is none for."""
    number = len(problem.item_class)
    return _MOST if number <= SHAKEN else _MORE if number <= _FEW else -_OPTIONS * (number - _FEW)


def _unused(problem: Problem, tree: Tree) -> float:
    """Work that the bound leaves, where there are hosts: placements on many ranks are better with every step."""
    is_many = can_pack(problem, ranks_together(problem), SOME_HOSTS)
    return _UNUSED * max(0.0, PROGRAMMES - tree.work) if is_many else 0.0


def _hosts(problem: Problem) -> int:
    """Hosts from which on ranks are not looked at one by one while starts are packed."""
    return MANY_HOSTS if len(problem.item_class) <= SHAKEN else SEVERAL_HOSTS


def _guide(problem: Problem, cuts: Cuts, best: Best, optimum: Optimum, out_of_time: Callable[[], bool]) -> float:
    """Pack starts like the relaxed optimum; returns the work."""
    group, few = ranks_together(problem), len(problem.item_class) <= SHAKEN
    most_work = _GUIDING if len(problem.item_class) <= _FEW else _GUIDING_MANY
    work, last = 0.0, 0.0
    is_many = can_pack(problem, group, SOME_HOSTS if few else SEVERAL_HOSTS)
    if few or not is_many:
        begun = [s for like in LIKE[:2] if (s := guided(problem, cuts, optimum, like)) is not None]
        # which of many optima was found must not matter: of the second start pieces may be larger, and no phase is free
        for start, most in [*((s, s.most[0]) for s in begun), *((s, s.most[-1]) for s in begun[:1])]:
            weights = _WEIGHTS[0] * (start.fill > _ROOMY), _POWERS[0]
            work += _pack(problem, cuts, start, most, weights, best, out_of_time)
            if work > _BUILDING / (2 if is_many else 1):
                break
    if not is_many:
        return work
    for own, start in ways(problem, cuts, optimum):
        if work + last > most_work or best.is_enough or out_of_time():
            break
        placement, last = pack_hosts(problem, own, start, group, best.seconds)
        work += last
        if placement is not None:
            best.rival(placement, 0.0)
    return work


def _with_slots(problem: Problem, cuts: Cuts, best: Best, optimum: Optimum, out_of_time: Callable[[], bool]) -> float:
    """Pack starts that say how long ranks may take, where there are hosts; returns the work."""
    if not can_pack(problem, ranks_together(problem), SOME_HOSTS):
        return 0.0
    work, vain = 0.0, _IN_VAIN if len(problem.item_class) <= SHAKEN else _IN_VAIN_OF_MANY
    for of in _choices(problem, cuts):
        placement, worth = best.placement(), best.seconds
        loads = Loads(problem, of, placement)
        for number, start in enumerate(slots(loads, optimum.own, placement, worth, _SLOTTED), 1):
            best.rival(pack_slots(loads, start), 0.0)
            if best.is_enough or out_of_time() or (number >= vain and best.seconds >= worth):
                break
        work += loads.work
    return work


def _choices(problem: Problem, cuts: Cuts) -> list[Cuts]:
    """Cuts to choose from: those over filled blocks alone, then all.

    What a block has that is not filled may be left over, which starts do not see: some do better without such blocks.
    Of many items there is time for all alone, which are better in the mean.
    """
    is_filled = problem.table.filled == problem.table.size
    if is_filled.all() or len(problem.item_class) > _FEW:
        return [cuts]
    return [cuts.of_rows(np.flatnonzero(is_filled)), cuts]


def _pack(
    problem: Problem,
    cuts: Cuts,
    start: Start,
    most: int,
    weights: tuple[float, int],
    best: Best,
    out_of_time: Callable[[], bool],
) -> float:
    """One start: all items put down, largest first, then again one by one; returns the work that it took.

    Largest in seconds: where memory is tight that leaves holes on ranks, in which nothing fits that is put down later.

    Args:
        weights: of memory, and the power to begin with.
    """
    memory, power = weights
    size = cuts.piece[start.first, :-1].sum(1) / max(float(start.target.sum()), 1e-30)  # which may cost nothing
    share = cuts.mean[start.first, -1] / problem.capacity.max()
    by_bytes = np.argsort(-share[cuts.item], kind="stable").tolist()
    order = np.argsort(-(np.maximum(size, share) if memory else size)[cuts.item], kind="stable").tolist()
    is_tight = start.fill > _TIGHT
    kept = everywhere_bytes(problem, cuts, start.first)[cuts.item]
    narrow, spent = menus(problem, cuts, start.cost, most), 0.0
    for _ in range(_AGAIN):
        placement = Placement(problem)
        potential = Potential(placement, start.target, memory)
        wide = partial(menus, problem, cuts, with_rest(cuts, start.cost), _WIDE_MENU)
        packer = Packer(potential, narrow, wide, cuts.item)
        failed = packer.build(order, kept, power, lambda: best.parts is not None and out_of_time())
        if failed is None:
            break
        spent += potential.work
        if best.parts is not None and out_of_time():
            return spent
        if is_tight:  # what seconds put first has left holes
            order, is_tight = by_bytes, False
        elif spent > _BUILDING / (4 if best.parts is None else 16):
            return spent
        else:
            order.remove(failed)
            order.insert(0, failed)
    else:
        return spent
    potential.work += spent
    every = 16 * (1 + len(problem.capacity) // 512)
    best.rival(placement, memory)
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
    best.rival(placement, memory)
    return potential.work
