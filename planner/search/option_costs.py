"""What options cost wherever they go. Pure, as `planner.search`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.search.problem import Array, Option


def totals(options: Sequence[Option], num_ranks: int) -> tuple[Array, Array, Array, Array]:
    """What options cost wherever they go.

    Returns:
        Each (options,): seconds summed over phases and averaged over ranks; of the busiest rank; of the idlest rank;
        bytes on all ranks together.
    """
    mean, most, least, size = [], [], [], []
    for o in options:
        common = float(o.everywhere[:-1].sum())
        ranks = o.loads[..., :-1].sum(-1)
        mean.append(float(ranks.sum()) / num_ranks + common)
        most.append(float(ranks.max()) + common)
        least.append(common + (float(ranks.min()) if ranks.size == num_ranks else 0.0))
        size.append(float(o.loads[..., -1].sum()) + float(o.everywhere[-1]) * num_ranks)
    return np.array(mean), np.array(most), np.array(least), np.array(size)
