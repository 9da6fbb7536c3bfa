"""Sums of bags in any order of segments, which is what owners of row blocks give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sharders.embedding.lookup.optimizers import OptimizerSpec
from tests.test_kernels import KERNELS, LAYOUTS, SPECS, Oracle, assert_close, make


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.kind)
@pytest.mark.parametrize("layout", ["one_width", "shared", "mixed"])
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_bags_of_segments(kernel: str, dtype: torch.dtype, layout: str, spec: OptimizerSpec, weighted: bool) -> None:
    bank, lookup = make(LAYOUTS[layout], dtype, spec, kernel)
    oracle = Oracle(bank, lookup.ranges)
    g = torch.Generator().manual_seed(0)
    bank.step()
    for width in bank.regions:
        slots = [i for i, s in enumerate(lookup.ranges) if s.chunk.width == width and s.rows]
        lengths = [torch.randint(1, 4, (num,), generator=g) for num in (3, 0, 5) for _ in slots]
        segments = [(i, int(n.sum())) for i, n in zip([*slots, *reversed(slots), *slots], lengths, strict=True)]
        parts = [torch.randint(0, lookup.ranges[i].rows, (n,), generator=g) for i, n in segments]
        weights = torch.rand(sum(map(len, parts)), generator=g).to(dtype).requires_grad_()
        of_parts = weights.split([len(part) for part in parts])
        expected = torch.cat([
            torch.segment_reduce(
                F.embedding(ids + (of := lookup.ranges[i]).first_row, oracle.parameters[of.chunk], sparse=oracle.sparse)
                * (w.unsqueeze(1) if weighted else 1),
                "sum",
                lengths=n,
                unsafe=True,
            )
            for (i, _), ids, n, w in zip(segments, parts, lengths, of_parts, strict=True)
        ])  # fmt: skip
        ids, bags = torch.cat(parts).int(), F.pad(torch.cat(lengths).cumsum(0), (1, 0)).int()
        given = (ids, segments, bags, weights.detach() if weighted else None)
        found = lookup.rows(*given)
        assert_close(found, expected.detach())
        grad = torch.randn(found.shape, dtype=dtype, generator=g)
        torch.autograd.backward(expected, grad)
        flat = lookup.gradient_rows(grad, *given)
        for chunk, parameter in oracle.parameters.items():
            if chunk.width == width and parameter.grad is not None:
                of_chunk = flat[chunk.element_offset :][: chunk.rows * chunk.width].view(chunk.rows, chunk.width)
                assert_close(of_chunk, parameter.grad.to_dense())
        if weighted:
            assert weights.grad is not None
            assert_close(lookup.gradient_row_weights(grad, *given[:3]), weights.grad)
        lookup.update_rows(grad, *given)
    oracle.step()
    oracle.check(bank)
