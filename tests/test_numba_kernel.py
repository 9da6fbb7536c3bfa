"""What numba's kernel promises beyond right numbers: the same bits however it is run, and any size of table."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numba import njit, types
from torch import Tensor

from sharders.embedding.lookup import numba_blocks, numba_kernel, threads
from sharders.embedding.lookup.bank import Bank, RowRange
from sharders.embedding.lookup.kernels import Lookup, compile_lookup
from sharders.embedding.lookup.numba_kernel import NumbaLookup
from sharders.embedding.lookup.optimizers import OPTIMIZERS, OptimizerSpec
from sharders.embedding.lookup.reads import Bags, Given, Segmented
from sharders.embedding.lookup.row_optimizer import StateTensor
from sharders.embedding.lookup.torch_kernel import Into
from tests.test_kernels import LAYOUTS, MIXED, SHARED, SPECS, make, make_batch

LAMB = OptimizerSpec.make("lamb", lr=0.1)

# What numba compiles for these alone takes it twelve seconds.
OTHERS = [pytest.param(of, marks=pytest.mark.slow) for of in (torch.float64, torch.bfloat16)]


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "ENOUGH_IDS", 1)
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
@pytest.mark.sampled(4)
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
    """Each pair takes another way to sort; none has memory for rows that it cannot have."""
    ids = torch.randint(0, rows, (num_ids,), generator=torch.Generator().manual_seed(0))
    offsets, grad = torch.arange(num_ids + 1), torch.randn(num_ids, 1)
    lookup = lookup_of(rows, "numba")
    order = lookup.order_pooled(Bags(ids, offsets))
    assert order.memory.numel() == num_ids + 2 * (min(num_ids, rows) + 1)
    lookup.update_pooled(grad, Bags(ids, offsets), order=order)
    distinct, places = ids.unique(return_inverse=True)
    expected = torch.zeros(len(distinct)).index_add_(0, places, grad.view(-1)).mul_(-0.1)
    torch.testing.assert_close(lookup.bank.weights[distinct], expected)


def test_rows_may_lie_apart() -> None:
    """Gradients as columns of something wider."""
    _, lookup = make(SHARED, torch.float32, SPECS[0], "numba")
    read = make_batch(lookup, 9).read()
    grad = torch.randn(9, lookup.num_columns + 5)[:, 3:-2]
    assert torch.equal(lookup.gradient_pooled(grad, read), lookup.gradient_pooled(grad.contiguous(), read))


@pytest.mark.parametrize("layout", ["shared", "mixed"])
@pytest.mark.parametrize("num", [9, 40_000])  # the larger ones are written past the caches
def test_sums_are_written_where_they_belong(layout: str, num: int) -> None:
    """Of some samples, in columns of any order and distance; nothing else is touched."""
    _, lookup = make(LAYOUTS[layout], torch.float32, SPECS[0], "numba")
    assert isinstance(lookup, NumbaLookup)
    widths = [r.chunk.width for r in lookup.ranges]
    read = make_batch(lookup, num).read()
    expected = lookup.pooled(read)
    for gap in (0, 3, 16):
        order = torch.randperm(len(widths), generator=torch.Generator().manual_seed(gap)).tolist()
        columns, at = [0] * len(widths), gap
        for i in order:
            columns[i], at = at, at + widths[i] + gap
        for samples in (range(num), range(num // 3, num // 2), range(2, 2)):
            wide = torch.full((len(samples), at), 7.0)
            lookup.pooled_to(read, samples, wide, tuple(columns))
            for column, part in zip(columns, expected[samples.start : samples.stop].split(widths, 1), strict=True):
                assert torch.equal(wide[:, column : column + part.shape[1]], part)
                wide[:, column : column + part.shape[1]] = 7
            assert (wide == 7).all()


@pytest.mark.parametrize("layout", ["shared", "mixed"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_are_read_where_they_are(layout: str, weighted: bool) -> None:
    """In columns of any order and distance, and their sums multiplied: the bits of a copy of them."""
    _, lookup = make(LAYOUTS[layout], torch.float32, SPECS[0], "numba")
    assert isinstance(lookup, NumbaLookup)
    widths = [r.chunk.width for r in lookup.ranges]
    read = make_batch(lookup, 9).read()
    if weighted:
        read = read._replace(weights=torch.rand(read.ids.numel()))
    for gap in (0, 3):
        order = torch.randperm(len(widths), generator=torch.Generator().manual_seed(gap)).tolist()
        columns, at = [0] * len(widths), gap
        for i in order:
            columns[i], at = at, at + widths[i] + gap
        grad = torch.randn(9, at)
        together = torch.cat([grad[:, c : c + w] for c, w in zip(columns, widths, strict=True)], 1)
        into = Into(torch.empty(lookup.bank.total_rows, dtype=torch.int64), torch.empty_like(lookup.bank.weights))
        found = lookup.row_gradients_in(grad, read, tuple(columns), 0.5, into)
        assert found[0][1].data_ptr() == into.rows.data_ptr()
        expected = lookup.pooled_row_gradients(together * 0.5, read)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert one[0] == other[0] and torch.equal(one[1], other[1]) and torch.equal(one[2], other[2])


@pytest.mark.parametrize("layout", ["shared", "mixed"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_are_read_where_they_were_left(layout: str, weighted: bool) -> None:
    """Those of the last samples, in columns of any order and distance, and multiplied: to the bit as if packed."""
    draw = torch.Generator().manual_seed(3)
    for num, others in ((9, 0), (9, 4), (9, 9), (300, 150)):
        trained_by = []
        for where in (False, True):
            bank, lookup = make(LAYOUTS[layout], torch.float32, OptimizerSpec.make("adagrad", lr=0.1), "numba")
            assert isinstance(lookup, NumbaLookup)
            widths = [r.chunk.width for r in lookup.ranges]
            columns = tuple(5 + 3 * i + sum(widths[i + 1 :]) for i in reversed(range(len(widths))))[::-1]
            wide = torch.randn(num - others, 5 + 4 * len(widths) + sum(widths), generator=draw.manual_seed(num))
            grad = torch.randn(num, sum(widths), generator=draw)
            parts = [wide[:, at : at + width] * (1 / 3) for at, width in zip(columns, widths, strict=True)]
            grad[others:] = torch.nan if where else torch.cat(parts, 1)
            told: dict[str, Any] = {"given": Given(wide, columns, 1 / 3)} if where else {}
            read = make_batch(lookup, num, weighted=weighted).read()
            found = lookup.gradient_pooled(grad, read, **told)
            bank.step()
            lookup.update_pooled(grad, read, **told)
            trained_by.append([found, bank.weights, *bank.state.values()])
        assert all(map(torch.equal, *trained_by)), (num, others)


def _ids_of(rows: Sequence[int], lengths: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """(N,) ids of bags (ranges, B) of these lengths, and their offsets."""
    counts = zip(rows, lengths.sum(1).tolist(), strict=True)
    ids = [torch.randint(0, num, (count,), generator=draw, dtype=torch.int32) for num, count in counts]
    return torch.cat(ids), F.pad(lengths.reshape(-1).cumsum(0, dtype=torch.int32), (1, 0))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "lamb", None])
@pytest.mark.parametrize("dtype", [torch.float32, *OTHERS])
@pytest.mark.usefixtures("three_threads")
@pytest.mark.sampled(2)
def test_tables_of_few_rows_are_summed_without_an_order(
    dtype: torch.dtype, optimizer: str | None, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit as along one: of pooled lookups, of gradients left elsewhere, and of bags of partials."""
    spec = None if optimizer is None else OptimizerSpec.make(optimizer, lr=0.1)
    trained_by = []
    for num_threads, most in ((3, 1 << 19), (1, 1 << 19), (1, 0)):
        torch.set_num_threads(num_threads)
        monkeypatch.setattr(numba_kernel, "_APART_BYTES", most)
        draw = torch.Generator().manual_seed(1)
        bank = Bank([[(3, 16)], [(40, 72)], [(900, 5)], [(7, 5)], [(400, 4)]], dtype, "cpu", spec)
        bank.weights.copy_(torch.randn(bank.weights.shape, generator=draw))
        tables = [RowRange(of, 0, of.rows) for (of,) in bank.chunks]
        lookup = compile_lookup(bank, [tables[0], *tables], kernel="numba")
        assert isinstance(lookup, NumbaLookup)
        lengths = torch.randint(0, 20, (6, 60), generator=draw)
        read = Bags(*_ids_of([3, 3, 30, 900, 7, 400], lengths, draw))  # ten rows of the second table are never named
        ids, bags = _ids_of([900, 7], lengths[:2].clamp(min=1), draw)
        of_rows = Segmented(ids, [*zip((3, 4), lengths[:2].clamp(min=1).sum(1).tolist(), strict=True)], bags)
        if weighted:
            read = read._replace(weights=torch.rand(len(read.ids), generator=draw).to(dtype))
            of_rows = of_rows._replace(weights=torch.rand(len(ids), generator=draw).to(dtype))
        grad, rows_grad, wide = (torch.randn(n, 200, generator=draw).to(dtype) for n in (60, 120, 25))
        order, order_of_rows, results = lookup.order_pooled(read), lookup.order_rows(of_rows), []
        apart = order.apart.num_rows, order_of_rows.apart.num_rows
        assert apart == ((3 + 40 + 7 + 400, 7) if most > 0 else (0, 0))
        for given in (None, Given(wide, (3, 30, 60, 150, 190, 195), 1 / 3)):
            if spec is None:
                results.append(lookup.gradient_pooled(grad[:, :118], read, order=order, given=given))
            else:
                bank.step()
                lookup.update_pooled(grad[:, :118], read, order=order, given=given)
        learn = lookup.gradient_rows if spec is None else lookup.update_rows
        results.append(learn(rows_grad[:, :5], of_rows, order=order_of_rows))
        trained_by.append([*(found for found in results if found is not None), bank.weights, *bank.state.values()])
    for other in trained_by[1:]:
        assert all(torch.equal(a, b) for a, b in zip(trained_by[0], other, strict=True))


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_gradients_may_lie_anyhow(kind: str) -> None:
    """Their elements may be one in memory, apart, or in another order."""
    spec, draw = OptimizerSpec.make(kind, lr=0.1), torch.Generator().manual_seed(0)
    for how in ("one row", "one column", "one number", "transposed", "every other"):
        trained_by = []
        for kernel in ("torch", "numba"):
            bank, lookup = make(MIXED, torch.float64, spec, kernel)
            batch, columns = make_batch(lookup, 20), lookup.num_columns
            wide = torch.randn(40, 2 * columns, generator=draw.manual_seed(1), dtype=torch.float64)
            rows = wide[:20, :columns]
            grad = {
                "one row": rows[:1].expand(20, columns),
                "one column": rows[:, :1].expand(20, columns),
                "one number": rows[0, 0].expand(20, columns),
                "transposed": rows.t().contiguous().t(),
                "every other": wide[::2, ::2],
            }[how]
            bank.step()
            lookup.update_pooled(grad if kernel == "numba" else grad.contiguous(), batch.read())
            trained_by.append((bank.weights, lookup.gradient_pooled(grad, batch.read())))
        for found, expected in zip(*trained_by, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=how)


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


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.kind)
def test_any_dim(spec: OptimizerSpec) -> None:
    """In one call: some that fill blocks of 64, 16 and 4 columns, and some that leave columns over."""
    dims = (1, 4, 7, 16, 21, 64, 85, 128, 150)
    layout = [[(11, dim)] for dim in dims], [(t, 0, 0, 11) for t in range(len(dims))]
    trained_by = []
    for kernel in ("torch", "numba"):
        bank, lookup = make(layout, torch.float64, spec, kernel)
        batch = make_batch(lookup, 12, weighted=True)
        output = lookup.pooled(batch.read())
        of_weights = lookup.gradient_weights(output, batch.read())
        bank.step()
        lookup.update_pooled(output, batch.read())
        trained_by.append((output, of_weights, bank.weights, *bank.state.values()))
    for found, expected in zip(*trained_by, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def by_touched_rows(kernel: str, layout: Any, dtype: torch.dtype, spec: OptimizerSpec) -> list[Tensor]:
    """Sums by row of three batches, the middle one empty, and the bank after two updates by them."""
    bank, lookup = make(layout, dtype, spec, kernel)
    results: list[Tensor] = []
    for step in range(2):
        sums = []
        for seed, bags in ((step, 30), (0, 0), (step + 7, 4)):
            batch = make_batch(lookup, bags, weighted=bool(step) and seed > 5, seed=seed)
            draw = torch.Generator().manual_seed(seed)
            grad = torch.randn(bags, lookup.num_columns, generator=draw, dtype=torch.float64)
            sums.append(lookup.pooled_row_gradients(grad.to(dtype), batch.read()))
        wide = [[(region, rows, of_rows.double()) for region, rows, of_rows in part] for part in sums]
        bank.step()
        flat = lookup.gradient_touched(wide)
        lookup.update_touched(wide if step else sums)
        results += [
            t for part in sums for _, rows, of_rows in sorted(part, key=lambda of: of[0].width) for t in (rows, of_rows)
        ]
        results += [flat, bank.weights.clone(), *(state.clone() for state in bank.state.values())]
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", [*SPECS, LAMB], ids=lambda s: s.kind)
@pytest.mark.sampled(8)
def test_sums_of_several_batches_are_added_as_torch_does(spec: OptimizerSpec, dtype: torch.dtype) -> None:
    """In the batches' order, whatever dtype they came in: the same rows, and the same bits again."""
    near = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2**-5}[dtype]
    for layout in (MIXED, SHARED):
        found, again, expected = (by_touched_rows(k, layout, dtype, spec) for k in ("numba", "numba", "torch"))
        assert all(map(torch.equal, found, again))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=near, atol=near)


