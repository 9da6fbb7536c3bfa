"""Layouts: what each constructor cuts, that a cover is exact, and that they are data."""

from __future__ import annotations

import copy
import json
import pickle
import random
from math import prod
from typing import Any

import pytest

from dmp import (
    Layout,
    Shard,
    ShardError,
    ShardingEnv,
    check_cover,
    column_wise,
    colwise,
    data_parallel,
    fully_sharded,
    grid,
    is_replicated,
    rectangles,
    row_wise,
    table_row_wise,
    table_wise,
)
from dmp.layouts.dense import DenseLayout
from dmp.layouts.tables import TableLayout
from tests.equality import random_rectangles

FLAT = ShardingEnv.abstract((4,), ("dp",), "cpu")
HOSTS = ShardingEnv.abstract((3, 2), ("host", "local"), "cpu")


def cut(layout: Layout, shape: tuple[int, ...], env: ShardingEnv = FLAT) -> list[tuple[tuple[int, ...], ...]]:
    """(offsets, sizes, (rank,)) of each shard."""
    return [(s.offsets, s.sizes, (s.rank,)) for s in layout.shards(shape, env)]


def test_table_wise() -> None:
    assert cut(table_wise(3), (5, 8)) == [((0, 0), (5, 8), (3,))]


def test_row_wise_blocks_are_ceil_and_in_rank_order() -> None:
    assert cut(row_wise(), (10, 8)) == [
        ((0, 0), (3, 8), (0,)),
        ((3, 0), (3, 8), (1,)),
        ((6, 0), (3, 8), (2,)),
        ((9, 0), (1, 8), (3,)),
    ]
    assert cut(row_wise([3, 1]), (5, 2)) == [((0, 0), (3, 2), (3,)), ((3, 0), (2, 2), (1,))]
    assert cut(row_wise([2]), (5, 2)) == [((0, 0), (5, 2), (2,))]
    assert cut(row_wise(), (6,)) == [((0,), (2,), (0,)), ((2,), (2,), (1,)), ((4,), (2,), (2,))]  # rank 3 owns nothing


def test_row_wise_more_ranks_than_rows() -> None:
    assert cut(row_wise(), (2, 4)) == [((0, 0), (1, 4), (0,)), ((1, 0), (1, 4), (1,))]
    assert cut(row_wise(), (1, 4)) == [((0, 0), (1, 4), (0,))]


def test_column_wise_is_even_in_multiples_of_4() -> None:
    assert [s[1][1] for s in cut(column_wise([0, 1]), (5, 16))] == [8, 8]
    assert [s[1][1] for s in cut(column_wise([0, 1, 2]), (5, 16))] == [8, 4, 4]
    assert [s[1][1] for s in cut(column_wise([0, 1]), (5, 10))] == [4, 6]
    assert cut(column_wise([2, 2]), (5, 8)) == [((0, 0), (5, 4), (2,)), ((0, 4), (5, 4), (2,))]
    assert cut(column_wise([1, 0], widths=[1, 6]), (5, 7)) == [((0, 0), (5, 1), (1,)), ((0, 1), (5, 6), (0,))]
    with pytest.raises(ShardError, match=r"7 columns cannot be cut into 2 blocks of at least 4.*widths="):
        column_wise([0, 1]).shards((5, 7), FLAT)


def test_table_row_wise() -> None:
    assert [s.rank for s in table_row_wise(1).shards((10, 4), HOSTS)] == [2, 3]
    several = table_row_wise([0, 2]).shards((10, 4), HOSTS)
    assert [(s.rank, s.offsets[0], s.sizes[0]) for s in several] == [(0, 0, 3), (1, 3, 3), (4, 6, 3), (5, 9, 1)]


def test_grid() -> None:
    assert cut(grid([[0, 1], [2, 3]]), (5, 8)) == [
        ((0, 0), (3, 4), (0,)),
        ((0, 4), (3, 4), (1,)),
        ((3, 0), (2, 4), (2,)),
        ((3, 4), (2, 4), (3,)),
    ]
    assert len(cut(grid([[0], [1], [2]]), (2, 4))) == 2  # a row block without rows is left out


