"""Whether dense weights fit: the error where what is certain does not, a note where what is estimated may not.

What stays between steps (weights, gradients, optimizer state) and what is gathered is certain, and an error where it
does not fit. Activations depend on code that is not run here, and on recomputation that may be asked for elsewhere
(`FSDPWrapper(activation_checkpointing=True)`): they are counted as far as they fit, and a note says what else is so.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from dmp import PlanError, shown_bytes
from planner.costs.topology import Topology
from planner.dense.block import ACTIVATIONS, GATHERED, GRADIENTS, PARTS, STATE, WEIGHTS, DenseBlock

_UNMODELLED = 1 / 3
"""Part of the reserved memory that nothing which is modelled may take."""
_STAYS = (WEIGHTS, GRADIENTS, STATE)
_CERTAIN = (*_STAYS, GATHERED)


def fits_certainly(blocks: Sequence[DenseBlock], topology: Topology) -> bool:
    """Whether what is certain fits into a rank's memory."""
    return _short(blocks, topology) <= 0


def certain_bytes(blocks: Sequence[DenseBlock]) -> int:
    """What is certain, on a rank."""
    return _total(blocks, *_CERTAIN)


def memory_needed(blocks: Sequence[DenseBlock], topology: Topology) -> float:
    """Bytes that a rank must have at least, for what is certain."""
    whole = 1 - _UNMODELLED * topology.reserved_fraction
    return max(_total(blocks, *_STAYS) / (1 - topology.reserved_fraction), certain_bytes(blocks) / whole)


def not_fitting(blocks: Sequence[DenseBlock], topology: Topology, changes: Sequence[str]) -> PlanError:
    """The error for what does not fit: the block that takes most, the bytes short, and `changes` that would help."""
    short = _short(blocks, topology)
    worst = max(blocks, key=lambda block: sum(block.training_bytes[part] for part in _CERTAIN))
    parts = ", ".join(f"{part} {shown_bytes(worst.training_bytes[part])}" for part in _CERTAIN)
    name = f"{worst.count} x {worst.name}" if worst.name else "what is in no repeated block"
    return PlanError(
        f"dense weights with gradients and optimizer state need {shown_bytes(topology.usable_bytes + short)} on a "
        f"rank, which has {shown_bytes(topology.usable_bytes)}: {shown_bytes(short)} short. Most is of {name}: "
        f"{parts}.\nAny of these would make it fit:\n" + "\n".join(f"  {change}" for change in changes),
        bytes_short=ceil(short),
    )


def _short(blocks: Sequence[DenseBlock], topology: Topology) -> float:
    return max(_total(blocks, *_STAYS) - topology.usable_bytes, certain_bytes(blocks) - _most(topology))


def fits_with_activations(blocks: Sequence[DenseBlock], topology: Topology) -> bool:
    """Whether all that dense weights need is there, activations as they are estimated."""
    return left_by(blocks, topology) >= 0


def left_by(blocks: Sequence[DenseBlock], topology: Topology) -> float:
    """Bytes of a rank that they leave, activations as they are estimated; negative where these do not fit."""
    return _most(topology) - _total(blocks, *PARTS)


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
        said = [
            f"dense activations at {batch_size:g} samples per data rank need about {shown_bytes(kept)}, and a rank has "
            f"{shown_bytes(max(0, room))} for them"
        ]
        if again < kept:
            relied = ", on which the plan counts," if counted else ""
            said.append(f"FSDPWrapper(activation_checkpointing=True){relied} makes that {shown_bytes(again)}")
        if not counted:
            fitting = max(0, int(batch_size * room / max(1, again)))
            said.append(f"the plan counts none of them; about {fitting} samples would fit")
        note = "; ".join(said)
    in_reserve = _most(topology) - topology.usable_bytes
    return int(stays + max(0.0, certain - stays + counted - in_reserve)), note


def _most(topology: Topology) -> float:
    """Bytes that all which is modelled may take of a rank at once."""
    return topology.memory_bytes - _UNMODELLED * topology.reserved_bytes


def _total(blocks: Sequence[DenseBlock], *parts: str) -> int:
    assert set(parts) <= set(PARTS)
    return sum(block.training_bytes[part] for block in blocks for part in parts)
