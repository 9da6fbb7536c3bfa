"""From a solution to a `PlanReport`: arrays alone, for planning waits for it; words are made when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dmp import Layout
from planner.candidates.candidates import Candidates
from planner.candidates.costed import Costed
from planner.candidates.offered import Offer
from planner.dense.decide import Dense
from planner.report.merged import Merged
from planner.report.offers import Offers
from planner.report.planned import Pieces, Planned
from planner.report.report import PlanReport
from planner.report.setting import Setting
from planner.report.traffic import Reads
from planner.report.words import plural
from planner.search.problem import Array, Problem
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
    paid = _paid(candidates, problem, solution)
    setups = problem.setups[sorted(paid)].sum(0) if paid else np.zeros(problem.setups.shape[1])
    costed = candidates.costed
    most, mean = (merged.loads(values) for values in costed.wholes(len(problem.capacity)))
    planned = _planned(candidates, shapes, layouts, solution, merged, (most, mean))
    return PlanReport(
        setting=setting,
        planned=planned,
        offers=_offers(
            costed, len(costed.offers) - len(candidates.pinned), (most, mean), merged, len(problem.capacity)
        ),
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
        reads=Reads.of(candidates, planned.names),
    )


def _paid(candidates: Candidates, problem: Problem, solution: Solution) -> frozenset[int]:
    """Set-ups that the plan needs."""
    needs = 0
    for _, row, _ in candidates.chosen(solution.choices):
        needs |= candidates.costed.kinds(row)
    return problem.base_kinds | {kind for kind in range(len(problem.setups)) if needs >> kind & 1}


def _offers(costed: Costed, of_offers: int, wholes: tuple[Array, Array], merged: Merged, num_ranks: int) -> Offers:
    """What all classes are offered.

    Args:
        of_offers: how many rows, the first, are no pinned layouts.
        wholes: twice (rows, names + 1): on the rank that each loads most, and averaged over ranks.
    """
    most, mean = wholes
    if not of_offers:
        return Offers.none(most.shape[1] - 1)
    labels: dict[str, int] = {}
    offers = costed.offers[:of_offers]
    distinct = {id(offer): offer for offer in offers}  # parameters that are alike share theirs
    number = {key: labels.setdefault(_label(offer), len(labels)) for key, offer in distinct.items()}
    label_of = [number[id(offer)] for offer in offers]
    owner = costed.owner[:of_offers]
    size, _, units, least = np.array([offer.family[1:5] for offer in offers], dtype=np.int64).T
    by_width = merged.loads(units[:, None] * costed.slope[:of_offers])
    by_piece = merged.loads(costed.fixed[:of_offers] * costed.sharing(size[:, None])) / num_ranks
    return Offers(
        np.searchsorted(owner, np.arange(int(owner[-1]) + 2)).astype(np.int32),
        tuple(labels),
        np.array(label_of, np.int32),
        most[:of_offers].astype(np.float32),
        mean[:of_offers].astype(np.float32),
        by_width.astype(np.float32),
        by_piece.astype(np.float32),
        np.maximum(units, 1).astype(np.int32),
        np.where(units > 0, np.minimum(units // np.maximum(least, 1), num_ranks // size), 1).astype(np.int32),
        {row: offer.objection for row, offer in enumerate(offers) if offer.objection},
    )


def _label(offer: Offer) -> str:
    """What a family is, in words, wherever it lies."""
    name, size, pieces = offer.family.name, offer.family.ranks, offer.family.pieces
    if pieces > 1:
        return f"{name}, {pieces} pieces" + f" of {plural(size, 'rank')}" * (size > 1)
    return name + f" over {size} ranks" * (size > 1 and not offer.family.is_copied and offer.own is None)


def _planned(
    candidates: Candidates,
    shapes: Mapping[str, tuple[int, ...]],
    layouts: Mapping[str, Layout],
    solution: Solution,
    merged: Merged,
    wholes: tuple[Array, Array],
) -> Planned:
    names, costed = sorted(layouts), candidates.costed
    index_of = {name: i for i, name in enumerate(names)}
    most, mean = wholes
    num_ranks, width = len(solution.load), (len(names), len(merged.names) + 1)
    busiest, average = np.zeros(width, np.float32), np.zeros(width, np.float32)
    class_of, chosen, cut = np.full((3, len(names)), [[-1], [-1], [1]], np.int32)
    pieces: list[tuple[int, int, list[tuple[int, Array]]]] = []
    for name, row in candidates.pinned_rows.items():
        index, of = index_of[name], candidates.pinned[name]
        busiest[index], average[index] = most[row], mean[row]
        sizes = zip(of.blocks, costed.pieces(row, None), strict=True)
        pieces += [(index, block * of.offer.family.size, runs) for block, runs in sizes]
    for name, row, choice in candidates.chosen(solution.choices):
        index, family = index_of[name], costed.offers[row].family
        class_of[index], chosen[index] = costed.owner[row], row
        busiest[index], average[index] = most[row], mean[row]
        widths, number = choice.widths, len(choice.blocks)
        if widths is None and family.units:  # of a member of a group that is cut evenly
            widths = (family.units // number,) * number
        if widths is not None:
            cut[index] = len(widths)
            busiest[index], average[index] = (merged.loads(x) for x in costed.of_cut(row, widths, num_ranks))
        sizes = zip(choice.blocks, costed.pieces(row, widths), strict=True)
        pieces += [(index, block * family.size, runs) for block, runs in sizes]
    return Planned(
        names=tuple(names),
        layouts=tuple(layouts[name] for name in names),
        shapes=tuple(shapes[name] for name in names),
        is_pinned=np.array([name in candidates.pinned for name in names], dtype=np.bool_),
        busiest=busiest,
        mean=average,
        class_of=class_of,
        chosen=chosen,
        cut=cut,
        pieces=_pieces(sorted(pieces, key=lambda piece: piece[0])),
    )


def _pieces(found: Sequence[tuple[int, int, list[tuple[int, Array]]]]) -> Pieces:
    """Blocks of ranks that have something; of one whose ranks differ, each run of equal ones.

    Args:
        found: index of the parameter, first rank, and runs of ranks with (phases + 1,) loads.
    """
    rows: list[tuple[int, int, int]] = []
    loads: list[Array] = []
    for index, first, runs in found:
        for size, load in runs:
            rows.append((index, first, size))
            loads.append(load)
            first += size
    if not rows:
        return Pieces(*np.zeros((3, 0), np.int32), *np.zeros((2, 0), np.float32))
    of_runs = np.stack(loads)
    kept = of_runs.any(1)
    owner, first_rank, size_of = np.array(rows, dtype=np.int32)[kept].T
    seconds, num_bytes = of_runs[kept, :-1].sum(1), of_runs[kept, -1]
    return Pieces(owner, first_rank, size_of, seconds.astype(np.float32), num_bytes.astype(np.float32))
