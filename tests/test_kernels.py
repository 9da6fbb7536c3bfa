"""Banks and lookups: storage, sums, gradients and updates against nn.EmbeddingBag and torch.optim."""

from __future__ import annotations

import copy
import os
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sharders.embedding.lookup.bank import Bank, Chunk, RowRange
from sharders.embedding.lookup.kernels import Lookup, compile_lookup
from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.embedding.lookup.reads import Bags, Segmented
from sharders.embedding.lookup.torch_kernel import spread, touched_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # FBGEMM's CPU build warns of what only its GPU build has
    import torchrec.optim

SPECS = [
    OptimizerSpec.make("sgd", lr=0.1),
    OptimizerSpec.make("adagrad", lr=0.1, initial_accumulator_value=0.1),
    OptimizerSpec.make("rowwise_adagrad", lr=0.1, eps=1e-8),
    OptimizerSpec.make("adam", lr=0.1, bias_corrected_eps=False),
]
ROWS_ALONE = {
    "bias_corrected_eps",
    "gradient_clipping",
    "max_gradient",
    "weight_decay",
    "weight_decay_mode",
    "max_norm",
}
KERNELS = [
    ("torch", torch.float64), ("torch", torch.float32), ("fbgemm", torch.float32), ("numba", torch.float32),
    ("numba", torch.float64),
]  # fmt: skip
CAN_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # as `make test-all` has it; nothing compiles for a CPU
if CAN_INTERPRET:
    KERNELS += [("triton", torch.float32), ("triton", torch.float64)]
NAMES = [*dict.fromkeys(name for name, _ in KERNELS)]
TOLERANCE = {torch.float32: (1e-5, 2e-6), torch.float64: (1e-12, 1e-12)}

# Per table its chunks (rows, width), and slots (table, chunk, first row, rows); equal ranges are two features.
ONE_WIDTH = ([[(7, 4)], [(5, 4)], [(0, 4)]], [(0, 0, 0, 7), (1, 0, 0, 5), (2, 0, 0, 0)])
SHARED = ([[(9, 4)], [(5, 4)]], [(0, 0, 0, 4), (0, 0, 0, 4), (0, 0, 4, 5), (1, 0, 0, 5), (1, 0, 0, 5)])
MIXED = (
    [[(5, 3)], [], [(4, 8), (4, 5)], [(6, 3)], [(3, 1)]],
    [(0, 0, 0, 5), (2, 1, 0, 4), (2, 0, 1, 3), (2, 0, 1, 3), (3, 0, 0, 6), (4, 0, 0, 3)],
)
EMPTY = ([[(0, 4)]], [(0, 0, 0, 0)])
LAYOUTS = {"one_width": ONE_WIDTH, "shared": SHARED, "mixed": MIXED, "empty": EMPTY}


def make(layout: Any, dtype: torch.dtype, spec: OptimizerSpec | None, kernel: str | None) -> tuple[Bank, Lookup]:
    shapes, slots = layout
    bank = Bank(shapes, dtype, "cpu", spec)
    generator = torch.Generator().manual_seed(0)
    for table, chunks in enumerate(bank.chunks):
        for i in range(len(chunks)):
            view = bank.chunk_view(table, i)
            view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64))
    lookup = compile_lookup(bank, [RowRange(bank.chunks[t][i], first, n) for t, i, first, n in slots], kernel=kernel)
    return bank, lookup


@dataclass
class Batch:
    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    lengths: Tensor

    def read(self) -> Bags:
        return Bags(self.ids, self.offsets, self.weights)


def make_batch(
    lookup: Lookup, num_bags: int, *, longest: int = 5, weighted: bool = False, index: torch.dtype = torch.int32,
    seed: int = 0,
) -> Batch:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    ids, lengths = [], []
    for slot in lookup.ranges:
        bag_lengths = torch.randint(0, longest + 1, (num_bags,), generator=g) * (slot.rows > 0)
        lengths.append(bag_lengths)
        ids.append(torch.randint(0, max(slot.rows, 1), (int(bag_lengths.sum()),), generator=g))
    flat, length = torch.cat(ids).to(index), torch.cat(lengths)
    weights = torch.rand(flat.numel(), generator=g).to(lookup.bank.weights.dtype) if weighted else None
    return Batch(flat, F.pad(length.cumsum(0), (1, 0)).to(index), weights, length.view(len(lookup.ranges), num_bags))


