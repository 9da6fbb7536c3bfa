"""Columns that are placed in runs end where they would one by one, and come back from there."""

from __future__ import annotations

import random

import pytest
import torch

from sharders.embedding.results.columns import Placing, runs_of
from sharders.embedding.results.ragged import Columns

DIM = 4


def _one_by_one(sources: list[list[Columns]], values: list[torch.Tensor], features: list[Columns]) -> torch.Tensor:
    """(rows, width): every feature's columns, summed over the sources in their order."""
    columns = []
    for feature, first, width in features:
        total = torch.zeros(len(values[0]), width)
        for of_source, matrix in zip(sources, values, strict=True):
            parts = matrix.split([c[2] for c in of_source], 1)
            for (f, column, num), part in zip(of_source, parts, strict=True):
                if f == feature:
                    total[:, column - first : column - first + num] += part
        columns.append(total)
    return torch.cat(columns, 1)


def _given(matrix: torch.Tensor, sources: list[list[Columns]], features: list[Columns]) -> list[torch.Tensor]:
    """What each source's columns are in a matrix of the features'."""
    by_feature = dict(zip((f for f, _, _ in features), matrix.split([c[2] for c in features], 1), strict=True))
    return [torch.cat([matrix[:, :0], *(by_feature[f][:, a : a + n] for f, a, n in of)], 1) for of in sources]


@pytest.mark.parametrize("kernel", [None, "torch"])
def test_runs_place_what_single_columns_do(kernel: str | None) -> None:
    rng = random.Random(0)
    for trial in range(100):
        features = [(f, 0, DIM * rng.choice((1, 1, 1, 2, 5))) for f in range(12)]
        sources: list[list[Columns]] = [[], [], []]
        for i, (f, _, width) in enumerate(features):  # round the sources, columns or rows cut, or anywhere
            if trial % 3 == 0:
                sources[i % 3].append((f, 0, width))
            elif trial % 3 == 1:
                sources[0].append((f, 0, width // 2))
                sources[1].append((f, width // 2, width - width // 2))
                sources[2].append((f, 0, width))
            else:
                for _ in range(rng.choice((1, 2))):
                    sources[rng.randrange(3)].append((f, 0, width))
        runs = runs_of(dict(enumerate(sources)), features)
        values = [torch.randint(-99, 99, (3, sum(c[2] for c in of))).float() for of in sources]
        wide = torch.full((3, 5 + sum(c[2] for c in features)), 7.0)
        Placing(runs, kernel)(dict(enumerate(values)), wide[:, 2:-3], 0.5)
        assert torch.equal(wide[:, 2:-3], 0.5 * _one_by_one(sources, values, features))
        assert (wide[:, :2] == 7).all() and (wide[:, -3:] == 7).all()
        for grad in (torch.rand(3, 1), torch.rand(3, wide.shape[1] - 5)):  # one without memory for each column
            given = grad.expand(3, wide.shape[1] - 5)
            for i, (values_back, expected) in enumerate(zip(values, _given(given, sources, features), strict=True)):
                back = Placing([run.back(of) for run in runs for of in run.sources if of.number == i], kernel)
                back({0: given}, values_back, 0.25)
                assert torch.equal(values_back, 0.25 * expected)


def test_tables_dealt_out_evenly_are_one_run_of_each_rank() -> None:
    features = [(f, 0, DIM) for f in range(8)]
    by_table = runs_of({0: features[::2], 1: features[1::2]}, features)
    assert [run.num for run in by_table] == [4, 4]
    by_column = runs_of({i: [(f, 2 * i, 2) for f in range(8)] for i in range(2)}, features)
    assert [run.num for run in by_column] == [8, 8]
    by_row = runs_of(dict.fromkeys(range(3), features), features)
    assert [(run.num, run.width, run.numbers) for run in by_row] == [(1, 8 * DIM, (0, 1, 2))]
