"""Every module kind x layout x optimizer x mesh equals the unsharded module on the global batch."""

from __future__ import annotations

import math

import pytest

from tests.equality import KINDS, MESHES, run_matrix, run_random
from tests.ranks import run_ranks

# Those with a tensor axis have a sample of the matrix in test_tensor_axis.py; the order of axes changes little.
_SLOW = {name for name, (shape, axes) in MESHES.items() if math.prod(shape) > 4 or "tp" in axes}
_SLOW |= {"shard2xreplicate2"}
_SLOW_KINDS = {
    "dp4": ("bag_mean", "bag_weighted"),
    "host2xlocal2": ("bag", "bag_mean", "ebc_weighted", "embedding"),
    "replicate2xshard2": ("bag", "bag_mean", "bag_weighted", "ebc_weighted", "embedding"),
}


def _cases() -> list[object]:
    return [
        pytest.param(m, k, marks=[pytest.mark.slow] if m in _SLOW or k in _SLOW_KINDS.get(m, ()) else [])
        for m in MESHES
        for k in KINDS
    ]


@pytest.mark.parametrize(("mesh", "kind"), _cases())
def test_equals_unsharded(mesh: str, kind: str) -> None:
    world = max(1, math.prod(MESHES[mesh][0]))
    failed = run_ranks(world, run_matrix, mesh, kind, timeout=300)
    assert not any(failed), "\n".join(sorted({line for of_rank in failed for line in of_rank}))


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [("dp2", "ebc"), ("dp4", "ebc_weighted"), ("dp4", "ec"), ("host2xlocal2", "ebc"), ("replicate2xshard2", "ebc")],
)
def test_random_rectangles(mesh: str, kind: str) -> None:
    world = math.prod(MESHES[mesh][0])
    failed = run_ranks(world, run_random, mesh, kind, range(50 if mesh == "dp4" else 10), timeout=300)
    assert not any(failed), "\n".join(sorted({line for of_rank in failed for line in of_rank}))
