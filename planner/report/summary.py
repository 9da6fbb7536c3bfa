"""From a solution to a `PlanReport`: arrays alone, for planning waits for it; words are made when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dmp import Layout
from planner.candidates.candidates import Candidates
from planner.candidates.costed import CostedLayout
from planner.dense.decide import Dense
from planner.report.merged import Merged
from planner.report.offers import Offers
from planner.report.planned import Pieces, Planned
from planner.report.report import PlanReport
from planner.report.setting import Setting
from planner.report.words import plural
from planner.search.problem import Array, Option, Problem
from planner.search.solve import Solution


def summarise(
    setting: Setting,
    shapes: Mapping[str, tuple[int, ...]],
    candidates: Candidates,
    layouts: Mapping[str, Layout],
    problem: Problem,
    solution: Solution,
    dense: Dense,
    phases: tuple[str, ...],
    planning_seconds: float,
) -> PlanReport:
    """The report of a plan.

    Args:
        shapes: of every parameter, unsharded.
        layouts: of every parameter, in its place.
        phases: the cost model's.
        planning_seconds: wall time that it took.
    """
    merged = Merged.of(phases)
    load = merged.loads(np.where(solution.load > solution.seconds * 1e-9, solution.load, 0.0))  # what sums left over
    paid = problem.base_kinds.union(*(k for k in _kinds(candidates, solution)))
    setups = problem.setups[sorted(paid)].sum(0) if paid else np.zeros(problem.setups.shape[1])
    offers, row_of = _offers(candidates, merged, len(problem.capacity))
    return PlanReport(
        setting=setting,
        planned=_planned(candidates, shapes, layouts, solution, merged, row_of, len(problem.capacity)),
        offers=offers,
        rank_seconds=load[:, :-1],
        rank_bytes=load[:, -1].astype(np.int64),
        usable_bytes=int(problem.capacity.max()),
        phase_seconds=tuple(merged.phases(solution.phase_seconds).tolist()),
        setup_seconds=tuple(merged.phases(setups).tolist()),
        lower_bound=solution.lower_bound,
        is_cut_short=solution.is_cut_short,
        planning_seconds=planning_seconds,
        phases=merged.names,
        dense=dense.blocks,
        notes=dense.notes,
        dense_seconds=dense.seconds,
        dense_bytes=dense.training_bytes,
    )


def _kinds(candidates: Candidates, solution: Solution) -> list[frozenset[int]]:
    chosen = zip(candidates.groups, solution.choices, strict=True)
    return [group.item.options[choice.option].kinds for group, choice in chosen]


def _loads(option: Option, merged: Merged, num_ranks: int) -> tuple[Array, Array]:
    """(names + 1,) of the rank that an option loads most, and the mean over all ranks."""
    loads, everywhere = merged.loads(option.loads), merged.loads(option.everywhere)
    return loads.max((0, 1)) + everywhere, loads.sum((0, 1)) / num_ranks + everywhere


def _offers(
    candidates: Candidates, merged: Merged, num_ranks: int
) -> tuple[Offers, dict[int, tuple[int, dict[int, int]]]]:
    """The options of all classes, and for each class its number and the row of each of its layouts, by identity."""
    found: dict[int, tuple[int, dict[int, int]]] = {}
    starts = [0]
    labels: dict[str, int] = {}
    label_of: list[int] = []
    busiest: list[Array] = []
    mean: list[Array] = []
    objections: dict[int, str] = {}
    for offered in candidates.offered.values():
        if id(offered) in found:
            continue
        rows: dict[int, int] = {}
        for costed in (*offered.choices, *offered.rejected):
            rows[id(costed)] = len(label_of)
            if costed.objection:
                objections[len(label_of)] = costed.objection
            label_of.append(labels.setdefault(_label(costed), len(labels)))
            most, average = _loads(costed.option, merged, num_ranks)
            busiest.append(most)
            mean.append(average)
        found[id(offered)] = len(starts) - 1, rows
        starts.append(len(label_of))
    if not label_of:
        return Offers.none(len(merged.names)), found
    return (
        Offers(
            np.array(starts, np.int32),
            tuple(labels),
            np.array(label_of, np.int32),
            np.array(busiest, np.float32),
            np.array(mean, np.float32),
            objections,
        ),
        found,
    )


def _label(costed: CostedLayout) -> str:
    """What a layout is, in words, wherever it lies."""
    name, size, count = costed.movable.layout.name, costed.movable.block_size, costed.movable.num_blocks
    return f"{name}, {count} pieces" + f" of {plural(size, 'rank')}" * (size > 1) if count > 1 else name


def _planned(
    candidates: Candidates,
    shapes: Mapping[str, tuple[int, ...]],
    layouts: Mapping[str, Layout],
    solution: Solution,
    merged: Merged,
    row_of: Mapping[int, tuple[int, dict[int, int]]],
    num_ranks: int,
) -> Planned:
    names = sorted(layouts)
    index_of = {name: i for i, name in enumerate(names)}
    got: list[tuple[int, CostedLayout, Sequence[int], int, int]] = []
    for name, kept in candidates.pinned.items():
        got.append((index_of[name], kept, (0,), -1, -1))
    for group, choice in zip(candidates.groups, solution.choices, strict=True):
        for name, chosen in zip(group.members, group.rows[choice.option], strict=True):
            of_class, rows = row_of[id(candidates.offered[name])]
            got.append((index_of[name], chosen, choice.blocks, of_class, rows[id(chosen)]))
    got.sort(key=lambda each: each[0])
    costs = [_loads(costed.option, merged, num_ranks) for _, costed, *_ in got]
    width = (len(got), len(merged.names) + 1)
    return Planned(
        names=tuple(names),
        layouts=tuple(layouts[name] for name in names),
        shapes=tuple(shapes[name] for name in names),
        is_pinned=np.array([name in candidates.pinned for name in names], dtype=np.bool_),
        busiest=np.array([most for most, _ in costs], np.float32).reshape(width),
        mean=np.array([average for _, average in costs], np.float32).reshape(width),
        class_of=np.array([each[3] for each in got], np.int32),
        chosen=np.array([each[4] for each in got], np.int32),
        pieces=_pieces([(index, costed, blocks) for index, costed, blocks, _, _ in got]),
    )


def _pieces(got: Sequence[tuple[int, CostedLayout, Sequence[int]]]) -> Pieces:
    """Blocks of ranks that have something; of one whose ranks differ, each run of equal ones."""
    rows: list[tuple[int, int, int, float, float]] = []
    for index, costed, blocks in got:
        loads = costed.option.loads
        for piece, block in enumerate(blocks):
            first = block * loads.shape[1]
            for start, stop in _equal_runs(loads[piece]):
                load = loads[piece, start]
                if load.any():
                    rows.append((index, first + start, stop - start, float(load[:-1].sum()), float(load[-1])))
    table: NDArray[np.float64] = np.array(rows, dtype=np.float64).reshape(len(rows), 5)
    owner, first, size = table[:, :3].T.astype(np.int32)
    return Pieces(owner, first, size, table[:, 3].astype(np.float32), table[:, 4].astype(np.float32))


def _equal_runs(loads: Array) -> list[tuple[int, int]]:
    cuts = np.flatnonzero((loads[1:] != loads[:-1]).any(1)) + 1
    edges = [0, *cuts.tolist(), len(loads)]
    return list(pairwise(edges))
