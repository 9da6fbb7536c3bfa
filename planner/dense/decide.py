"""Dense weights: what is split over the tensor axis, fully sharded or replicated, and what that takes of a step.

The roles of the mesh's axes say most of it: tensor-parallel as the model sharders offer, else split over the fully
sharded axes where there are any, else a copy on every rank. Repeated blocks are one decision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from dmp import (
    Found,
    Layout,
    ModelPlacement,
    ModuleSharder,
    ParameterInfo,
    PlanError,
    ShardingEnv,
    fully_sharded,
    hook,
    replicate,
)
from planner.candidates.constraints import Constraint
from planner.costs.topology import Topology
from planner.dense.asked import Asked
from planner.dense.block import PARTS, SECONDS, DenseBlock
from planner.dense.changes import changes
from planner.dense.choose import chosen_layouts
from planner.dense.fitting import counted_activations, fits_certainly, not_fitting
from planner.dense.memory import training_bytes
from planner.dense.model import DenseModel
from planner.dense.placed import place
from planner.dense.time import NO_TIME, Clock

_VOCABULARY_ROWS = 1 << 18


@dataclass(frozen=True)
class Dense:
    """What the dense weights of a model get, and what they take on every rank alike.

    Args:
        layouts: entries for the plan: those that the mesh alone does not say.
        blocks: the decisions.
        taken_bytes: of what tables could have otherwise, see `Topology.reserved_fraction`.
        notes: what the model sharders say of their choice, and what is taken for granted.
    """

    layouts: Mapping[str, Layout]
    blocks: tuple[DenseBlock, ...]
    taken_bytes: int
    notes: tuple[str, ...]

    @property
    def seconds(self) -> dict[str, float]:
        """Of a step, by what they go to (`SECONDS`); empty without dense weights."""
        return _summed([block.seconds for block in self.blocks], SECONDS)

    @property
    def training_bytes(self) -> dict[str, int]:
        """On a rank, by part (`PARTS`); empty without dense weights."""
        return {part: int(n) for part, n in _summed([block.training_bytes for block in self.blocks], PARTS).items()}


def vocabularies(
    tables: Mapping[str, tuple[ModuleSharder, ParameterInfo]],
    weights: Mapping[str, ParameterInfo],
    constraints: Mapping[str, Constraint],
    pinned: Collection[str],
    env: ShardingEnv,
) -> dict[str, Layout]:
    """Tables that are a transformer's vocabulary or positions: better a dense weight, where their sharder offers that.

    Such a table has few rows, and no more elements than the other dense weights together. Where these are copied to
    every rank it stays a table, which is copied too: it costs little more, and one rank may then run the model alone,
    to evaluate or to generate, as under `DistributedDataParallel`.
    """
    room = sum(prod(info.shape) for info in weights.values())
    splits = env.fully_sharded_axes or env.axes("tensor")  # dense weights are split, or samples shared
    found = {}
    for name, (sharder, info) in tables.items():
        small = info.shape[0] <= _VOCABULARY_ROWS and prod(info.shape) <= room
        if name in pinned or not (small or constraints[name].layouts):
            continue
        layouts = [*sharder.layouts(info, env)]
        offered = {layout.name: layout for layout in layouts if layout.is_dense}
        wanted = [offered[asked] for asked in constraints[name].layouts or () if asked in offered]
        if not wanted and offered and small and constraints[name] == Constraint():
            copies = [layout for layout in layouts if layout.is_copied and not layout.is_dense]
            wanted = [*offered.values()] if splits else copies
        if wanted:
            found[name] = wanted[0]
    return found


def said_of_copied(names: Collection[str]) -> tuple[str, ...]:
    """Why they are not cut."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    why = "copied to every rank, as dense weights are, beside which it is small: one rank may evaluate alone"
    return (f"{next(iter(names))}{more}: {why}; Constraint(layouts=[...]) cuts it",) if names else ()


def decide(
    model: DenseModel,
    placements: Sequence[ModelPlacement],
    chosen: Mapping[str, Layout],
    env: ShardingEnv,
    topology: Topology,
    batch_size: float,
    asked: Asked | None = None,
) -> Dense:
    """The layouts of dense weights, and what they take.

    Args:
        placements: what the model sharders split.
        chosen: layouts of weights that are given (pinned, or vocabularies).
        batch_size: samples per data rank.
        asked: layouts that constraints allow, by the names of weights that they speak of.

    Raises:
        PlanError: weights, gradients and optimizer state do not fit into a rank's memory.
    """
    tensor = {name: layout for p in placements for name, layout in p.layouts.items()}
    layouts = {**chosen, **tensor}
    clock = Clock(model, env, topology, batch_size)
    if asked:
        layouts = chosen_layouts(model, layouts, asked, env, topology, lambda other: _blocks(model, other, clock))
    blocks = _blocks(model, layouts, clock)
    if not fits_certainly(blocks, topology):

        def on_mesh(other: ShardingEnv) -> Sequence[DenseBlock]:
            return _blocks(model, layouts, Clock(model, other, topology, batch_size), timed=False)

        raise not_fitting(blocks, topology, changes(blocks, on_mesh, env, topology))
    taken, note = counted_activations(blocks, topology, batch_size)
    notes = list(dict.fromkeys(note for p in placements for note in hook(p, "notes") or ()))
    if blocks:
        notes += [f"a sample is {model.tokens:,} tokens for dense weights ({model.tokens_said})"] * (model.tokens > 1)
        notes += [note] * bool(note)
    return Dense(layouts, blocks, taken, tuple(notes))


def split_as(dense: Dense, found: Found) -> Found:
    """What the sharders take, with those weights whole on the tensor axis that were chosen so.

    Raises:
        PlanError: all of them, which is said by a sharder instead; or what the rest of a plan may not be split without.
    """
    left = {name: layout for name, layout in found.split.items() if name in dense.layouts}
    if len(left) == len(found.split):
        return found
    if not left:
        raise PlanError(
            "constraints leave all weights whole on the tensor axis, which a plan cannot say: pass sharders=[..., "
            "TensorParallelSharder({})], or a mesh without that axis"
        )
    return Found.of(found.module, found.sharders, found.env, {**dense.layouts, **left})


def _blocks(
    model: DenseModel, layouts: Mapping[str, Layout], clock: Clock, *, timed: bool = True
) -> tuple[DenseBlock, ...]:
    """Every block on the clock's mesh; without seconds where they are not `timed`."""
    rest = fully_sharded() if clock.env.fully_sharded_axes else replicate()
    placed = place(model, layouts, rest, clock.env)
    times = clock.times(placed) if timed else [NO_TIME] * len(placed)
    found = []
    for block, time, (parts, recomputed) in zip(placed, times, training_bytes(placed, clock), strict=True):
        by_kind: dict[str, int] = {}
        for w in block.weights:
            by_kind[w.kind] = by_kind.get(w.kind, 0) + w.times * w.kept * w.item_bytes
        numel = sum(w.times * w.weight.numel for w in block.weights)
        found.append(
            DenseBlock(
                block.name,
                block.count,
                numel,
                by_kind,
                training_bytes=parts,
                recomputed_bytes=recomputed,
                flops=time.flops,
                seconds=time.seconds,
                hidden_seconds=time.hidden_seconds,
            )
        )
    return tuple(found)


def _summed(several: Sequence[Mapping[str, float]], keys: Sequence[str]) -> dict[str, float]:
    return {key: sum(each.get(key, 0) for each in several) for key in keys} if several else {}
