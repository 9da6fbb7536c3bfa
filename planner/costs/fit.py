"""Least squares with no coefficient below zero, and every measurement weighed by its own size."""

from __future__ import annotations

import numpy as np

from planner.costs.protocol import Array

_REWEIGHED, _LEAST = 8, 0.02
_NO_SLOPE, _ZERO = 1e-10, 1e-15


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
    """Lawson and Hanson's active set: exact, however alike terms are."""
    weighed = terms / measured[:, None]
    scale = np.linalg.norm(weighed, axis=0)
    matrix, target = weighed / np.where(scale > 0, scale, 1), wanted / measured
    found, is_free = np.zeros(terms.shape[1]), np.zeros(terms.shape[1], dtype=bool)
    for _ in range(3 * len(found)):
        slope = np.where(is_free, -np.inf, matrix.T @ (target - matrix @ found))
        if slope.max(initial=-np.inf) <= _NO_SLOPE:
            break
        is_free[slope.argmax()] = True
        while is_free.any():
            best = np.zeros_like(found)
            best[is_free] = np.linalg.lstsq(matrix[:, is_free], target, rcond=None)[0]
            below = is_free & (best <= 0)
            if not below.any():
                found = best
                break
            step = (found[below] / np.maximum(found[below] - best[below], 1e-300)).min()  # until the first is zero
            found = found + step * (best - found)
            is_free &= found > _ZERO
            found[~is_free] = 0
    return np.where(scale > 0, found / np.where(scale > 0, scale, 1), 0.0)