def assert_close(found: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


class Oracle:
    """One parameter per chunk, F.embedding_bag per slot, and an optimizer of torch's."""

    def __init__(self, bank: Bank, slots: tuple[RowRange, ...]) -> None:
        self.slots = slots
        self.parameters = {
            chunk: bank.chunk_view(t, i).clone().requires_grad_()
            for t, chunks in enumerate(bank.chunks)
            for i, chunk in enumerate(chunks)
        }
        self.sparse = bank.spec is not None and bank.spec.kind == "adam"
        classes = {
            "sgd": torch.optim.SGD,
            "adagrad": torch.optim.Adagrad,
            "rowwise_adagrad": torchrec.optim.RowWiseAdagrad,
            "adam": torch.optim.SparseAdam,
        }
        filled = [p for p in self.parameters.values() if p.numel()]
        options = {k: v for k, v in bank.options.items() if k not in ROWS_ALONE}
        self.optimizer: Any = classes[bank.spec.kind](filled, **options) if bank.spec and filled else None

    def pooled(self, batch: Batch) -> Tensor:
        outputs, first = [], 0
        for slot, lengths in zip(self.slots, batch.lengths, strict=True):
            n = int(lengths.sum())
            if not n:
                outputs.append(torch.zeros(len(lengths), slot.chunk.width, dtype=self.dtype(slot)))
                continue
            ids = batch.ids[first : first + n].long() + slot.first_row
            weights = None if batch.weights is None else batch.weights[first : first + n]
            offsets = lengths.cumsum(0) - lengths
            table = self.parameters[slot.chunk]
            outputs.append(
                F.embedding_bag(ids, table, offsets, mode="sum", per_sample_weights=weights, sparse=self.sparse)
                if weights is None
                else self._weighted(ids, table, lengths, weights)
            )
            first += n
        return torch.cat(outputs, 1)

    def _weighted(self, ids: Tensor, table: Tensor, lengths: Tensor, weights: Tensor) -> Tensor:
        rows = F.embedding(ids, table, sparse=self.sparse) * weights.unsqueeze(1)
        bags = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return rows.new_zeros(len(lengths), table.shape[1]).index_add(0, bags, rows)

    def dtype(self, slot: RowRange) -> torch.dtype:
        return self.parameters[slot.chunk].dtype

    def step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def check(self, bank: Bank) -> None:
        for t, chunks in enumerate(bank.chunks):
            for i, chunk in enumerate(chunks):
                expected = self.parameters[chunk].detach()
                assert_close(bank.chunk_view(t, i), expected)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.kind)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
@pytest.mark.sampled(2)
def test_pooled_training(kernel: str, dtype: torch.dtype, layout: str, spec: OptimizerSpec, weighted: bool) -> None:
    bank, lookup = make(LAYOUTS[layout], dtype, spec, kernel)
    oracle = Oracle(bank, lookup.ranges)
    for seed in range(3):
        if seed == 2:
            bank.options["lr"] = 0.03
            for group in oracle.optimizer.param_groups if oracle.optimizer else ():
                group["lr"] = 0.03
        index = torch.int64 if seed else torch.int32
        batch = make_batch(lookup, 6, weighted=weighted, seed=seed, index=index)
        output, expected = lookup.pooled(batch.read()), oracle.pooled(batch)
        assert output.is_contiguous() and output.shape == (6, lookup.num_columns)
        assert_close(output, expected.detach())
        grad = torch.randn(output.shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
        if expected.requires_grad:
            torch.autograd.backward(expected, grad)
        oracle.step()
        bank.step()
        lookup.update_pooled(grad, batch.read())
        oracle.check(bank)
    assert bank.steps.tolist() == [3.0] * len(bank.chunks)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_pooled_gradients(kernel: str, dtype: torch.dtype, layout: str) -> None:
    bank, lookup = make(LAYOUTS[layout], dtype, None, kernel)
    oracle = Oracle(bank, lookup.ranges)
    batch = make_batch(lookup, 6, weighted=True)
    assert batch.weights is not None
    grad = torch.randn(6, lookup.num_columns, dtype=dtype)
    batch.weights.requires_grad_()
    expected = oracle.pooled(batch)
    if expected.requires_grad:
        torch.autograd.backward(expected, grad)
    batch.weights.requires_grad_(False)
    flat = lookup.gradient_pooled(grad, batch.read())
    again, touched = spread(bank, lookup.pooled_row_gradients(grad, batch.read()))
    assert_close(again.to(dtype), flat)
    assert flat.shape == bank.weights.shape and touched.shape == (bank.total_rows,)
    for t, chunks in enumerate(bank.chunks):
        for chunk in chunks:
            found = flat[chunk.element_offset :][: chunk.rows * chunk.width].view(chunk.rows, chunk.width)
            parameter_grad = oracle.parameters[chunk].grad
            wanted = torch.zeros_like(found) if parameter_grad is None else parameter_grad
            assert_close(found, wanted)
            rows = touched[chunk.row_offset :][: chunk.rows]
            assert torch.equal(rows, wanted.abs().sum(1) > 0), t
    if batch.ids.numel():
        by_weights = lookup.gradient_weights(grad, batch.read())
        assert batch.weights.grad is not None
        assert_close(by_weights, batch.weights.grad)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.kind)
