"""Columns that are moved in runs end where they would one by one."""

from __future__ import annotations

import random

import torch

from sharders.embedding.pooled_output import Move, compile_moves, runs_of

DIM = 4


def _apply(moves: list[Move], sources: list[torch.Tensor], width: int) -> torch.Tensor:
    out = torch.zeros(3, width)
    for source, at, column, num, add in moves:
        target = out[:, column : column + num]
        target.copy_(sources[source][:, at : at + num] + (target if add else 0))
    return out


def test_runs_move_what_single_moves_do() -> None:
    rng = random.Random(0)
    for trial in range(200):
        features = [(f, 0, DIM * rng.choice((1, 1, 1, 2))) for f in range(12)]
        sources: list[list[tuple[int, int, int]]] = [[], [], []]
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
        moves = compile_moves(sources, features)
        runs = runs_of(moves)
        assert sum(run.num for run in runs) == len(moves)
        values = [torch.rand(3, sum(c[2] for c in of)) for of in sources]
        width = sum(c[2] for c in features)
        expected, out = _apply(moves, values, width), torch.zeros(3, width)
        for run in runs:
            target, source = run.of_target(out), run.of_source(values[run.first.source])
            target.add_(source) if run.first.add else target.copy_(source)
        assert torch.equal(out, expected)
        given = torch.rand(1, width).expand(3, -1)  # a gradient without memory of its own for each row
        assert all(run.of_target(given).shape == run.of_source(values[run.first.source]).shape for run in runs)


def test_tables_dealt_out_evenly_are_one_run_of_each_rank() -> None:
    features = [(f, 0, DIM) for f in range(8)]
    by_table = compile_moves([features[::2], features[1::2]], features)
    assert [run.num for run in runs_of(by_table)] == [4, 4]
    by_column = compile_moves([[(f, 2 * i, 2) for f in range(8)] for i in range(2)], features)
    assert [run.num for run in runs_of(by_column)] == [8, 8]
