"""The choice that a mesh leaves for a block, where constraints open it: split along an axis, or whole on its ranks.

A block is split as far as the mesh's axes say, unless a constraint allows it whole: that saves collectives and costs
memory. Of the blocks that may be either, those that save most for a byte are taken whole, as long as they fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dmp import Layout, PlanError, ShardingEnv, fully_sharded, replicate
from planner.costs.topology import Topology
from planner.dense.asked import Asked, allows
from planner.dense.block import DenseBlock
from planner.dense.fitting import certain_bytes, fits_certainly
from planner.dense.model import DenseModel

Layouts = Mapping[str, Layout]
OnLayouts = Callable[[Layouts], Sequence[DenseBlock]]


class _Whole(NamedTuple):
    """Weights of a block that may be whole along the axes that split them, or must."""

    names: tuple[str, ...]
    must: bool
    is_copied: bool
    """Along all axes; else, whole on the tensor axis, they are split along the others."""


def chosen_layouts(
    model: DenseModel, split: Layouts, asked: Asked, env: ShardingEnv, topology: Topology, on_layouts: OnLayouts
) -> dict[str, Layout]:
    """The layouts of weights by name, those that the mesh says left out.

    Args:
        split: tensor-parallel layouts, and those that are given.
        on_layouts: what blocks take with such layouts.

    Raises:
        PlanError: a constraint asks for what the mesh has no axis for.
    """
    layouts = dict(split)
    open_ones: list[_Whole] = []
    for whole in _wholes(model, split, asked, env):
        if whole.must:
            _take(layouts, whole)
        else:
            open_ones.append(whole)
    now = on_layouts(layouts)
    while open_ones:
        tried = [(whole, _with(layouts, whole)) for whole in open_ones]
        rated = [(_worth(now, there), whole, there) for whole, into in tried for there in [on_layouts(into)]]
        rated = [each for each in rated if each[0] > 0 and fits_certainly(each[2], topology)]
        if not rated:
            break
        _, best, now = max(rated, key=lambda each: each[0])
        _take(layouts, best)
        open_ones.remove(best)
    return layouts


def _wholes(model: DenseModel, split: Layouts, asked: Asked, env: ShardingEnv) -> list[_Whole]:
    """What constraints allow, or ask, to be whole: a block's tensor-parallel weights, and its others."""
    found: dict[tuple[str, bool, bool, bool], list[str]] = {}
    for name, weight in model.weights.items():
        if name not in asked:
            continue
        layout = split.get(name)
        is_tensor = layout is not None and layout.is_tensor_parallel
        may_split = allows(asked, name, layout if layout is not None else fully_sharded())
        may_copy = allows(asked, name, replicate())
        has_axis = is_tensor or bool(env.fully_sharded_axes)
        if not may_copy and not may_split:
            raise PlanError(
                f"the constraint on {name!r} allows {sorted(asked[name])}; on {env} it can be "
                f"{layout if is_tensor else fully_sharded() if has_axis else replicate()}"
                + (" or replicate()" if has_axis else "")
                + ". A tensor-parallel plan of your own: TensorParallelSharder({module path: style})",
                table=name,
            )
        if not may_copy and not has_axis:
            raise PlanError(
                f"the constraint on {name!r} allows {sorted(asked[name])}, for which {env} has no axis: dense weights "
                "are split along axes called shard, dp_shard or fsdp, and along a tensor axis",
                table=name,
            )
        if may_copy and has_axis and (layout is None or is_tensor):
            is_copied = not is_tensor or not allows(asked, name, fully_sharded())
            found.setdefault((weight.block, is_tensor, not may_split, is_copied), []).append(name)
    return [_Whole(tuple(names), must, is_copied) for (_, _, must, is_copied), names in found.items()]


def _with(layouts: Layouts, whole: _Whole) -> dict[str, Layout]:
    copy = dict(layouts)
    _take(copy, whole)
    return copy


def _take(layouts: dict[str, Layout], whole: _Whole) -> None:
    for name in whole.names:
        layouts.pop(name, None)
        if whole.is_copied:
            layouts[name] = replicate()


def _worth(now: Sequence[DenseBlock], there: Sequence[DenseBlock]) -> float:
    """Seconds saved for a byte more; 0 where none are saved."""
    saved = _seconds(now) - _seconds(there)
    return max(0.0, saved) / max(1, certain_bytes(there) - certain_bytes(now))


def _seconds(blocks: Sequence[DenseBlock]) -> float:
    return sum(sum(block.seconds.values()) for block in blocks)