@pytest.mark.parametrize("layout", [MIXED, SHARED], ids=["mixed", "shared"])
def test_touched_rows_of_more_parts_than_sources_can_tell(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = by_touched_rows("numba", layout, torch.float32, SPECS[1])
    monkeypatch.setattr(numba_kernel, "_MAX", 16)
    assert all(map(torch.equal, by_touched_rows("numba", layout, torch.float32, SPECS[1]), expected))


def _in_child(queue: multiprocessing.Queue[bool]) -> None:
    queue.put(all(map(torch.equal, trained(SPECS[2], False), trained(SPECS[2], True))))


@pytest.mark.filterwarnings(r"ignore:.*fork\(\):DeprecationWarning")  # Python 3.12's, of any process with threads
@pytest.mark.usefixtures("three_threads")
def test_more_bags_than_sources_can_tell_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a table with so many features; else gradients would be read from elsewhere."""
    _, lookup = make(SHARED, torch.float32, SPECS[0], "numba")
    monkeypatch.setattr(numba_kernel, "ALL_BITS", 6)
    lookup.pooled(make_batch(lookup, 16).read())
    with pytest.raises(ValueError, match="features with 33 bags each: use smaller batches"):
        lookup.pooled(make_batch(lookup, 33).read())


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


def test_neighbouring_ids_are_not_gathered() -> None:
    """One by one, which takes four times as long: LLVM is to see that they lie side by side."""
    signature = (types.int64,) * 9
    checks = njit(error_model="numpy")(numba_blocks.check_ids)
    checks.compile(signature)
    assert "gather" not in checks.inspect_asm(signature)