@pytest.mark.parametrize("layout", ["one_width", "shared", "mixed"])
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
@pytest.mark.sampled(2)
def test_unpooled_training(kernel: str, dtype: torch.dtype, layout: str, spec: OptimizerSpec) -> None:
    bank, lookup = make(LAYOUTS[layout], dtype, spec, kernel)
    oracle = Oracle(bank, lookup.ranges)
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        bank.step()
        for width in bank.regions:
            slots = [i for i, s in enumerate(lookup.ranges) if s.chunk.width == width and s.rows]
            segments = [(i, n) for n in (4, 0, 9) for i in reversed(slots)]
            ids = torch.cat([torch.randint(0, lookup.ranges[i].rows, (n,), generator=g) for i, n in segments])
            parts = torch.split(ids, [n for _, n in segments])
            expected = torch.cat([
                F.embedding(
                    part + lookup.ranges[i].first_row, oracle.parameters[lookup.ranges[i].chunk], sparse=oracle.sparse
                )
                for (i, _), part in zip(segments, parts, strict=True)
            ])  # fmt: skip
            output = lookup.rows(Segmented(ids.int(), segments))
            assert_close(output, expected.detach())
            grad = torch.randn(output.shape, dtype=dtype, generator=g)
            torch.autograd.backward(expected, grad)
            flat = lookup.gradient_rows(grad, Segmented(ids.int(), segments))
            wanted = torch.zeros(bank.total_rows, dtype=torch.bool)
            for (i, _), part in zip(segments, parts, strict=True):
                wanted[part + lookup.ranges[i].chunk.row_offset + lookup.ranges[i].first_row] = True
            again, touched = spread(bank, lookup.row_gradients(grad, Segmented(ids.int(), segments)))
            assert torch.equal(touched, wanted)
            assert_close(again.to(dtype), flat)
            for chunk, parameter in oracle.parameters.items():
                if chunk.width == width and parameter.grad is not None:
                    found = flat[chunk.element_offset :][: chunk.rows * chunk.width].view(chunk.rows, chunk.width)
                    assert_close(found, parameter.grad.to_dense())
            lookup.update_rows(grad, Segmented(ids.int(), segments))
        oracle.step()
        oracle.check(bank)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.kind)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_update_is_the_same(layout: str, spec: OptimizerSpec) -> None:
    one, lookup = make(LAYOUTS[layout], torch.float64, spec, "torch")
    other, its_lookup = make(LAYOUTS[layout], torch.float64, spec, "torch")
    for seed in range(2):
        batch = make_batch(lookup, 5, seed=seed)
        grad = torch.randn(5, lookup.num_columns, dtype=torch.float64)
        for bank in (one, other):
            bank.step()
        its_lookup.update_touched([touched_of(other, *spread(one, lookup.pooled_row_gradients(grad, batch.read())))])
        lookup.update_pooled(grad, batch.read())
        torch.testing.assert_close(one.weights, other.weights)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.kind)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fbgemm_equals_torch(layout: str, spec: OptimizerSpec) -> None:
    results = []
    for kernel in ("torch", "fbgemm"):
        bank, lookup = make(LAYOUTS[layout], torch.float32, spec, kernel)
        for seed, num_bags in enumerate((70, 1, 200)):
            batch = make_batch(lookup, num_bags, weighted=seed == 1, longest=2, seed=seed)
            grad = torch.randn(num_bags, lookup.num_columns, generator=torch.Generator().manual_seed(seed)) / num_bags
            bank.step()
            lookup.update_pooled(grad, batch.read())
        results.append((bank, lookup.pooled(batch.read())))
    (bank, output), (other, other_output) = results
    torch.testing.assert_close(output, other_output, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(bank.weights, other.weights, rtol=1e-6, atol=1e-6)
    for name in bank.state:
        torch.testing.assert_close(bank.state[name], other.state[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_bags", [0, 3])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.kind)
@pytest.mark.parametrize("kernel", NAMES)
def test_no_ids(kernel: str, spec: OptimizerSpec, num_bags: int) -> None:
    bank, lookup = make(MIXED, torch.float32, spec, kernel)
    before = bank.weights.clone()
    ids, offsets = torch.zeros(0, dtype=torch.int32), torch.zeros(len(lookup.ranges) * num_bags + 1, dtype=torch.int32)
    output = lookup.pooled(Bags(ids, offsets))
    assert torch.equal(output, torch.zeros(num_bags, lookup.num_columns))
    for weights in (None, torch.zeros(0)):
        bank.step()
        lookup.update_pooled(output, Bags(ids, offsets, weights))
        assert torch.equal(lookup.gradient_pooled(output, Bags(ids, offsets, weights)), torch.zeros_like(before))
    assert lookup.gradient_weights(output, Bags(ids, offsets)).shape == (0,)
    assert not lookup.pooled_row_gradients(output, Bags(ids, offsets))
    assert lookup.rows(Segmented(ids, [(0, 0)])).shape == (0, 3)
    lookup.update_rows(torch.zeros(0, 3), Segmented(ids, [(0, 0)]))
    assert not lookup.gradient_rows(torch.zeros(0, 3), Segmented(ids, [(0, 0)])).any()
    assert torch.equal(bank.weights, before) and bank.steps.tolist() == [2.0] * 5


@pytest.mark.parametrize("kernel", NAMES)
def test_no_slots(kernel: str) -> None:
    bank = Bank([[], []], torch.float32, "cpu", SPECS[2])
    lookup = compile_lookup(bank, [], kernel=kernel)
    ids, offsets = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    assert lookup.pooled(Bags(ids, offsets)).shape == (0, 0)
    lookup.update_pooled(torch.zeros(0, 0), Bags(ids, offsets))
    assert lookup.rows(Segmented(ids, [])).shape == (0, 0)
    lookup.update_rows(torch.zeros(0, 0), Segmented(ids, []))
    lookup.update_touched([touched_of(bank, torch.zeros(0), torch.zeros(0, dtype=torch.bool))])
    assert bank.table_view(1, 6).shape == (0, 6)


@pytest.mark.parametrize(("kernel", "dtype"), [case for case in KERNELS if case[0] in ("torch", "triton")])
def test_tables_may_have_different_steps(kernel: str, dtype: torch.dtype) -> None:
    """A checkpoint may bring them: Adam's correction goes by table."""
    bank, lookup = make(ONE_WIDTH, dtype, SPECS[3], kernel)
    bank.steps.copy_(torch.tensor([1.0, 500.0, 7.0]))
    before = bank.weights.clone()
    lookup.update_pooled(torch.ones(1, 12, dtype=dtype), Bags(torch.tensor([0, 0]), torch.tensor([0, 1, 2, 2])))
    moved = (before - bank.weights).abs()
    for table, step in ((0, 1.0), (1, 500.0)):
        scale = (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
        first = bank.chunks[table][0].element_offset
        expected = torch.full((4,), 0.1 * scale * 0.1 / (0.001**0.5 + 1e-8), dtype=dtype)
        assert_close(moved[first : first + 4], expected)


def test_bank_layout() -> None:
    bank = Bank([[(5, 3)], [], [(4, 5), (4, 8)], [(6, 3)]], torch.float32, "cpu", SPECS[2])
    assert bank.chunks[2] == [Chunk(35, 4, 4, 5), Chunk(0, 0, 4, 8)]  # 32 elements, 3 of padding
    assert bank.chunks[0] == [Chunk(57, 8, 5, 3)] and bank.chunks[3] == [Chunk(72, 13, 6, 3)]
    assert bank.total_rows == 19 and bank.weights.shape == (90,) and bank.state["sum"].shape == (19,)
    assert bank.table_view(0, 3).shape == (5, 3) and bank.table_view(1, 9).shape == (0, 9)
    assert bank.table_view(2, 13).shape == (55, 1)
    bank.table_view(3, 3).fill_(2.0)
    assert torch.equal(bank.chunk_view(3, 0), torch.full((6, 3), 2.0))
    gradient = torch.arange(90.0)
    assert torch.equal(bank.table_view(3, 3, gradient), gradient[72:].view(6, 3))
    bank.state_view("sum", 3, 0).fill_(1.0)
    assert bank.state["sum"].tolist() == [0.0] * 13 + [1.0] * 6


def test_initial_accumulator_value() -> None:
    spec = OptimizerSpec.make("adagrad", initial_accumulator_value=0.5)
    bank = Bank([[(2, 3)]], torch.float32, "cpu", spec)
    assert torch.equal(bank.state_view("sum", 0, 0), torch.full((2, 3), 0.5))


@pytest.mark.parametrize("kernel", NAMES)
def test_deepcopy_is_independent(kernel: str) -> None:
    bank, lookup = make(MIXED, torch.float32, SPECS[1], kernel)
    before = bank.weights.clone()
    other: Lookup = copy.deepcopy(lookup)
    batch = make_batch(other, 4)
    other.bank.step()
    other.update_pooled(torch.ones(4, other.num_columns), batch.read())
    other.bank.options["lr"] = 9.0
    assert torch.equal(bank.weights, before) and bank.options["lr"] == 0.1 and not bank.steps.any()
    assert not torch.equal(other.bank.weights, before)
    other.bank.chunk_view(0, 0).fill_(7.0)
    assert (other.bank.table_view(0, 3) == 7.0).all()


def test_apply_moves_weights_and_state() -> None:
    bank, lookup = make(SHARED, torch.float32, SPECS[2], "fbgemm")
    batch = make_batch(lookup, 4)
    expected = lookup.pooled(batch.read())
    bank.apply(Tensor.double)
    assert bank.weights.dtype == bank.state["sum"].dtype == torch.float64
    lookup = compile_lookup(bank, lookup.ranges)  # FBGEMM does not take it any more
    output = lookup.pooled(batch.read())
    torch.testing.assert_close(output, expected.double())
    bank.step()
    lookup.update_pooled(output, batch.read())


def test_other_tables_rest() -> None:
    """Gradients of one row from several ids, bags and features are one update; other rows, and padding, do not move."""
    bank, lookup = make(MIXED, torch.float32, SPECS[2], "fbgemm")
    before = bank.weights.clone()
    lengths = torch.tensor([0, 0, 2, 1, 0, 0])  # two features of one row range
    ids, offsets = torch.tensor([1, 1, 1]), F.pad(lengths.cumsum(0), (1, 0))
    lookup.update_pooled(torch.ones(1, lookup.num_columns), Bags(ids, offsets))
    rows = (bank.weights != before).nonzero().flatten().tolist()
    first = bank.chunks[2][0].element_offset + 2 * 8
    assert rows == list(range(first, first + 8))
    assert bank.state_view("sum", 2, 0).tolist() == [0.0, 0.0, 9.0, 0.0]


@pytest.mark.parametrize("kernel", NAMES)
def test_default_device_does_not_matter(kernel: str) -> None:
    """Modules are often built inside `torch.device("meta")`."""
    with torch.device("meta"):
        bank = Bank([[(4, 3)]], torch.float32, "cpu", SPECS[3 if kernel == "torch" else 2])
        lookup = compile_lookup(bank, [RowRange(bank.chunks[0][0], 0, 4)], kernel=kernel)
    batch = make_batch(lookup, 3)
    with torch.device("meta"):
        bank.step()
        output = lookup.pooled(batch.read())
        lookup.update_pooled(output, batch.read())
        read = Segmented(batch.ids, [(0, batch.ids.numel())])
        lookup.update_rows(lookup.rows(read), read)
    assert output.device.type == bank.weights.device.type == "cpu"
    assert bank.weights.isfinite().all()
