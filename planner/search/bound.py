"""A lower bound on every placement. Pure, as `planner.search`.

Two relaxations. Both let items mix their options, and ask of each phase only that its time is at least the mean over
ranks, and at least the load of any one rank that holds a large piece. A linear programme takes these as they are, where
SciPy is installed; the Lagrangian below weighs them by one share and one price, and needs nothing.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np

from planner.search.option_costs import OptionCosts
from planner.search.problem import Array, Option, Problem

_LARGE_ITEMS = 60
"""Items whose largest piece the linear programme looks at."""
_MOST_COLUMNS = 4000
"""Above it the linear programme, which takes more than linear time, is left out."""


def lower_bound(problem: Problem) -> float:
    """Seconds that no placement of the problem's options goes below.

    What set-ups a placement uses is not known, so the bound is the least over all sets of them: that of the options
    that need no other, and what the set costs.
    """
    base = float(problem.base[:, :-1].max(0).sum())
    kinds = sorted(set(range(len(problem.setups))) - problem.base_kinds)
    paid = float(problem.setups[sorted(problem.base_kinds)].sum())
    if not problem.items:
        return base + paid
    costs = OptionCosts.of(problem)
    relaxed = max(base, _programme(problem))
    values = []
    for number in range(len(kinds) + 1):
        for used in combinations(kinds, number):
            others = frozenset(kinds) - frozenset(used)
            value = _lagrangian(problem, costs.without(problem, others))
            values.append(max(value, relaxed) + paid + float(problem.setups[list(used)].sum()))
    return min(values) * (1 - 1e-6)


def _lagrangian(problem: Problem, costs: OptionCosts) -> float:
    """The bound for one share and one price.

    The sum over phases of the maximum is at least, for any share s in [0, 1] and any one rank, (1 - s) times the mean
    over ranks plus s times that rank's load. For each item the rank is the one that holds its largest piece. Memory
    enters with a price per byte on what all ranks together have. Items then choose one by one.
    """
    base = problem.base[:, :-1].sum(1)
    free_bytes = float((problem.capacity - problem.base[:, -1]).sum())
    best = 0.0
    prices = _prices(costs, free_bytes)
    for share in np.linspace(0, 1, 17):
        spent = (1 - share) * costs.mean + share * costs.least
        busiest = (1 - share) * costs.mean + share * costs.most
        start = (1 - share) * float(base.mean()) + share * float(base.min())
        for price in prices:
            others = (spent + price * costs.size).min(1)
            own = (busiest + price * costs.size).min(1)
            best = max(best, start + float(others.sum()) + float((own - others).max()) - price * free_bytes)
    return best


def _prices(costs: OptionCosts, free_bytes: float) -> Array:
    """Seconds per byte to try; none but 0 when the fastest options fit together."""
    fastest = costs.mean.argmin(1)
    needed = float(costs.size[np.arange(len(fastest)), fastest].sum())
    if needed <= free_bytes:
        return np.zeros(1)
    scale = float(costs.mean.min(1).sum()) / max(free_bytes, 1.0)
    return np.concatenate([np.zeros(1), scale * np.geomspace(1e-3, 1e2, 16)])


def _programme(problem: Problem) -> float:
    """The bound of the linear programme, set-ups left out; 0 where it is not solved."""
    counts = Counter(item.options for item in problem.items)
    columns = [(c, o) for c, options in enumerate(counts) for o in options]
    if len(columns) > _MOST_COLUMNS:
        return 0.0
    try:
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix, hstack, vstack
    except ModuleNotFoundError:
        return 0.0
    num_ranks, phases, num = len(problem.capacity), problem.base.shape[1] - 1, len(columns)
    of_class = np.array([c for c, _ in columns])
    numbers = np.array(list(counts.values()), dtype=float)
    mean = np.array([o.loads.sum((0, 1)) / num_ranks + o.everywhere for _, o in columns])
    least = np.array([_idlest(o, num_ranks) for _, o in columns])
    most = np.array([_busiest(o) for _, o in columns])
    idlest_base = problem.base[:, :-1].min(0)

    # Variables: number of items of each class with each option, then the phases' times, then what all items put on any
    # rank, by phase, at least.
    minus, zero = csr_matrix(-np.eye(phases)), csr_matrix((phases, phases))
    rows = [hstack([csr_matrix(mean[:, :-1].T), minus, zero]), hstack([csr_matrix(least.T), zero, minus])]
    limits = [-problem.base[:, :-1].mean(0), np.zeros(phases)]
    smallest = np.array([most[of_class == c].sum(1).min() for c in range(len(counts))])
    for c in np.argsort(-smallest, kind="stable")[:_LARGE_ITEMS].tolist():
        # one item of the class: its mix is the class's over its number; the rest of it is at least `least`
        extra = np.where((of_class == c)[:, None], (most - least) / numbers[c], 0)
        rows.append(hstack([csr_matrix(extra.T), minus, csr_matrix(np.eye(phases))]))
        limits.append(-idlest_base)
    rows.append(csr_matrix(np.concatenate([mean[:, -1] * num_ranks, np.zeros(2 * phases)])[None]))
    limits.append(np.array([float((problem.capacity - problem.base[:, -1]).sum())]))
    members = csr_matrix((np.ones(num), (of_class, np.arange(num))), shape=(len(counts), num + 2 * phases))
    # in microseconds and gigabytes, so that the solver's absolute tolerances mean little
    scaled = [r * 1e6 for r in rows[:-1]] + [rows[-1] * 1e-9]
    result = linprog(
        np.concatenate([np.zeros(num), np.ones(phases), np.zeros(phases)]),
        A_ub=vstack(scaled).tocsr(),
        b_ub=np.concatenate([*(limit * 1e6 for limit in limits[:-1]), limits[-1] * 1e-9]),
        A_eq=members,
        b_eq=numbers,
        bounds=(0, None),
        method="highs",
    )
    return float(result.fun) if result.success else 0.0


def _idlest(option: Option, num_ranks: int) -> Array:
    """(phases,) at least what an option puts on every rank."""
    ranks = option.loads.reshape(-1, option.loads.shape[2])[:, :-1]
    return option.everywhere[:-1] + (ranks.min(0) if len(ranks) == num_ranks else 0.0)


def _busiest(option: Option) -> Array:
    """(phases,) what an option puts on the rank it loads most in all."""
    ranks = option.loads.reshape(-1, option.loads.shape[2])[:, :-1]
    busiest: Array = ranks[ranks.sum(1).argmax()] + option.everywhere[:-1]
    return busiest
