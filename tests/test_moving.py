"""Which parts of rectangles go to whom: each wanted element comes once, from who has it, and both sides agree."""

from __future__ import annotations

import pytest
import torch

from dmp import ShardError
from dmp.moving.routes import Rectangle, find_routes
from tests.equality import random_rectangles

SHAPE, RANKS = (13, 9), 4


def by_rank(seed: int) -> list[list[Rectangle]]:
    held: list[list[Rectangle]] = [[] for _ in range(RANKS)]
    for shard in random_rectangles(SHAPE, RANKS, seed):
        held[shard.rank].append((shard.offsets, shard.sizes))
    return held


def area(at: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(at, size, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_every_element_comes_once_from_who_has_it(seed: int) -> None:
    old, new = by_rank(seed), by_rank(1000 + seed)
    routes = [find_routes(SHAPE, old, new, rank) for rank in range(RANKS)]
    for rank, mine in enumerate(routes):
        owned, wanted, came = (torch.zeros(SHAPE, dtype=torch.int64) for _ in range(3))
        for rectangles, counts in ((old[rank], owned), (new[rank], wanted)):
            for at, size in rectangles:
                counts[area(at, size)] += 1
        for part in [*mine.kept, *(p for parts in mine.received.values() for p in parts)]:
            came[area(*part.shared)] += 1
        assert torch.equal(came, wanted)
        assert all(owned[area(*part.shared)].all() for part in mine.kept), "what a rank has does not travel"
        assert not any(owned[area(*p.shared)].any() for parts in mine.received.values() for p in parts)
        assert rank not in mine.sent and rank not in mine.received
        assert mine.received == {r: routes[r].sent[rank] for r in range(RANKS) if rank in routes[r].sent}


def test_what_all_have_whole_is_nobodys_to_send() -> None:
    everywhere = [[((0, 0), SHAPE)] for _ in range(RANKS)]
    routes = find_routes(SHAPE, everywhere, by_rank(0), 1)
    assert routes.kept and not routes.sent and not routes.received


def test_what_is_not_all_there_is_an_error() -> None:
    old = by_rank(0)
    old[0] = []
    with pytest.raises(ShardError, match="of 117 elements"):
        find_routes(SHAPE, old, by_rank(1), 0)
