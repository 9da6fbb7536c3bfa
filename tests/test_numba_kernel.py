"""What numba's kernel promises beyond right numbers: the same bits however it is run, and any size of table."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sharders.embedding.lookup import numba_kernel
from sharders.embedding.lookup.bank import Bank, RowRange
from sharders.embedding.lookup.kernels import Lookup, compile_lookup
from sharders.embedding.lookup.optimizers import OPTIMIZERS, OptimizerSpec
from sharders.embedding.lookup.reads import Bags, Segmented
from sharders.embedding.lookup.row_optimizer import StateTensor
from tests.test_kernels import MIXED, SHARED, SPECS, make, make_batch

LAMB = OptimizerSpec.make("lamb", lr=0.1)


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(numba_kernel, "_ENOUGH_IDS", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def trained(spec: OptimizerSpec, ahead: bool) -> list[Tensor]:
    """Results and weights of some steps, pooled, weighted and unpooled."""
    results = []
    for layout in (MIXED, SHARED):
        bank, lookup = make(layout, torch.float32, spec, "numba")
        for seed in range(3):
            batch = make_batch(lookup, 40, weighted=seed == 1, seed=seed)
            order = lookup.order_pooled(batch.read()) if ahead else None
            output = lookup.pooled(batch.read())
            bank.step()
            lookup.update_pooled(output, batch.read(), order=order)
            results += [output, lookup.gradient_weights(output, batch.read())]
        ids, segments = torch.tensor([1, 0, 2, 2, 1, 2]), [(0, 4), (0, 2)]
        order = lookup.order_rows(Segmented(ids, segments)) if ahead else None
        rows = lookup.rows(Segmented(ids, segments))
        results += [rows, lookup.gradient_rows(rows, Segmented(ids, segments), order=order)]
        lookup.update_rows(rows, Segmented(ids, segments), order=order)
        results.append(bank.weights)
    return results


@pytest.mark.parametrize("spec", [*SPECS, LAMB], ids=lambda s: s.kind)
@pytest.mark.usefixtures("three_threads")
def test_bits_do_not_depend_on_threads(spec: OptimizerSpec) -> None:
    """Nor on whether the ids' order was worked out ahead."""
    many = trained(spec, True)
    torch.set_num_threads(1)
    assert all(map(torch.equal, many, trained(spec, False)))


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_are_torchs_to_the_bit(weighted: bool) -> None:
    """In the ids' order: forward, the gradient, and with it all that SGD does."""
    results = []
    for kernel in ("torch", "numba"):
        _, lookup = make(MIXED, torch.float64, SPECS[0], kernel)
        batch = make_batch(lookup, 300, weighted=weighted)
        output = lookup.pooled(batch.read())
        results.append((output, lookup.gradient_pooled(output, batch.read())))
    for one, other in zip(*results, strict=True):
        if weighted:
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
        else:
            assert torch.equal(one, other)


def lookup_of(rows: int, kernel: str) -> Lookup:
    bank = Bank([[(rows, 1)]], torch.float32, "cpu", SPECS[0])
    return compile_lookup(bank, [RowRange(bank.chunks[0][0], 0, rows)], kernel=kernel)


@pytest.mark.parametrize("num_ids", [3, 500, 20_000])
@pytest.mark.parametrize("rows", [2, 900, 30_000, 1_000_000, 40_000_000])
def test_tables_of_any_size(rows: int, num_ids: int) -> None:
    """Each pair takes another way to sort; none has memory for every row of the large table."""
    ids = torch.randint(0, rows, (num_ids,), generator=torch.Generator().manual_seed(0))
    offsets, grad = torch.arange(num_ids + 1), torch.randn(num_ids, 1)
    lookup = lookup_of(rows, "numba")
    order = lookup.order_pooled(Bags(ids, offsets))
    assert order.memory.numel() <= 4 * num_ids + 16
    lookup.update_pooled(grad, Bags(ids, offsets), order=order)
    distinct, places = ids.unique(return_inverse=True)
    expected = torch.zeros(len(distinct)).index_add_(0, places, grad.view(-1)).mul_(-0.1)
    torch.testing.assert_close(lookup.bank.weights[distinct], expected)


def test_rows_may_lie_apart() -> None:
    """Memory that is offered, and gradients, as columns of something wider."""
    _, lookup = make(SHARED, torch.float32, SPECS[0], "numba")
    batch = make_batch(lookup, 9)
    wide = torch.full((9, lookup.num_columns + 5), 7.0)
    out = wide[:, 3 : 3 + lookup.num_columns]
    assert lookup.pooled(batch.read(), out).data_ptr() == out.data_ptr()
    assert torch.equal(out, lookup.pooled(batch.read()))
    assert (wide[:, :3] == 7).all() and (wide[:, -2:] == 7).all()
    flat = lookup.gradient_pooled(out, batch.read())
    assert torch.equal(flat, lookup.gradient_pooled(out.contiguous(), batch.read()))


def test_another_optimizer_with_an_update_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state may be of another dtype, and its options another's defaults: it trains as by torch's operations."""
    fine = replace(OPTIMIZERS["adagrad"], name="fine", state={"sum": StateTensor(dtype=torch.float32)})
    decays = replace(OPTIMIZERS["rowwise_adagrad"], name="decays")
    for own, options in ((fine, {}), (decays, {"weight_decay": 0.5, "weight_decay_mode": "l2"})):
        monkeypatch.setitem(OPTIMIZERS, own.name, own)
        trained_by = []
        for kernel in ("torch", "numba"):
            bank, lookup = make(SHARED, torch.float64, OptimizerSpec.make(own.name, lr=0.1, **options), kernel)
            batch = make_batch(lookup, 4)
            lookup.update_pooled(torch.ones(4, lookup.num_columns, dtype=torch.float64), batch.read())
            trained_by.append(bank.weights)
        torch.testing.assert_close(*trained_by)


def _in_child(queue: multiprocessing.Queue[bool]) -> None:
    queue.put(all(map(torch.equal, trained(SPECS[2], False), trained(SPECS[2], True))))


@pytest.mark.filterwarnings(r"ignore:.*fork\(\):DeprecationWarning")  # Python 3.12's, of any process with threads
@pytest.mark.usefixtures("three_threads")
def test_a_forked_process_has_threads_of_its_own() -> None:
    trained(SPECS[2], False)
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[bool] = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    try:
        assert queue.get(timeout=60)
    finally:
        child.kill()
