"""Tables of 16 bits: what is computed of them is rounded once."""

from __future__ import annotations

import pytest
import torch

from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.embedding.lookup.reads import Segmented
from tests.test_kernels import MIXED, SHARED, SPECS, make, make_batch

HALVES = [(of, s) for of in (torch.bfloat16, torch.float16) for s in SPECS]
ALL = tuple(spec.kind for spec in SPECS)
# Kernels that other quick tests use as well: each further one takes numba two seconds.
QUICK_EPS = {("torch", "rowwise_adagrad"), ("numba", "adagrad")}


@pytest.mark.parametrize(("dtype", "spec"), HALVES, ids=lambda p: getattr(p, "kind", None))
@pytest.mark.sampled(8)
def test_half_precision(dtype: torch.dtype, spec: OptimizerSpec) -> None:
    """What torch gives, up to its roundings between; FBGEMM has none. And as good as float32 allows."""
    results = []
    for kernel, of in (("torch", dtype), ("numba", dtype), ("torch", torch.float32)):
        bank, lookup = make(MIXED, of, spec, kernel)
        bank.weights.copy_(bank.weights.to(dtype))
        batch = make_batch(lookup, 4, weighted=True)
        output = lookup.pooled(batch.read())
        by_weights = lookup.gradient_weights(output.to(dtype), batch.read())
        assert by_weights.dtype == torch.float32
        rows = lookup.rows(Segmented(batch.ids[:3], [(0, 3)]))
        assert output.dtype == rows.dtype == of
        bank.step()
        lookup.update_pooled(output.float(), batch.read())
        lookup.update_rows(rows, Segmented(batch.ids[:3], [(0, 3)]))
        results.append([t.float() for t in (output, by_weights, rows, bank.weights)])
    rough, fine = (0.06, 0.06) if dtype == torch.bfloat16 else (0.01, 0.01), torch.finfo(dtype).eps
    for by_torch, by_numba, exact in zip(*results, strict=True):
        torch.testing.assert_close(by_numba, by_torch, rtol=rough[0], atol=rough[1])
        assert (by_numba - exact).abs().max() <= (by_torch - exact).abs().max() + 4 * fine


@pytest.mark.parametrize(
    ("kernel", "spec"),
    [
        pytest.param(kernel, spec, marks=[] if (kernel, spec.kind) in QUICK_EPS else [pytest.mark.slow])
        for kernel in ("torch", "numba")
        for spec in SPECS
        if spec.kind != "sgd"
    ],
    ids=lambda p: getattr(p, "kind", None),
)
def test_an_eps_that_float16_has_not(kernel: str, spec: OptimizerSpec) -> None:
    """A gradient that is 0, or whose square is, divides nothing by 0: it is computed in float32."""
    bank, lookup = make(SHARED, torch.float16, OptimizerSpec.make(spec.kind, lr=0.01), kernel)
    batch = make_batch(lookup, 4)
    grad = torch.tensor([0.0, 1e-5, 1e-3, 1.0]).half().repeat(4, lookup.num_columns // 4)
    for _ in range(2):
        bank.step()
        lookup.update_pooled(grad, batch.read())
    assert bank.weights.isfinite().all()


@pytest.mark.parametrize(
    ("kernel", "dtype", "kinds"),
    [
        ("torch", torch.bfloat16, ALL),
        ("numba", torch.bfloat16, ("sgd", "rowwise_adagrad")),
        pytest.param("torch", torch.float16, ALL, marks=pytest.mark.slow),
        pytest.param("numba", torch.bfloat16, ALL, marks=pytest.mark.slow),
        pytest.param("numba", torch.float16, ALL, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_and_state_are_those_of_float32_tables(
    kernel: str, dtype: torch.dtype, kinds: tuple[str, ...]
) -> None:
    """As FBGEMM's: neither is rounded to 16 bits, whichever way gradients come, where weights move only by rounding."""
    for spec in (spec for spec in SPECS if spec.kind in kinds):
        found = []
        for of in (dtype, torch.float32):
            bank, lookup = make(MIXED, of, spec, kernel)
            assert all(tensor.dtype == torch.float32 for tensor in bank.state.values())
            batch, segments = make_batch(lookup, 30, weighted=True), [(0, 3)]
            assert batch.weights is not None
            read = batch.read()._replace(weights=batch.weights.to(dtype).to(of))
            of_rows, width = Segmented(batch.ids[:3], segments), lookup.ranges[0].chunk.width
            for step in range(3):
                draw = torch.Generator().manual_seed(step)
                grad, rows = (1e-5 * torch.randn(n, lookup.num_columns, generator=draw) for n in (30, 3))
                bank.step()
                lookup.update_pooled(grad, read)
                lookup.update_rows(rows[:, :width], of_rows)
                lookup.update_touched([lookup.pooled_row_gradients(grad, read)])
            bank.weights.zero_()
            lookup.update_pooled(grad, read)
            found.append([*bank.state.values(), bank.weights.float()])
        about = torch.finfo(dtype)
        for ours, expected in zip(*found, strict=True):
            within = 1e-4 * float(expected.abs().max()) + about.tiny * about.eps
            torch.testing.assert_close(ours, expected, rtol=about.eps, atol=within)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64, torch.float32])
def test_a_cast_of_weights_leaves_state_what_it_computes_in(cast: torch.dtype) -> None:
    """A module that is cast to 16 bits keeps its optimizer's sums: nothing of them is rounded."""
    (spec,) = (s for s in SPECS if s.kind == "adam")
    for start in (torch.bfloat16, torch.float32, torch.float64):
        bank, _ = make(MIXED, start, spec, "torch")
        before = {name: tensor.uniform_().clone() for name, tensor in bank.state.items()}
        bank.apply(lambda tensor: tensor.to(cast) if tensor.is_floating_point() else tensor)
        wide = torch.float64 if cast == torch.float64 else torch.float32
        assert bank.weights.dtype == cast
        for name, tensor in bank.state.items():
            assert tensor.dtype == wide and torch.equal(tensor, before[name].to(wide))
