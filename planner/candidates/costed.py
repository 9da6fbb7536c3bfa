"""Layouts with their costs, and those that parameters of one class share.

Parameters of one *class* (same sharder, shape, optimizer, features and constraint) share their layouts, so that a
thousand alike tables are costed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dmp import ShardingEnv
from planner.candidates.movable import MovableLayout
from planner.costs.protocol import ALL_REDUCE, EXCHANGE, Array, CostProtocol, Integers, ShardTable
from planner.costs.topology import Topology
from planner.search.problem import Option


class CostedLayout(NamedTuple):
    """A layout of a parameter, what it costs, and why it may not be chosen (empty where it may)."""

    movable: MovableLayout
    option: Option
    objection: str = ""


@dataclass(frozen=True, eq=False)
class ClassLayouts:
    """What a class of parameters is offered.

    Args:
        choices: at least one.
        rejected: those that may not be chosen.
    """

    choices: tuple[CostedLayout, ...]
    rejected: tuple[CostedLayout, ...]


def costed(
    layouts: Sequence[tuple[MovableLayout, str]],
    model: CostProtocol,
    env: ShardingEnv,
    topology: Topology,
    batch_size: float,
) -> list[CostedLayout]:
    """Layouts, each with an objection, with their costs, all in one evaluation of the model.

    Args:
        batch_size: samples per data rank.
    """
    shards = [shard for layout, _ in layouts for shard in layout.shards]
    local, everywhere = model.costs(ShardTable.of(shards), env, topology, batch_size)
    spans, width = model.spans(env), local.shape[1]
    found, start = [], 0
    for layout, objection in layouts:
        stop = start + len(layout.shards)
        is_copied = layout.shards[0].replicated
        loads = np.zeros((layout.num_blocks * layout.block_size, width))
        if is_copied:
            loads[:] = local[start]
        elif stop == start + 1:  # `add.at` is slow
            loads[layout.ranks[0]] = local[start]
        else:
            np.add.at(loads, np.array(layout.ranks), local[start:stop])
        blocks = _shared(loads.reshape(layout.num_blocks, layout.block_size, width), spans)
        kinds = frozenset([EXCHANGE, ALL_REDUCE] if is_copied else [EXCHANGE])
        found.append(CostedLayout(layout, Option(blocks, everywhere[start:stop].sum(0), kinds), objection))
        start = stop
    return found


def _shared(blocks: Array, spans: Integers) -> Array:
    """Loads of phases that ranks share, on each of these; where a block has fewer, as if the others had as much."""
    num, size, _ = blocks.shape
    for phase, span in enumerate(spans.tolist()):
        if span > 1 and size % span:
            blocks[:, :, phase] *= span
        elif span > 1:
            groups = blocks[:, :, phase].reshape(num, -1, span)
            blocks[:, :, phase] = np.broadcast_to(groups.sum(2, keepdims=True), groups.shape).reshape(num, size)
    return blocks
