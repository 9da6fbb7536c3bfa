"""`Shard`: a rectangle of a parameter on one rank; and lists of them, as a layout resolves to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from dmp.errors import ShardError
from dmp.layouts.cover import first_fault
from dmp.layouts.integers import LIMIT, integers
from dmp.read_values import shown


@dataclass(frozen=True, order=True)
class Shard:
    """One rectangle of a parameter on one rank.

    Args:
        offsets: first index along each tensor dim.
        sizes: extent along each tensor dim.
        rank: table rank that holds it.

    Raises:
        ShardError: what are no integers.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", integers("Shard.offsets", self.offsets))
        object.__setattr__(self, "sizes", integers("Shard.sizes", self.sizes))
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or abs(self.rank) >= LIMIT:
            raise ShardError(f"Shard.rank must be an integer; got {shown(self.rank)}")


def known_shard(offsets: tuple[int, ...], sizes: tuple[int, ...], rank: int) -> Shard:
    """One of integers that a layout has worked out itself: 2,000 tables on 4,096 ranks are millions of them."""
    made = object.__new__(Shard)
    for name, value in (("offsets", offsets), ("sizes", sizes), ("rank", rank)):
        object.__setattr__(made, name, value)
    return made


def is_replicated(shards: Sequence[Shard], shape: Sequence[int]) -> bool:
    """True when several ranks hold the whole parameter each."""
    return len(shards) > 1 and shards[0].sizes == tuple(shape)


def check_cover(shards: Sequence[Shard], shape: Sequence[int], size: int) -> None:
    """Raise `ShardError` unless `shards` cover `shape` exactly once, or are the whole of it on each of `size` ranks."""
    shape = tuple(shape)
    if shards and 0 in shape:
        raise ShardError(f"shape {shape} has no elements, so there is nothing to place: leave it out of the model")
    for s in shards:
        if not 0 <= s.rank < size:
            raise ShardError(f"{s} is on rank {s.rank}, but the mesh has table ranks 0..{size - 1}")
        inside = len(s.offsets) == len(s.sizes) == len(shape) and all(
            o >= 0 and n >= 1 and o + n <= d for o, n, d in zip(s.offsets, s.sizes, shape, strict=True)
        )
        if not inside:
            raise ShardError(f"{s} does not lie inside shape {shape} (each size must be at least 1)")
    if is_replicated(shards, shape) and all(s.sizes == shape for s in shards):
        if sorted(s.rank for s in shards) != list(range(size)):
            raise ShardError(f"whole copies must be on every rank 0..{size - 1} once; got {[s.rank for s in shards]}")
        return
    if first_fault([(s.offsets, s.sizes) for s in shards], shape) is None:
        return
    clash = _first_overlap(shards)
    if clash:
        raise ShardError(f"rectangles overlap in shape {shape}: {clash[0]} and {clash[1]}")
    covered = sum(prod(s.sizes) for s in shards)
    raise ShardError(f"rectangles cover {covered} of {prod(shape)} elements of shape {shape}; every one is needed")


def _first_overlap(shards: Sequence[Shard]) -> tuple[Shard, Shard] | None:
    """First overlapping pair by a sweep along dim 0, or None."""
    active: list[Shard] = []
    for s in sorted(shards, key=lambda s: s.offsets):
        if s.offsets:
            active = [a for a in active if a.offsets[0] + a.sizes[0] > s.offsets[0]]
        for a in active:
            if all(
                ao < so + sn and so < ao + an
                for ao, an, so, sn in zip(a.offsets[1:], a.sizes[1:], s.offsets[1:], s.sizes[1:], strict=True)
            ):
                return a, s
        active.append(s)
    return None
