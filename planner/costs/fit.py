"""Least squares with no coefficient below zero, and every measurement weighed by its own size."""

from __future__ import annotations

import numpy as np

from planner.costs.protocol import Array

_ROUNDS, _REWEIGHED, _LEAST = 2_000, 8, 0.02


def fit(terms: Array, wanted: Array, measured: Array) -> Array:
    """Coefficients (n,) >= 0 for which `terms @ coefficients` is nearest to `wanted`, in parts of `measured`.

    Args:
        terms: (m, n) how often each measurement has each coefficient.
        wanted: (m,) what they are to explain.
        measured: (m,) above 0: a measurement's error counts in parts of it, and not squared: a few that others on the
            machine have spoilt are outvoted.
    """
    weights = np.ones(len(measured))
    for _ in range(_REWEIGHED):
        found = _least_squares(terms, wanted, measured / weights)
        weights = np.maximum(np.abs((terms @ found - wanted) / measured), _LEAST) ** -0.5
    return found


def _least_squares(terms: Array, wanted: Array, measured: Array) -> Array:
    weighed = terms / measured[:, None]
    scale = np.linalg.norm(weighed, axis=0)
    used = scale > 0
    matrix = weighed[:, used] / scale[used]
    products, target = matrix.T @ matrix, matrix.T @ (wanted / measured)
    found = np.zeros(int(used.sum()))
    for _ in range(_ROUNDS):  # one coefficient after the other: few, and as near as one likes
        before = found.copy()
        for i in range(len(found)):
            found[i] = max(0.0, found[i] + target[i] - float(products[i] @ found))
        if np.abs(found - before).max(initial=0.0) <= 1e-12 * found.max(initial=1e-300):
            break
    coefficients = np.zeros(terms.shape[1])
    coefficients[used] = found / scale[used]
    return coefficients
