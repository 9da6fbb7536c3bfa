"""Dense weights: what is split over the tensor axis, fully sharded or replicated, and the memory that it takes.

A plain rule for now: tensor-parallel as the model sharders offer, else split over the fully sharded axes where there
are any, else a copy on every rank. What does not fit then is an error. Repeated blocks are one decision.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from dmp import (
    Layout,
    ModelPlacement,
    ModuleSharder,
    ParameterInfo,
    PlanError,
    ShardingEnv,
    fully_sharded,
    hook,
    join_name,
    replicate,
    shown_bytes,
)
from planner.candidates.constraints import Constraint
from planner.costs.topology import Topology

KINDS = ("tensor parallel", "fully sharded", "replicated")
_VOCABULARY_ROWS = 1 << 18
_COPIES_IN_MEMORY = 4  # the weight, its gradient, and two tensors of optimizer state


@dataclass(frozen=True)
class DenseBlock:
    """Weights with one decision.

    Args:
        name: of the block, `*` for the index of a repeated one; empty for what is in none.
        count: how many such blocks there are.
        num_parameters: elements of all of them together, unsharded.
        rank_bytes: of their weights on each rank, by kind (one of `KINDS`).
    """

    name: str
    count: int
    num_parameters: int
    rank_bytes: Mapping[str, int]


@dataclass(frozen=True)
class Dense:
    """What the dense weights of a model get.

    Args:
        layouts: entries for the plan: those that the mesh alone does not say.
        blocks: the decisions.
        notes: what the model sharders say of their choice.
    """

    layouts: Mapping[str, Layout]
    blocks: tuple[DenseBlock, ...]
    notes: tuple[str, ...]

    @property
    def training_bytes(self) -> int:
        """Weights, gradients and optimizer state on a rank; activations and gathered weights are not modelled."""
        return _COPIES_IN_MEMORY * sum(n for block in self.blocks for n in block.rank_bytes.values())


def vocabularies(
    tables: Mapping[str, tuple[ModuleSharder, ParameterInfo]],
    weights: Mapping[str, ParameterInfo],
    constraints: Mapping[str, Constraint],
    pinned: Collection[str],
    env: ShardingEnv,
) -> dict[str, Layout]:
    """Tables that are a transformer's vocabulary or positions: better a dense weight, where their sharder offers that.

    Such a table has few rows, and no more elements than the other dense weights together.
    """
    room = sum(prod(info.shape) for info in weights.values())
    found = {}
    for name, (sharder, info) in tables.items():
        small = info.shape[0] <= _VOCABULARY_ROWS and prod(info.shape) <= room
        if name in pinned or not (small or constraints[name].layouts):
            continue
        offered = {layout.name: layout for layout in sharder.layouts(info, env) if layout.is_dense}
        wanted = [offered[asked] for asked in constraints[name].layouts or () if asked in offered]
        if wanted:
            found[name] = wanted[0]
        elif offered and small and constraints[name] == Constraint():
            found[name] = next(iter(offered.values()))
    return found


def decide(
    weights: Mapping[str, ParameterInfo],
    placements: Sequence[ModelPlacement],
    chosen: Mapping[str, Layout],
    env: ShardingEnv,
    topology: Topology,
) -> Dense:
    """The layouts of dense weights, and what they take.

    Args:
        weights: every dense weight by name.
        placements: what the model sharders split.
        chosen: layouts of weights that are given (pinned, or vocabularies).

    Raises:
        PlanError: weights, gradients and optimizer state do not fit into a rank's memory.
    """
    tensor = {name: layout for p in placements for name, layout in p.layouts.items()}
    layouts = {**chosen, **tensor}
    rest = fully_sharded() if env.fully_sharded_axes else replicate()
    blocks: dict[str, list[str]] = {}
    for name in weights:
        blocks.setdefault(_block(name)[0], []).append(name)
    decided = []
    for block, names in blocks.items():
        bytes_by_kind = dict.fromkeys(KINDS, 0)
        for name in names:
            layout = layouts.get(name, rest)
            bytes_by_kind[_kind(layout)] += _rank_bytes(layout, weights[name], env)
        indices = {_block(name)[1] for name in names}
        decided.append(
            DenseBlock(
                block,
                len(indices),
                sum(prod(weights[name].shape) for name in names),
                {kind: n for kind, n in bytes_by_kind.items() if n},
            )
        )
    notes = tuple(dict.fromkeys(note for p in placements for note in hook(p, "notes") or ()))
    dense = Dense(layouts, tuple(decided), notes)
    short = dense.training_bytes - topology.usable_bytes
    if short > 0:
        further = (
            "more ranks on the shard or tensor axis" if env.fully_sharded_axes else "a shard axis (FSDP2), or more tp"
        )
        raise PlanError(
            f"dense weights with gradients and optimizer state need {shown_bytes(dense.training_bytes)} on a rank, "
            f"which has {shown_bytes(topology.usable_bytes)}: {shown_bytes(short)} short; split them further: "
            f"{further}, or say what a rank has: ShardingPlanner(Topology(...))",
            bytes_short=int(short),
        )
    return dense


def _kind(layout: Layout) -> str:
    if layout.is_tensor_parallel:
        return "tensor parallel"
    return "replicated" if layout.is_copied else "fully sharded"


def _rank_bytes(layout: Layout, info: ParameterInfo, env: ShardingEnv) -> int:
    """On the rank with the largest part: the first."""
    shards = layout.shards(info.shape, env)
    return prod(shards[0].sizes) * info.dtype.itemsize if shards else 0


def _block(name: str) -> tuple[str, str]:
    """`layers.*` and its index 3 for a weight of `layers.3`; both empty for one of no repeated block."""
    found = re.match(r"(?:(.*?)\.)?(\d+)\.", name)
    return (join_name(found[1] or "", "*"), found[2]) if found else ("", "")
