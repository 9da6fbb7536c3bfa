"""The step's matrix in `make bench`: its cells cover what they say, its bound counts the bytes that a person would."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.bench import floor
from tests.bench.step_cells import KINDS, MATRIX, OPTIMIZERS, QUICK, Cell
from tests.bench.step_report import Row, goals
from tests.bench.workload import Workload


def test_every_two_values_meet() -> None:
    cells = [
        (c.kind, c.ranks, c.work.batch_size, c.work.max_bag, c.work.dim, c.work.skewed, c.work.optimizer)
        for c in MATRIX
    ]
    for one, other in combinations(zip(*cells, strict=True), 2):
        missing = set(product(set(one), set(other))) - set(zip(one, other, strict=True))
        assert missing <= {("table-row-wise", 2), ("table-row-wise", 16)}  # it has four ranks
    assert {c.kind for c in QUICK} == set(KINDS) and {c.work.optimizer for c in QUICK} == set(OPTIMIZERS)


# One row of four numbers, on the first of two ranks: what each sends, and what passes through each one's memory.
ROW, ID = 16, 4


@pytest.mark.parametrize(
    ("batch", "pooled", "wire", "memory"),
    [
        # Sums of one bag: the row read, read and written; for each rank a sum written and its gradient read.
        (1, True, (ROW, ROW + ID), (3 * ROW + 2 * ID + 2 * 2 * ROW, 0)),
        # Of 100 bags on another rank the row itself travels: it is written there 100 times, and as many gradients read.
        (100, True, (ROW, ROW + ID), (3 * ROW + 200 * ID + 2 * 100 * ROW + 2 * ROW, 2 * 100 * ROW)),
        (100, False, (ROW, ROW + ID), (3 * ROW + 200 * ID + 2 * 100 * ROW + 2 * ROW, 2 * 100 * ROW)),
    ],
)
def test_least_bytes(batch: int, pooled: bool, wire: tuple[int, int], memory: tuple[int, int]) -> None:
    kind = "table-wise" if pooled else "sequence, table-wise"
    least = floor.least_bytes(Cell(kind, 2, Workload((1,), 4, batch, pooled=pooled, optimizer="sgd")))
    assert tuple(least.wire.tolist()) == wire and tuple(least.memory.tolist()) == memory
    assert tuple(least.rows.tolist()) == (3 * ROW, 0)
    ((rows, columns, named),) = least.touched[0]  # of each batch that is gathered in turns
    assert (rows, columns) == (1, 4) and [list(of) for of in named] == [[0]] * len(named) and not least.touched[1]


def test_means_come_with_those_of_thirds() -> None:
    cells = [Cell("row-wise", 2, Workload((1,), 4, 8, optimizer=of)) for of in OPTIMIZERS]
    rows = [
        Row(cell, 2.0, 1.0, [1.0, 2.0, 4.0, 1.0, 2.0, 4.0], 1.0, 1.0, 1e-3, 5e-4, 3, 2 + i)
        for i, cell in enumerate(cells)
    ]
    found = {result.name: result for result in goals(rows)}
    assert found["step: geometric mean, SGD of 1"].spread == (1.0, 4.0)
    assert found["step: ours by the bound of the stream, mean"].ours == 1.0
    assert found["step: ours by the bound of the rows, mean"].ours == 2.0
    assert found["step: cells of 2 with more memory than TorchRec"].verdict == "OK"
    assert found["step: cells under 1.15 in some third of the rounds"].ours == 2
