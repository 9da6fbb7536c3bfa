"""Compiled code reads and writes what it is given and nothing else: every tensor lies beside a page of no use.

Each case runs in a process of its own, which ends where a byte too far is touched.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from sharders.embedding.batches.batch import Batch, Ids
from sharders.embedding.batches.input_checks import check_batch
from sharders.embedding.data_path.whole import offsets
from sharders.embedding.exchange.placement import neighbours
from sharders.embedding.ids.packing import Packable, Packing
from sharders.embedding.ids.received import Received
from sharders.embedding.lookup import numba_kernel, threads
from sharders.embedding.lookup.bag_counts import bag_counts
from sharders.embedding.lookup.bank import Bank, RowRange
from sharders.embedding.lookup.bucketize import Bucketizer
from sharders.embedding.lookup.distinct import Numbered, distinct_rows, spread
from sharders.embedding.lookup.kernels import Lookup, can_place, compile_lookup
from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.embedding.lookup.reads import Bags, Given, Segmented
from sharders.embedding.results import columns
from sharders.embedding.results.columns import Placing, runs_of
from sharders.embedding.results.partial_columns import PartialColumns
from sharders.embedding.results.ragged import Columns
from tests.guard_pages import GuardedMemory
from tests.programs import run_program
from tests.test_partial_columns import draw as draw_partials

DIMS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 20, 31, 48, 63, 64, 65, 68, 80, 84, 100, 127, 128, 130)
KINDS = (None, "sgd", "adagrad", "rowwise_adagrad", "adam", "lamb")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Draw:
    """What is drawn for a case."""

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)

    def below(self, stop: int) -> int:
        return int(torch.randint(0, stop, (), generator=self.rng))

    def one(self, of: Any) -> Any:
        return of[self.below(len(of))]

    def ids(self, num: int, rows: int, dtype: torch.dtype) -> Tensor:
        """Any, all equal, the last row's alone, or each row once and again."""
        how = self.below(5)
        if how == 0:
            drawn = torch.full((num,), self.below(rows))
        elif how == 1:
            drawn = torch.full((num,), rows - 1)
        elif how == 2:
            drawn = torch.arange(num) % rows
        else:
            drawn = torch.randint(0, rows, (num,), generator=self.rng)
        return drawn.to(dtype)

    def lengths(self, num: int) -> Tensor:
        longest = self.one((0, 1, 1, 2, 9, 60))
        return torch.randint(self.below(2) if longest == 1 else 0, longest + 1, (num,), generator=self.rng)


def tables_of(draw: Draw, dtype: torch.dtype, kind: str | None) -> tuple[Lookup, Lookup]:
    """The same lookups by numba's kernel and by torch's; tables of some widths, features that share one, row blocks."""
    width = draw.one(DIMS)
    shapes = [[(1 + draw.one((0, 1, 6, 40, 300, 4000)), draw.one((width, draw.one(DIMS))))] for _ in range(4)]
    spec = OptimizerSpec.make(kind, lr=0.1) if kind else None
    banks = [Bank(shapes, dtype, "cpu", spec) for _ in range(2)]
    banks[0].weights.copy_(torch.randn(banks[0].weights.shape, generator=draw.rng))
    banks[1].weights.copy_(banks[0].weights)
    ranges = []
    for (chunk,) in banks[0].chunks:
        cut = draw.below(chunk.rows) if draw.below(3) == 0 else 0
        ranges += [RowRange(chunk, cut, chunk.rows - cut)] * (1 + draw.below(3))
    one, other = (compile_lookup(bank, ranges, kernel=k) for bank, k in zip(banks, ("numba", "torch"), strict=True))
    return one, other


def both(lookups: tuple[Lookup, Lookup], call: Any, near: float) -> Any:
    """The results of numba's kernel and of torch's are near each other; the former."""
    results = [call(lookup) for lookup in lookups]
    for found, expected in zip(*([r] if isinstance(r, Tensor) else r or [] for r in results), strict=True):
        torch.testing.assert_close(found.double(), expected.double(), rtol=near, atol=near)
    return results[0]


def of_bank(lookup: Lookup) -> list[Tensor]:
    return [lookup.bank.weights, *lookup.bank.state.values()]


