"""Sorting ids by row block: what numba compiles, FBGEMM's pass and torch's operators give the same."""

from __future__ import annotations

import pytest
import torch

from sharders.embedding.lookup import fbgemm_kernel
from sharders.embedding.lookup.bucketize import Bucketizer


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "bounds",
    [
        [[0, 4, 8, 10]],
        [[0, 5, 10], [0, 1, 2]],
        [[0, 1, 9, 10], [0, 7, 8], [0, 3]],
        [list(range(0, 101, 5)), [0, 1, 2, 3]],
    ],
)
def test_kernels_agree(bounds: list[list[int]], dtype: torch.dtype) -> None:
    assert fbgemm_kernel.problem() == ""
    rng = torch.Generator().manual_seed(len(bounds))
    lengths = torch.randint(0, 4, (len(bounds), 7), generator=rng).to(dtype)
    counts = lengths.sum(1).tolist()
    values = torch.cat([torch.randint(0, b[-1], (n,), generator=rng) for b, n in zip(bounds, counts, strict=True)]).to(
        dtype
    )
    bucketize = Bucketizer(bounds, torch.device("cpu"))
    ours, before = bucketize._by_torch(values, lengths, True), torch.arange(values.numel())
    on_device = Bucketizer(bounds, torch.device("cpu"))
    on_device._waits = True
    others = (bucketize._by_fbgemm, bucketize, on_device._by_torch)
    for theirs in (sort(values, lengths, True) for sort in others):
        for a, b in (
            (ours.values, theirs.values),
            (ours.lengths, theirs.lengths),
            (ours.moved(before), theirs.moved(before)),
        ):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    shifts = [100 * feature - 7 for feature in range(len(bounds))]
    expected = ours.moved(before + torch.tensor(shifts).repeat_interleave(lengths.sum(1).long())).int()
    for kernel in (None, "fbgemm", "torch"):
        sorted_ids = Bucketizer(bounds, torch.device("cpu"), kernel)(values, lengths, False, shifts)
        assert sorted_ids.rows is not None and sorted_ids.rows.equal(expected)
        assert sorted_ids.rows.dtype == torch.int32 and sorted_ids.values.equal(ours.values)
    with pytest.raises(AssertionError, match="nobody has asked"):
        bucketize(values, lengths, False).moved(before)


def test_every_id_is_in_its_block() -> None:
    bucketize = Bucketizer([[0, 2, 7], [0, 1, 4, 6]], torch.device("cpu"))
    values, lengths = torch.tensor([6, 1, 2, 0, 5, 3]), torch.tensor([[2, 1], [0, 3]])
    result = bucketize(values, lengths, True)
    assert result.lengths.tolist() == [[1, 0], [0, 1], [1, 1], [0, 1], [0, 0], [0, 1]]
    assert result.values.tolist() == [1, 0, 4, 0, 2, 1]
    assert result.moved(torch.arange(6)).tolist() == [1, 3, 0, 2, 5, 4]


@pytest.mark.parametrize("kernel", [None, "fbgemm", "torch"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_and_lengths_that_do_not_lie_side_by_side(dtype: torch.dtype, kernel: str | None) -> None:
    """A column of a matrix of ids: FBGEMM's pass reads by address, and took its neighbours for ids."""
    values, lengths = torch.tensor([6, 1, 2, 0, 5, 3], dtype=dtype), torch.tensor([[2, 1], [0, 3]], dtype=dtype)
    bucketize = Bucketizer([[0, 2, 7], [0, 1, 4, 6]], torch.device("cpu"), kernel)
    expected = bucketize(values, lengths, True)
    apart = torch.stack([values, values + 1], 1)[:, 0], lengths.t().contiguous().t()
    assert not any(t.is_contiguous() for t in apart)
    found = bucketize(*apart, True)
    assert torch.equal(found.values, expected.values) and torch.equal(found.lengths, expected.lengths)
    assert torch.equal(found.moved(torch.arange(6)), expected.moved(torch.arange(6)))
