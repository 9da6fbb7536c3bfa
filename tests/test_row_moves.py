"""Rows read for ids, and gradients summed for rows: to the bit what torch's operators give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from sharders.embedding.lookup import numba_kernel
from sharders.embedding.results import row_moves

pytestmark = pytest.mark.skipif(bool(numba_kernel.problem()), reason="numba compiles what is shown here")

LARGE = 5000  # rows of results that are written past the caches, and shared among threads


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 12, 16, 64, 200])
@pytest.mark.parametrize("num", [0, 7, LARGE])
def test_rows_are_gathered(num: int, width: int, dtype: torch.dtype) -> None:
    matrix, rows = torch.randn(300, width, dtype=dtype), torch.randint(0, 300, (num,), dtype=torch.int32)
    assert row_moves.can_move(None, [matrix])
    assert torch.equal(row_moves.gathered(matrix, rows, None), matrix.index_select(0, rows))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width", [1, 12, 16, 64])
@pytest.mark.parametrize("num", [1, LARGE])
def test_sums_over_several_matrices_lie_one_behind_the_other(num: int, width: int) -> None:
    matrices = [torch.randn(num, width) for _ in range(3)]
    times = torch.randint(1, 4, (3 * num,), dtype=torch.int32)
    bounds = F.pad(times.cumsum(0, dtype=torch.int32), (1, 0))
    places = torch.randint(0, num, (int(times.sum()),), dtype=torch.int32)
    places[int(bounds[num]) : int(bounds[2 * num])] += 17  # of the second matrix, which counts from there
    sums = row_moves.Sums(matrices, places, bounds)
    order, out = [2, 0, 1], torch.full((3 * num, width), torch.nan)
    spans = [range(i * num, (i + 1) * num) for i in range(3)]
    runs = [sums.run(i, width, -17 * (i == 1), spans[i], at * num * width) for at, i in enumerate(order)]
    sums.write(runs, len(places), 0.5, out)
    for i, found in zip(order, out.split(num), strict=True):
        of_matrix = bounds[spans[i].start : spans[i].stop + 1]
        read = places[int(of_matrix[0]) : int(of_matrix[-1])] - 17 * (i == 1)
        expected = F.embedding_bag(read, matrices[i], of_matrix - of_matrix[0], mode="sum", include_last_offset=True)
        assert torch.equal(found, expected * 0.5)


def test_what_compiled_code_cannot_read_is_left_to_torch() -> None:
    whole = torch.randn(8, 8)
    rows = torch.tensor([3, 0, 3], dtype=torch.int32)
    assert not row_moves.can_move("torch", [whole])
    assert not row_moves.can_move(None, [whole, whole[:, :4]])
    assert not row_moves.can_move(None, [whole, whole.double()])
    assert torch.equal(row_moves.gathered(whole[:, :4], rows, None), whole[rows.long(), :4])
