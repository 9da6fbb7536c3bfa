"""Which part of whose rectangles goes to whom, when a tensor's rectangles change their ranks: geometry alone.

What a rank holds already it keeps; the rest comes from the one rank that holds it. A tensor that every rank holds whole
is nobody's to send.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from dmp.chunked import Rectangle as Rectangle
from dmp.chunked import overlap
from dmp.errors import ShardError


class Part(NamedTuple):
    """What a rectangle that was and one that will be have in common.

    Attributes:
        source: which of its rank's rectangles has it.
        target: which of its rank's rectangles takes it.
        shared: the part of the tensor.
    """

    source: int
    target: int
    shared: Rectangle


class Routes(NamedTuple):
    """One rank's parts of one tensor, in an order that is the same where they are sent and where they come.

    Attributes:
        kept: it has them itself.
        sent: to each rank.
        received: from each rank.
    """

    kept: list[Part]
    sent: dict[int, list[Part]]
    received: dict[int, list[Part]]


def find_routes(
    size: Sequence[int], old: Sequence[Sequence[Rectangle]], new: Sequence[Sequence[Rectangle]], rank: int
) -> Routes:
    """The routes of `rank`.

    Args:
        size: of the tensor.
        old, new: for each rank the rectangles that it holds, and those that it will hold.

    Raises:
        ShardError: the ranks hold the tensor neither once between them nor whole each.
    """
    if _is_whole_everywhere(size, old):
        return Routes(_parts(old[rank], new[rank]), {}, {})
    received = {r: parts for r, held in enumerate(old) if (parts := _parts(held, new[rank]))}
    sent = {r: parts for r, wanted in enumerate(new) if r != rank and (parts := _parts(old[rank], wanted))}
    return Routes(received.pop(rank, []), sent, received)


def _is_whole_everywhere(size: Sequence[int], old: Sequence[Sequence[Rectangle]]) -> bool:
    count = prod(size)
    held = [sum(prod(extent) for _, extent in of_rank) for of_rank in old]
    if sum(held) == count and count:
        return len(old) == 1
    if all(each == count for each in held):
        return True
    raise ShardError(f"the ranks' chunks hold {sum(held)} of {count} elements, and not each rank all of them: {held}")


def _parts(held: Sequence[Rectangle], wanted: Sequence[Rectangle]) -> list[Part]:
    """What held rectangles have of wanted ones."""
    found = []
    for target, (at, extent) in enumerate(wanted):
        for source, (other_at, other_extent) in enumerate(held):
            shared = overlap(at, extent, other_at, other_extent)
            if shared is not None:
                found.append(Part(source, target, shared))
    return found
