"""`Placed`: dense weights on a mesh: how much of each a rank computes with, and how much it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod

from dmp import Layout, ShardingEnv, fully_sharded_dim
from planner.dense.block import FULLY_SHARDED, REPLICATED, TENSOR_PARALLEL
from planner.dense.model import DenseModel, DenseWeight

_LARGE_NUMEL = 1 << 20


@dataclass(frozen=True)
class PlacedWeight:
    """A weight on a mesh, and those alike in other repetitions of its block.

    Args:
        weight: one of them.
        times: how many there are.
        kind: one of `KINDS`.
        tensor_dim: that is split over the tensor axis, or None; 0 for output features, 1 for those of the input.
        is_sequence: its module runs on chunks of the sequence.
        used: elements of one that a rank computes with.
        kept: elements of one that a rank keeps.
    """

    weight: DenseWeight
    times: int
    kind: str
    tensor_dim: int | None
    is_sequence: bool
    used: int
    kept: int

    @property
    def is_copied(self) -> bool:
        """Whole along the data axes."""
        return self.kept == self.used

    @property
    def item_bytes(self) -> int:
        """Of an element."""
        return self.weight.item_bytes


@dataclass(frozen=True)
class Placed:
    """A block on a mesh.

    Args:
        name: of the block.
        count: repetitions of it.
        weights: of all of them.
        is_unit: whether FSDP2 gathers each repetition by itself; else with the root.
    """

    name: str
    count: int
    weights: tuple[PlacedWeight, ...]
    is_unit: bool

    @property
    def is_split(self) -> bool:
        """Whether products in it are split over the tensor axis."""
        return any(w.tensor_dim is not None for w in self.weights)

    @property
    def has_rowwise(self) -> bool:
        """Whether a product in it takes split features, and gives what is summed over the tensor axis."""
        return any(w.tensor_dim == 1 and w.weight.outputs for w in self.weights)


def place(model: DenseModel, layouts: Mapping[str, Layout], rest: Layout, env: ShardingEnv) -> tuple[Placed, ...]:
    """Every block on a mesh.

    Args:
        layouts: of weights by name.
        rest: of those that it does not name.
    """
    alike: dict[str, dict[object, list[DenseWeight]]] = {}
    layout_of: dict[object, Layout] = {}
    for name, weight in model.weights.items():
        layout = layouts.get(name, rest)
        relative = name[len(weight.block) - 1 + len(weight.place) :] if weight.block else name
        key = (relative, weight._replace(place="", owner=""), layout)
        layout_of[key] = layout
        alike.setdefault(weight.block, {}).setdefault(key, []).append(weight)
    found = []
    for block, groups in alike.items():
        indices = {weight.place for members in groups.values() for weight in members}
        weights = tuple(_placed(members, layout_of[key], env) for key, members in groups.items())
        found.append(Placed(block, len(indices), weights, _is_unit(block, len(indices), groups)))
    return tuple(found)


def _placed(members: list[DenseWeight], layout: Layout, env: ShardingEnv) -> PlacedWeight:
    weight = members[0]
    sizes = list(weight.shape)
    dim = layout.tensor_dim(len(sizes)) if layout.is_tensor_parallel else None
    if dim is not None:
        sizes[dim] = ceil(sizes[dim] / env.tensor_size)
    used = prod(sizes)
    splits = prod(env.shape[env.names.index(axis)] for axis in env.fully_sharded_axes)
    along = None if layout.is_copied else fully_sharded_dim(sizes, dim, layout.num_parts, splits)
    if along is not None:
        sizes[along] = ceil(sizes[along] / splits)
    if dim is not None and not weight.looked_up:
        dim = int(layout.splits_inputs)  # whichever dim of the weight that is
    kind = TENSOR_PARALLEL if layout.is_tensor_parallel else REPLICATED if layout.is_copied else FULLY_SHARDED
    is_sequence = layout.is_tensor_parallel and layout.tensor_dim(2) is None
    return PlacedWeight(weight, len(members), kind, dim, is_sequence, used, prod(sizes))


def _is_unit(block: str, count: int, groups: Mapping[object, list[DenseWeight]]) -> bool:
    """As FSDP2 is given units: repeated blocks that are more than a small leaf."""
    if not block or count < 2:
        return False
    members = [weight for group in groups.values() for weight in group]
    owners = {weight.owner for weight in members}
    numel = sum(weight.numel for weight in members) // count
    return len(owners) > count or numel >= _LARGE_NUMEL
