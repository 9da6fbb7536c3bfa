"""Whether rectangles cover a whole exactly once, in a time that grows with their number alone.

[Note: corners]
A rectangle is a sum of quadrants that begin at its corners, with the sign of the corner: +1 at the first, and changed
for each dim in which the corner is the end. Quadrants that begin at different points are independent of each other. So
rectangles cover a whole once, without a hole, if and only if their corners with signs add up to the whole's. Where they
do not, the first point in order that is left over is where a hole begins (-), or an overlap (+).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

_MOST_DIMS = 8  # that are cut: each doubles the corners


def first_fault(boxes: Iterable[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> str | None:
    """What is wrong with rectangles as the parts of a whole; None where they cover it exactly once.

    Args:
        boxes: offset and size of each, all of them numbers >= 0.
        shape: of the whole.
    """
    boxes = list(boxes)
    shape = tuple(shape)
    for offset, size in boxes:
        if not len(offset) == len(size) == len(shape) or any(
            o + n > d for o, n, d in zip(offset, size, shape, strict=True)
        ):
            return f"one of size {tuple(size)} at {tuple(offset)} does not lie inside {shape}"
    boxes = [box for box in boxes if all(box[1])]
    cut = [dim for dim, n in enumerate(shape) if any(size[dim] != n for _, size in boxes)]
    if len(cut) > _MOST_DIMS:
        return f"they are cut in {len(cut)} dims; expected {_MOST_DIMS} at most"
    signs = [((1, -1)[sum(ends) % 2], ends) for ends in product((0, 1), repeat=len(cut))]
    left: dict[tuple[int, ...], int] = {}
    whole = [((0,) * len(shape), shape)] if all(shape) else []
    for times, many in ((1, boxes), (-1, whole)):
        for offset, size in many:
            for sign, ends in signs:
                at = tuple(offset[dim] + end * size[dim] for dim, end in zip(cut, ends, strict=True))
                left[at] = left.get(at, 0) + times * sign
    wrong = min((at for at, count in left.items() if count), default=None)
    if wrong is None:
        return None
    place = [0] * len(shape)
    for dim, index in zip(cut, wrong, strict=True):
        place[dim] = index
    return f"{'they leave a hole' if left[wrong] < 0 else 'they overlap'} at {tuple(place)} of {shape}"
