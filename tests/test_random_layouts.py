"""Modules whose tables lie in any way beside each other, by seeds: every kind of batch, partials always, any wire."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from unittest import mock

import pytest
import torch

import sharders
from dmp import Layout, ShardingEnv, rectangles
from sharders.embedding.data_path import engine
from sharders.embedding.exchange.stages import TwoStages
from sharders.embedding.ids import input_dist
from sharders.embedding.lookup import distinct
from sharders.embedding.results import row_places
from tests.equality import MESHES, OPTIMIZERS, check_case, env_of, layouts_for, random_rectangles
from tests.ranks import run_ranks

KINDS = ("ebc", "ebc_weighted", "ebc_vbe", "ebc_weighted_vbe", "bag", "bag_mean", "bag_weighted", "ec", "ec_vbe")
WIRES = (None, None, torch.bfloat16, torch.float16, (None, torch.bfloat16))
NAMES = ("row_wise", "data_parallel", "table_wise", "column_wise", "uneven", "row_subset", "row_reversed")
SHARDERS = ("EmbeddingBagCollection", "EmbeddingCollection", "EmbeddingBag", "Embedding")


def _settles(draw: random.Random) -> Callable[..., tuple[bool, list[int]]]:
    """Each rank would have other tables' results go straight in each batch."""

    def settle(self: TwoStages, *_: object) -> tuple[bool, list[int]]:
        return draw.random() < 0.1, [i for i in range(len(self.tables)) if draw.random() < 0.9]

    return settle


def _case(seed: int, env: ShardingEnv) -> None:
    draw, named = random.Random(seed), layouts_for(env)
    wire = draw.choice(WIRES)
    optimizer = draw.choice(OPTIMIZERS if wire is None else OPTIMIZERS[:2])  # others divide what was rounded
    chosen = [draw.choice((*NAMES, *["random"] * 4)) for _ in range(8)]

    def layout(i: int, shape: tuple[int, int], env: ShardingEnv) -> Layout:
        if chosen[i] == "random":
            return rectangles(random_rectangles(shape, env.table_size, 97 * seed + i))
        return named[chosen[i]](i, shape, env)

    of_wire = [getattr(sharders, f"{name}Sharder")(wire=wire) for name in SHARDERS]
    settle = _settles(random.Random(100 * seed + env.rank)) if draw.random() < 0.7 else TwoStages.settle
    with (
        mock.patch.object(TwoStages, "settle", settle),
        mock.patch.object(input_dist, "MOST_FILLED", draw.choice((input_dist.MOST_FILLED, 1.0))),
        mock.patch.multiple(distinct, FEWEST_IDS=0, FEW_IDS=1),
        mock.patch.object(row_places, "READ_APART", draw.choice((0, row_places.READ_APART))),
        mock.patch.object(row_places, "FEW", 0 if seed % 2 else row_places.FEW),
        mock.patch.object(engine, "are_fewer", return_value=draw.random() < 0.5),
    ):
        kind, near = KINDS[seed % len(KINDS)], 1e-5 if wire is None else 0.1
        check_case(kind, layout, optimizer, env, near=near, sharders=of_wire)


def _failing(mesh: str, seeds: range) -> list[str]:
    env, failed = env_of(mesh), []
    for seed in seeds:
        try:
            _case(seed, env)
        except AssertionError as error:
            failed.append(f"seed {seed}: {str(error)[:400]}")
    return failed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "seeds"),
    [
        ("dp2", range(36)),
        ("dp4", range(100, 118)),
        ("replicate2xshard2", range(200, 209)),
        ("host2xlocal2", range(300, 327)),
        ("replicate2xhost2xlocal2", range(400, 409)),
    ],
    ids=str,
)
def test_any_layouts_side_by_side(mesh: str, seeds: range) -> None:
    failed = run_ranks(math.prod(MESHES[mesh][0]), _failing, mesh, seeds, timeout=500)
    assert not any(failed), "\n".join(sorted({line for of_rank in failed for line in of_rank}))
