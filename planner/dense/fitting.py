"""Whether dense weights fit: the error where what is certain does not, a note where what is estimated may not.

What stays between steps (weights, gradients, optimizer state) and what is gathered is certain, and an error where it
does not fit. Activations depend on code that is not run here, and on recomputation that may be asked for elsewhere
(`FSDPWrapper(activation_checkpointing=True)`): they are counted as far as they fit, and a note says what else is so.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from dmp import PlanError, ShardingEnv, shown_bytes
from planner.costs.topology import Topology
from planner.dense.block import ACTIVATIONS, GATHERED, GRADIENTS, PARTS, STATE, WEIGHTS, DenseBlock

_UNMODELLED = 1 / 3
"""Part of the reserved memory that nothing which is modelled may take."""
_STAYS = (WEIGHTS, GRADIENTS, STATE)
_CERTAIN = (*_STAYS, GATHERED)


def check_fits(blocks: Sequence[DenseBlock], env: ShardingEnv, topology: Topology) -> None:
    """Raise where what is certain does not fit into a rank's memory.

    Raises:
        PlanError: with the block that takes most, the bytes short and the smallest change.
    """
    stays, certain = _total(blocks, *_STAYS), _total(blocks, *_CERTAIN)
    short = max(stays - topology.usable_bytes, certain - _most(topology))
    if short <= 0:
        return
    worst = max(blocks, key=lambda block: sum(block.training_bytes[part] for part in _CERTAIN))
    parts = ", ".join(f"{part} {shown_bytes(worst.training_bytes[part])}" for part in _CERTAIN)
    name = f"{worst.count} x {worst.name}" if worst.name else "what is in no repeated block"
    raise PlanError(
        f"dense weights with gradients and optimizer state need {shown_bytes(topology.usable_bytes + short)} on a "
        f"rank, which has {shown_bytes(topology.usable_bytes)}: {shown_bytes(short)} short. Most is of {name}: "
        f"{parts}.\n"
        "Any of these would make it fit:\n" + "\n".join(f"  {change}" for change in _changes(blocks, env, topology)),
        bytes_short=ceil(short),
    )


def _changes(blocks: Sequence[DenseBlock], env: ShardingEnv, topology: Topology) -> list[str]:
    stays, gathered = _total(blocks, *_STAYS), _total(blocks, GATHERED)
    whole = 1 - _UNMODELLED * topology.reserved_fraction
    memory = max(stays / (1 - topology.reserved_fraction), (stays + gathered) / whole)
    found = [
        f"memory_bytes of {memory:.0f} per rank ({shown_bytes(memory)}; now {shown_bytes(topology.memory_bytes)}): say "
        "what a rank has: ShardingPlanner(Topology(...))"
    ]
    room = min(topology.usable_bytes, _most(topology) - gathered)
    factor = ceil(stays / room) if room > 0 else 0
    data = env.axes("replicate", "shard")
    if env.fully_sharded_axes:
        if factor > 1:
            found.append(f"{factor} times the ranks on {env.fully_sharded_axes[-1]!r}, or on a tensor axis")
    elif data and 1 < factor <= env.data_size:
        split = shown_bytes(stays / env.data_size)
        found.insert(0, f"the mesh's axis {data[-1]!r} called 'shard' (FSDP2): {split} on a rank")
    elif factor > 1:
        found.append(f"a shard axis (FSDP2), or a tensor axis, of at least {factor} ranks")
    return found


def fits_with_activations(blocks: Sequence[DenseBlock], topology: Topology) -> bool:
    """Whether all that dense weights need is there, activations as they are estimated."""
    return _total(blocks, *PARTS) <= _most(topology)


def counted_activations(blocks: Sequence[DenseBlock], topology: Topology, batch_size: float) -> tuple[int, str]:
    """Bytes that dense weights take of what tables could have, and a note where activations do not fit as they are.

    Args:
        batch_size: samples per data rank.
    """
    stays, certain = _total(blocks, *_STAYS), _total(blocks, *_CERTAIN)
    kept, again = _total(blocks, ACTIVATIONS), sum(block.recomputed_bytes for block in blocks)
    room = _most(topology) - certain
    counted, note = kept, ""
    if kept > room:
        counted = again if again <= room else 0
        fits = (
            f"recomputed they are {shown_bytes(again)}, which is what the plan counts on: "
            "FSDPWrapper(activation_checkpointing=True)"
            if counted
            else f"recomputed (FSDPWrapper(activation_checkpointing=True)) {shown_bytes(again)}; the plan counts none: "
            f"about {max(0, int(batch_size * room / max(1, again)))} samples would fit so"
        )
        note = (
            f"dense activations at {batch_size:g} samples per data rank need about {shown_bytes(kept)}, and a "
            f"rank has {shown_bytes(max(0, room))} for them; {fits}"
        )
    in_reserve = _most(topology) - topology.usable_bytes
    return int(stays + max(0.0, certain - stays + counted - in_reserve)), note


def _most(topology: Topology) -> float:
    """Bytes that all which is modelled may take of a rank at once."""
    return topology.memory_bytes - _UNMODELLED * topology.reserved_bytes


def _total(blocks: Sequence[DenseBlock], *parts: str) -> int:
    assert set(parts) <= set(PARTS)
    return sum(block.training_bytes[part] for block in blocks for part in parts)