def in_reverse(lookup: Lookup, read: Bags, samples: range) -> Tensor:
    """Sums of some samples, each range's behind those of the next."""
    widths, dtype = [r.chunk.width for r in lookup.ranges], lookup.bank.weights.dtype
    columns = tuple(sum(widths[i + 1 :]) for i in range(len(widths)))
    wide = torch.zeros(len(samples), sum(widths), dtype=dtype)
    if can_place(lookup, dtype):
        lookup.pooled_to(read, samples, wide, columns)
        return wide
    return torch.cat([wide[:, :0], *lookup.pooled(read)[samples.start : samples.stop].split(widths, 1)[::-1]], 1)


def pooled(draw: Draw, lookups: tuple[Lookup, Lookup], near: float) -> None:
    bags, of_ids = draw.one((0, 1, 2, 13, 100)), draw.one((torch.int32, torch.int64))
    lengths = [draw.lengths(bags) for _ in lookups[0].ranges]
    ids = [draw.ids(int(n.sum()), r.rows, of_ids) for n, r in zip(lengths, lookups[0].ranges, strict=True)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)]).to(of_ids)
    dtype = lookups[0].bank.weights.dtype
    weights = torch.rand(int(offsets[-1]), generator=draw.rng).to(dtype) if draw.below(2) else None
    read = Bags(torch.cat(ids), offsets, weights)
    grad = torch.randn(bags, lookups[0].num_columns, generator=draw.rng).to(dtype)
    both(lookups, lambda lookup: lookup.pooled(read), near)
    first = draw.below(bags + 1)
    samples = range(first, first + draw.below(bags - first + 1))
    both(lookups, lambda lookup: in_reverse(lookup, read, samples), near)
    if weights is not None:
        both(lookups, lambda lookup: lookup.gradient_weights(grad, read), 10 * near)
    both(lookups, lambda lookup: lookup.gradient_pooled(grad, read), 10 * near)
    if can_place(lookups[0], dtype):  # those of the last samples where they were left, the last columns first
        widths = [r.chunk.width for r in lookups[0].ranges]
        left = torch.cat([grad[first:, :0], *grad[first:].split(widths, 1)[::-1]], 1)
        given = Given(left, tuple(sum(widths[i + 1 :]) for i in range(len(widths))), 1.0)
        junk = grad.clone()
        junk[first:] = torch.nan
        found = lookups[0].gradient_pooled(junk, read, given=given)
        assert torch.equal(found, lookups[0].gradient_pooled(grad, read))
    sums = [lookup.pooled_row_gradients(grad, read) for lookup in lookups]
    both(lookups, lambda lookup: lookup.gradient_touched([sums[lookup is lookups[1]]] * 2), 20 * near)
    if lookups[0].bank.spec is not None:
        order = lookups[0].order_pooled(read) if draw.below(2) else None
        for lookup in lookups:
            lookup.bank.step()
            lookup.update_pooled(grad, read, order=order if lookup is lookups[0] else None)
            lookup.update_touched([sums[lookup is lookups[1]]] * 2)
        assert dtype == torch.float16 or all(tensor.isfinite().all() for tensor in of_bank(lookups[0]))


