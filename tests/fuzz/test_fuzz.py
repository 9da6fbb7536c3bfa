"""Every probe ends in a named error that changes nothing, or in the unsharded module's numbers; see the package."""

from __future__ import annotations

import pytest

from tests.fuzz.run import CATEGORIES, run, table

_SAMPLE = {
    "inputs": 6,
    "plans": 6,
    "meshes": 2,
    "sources": 12,
    "misuse": 3,
    "divergent": 1,
    "programs": 2,
    "keyed programs": 2,
}


@pytest.mark.parametrize("name", CATEGORIES)
def test_sample(name: str) -> None:
    found = run(name, seed=11, count=_SAMPLE[name])
    assert len(found) == _SAMPLE[name]
    assert all(outcome.is_good for outcome in found), table({name: found})


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CATEGORIES)
def test_whole(name: str, seed: int) -> None:
    found = run(name, seed)
    assert all(outcome.is_good for outcome in found), table({name: found})


@pytest.mark.slow
def test_a_whole_run_is_large_enough() -> None:
    assert sum(count for _, _, count in CATEGORIES.values()) >= 500
