"""The largest batch that a plan has room for, by planning anew with all of it pinned: so what is told fits.

Bytes are nearly affine in the batch: a line through two batches says where they end, and what it says is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from dmp import Layout, PlanError
from planner.candidates.candidates import Leeway
from planner.candidates.request import Request
from planner.costs.protocol import BYTES
from planner.costs.topology import Topology
from planner.dense.decide import Dense
from planner.dense.fitting import left_by

MOST_PARAMETERS, MOST_PIECES = 1000, 1 << 16
"""Of plans for which this is worked out, the second times ranks: some tries take a fifth of a second there."""

_TRIES = 24
_ENOUGH = 0.01  # of the batch
_MOST = 1 << 31


def largest_batch(room: Callable[[int], float], batch_size: int) -> int:
    """The largest batch that was seen to fit; 0 where there is no end to it, or the one that was planned for does not.

    Args:
        room: of a batch, bytes that are left on the fullest rank; negative where it does not fit.
    """
    fits, left = batch_size, room(batch_size)
    if left < 0:
        return 0
    fails: tuple[int, float] | None = None
    tried = 2 * batch_size
    for number in range(_TRIES):
        there = room(tried)
        if there < 0:
            fails = tried, there
        else:
            slope = (left - there) / (tried - fits)
            fits, left = tried, there
            if slope * _MOST < left:
                return 0
        if fails is None:
            tried = fits + int(left / slope)
            is_near = tried - fits <= _ENOUGH * fits
        else:
            by_line = fits + int(left / (left - fails[1]) * (fails[0] - fits))
            tried = (fits + fails[0]) // 2 if number % 2 else by_line  # where it is no line
            is_near = fails[0] - fits <= _ENOUGH * fits
        if is_near or tried == fits:
            break
    return fits


def room_for(
    request: Request,
    layouts: Mapping[str, Layout],
    leeway: Leeway,
    topology: Topology,
    dense_for: Callable[[int], Dense],
) -> Callable[[int], float]:
    """What `largest_batch` asks of a plan.

    Args:
        request: what the plan was asked with.
        layouts: of its tables.
        leeway: what it gave up.
        dense_for: the plan's dense weights at a batch.
    """
    counts_activations = left_by(dense_for(int(request.costs.batch_size)).blocks, topology) >= 0

    def room(batch_size: int) -> float:
        try:
            dense = dense_for(batch_size)
            costs = replace(request.costs, batch_size=batch_size)
            asked = replace(request, pinned=layouts, costs=costs, dense_bytes=dense.taken_bytes)
            problem = asked.candidates(leeway).problem(dense.taken_bytes)
        except PlanError:
            return -float(topology.memory_bytes)
        left = float((problem.capacity - problem.base[:, BYTES]).min())
        return min(left, left_by(dense.blocks, topology)) if counts_activations else left

    return room
