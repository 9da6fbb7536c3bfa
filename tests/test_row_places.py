"""Rows that come in many short pieces are put into their dim's result by one compiled call, and not piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

import dmp
from dmp import Layout, column_wise, data_parallel, table_wise
from sharders.embedding.lookup import numba_kernel
from sharders.embedding.results import unpooled_output
from tests.equality import env_of
from tests.ranks import run_ranks

LAYOUTS: dict[str, Callable[[int], Layout]] = {
    "in turns": lambda i: table_wise(i % 2),
    "some on all ranks": lambda i: data_parallel() if i % 4 == 0 else table_wise(i // 4 % 2),
    "some cut": lambda i: column_wise([0, 1]) if i == 5 else table_wise(i % 2),
}


def _placed(layout: str, lengths: list[int]) -> int:
    """How many pieces are put one by one in a call whose features have so many ids in each bag, in turns."""
    names = [f"t{i}" for i in range(12)]
    module = EmbeddingCollection([EmbeddingConfig(9, 8, name, feature_names=[name]) for name in names])
    plan = {f"embeddings.{name}.weight": LAYOUTS[layout](i) for i, name in enumerate(names)}
    env = env_of("dp2")
    model = dmp.DistributedModelParallel(module, env, plan=plan)
    whole = dmp.to_unsharded(model)
    draw = torch.Generator().manual_seed(env.rank)
    of_bags = torch.tensor([lengths[i % len(lengths)] for i in range(len(names)) for _ in range(3)])
    ids = torch.randint(0, 9, (int(of_bags.sum()),), generator=draw)
    features = KeyedJaggedTensor(names, ids, lengths=of_bags)
    place = unpooled_output._place
    with mock.patch.object(unpooled_output, "_place", side_effect=place) as one_by_one:
        found = model(features)
    for name, expected in whole(features).items():
        assert torch.equal(found[name].values(), expected.values()), name
    return one_by_one.call_count


@pytest.mark.skipif(bool(numba_kernel.problem()), reason="it is numba that compiles it")
@pytest.mark.parametrize(
    ("layout", "lengths", "placed"),
    [
        ("in turns", [1], 0),
        ("in turns", [0, 2, 0, 5], 0),
        ("in turns", [0], None),
        ("some on all ranks", [1, 3], None),  # which are put one by one
        ("some cut", [2], None),
    ],
)
def test_results_are_rows_to_the_bit(layout: str, lengths: list[int], placed: int | None) -> None:
    counts = run_ranks(2, _placed, layout, lengths)
    assert placed is None or counts == [placed] * 2
