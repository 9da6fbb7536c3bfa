"""TorchRec's managed collision on a mesh: maps, evictions, results and weights as in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.torchrec_dropin import raw_ids

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

SAMPLE = [
    ("dp2", "row_wise", {}),
    ("dp2", "mixed", {"kind": "ec", "policy": "LRU", "interval": 1, "optimizer": "adagrad"}),
]


def _world(at: str) -> int:
    from tests.equality import MESHES

    size = 1
    for each in MESHES[at][0]:
        size *= each
    return size


@pytest.mark.parametrize(("at", "layout", "options"), SAMPLE)
def test_two_ranks(at: str, layout: str, options: dict[str, Any]) -> None:
    for filled in run_ranks(2, raw_ids.check, at, layout, **options):
        assert min(filled) > 10, filled


MANY = [
    (at, layout)
    for at, layouts in {
        "single": ("table_wise", "row_wise"),
        "dp1": ("row_wise",),
        "dp2": ("table_wise", "all_on_last", "column_wise", "data_parallel", "uneven", "random", "row_reversed"),
        "dp4": ("row_wise", "table_wise", "grid", "mixed", "random", "row_reversed"),
        "replicate2": ("row_wise", "data_parallel"),
        "replicate2xshard2": ("row_wise", "mixed"),
        "host2xlocal2": ("table_row_wise", "row_wise"),
        "tp2": ("row_wise", "column_wise"),
        "shard2xtp2": ("mixed",),
    }.items()
    for layout in layouts
]


@pytest.mark.slow
@pytest.mark.parametrize("policy", raw_ids.POLICIES)
@pytest.mark.parametrize(("at", "layout"), MANY)
def test_every_plan(at: str, layout: str, policy: str) -> None:
    """Maps fill, ids are evicted; batches that grow, so that the history has no room for all; steps of evaluation."""
    for i, kind in enumerate(("ebc", "ec")):
        options: dict[str, Any] = {"kind": kind, "policy": policy, "interval": 3 - 2 * i, "modes": "ttettttte"}
        options |= {"optimizer": "adagrad" if i else None, "sizes": (3, 8, 12) if i else (8,), "steps": 9}
        for filled in run_ranks(_world(at), raw_ids.check, at, layout, timeout=200, **options):
            assert min(filled) > 10, filled