def test_data_parallel_is_whole_on_every_rank() -> None:
    shards = data_parallel().shards((5, 8), FLAT)
    assert [s.rank for s in shards] == [0, 1, 2, 3] and is_replicated(shards, (5, 8))
    single = data_parallel().shards((5, 8), ShardingEnv.single())
    assert len(single) == 1 and not is_replicated(single, (5, 8))
    replicated = ShardingEnv.abstract((2, 4), ("replicate", "shard"))
    assert len(data_parallel().shards((5, 8), replicated)) == 4  # copies along the replicate axis are not counted


def test_one_rank_needs_no_other_plan() -> None:
    env = ShardingEnv.single()
    for layout in (table_wise(0), row_wise(), column_wise([0, 0]), grid([[0, 0], [0, 0]]), data_parallel()):
        check_cover(layout.shards((7, 8), env), (7, 8), 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: table_wise(4).shards((5, 8), FLAT), ["rank 4", "0..3"]),
        (lambda: row_wise([0, 7]).shards((5, 8), FLAT), ["rank 7", "0..3"]),
        (lambda: grid([[0, 9]]).shards((5, 8), FLAT), ["rank 9", "0..3"]),
        (lambda: column_wise([0, 1], widths=[4, 5]).shards((5, 8), FLAT), ["sum to 8", "(4, 5)"]),
        (lambda: column_wise([0, 1], widths=[8, 0]).shards((5, 8), FLAT), ["positive", "(8, 0)"]),
        (lambda: column_wise([0, 1], widths=[8]).shards((5, 8), FLAT), ["2 positive", "(8,)"]),
        (lambda: column_wise([0]).shards((5,), FLAT), ["column_wise", "(5,)"]),
        (lambda: table_row_wise(0).shards((5, 8), FLAT), ["two shard axes", "(4,)"]),
        (lambda: table_row_wise(3).shards((5, 8), HOSTS), ["host 3", "size 3"]),
        (lambda: table_wise(-1), ["-1"]),
        (lambda: table_wise("0"), ["'0'"]),
        (lambda: table_wise(True), ["True"]),
        (lambda: table_wise(None), ["None"]),
        (lambda: row_wise(3), ["ranks", "3"]),
        (lambda: row_wise([]), ["at least one rank"]),
        (lambda: row_wise("01"), ["'0'"]),
        (lambda: column_wise(2), ["ranks", "2"]),
        (lambda: column_wise([0, 1], widths=[2.5, 5.5]), ["2.5"]),
        (lambda: column_wise([0, 1], widths=8), ["widths", "8"]),
        (lambda: grid([]), ["at least 1x1"]),
        (lambda: grid([[0, 1], [2]]), ["one length"]),
        (lambda: grid([0, 1]), ["ranks", "0"]),
        (lambda: rectangles([]).shards((5, 8), FLAT), ["cover 0 of 40"]),
        (lambda: rectangles([Shard((0,), (5,), 0)]).shards((5, 8), FLAT), ["inside", "(5, 8)"]),
        (lambda: rectangles([((0, 0), (5, 8))]), ["Shard", "((0, 0), (5, 8))"]),
        (lambda: Layout("diagonal").shards((5, 8), FLAT), ["'diagonal'", "row_wise"]),
    ],
)
def test_errors(make: Any, words: list[str]) -> None:
    with pytest.raises(ShardError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ([Shard((0, 0), (3, 8), 0), Shard((2, 0), (3, 8), 1)], ["overlap"]),
        ([Shard((0, 0), (5, 5), 0), Shard((0, 4), (5, 4), 1)], ["overlap"]),
        ([Shard((0, 0), (5, 8), 0), Shard((0, 0), (1, 1), 1)], ["overlap"]),
        ([Shard((0, 0), (5, 4), 0)], ["20 of 40"]),
        ([Shard((0, 0), (2, 8), 0), Shard((3, 0), (2, 8), 0)], ["32 of 40"]),
        ([Shard((0, 0), (6, 8), 0)], ["inside", "(5, 8)"]),
        ([Shard((-1, 0), (6, 8), 0)], ["inside"]),
        ([Shard((0, 0), (5, 0), 0), Shard((0, 0), (5, 8), 1)], ["at least 1"]),
        ([Shard((0, 0), (5, 8), 4)], ["rank 4", "0..3"]),
        ([Shard((0, 0), (5, 8), -1)], ["-1"]),
        ([Shard((0, 0), (5, 8), 0), Shard((0, 0), (5, 8), 1)], ["every rank", "[0, 1]"]),
        ([Shard((0, 0), (5, 8), 0)] * 4, ["every rank", "[0, 0, 0, 0]"]),
    ],
)
def test_cover_is_exact(shards: list[Shard], words: list[str]) -> None:
    with pytest.raises(ShardError) as error:
        check_cover(shards, (5, 8), 4)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("shape", [(0, 8), (5, 0)])