def unpooled(draw: Draw, lookups: tuple[Lookup, Lookup], near: float) -> None:
    ranges, of_ids = lookups[0].ranges, draw.one((torch.int32, torch.int64))
    width = draw.one(ranges).chunk.width
    of_width = [i for i, r in enumerate(ranges) if r.chunk.width == width]
    segments = [(draw.one(of_width), draw.one((0, 1, 5, 30, 200))) for _ in range(draw.below(6))]
    ids = [draw.ids(n, ranges[i].rows, of_ids) for i, n in segments]
    num, dtype = sum(n for _, n in segments), lookups[0].bank.weights.dtype
    bags = weights = None
    if num and draw.below(2):
        cuts = {sum(n for _, n in segments[:i]) for i in range(len(segments) + 1)}
        cuts |= {draw.below(num) for _ in range(num // 2)}
        bags = torch.tensor(sorted(cuts)).to(of_ids)
        weights = torch.rand(num, generator=draw.rng).to(dtype) if draw.below(2) else None
    read = Segmented(torch.cat([torch.zeros(0, dtype=of_ids), *ids]), segments, bags, weights)
    rows = both(lookups, lambda lookup: lookup.rows(read), near)
    grad = torch.randn(rows.shape, generator=draw.rng).to(dtype)
    if segments:
        both(lookups, lambda lookup: lookup.gradient_rows(grad, read), 10 * near)
        if weights is not None:
            both(lookups, lambda lookup: lookup.gradient_row_weights(grad, read), 10 * near)
        lookups[0].row_gradients(grad, read)
        if lookups[0].bank.spec is not None:
            lookups[0].update_rows(grad, read, order=lookups[0].order_rows(read) if draw.below(2) else None)


def deduplicated(draw: Draw) -> None:
    rows = [draw.one((1, 7, 90, 5000, 1 << 20)) for _ in range(4)]
    counts = [draw.one((0, 1, 17, 400, 1500)) for _ in rows]
    values = torch.cat([draw.ids(n, r, torch.int64) for n, r in zip(counts, rows, strict=True)])
    found = distinct_rows(values, counts, rows)
    if found is not None:
        to = torch.full((len(values),), -1, dtype=torch.int32)
        spread([Numbered(0, len(found.times), found.places.data_ptr(), found.times.data_ptr(), 0)], to)
        assert torch.equal(found.values[to.long()], values)


def placed(draw: Draw) -> None:
    """Rows and columns of features, cut among ranks, to a result and back."""
    dims, ranks, rows = [draw.one((4, 8, 16, 64, 80, 128)) for _ in range(6)], draw.one((1, 2, 4)), draw.one((0, 1, 65))
    features = [(f, 0, dim) for f, dim in enumerate(dims)]
    sources: dict[int, list[Columns]] = {rank: [] for rank in range(ranks)}
    for f, dim in enumerate(dims):
        how, each = draw.below(3), dim // ranks
        for rank, of_rank in sources.items():
            cut = (f, rank * each, each) if how == 0 else (f, 0, dim)
            of_rank += [cut] * (how < 2 or rank == f % ranks)
    runs, dtype = runs_of(sources, features), draw.one((torch.float32, torch.float64))
    given = {r: torch.rand(rows, sum(c[2] for c in of)).to(dtype) for r, of in sources.items()}
    outs = [torch.empty(rows, sum(dims), dtype=dtype) for _ in range(2)]
    for kernel, out in zip((None, "torch"), outs, strict=True):
        Placing(runs, kernel)(given, out, 0.25)
    assert torch.equal(*outs)
    for rank, matrix in given.items():
        back = [run.back(of) for run in runs for of in run.sources if of.number == rank]
        pair = [torch.empty(len(matrix) * matrix.shape[1], dtype=dtype).view(matrix.shape) for _ in range(2)]
        for kernel, out in zip((None, "torch"), pair, strict=True):
            Placing(back, kernel)({0: outs[0]}, out, 0.5)
        assert torch.equal(*pair)


def added_up(draw: Draw) -> None:
    """Partials of features; their gradients are of the result."""
    plan, target, partials, came = draw_partials(draw.rng, draw.one((0, 1, 65)))
    of, samples = PartialColumns(plan, target, None), partials.lengths.shape[1]
    out = torch.empty(samples, sum(c[2] for c in target))
    of.add_up(partials, came, out)
    assert not samples or float(out.abs().max()) <= 99 * len(plan.columns)  # junk is larger
    for sender, flat in enumerate(came):
        picked = torch.empty(len(flat))
        of.pick(partials, sender, out, 1.0, picked)
        assert torch.isin(picked, out).all()


def sorted_by_block(draw: Draw) -> None:
    rows = [draw.one((1, 7, 90, 5000)) for _ in range(3)]
    num = draw.one((2, 4, 8))
    bounds = [[min(i * -(-n // num), n) for i in range(num + 1)] for n in rows]
    lengths = torch.stack([draw.lengths(9) for _ in rows])
    counts = lengths.sum(1).tolist()
    ids = torch.cat([draw.ids(n, r, torch.int32) for n, r in zip(counts, rows, strict=True)])
    bucketize = Bucketizer(bounds, ids.device)
    found = [sort(ids, lengths.to(torch.int32), True) for sort in (bucketize, bucketize._by_torch)]
    for name in ("values", "lengths"):
        assert torch.equal(*(getattr(of, name) for of in found))
    assert torch.equal(*(of.moved(ids) for of in found))
    before = torch.arange(len(ids), dtype=torch.int32)
    shifts = [draw.below(100) for _ in rows]
    moved = found[1].moved(before + torch.tensor(shifts, dtype=torch.int32).repeat_interleave(lengths.sum(1)))
    assert torch.equal(bucketize(ids, lengths.to(torch.int32), False, shifts).rows, moved)
    for of_bags in (lengths, found[0].lengths, lengths[:0]):
        assert bag_counts([of_bags], True) == bag_counts([of_bags], False)
    batch = Ids(ids, lengths, (0, 1, 2))
    assert vars(check_batch(batch, rows, True, True)) == vars(check_batch(batch, rows, True))  # the same tensors


def packed(draw: Draw) -> None:
    """Slots of whole keys and of row blocks on some ranks, several of which may get the same; weights are positions."""
    rows, samples = [draw.one((1, 7, 90, 5000)) for _ in range(3)], draw.one((0, 1, 3, 9))
    lengths = torch.stack([draw.lengths(samples) for _ in rows]).to(draw.one((torch.int32, torch.int64)))
    counts = lengths.sum(1).tolist()
    dtype, head, tail = draw.one((torch.int32, torch.int64)), draw.one((0, 26)), draw.one((0, 0, 3))
    ids = torch.cat([draw.ids(n, r, dtype) for n, r in zip(counts, rows, strict=True)])
    weights = torch.arange(len(ids), dtype=torch.int32) if draw.below(2) else None
    of_ranks: list[list[Packable]] = [[] for _ in range(draw.one((1, 2, 5)))]
    for feature in range(5):
        key = draw.below(len(rows))
        cut = draw.below(rows[key] + 1)
        blocks = [(0, cut), (cut, rows[key])] if draw.below(2) else [(0, -1)]
        for low, high in blocks * draw.one((1, 2)):
            draw.one(of_ranks).append(Packable(feature, key, low, high))
    batch = Batch(ids, lengths, (), weights, counts=tuple(counts))
    packing = Packing(of_ranks, head, tail)
    out = torch.full((packing.room(counts, samples, weights is not None),), -1, dtype=torch.int32)
    found = packing(batch, weights, True, out)
    bags = [of_key.split(of.tolist()) for of_key, of in zip(ids.split(counts), lengths, strict=True)]
    places = [
        of_key.split(of.tolist()) for of_key, of in zip(torch.arange(len(ids)).split(counts), lengths, strict=True)
    ]
    at = 0
    for slots, words, its_counts, its_bags, its_lengths, end in zip(of_ranks, *found[1:], strict=True):
        chosen = [
            [(of >= low) & (of < high) if high >= 0 else of >= 0 for of in bags[key]] for _, key, low, high in slots
        ]
        of_lengths = [[int(of.sum()) for of in of_slot] for of_slot in chosen]
        assert its_lengths.tolist() == of_lengths and its_counts == [*map(sum, of_lengths)]
        filled = [[n > 0 for n in of if slot.high >= 0] for of, slot in zip(of_lengths, slots, strict=True)]
        assert its_bags == [*map(sum, filled)]
        expected = [n for of in of_lengths for n in of]
        for of_keys, less in ((bags, 1), (places, 0)) if weights is not None else ((bags, 1),):
            for slot, masks in zip(slots, chosen, strict=True):
                for of, mask in zip(of_keys[slot.key], masks, strict=True):
                    expected += (of[mask] - slot.low * less).tolist()
        at += head
        assert out[at : at + words - tail].tolist() == expected and end == at + words
        at += words + (words & 1 if head else 0)
    assert found.filled == at


def from_sources(draw: Draw) -> None:
    """Some slots of what several ranks have sent, in any order of these; numbers of ids alone packed by key."""
    num, num_slots, is_weighted = draw.one((2, 3, 5)), draw.one((1, 3, 6)), draw.below(2)
    samples = [draw.one((0, 1, 4, 9)) for _ in range(num)]
    lengths = [draw.lengths(num_slots * n).view(num_slots, n).to(torch.int32) for n in samples]
    counts = [of.sum(1).tolist() for of in lengths]
    ids = [draw.ids(sum(of), 5000, torch.int32) for of in counts]
    weights = [torch.rand(len(of), generator=draw.rng) for of in ids] if is_weighted else None
    received = Received(lengths, ids, weights, counts, counts)
    slots = sorted({draw.below(num_slots) for _ in range(num_slots)})
    order = torch.randperm(num, generator=draw.rng).tolist()
    chosen = torch.tensor([int(slot in slots) for slot in range(num_slots)])
    found = received.bags_of(order, slots, chosen, torch.float64)
    of_ids, of_bags, of_weights = received.slot_major(order, neighbours(slots))
    assert found.ids.equal(of_ids) and found.offsets.equal(offsets(of_bags))
    assert found.weights is None if of_weights is None else found.weights.equal(of_weights.double())
    of_ranks, head, at = (slots, slots[:1]), draw.one((0, 26)), 0
    packing = Packing([[Packable(f, key, 0, -1) for key in of] for f, of in enumerate(of_ranks)], head)
    out = torch.full((packing.room(counts[0], 1, False),), -1, dtype=torch.int32)
    rows = [of_key.tolist() for of_key in ids[0].split(counts[0])]
    packed = packing.ids_alone(ids[0], counts[0], [*accumulate(counts[0], initial=0)], out)
    assert packed.counts == [[len(rows[key]) for key in of_rank] for of_rank in of_ranks]
    for words, of_rank in zip(packed.words, of_ranks, strict=True):
        at += head
        expected = [*(len(rows[key]) for key in of_rank), *(row for key in of_rank for row in rows[key])]
        assert out[at : at + words].tolist() == expected
        at += words + (words & 1 if head else 0)
    assert packed.filled == at


def run_cases(seed: int, at_begin: bool, seconds: float) -> None:
    """As many as there is time for."""
    faulthandler.enable()
    until, number = time.monotonic() + seconds, 0
    with GuardedMemory(at_begin) as memory:
        numba_kernel._STREAMED_BYTES = columns._STREAMED_BYTES = 1 << 12
        threads.ENOUGH_IDS = 1
        pool = ThreadPoolExecutor(3, initializer=GuardedMemory.__enter__, initargs=(memory,))
        threads._pool = lambda _: pool  # type: ignore[assignment]
        while time.monotonic() < until or number < 2:
            draw = Draw(1000 * seed + number)
            torch.set_num_threads(draw.one((1, 1, 3)))
            dtype, kind = draw.one(DTYPES[:1] if seconds < 5 else DTYPES), draw.one(KINDS)
            near = {torch.float32: 1e-4, torch.float64: 1e-9}.get(dtype, 0.2)
            lookups = tables_of(draw, dtype, kind)
            for _ in range(3):
                pooled(draw, lookups, near)
                unpooled(draw, lookups, near)
                for tensor, of_torch in zip(of_bank(lookups[0]), of_bank(lookups[1]), strict=True):
                    of_torch.copy_(tensor)
            deduplicated(draw)
            placed(draw)
            added_up(draw)
            sorted_by_block(draw)
            packed(draw)
            from_sources(draw)
            number += 1
    print(f"cases: {number}", flush=True)
    os._exit(0)  # threads that end with the interpreter cannot give their tensors' memory back


def in_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_program(["-m", "tests.test_guard_pages", *map(str, arguments)])


needs_numba = pytest.mark.skipif(bool(numba_kernel.problem()), reason="it is numba's code that is looked at")


@needs_numba
@pytest.mark.parametrize("at_begin", [0, 1])
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow) for seed in range(12)])
def test_no_byte_too_far(seed: int, at_begin: int) -> None:
    ran = in_process("cases", seed, at_begin, 20)
    assert ran.returncode == 0 and "cases: " in ran.stdout, ran.stderr


def too_far(at_begin: bool) -> None:
    with GuardedMemory(at_begin):
        tensor = torch.arange(5).to(torch.int16)
        assert tensor.tolist() == [0, 1, 2, 3, 4]
        ctypes.memset(tensor.data_ptr() + (-1 if at_begin else tensor.nbytes), 0, 1)


@needs_numba
def test_a_few_cases() -> None:
    ran = in_process("cases", 99, 0, 1)
    assert ran.returncode == 0 and "cases: " in ran.stdout, ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("at_begin", [0, 1])
def test_one_byte_too_far_ends_the_process(at_begin: int) -> None:
    assert in_process("too_far", 0, at_begin, 0).returncode == -signal.SIGSEGV


if __name__ == "__main__":
    what, seed, at_begin, seconds = sys.argv[1:]
    too_far(at_begin == "1") if what == "too_far" else run_cases(int(seed), at_begin == "1", float(seconds))
