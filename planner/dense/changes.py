"""What would make dense weights fit that do not: other meshes, tried one by one, and more memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from dmp import ShardingEnv, shown_bytes
from planner.costs.topology import Topology
from planner.dense.block import DenseBlock
from planner.dense.fitting import certain_bytes, fits_certainly, memory_needed

_MOST_TIMES = 256


def changes(
    blocks: Sequence[DenseBlock],
    on_mesh: Callable[[ShardingEnv], Sequence[DenseBlock]],
    env: ShardingEnv,
    topology: Topology,
) -> list[str]:
    """Changes each of which is enough, the smallest of its kind, in words.

    Args:
        on_mesh: what the blocks take on another mesh.
    """
    found = []
    for text, other in _meshes(env):
        there = on_mesh(other)
        if fits_certainly(there, topology):
            found.append(f"{text}: {shown_bytes(certain_bytes(there))} on a rank")
            break
    needed = memory_needed(blocks, topology)
    return [
        *found,
        f"memory_bytes of {needed:.0f} per rank ({shown_bytes(needed)}; now {shown_bytes(topology.memory_bytes)}): say "
        "what a rank has: ShardingPlanner(Topology(...))",
    ]


def _meshes(env: ShardingEnv) -> Iterator[tuple[str, ShardingEnv]]:
    """The same mesh with weights split along an axis of copies; then larger ones."""
    split = env.fully_sharded_axes
    copies = [axis for axis in env.axes("shard") if axis not in split] or list(env.axes("replicate"))
    sizes = dict(zip(env.names, env.shape, strict=True))
    if not split and copies and sizes[copies[-1]] > 1 and "shard" not in env.names:
        axis = copies[-1]
        yield f"the mesh's axis {axis!r} called 'shard' (FSDP2)", _with_axis(env, axis, "shard", sizes[axis])
    times = 2
    while times <= _MOST_TIMES:
        if split:
            axis = split[-1]
            text = f"{times} times the ranks on {axis!r}, {times * sizes[axis]}"
            yield text, _with_axis(env, axis, axis, times * sizes[axis])
        elif "shard" not in env.names:
            axis = copies[-1] if copies else env.names[0]
            text = f"an axis called 'shard' (FSDP2) of {times * sizes[axis]} ranks in the place of {axis!r}"
            yield text, _with_axis(env, axis, "shard", times * sizes[axis])
        times *= 2


def _with_axis(env: ShardingEnv, axis: str, name: str, size: int) -> ShardingEnv:
    index = env.names.index(axis)
    names = (*env.names[:index], name, *env.names[index + 1 :])
    shape = (*env.shape[:index], size, *env.shape[index + 1 :])
    roles = (*env.roles[:index], "shard", *env.roles[index + 1 :])
    return replace(env, mesh=None, names=names, shape=shape, roles=roles, coordinate=(0,) * len(shape), _groups={})