def test_nothing_is_not_placed(shape: tuple[int, int]) -> None:
    for layout in (table_wise(0), data_parallel()):
        with pytest.raises(ShardError, match="no elements"):
            layout.check(shape, ShardingEnv.abstract((2,), ("dp",), "cpu"))


def _is_cover(shards: list[Shard], shape: tuple[int, int]) -> bool:
    """By counting, element by element."""
    seen = [0] * prod(shape)
    for s in shards:
        for r in range(s.offsets[0], s.offsets[0] + s.sizes[0]):
            for c in range(s.offsets[1], s.offsets[1] + s.sizes[1]):
                seen[r * shape[1] + c] += 1
    return set(seen) == {1}


def test_random_rectangles() -> None:
    """Random covers pass; the same with one rectangle moved, grown, lost or doubled only where it still covers."""
    rng = random.Random(0)
    broken = 0
    for seed in range(300):
        shape = (rng.randint(1, 9), rng.randint(1, 9))
        shards = random_rectangles(shape, 4, seed)
        check_cover(shards, shape, 4)
        assert sorted(rectangles(shards).shards(shape, FLAT)) == sorted(shards)
        i = rng.randrange(len(shards))
        (r, c), (n, m) = shards[i].offsets, shards[i].sizes
        bad = list(shards)
        change = rng.choice(["move", "grow", "lose", "double"])
        if change == "move":
            at = (rng.randint(0, shape[0] - n), rng.randint(0, shape[1] - m))
            bad[i] = Shard(at, (n, m), 0)
        elif change == "grow":
            bad[i] = Shard((r, c), (rng.randint(1, shape[0] - r), rng.randint(1, shape[1] - c)), 0)
        elif change == "lose":
            bad.pop(i)
        else:
            bad.append(Shard((r, c), (n, m), 1))
        if _is_cover(bad, shape):
            check_cover(bad, shape, 4)
        else:
            broken += 1
            with pytest.raises(ShardError):
                check_cover(bad, shape, 4)
    assert broken > 100


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (table_wise(1), "table_wise(1)"),
        (row_wise(), "row_wise()"),
        (row_wise([1, 0]), "row_wise([1, 0])"),
        (column_wise([0, 1]), "column_wise([0, 1])"),
        (column_wise((0, 1), widths=(3, 5)), "column_wise([0, 1], widths=[3, 5])"),
        (table_row_wise(1), "table_row_wise(1)"),
        (table_row_wise([1, 0]), "table_row_wise([1, 0])"),
        (grid([[0, 1], [2, 3]]), None),
        (rectangles([Shard((0, 0), (5, 8), 2)]), None),
        (rectangles([((0, 0), (5, 8), 2)]), None),
        (data_parallel(), "data_parallel()"),
    ],
)
def test_is_data(layout: Layout, text: str | None) -> None:
    """JSON and back gives the same value, which is hashable and prints as it is written."""
    back = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert back == layout and hash(back) == hash(layout)
    assert text is None or str(layout) == text


