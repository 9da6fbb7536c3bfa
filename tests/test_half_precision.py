"""Tables of 16 bits: what is computed of them is rounded once."""

from __future__ import annotations

import pytest
import torch

from sharders.embedding.lookup import kernels
from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.embedding.lookup.reads import Segmented
from tests.test_kernels import MIXED, SHARED, SPECS, make, make_batch

HALVES = [(of, s) for of in (torch.bfloat16, torch.float16) for s in SPECS]


@pytest.mark.parametrize(("dtype", "spec"), HALVES, ids=lambda p: getattr(p, "kind", None))
def test_half_precision(dtype: torch.dtype, spec: OptimizerSpec) -> None:
    """What torch gives, up to its roundings between; FBGEMM has none. And as good as float32 allows."""
    results = []
    for kernel, of in (("torch", dtype), ("numba", dtype), ("torch", torch.float32)):
        bank, lookup = make(MIXED, of, spec, kernel)
        bank.weights.copy_(bank.weights.to(dtype))
        batch = make_batch(lookup, 4, weighted=True)
        output = lookup.pooled(batch.read())
        by_weights = lookup.gradient_weights(output.to(dtype), batch.read())
        rows = lookup.rows(Segmented(batch.ids[:3], [(0, 3)]))
        assert output.dtype == by_weights.dtype == rows.dtype == of
        bank.step()
        lookup.update_pooled(output.float(), batch.read())
        lookup.update_rows(rows, Segmented(batch.ids[:3], [(0, 3)]))
        results.append([t.float() for t in (output, by_weights, rows, bank.weights)])
    rough, fine = (0.06, 0.06) if dtype == torch.bfloat16 else (0.01, 0.01), torch.finfo(dtype).eps
    for by_torch, by_numba, exact in zip(*results, strict=True):
        torch.testing.assert_close(by_numba, by_torch, rtol=rough[0], atol=rough[1])
        assert (by_numba - exact).abs().max() <= (by_torch - exact).abs().max() + 4 * fine


@pytest.mark.parametrize("spec", [s for s in SPECS if s.kind != "sgd"], ids=lambda s: s.kind)
@pytest.mark.parametrize("kernel", ["torch", "numba"])
def test_an_eps_that_float16_has_not(kernel: str, spec: OptimizerSpec, caplog: pytest.LogCaptureFixture) -> None:
    """A gradient that is 0, or whose square is, divides nothing by 0: it is computed in float32."""
    kernels._say_what_float16_forgets.cache_clear()
    bank, lookup = make(SHARED, torch.float16, OptimizerSpec.make(spec.kind, lr=0.01), kernel)
    batch = make_batch(lookup, 4)
    grad = torch.tensor([0.0, 1e-5, 1e-3, 1.0]).half().repeat(4, lookup.num_columns // 4)
    for _ in range(2):
        bank.step()
        lookup.update_pooled(grad, batch.read())
    assert bank.weights.isfinite().all()
    (told,) = [text for text in caplog.messages if "those below 3e-8 are 0" in text]
    assert told.startswith(f"{spec.kind} of float16 tables") and "too, where squares of those below" in told
