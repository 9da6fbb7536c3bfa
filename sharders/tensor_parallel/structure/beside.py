"""Linears that an attention has beside query, key, value and output: gates, biases of relative positions.

[Note: beside] What such a Linear gives may be for each head, one after the other, or all heads again and again, as many
times as there are distances: then a rank has its heads' part. Or it is a step on the way to that, and of all ranks; or
it is used on a rank's heads alone, and gradients of its weights are parts of a sum. Shapes do not tell, a proof does.
"""

from __future__ import annotations

from collections.abc import Mapping

from sharders.tensor_parallel.structure.linears import Features
from sharders.tensor_parallel.structure.transformer import Heads

MOST_TIMES = 64
"""Times that one Linear may give something for all heads."""


def ways_beside(linears: Mapping[str, Features], heads: Heads, width: int) -> tuple[dict[str, str], ...]:
    """Styles that they may have, by path, the likeliest first.

    Args:
        linears: by path.
        width: the hidden size, which any of them may read.
    """
    if not linears:
        return ()
    times: dict[str, int] = {}
    taken: set[int] = set()  # by those behind
    for name, of in reversed([*linears.items()]):
        if of.out_features not in taken - {width} and of.out_features % heads.query == 0:
            times[name] = of.out_features // heads.query
        taken.add(of.in_features)
    of_heads = dict.fromkeys(times, "colwise")
    again = {**of_heads, **{n: f"colwise_packed_{count}" for n, count in times.items() if 1 < count <= MOST_TIMES}}
    found = [
        {**dict.fromkeys(linears, rest), **way}
        for way in (of_heads, again, {})
        for rest in ("replicate", "sum_gradients")
    ]
    return tuple(way for i, way in enumerate(found) if way not in found[:i])