def test_relocated_keeps_everything_but_ranks() -> None:
    env = ShardingEnv.abstract((2, 2), ("host", "local"), "cpu")
    moved = {0: 3, 1: 2, 2: 1, 3: 0}
    two = rectangles([((0, 0), (2, 4), 0), ((2, 0), (2, 4), 1)])
    pairs = {
        table_wise(0): table_wise(3),
        column_wise([0, 1], widths=[4, 12]): column_wise([3, 2], widths=[4, 12]),
        row_wise([1, 0]): row_wise([2, 3]),
        grid([[0, 1], [2, 3]]): grid([[3, 2], [1, 0]]),
        two: rectangles([((0, 0), (2, 4), 3), ((2, 0), (2, 4), 2)]),
        row_wise(): row_wise(),
        data_parallel(): data_parallel(),
        colwise(): colwise(),
    }
    for before, after in pairs.items():
        assert before.relocated(moved, env) == after
    assert table_row_wise(0).relocated({0: 2, 1: 3}, env) == table_row_wise(1)
    assert table_row_wise([0, 1]).named_ranks(env) == (0, 2) and grid([[3, 1]]).named_ranks(env) == (3, 1)
    assert row_wise().named_ranks(env) == data_parallel().named_ranks(env) == fully_sharded().named_ranks(env) == ()


def test_two_types() -> None:
    """Both are `Layout`s, written by hand too, and come back from pickles, of when they were one type as well."""
    for layout, kind in ((row_wise([1, 0]), TableLayout), (colwise(dim=1), DenseLayout)):
        assert type(layout) is type(Layout(layout.name, layout.args)) is kind and isinstance(layout, Layout)
        as_it_was = object.__new__(Layout)
        as_it_was.__dict__.update(name=layout.name, args=layout.args)
        for back in (copy.deepcopy(layout), *(pickle.loads(pickle.dumps(x)) for x in (layout, as_it_was))):
            assert back == layout and type(back) is kind


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"layout": "diagonal"}, ["'diagonal'", "row_wise"]),
        ({}, ["None", "row_wise"]),
        ({"layout": "table_wise"}, ["'table_wise'", "rank"]),
        ({"layout": "row_wise", "host": 1}, ["'row_wise'", "host"]),
        ({"layout": "table_wise", "rank": "x"}, ["'x'"]),
        ({"layout": "rectangles", "shards": [[1]]}, ["Shard", "[1]"]),
    ],
)
def test_bad_json(data: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ShardError) as error:
        Layout.from_json(data)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_many_ranks_are_written_short() -> None:
    env = ShardingEnv.abstract((512, 8), ("host", "local"))
    shape = (10_000_000, 128)
    columns = grid([[i, 2048 + i, 1024 + i] for i in range(1024)], widths=[64, 32, 32])
    for layout in (row_wise(range(2048, 4096)), columns, table_row_wise(range(256))):
        text = json.dumps(layout.to_json())
        assert len(text) < 120
        assert Layout.from_json(json.loads(text)) == layout
        assert len(str(layout)) < 120
        assert eval(str(layout)) == layout  # as one would write it
        layout.check(shape, env)
    assert [s.sizes for s in columns.shards(shape, env)[:3]] == [(9766, 64), (9766, 32), (9766, 32)]
    for wrong in ({"range": [0, 1 << 40]}, {"range": [3, 3]}, {"zip": [[0, 4], [0, 5]]}, {"zip": []}, {"list": [1]}):
        with pytest.raises(ShardError, match="ranks"):
            Layout.from_json({"layout": "row_wise", "ranks": wrong})


@pytest.mark.parametrize(
    ("layout", "shape", "text"),
    [
        (row_wise([0, 9]), (10, 8), "rank 9"),
        (table_row_wise(4), (10, 8), "host 4"),
        (grid([[0, 1], [2, 9]]), (10, 8), "rank 9"),
        (grid([[0, 1]], widths=[4, 3]), (10, 8), "widths must be 2"),
        (grid([[0, 1]]), (10, 4), "cannot be cut into 2"),
    ],
    ids=str,
)
def test_checked_without_shards_as_with_them(layout: Layout, shape: tuple[int, int], text: str) -> None:
    env = ShardingEnv.abstract((4, 2), ("host", "local"))
    for check in (layout.check, layout.shards):
        with pytest.raises(ShardError, match=text):
            check(shape, env)
    row_wise([0, 9]).check((1, 8), env)  # a rank that would get no rows is not looked at
