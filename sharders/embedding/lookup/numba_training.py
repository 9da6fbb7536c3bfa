"""What is made of the gradients of rows, once their order is known: updates, sums by row, the gradient of all weights.

SGD, Adagrad, row-wise Adagrad and Adam are compiled with the sums; for others the sums are given to `row_updates`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from math import inf, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sharders.embedding.lookup import row_updates, threads
from sharders.embedding.lookup.bank import Bank
from sharders.embedding.lookup.numba_layout import Order, Summed, address, int64, longs, words
from sharders.embedding.lookup.reads import Given
from sharders.embedding.lookup.row_optimizer import Rows
from sharders.embedding.lookup.torch_kernel import Into, RowGradients, update

ELEMENTS = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
"""Of tables, and what compiled code calls them."""


def elements_of(table: torch.dtype, gradients: torch.dtype) -> str:
    """What compiled code that reads both calls them."""
    return ELEMENTS[table] if table == gradients else f"{ELEMENTS[table]}_{ELEMENTS[gradients]}"


_COPY = "copy"
KINDS: dict[Callable[[Rows], None], str] = {
    row_updates.sgd: "sgd",
    row_updates.adagrad: "adagrad",
    row_updates.rowwise_adagrad: "rowwise_adagrad",
    row_updates.adam: "adam",
}
"""Updates that are compiled, by what they are called there; see `numba_updates`."""
_STATES = {
    "sgd": [],
    "adagrad": [("sum", False)],
    "rowwise_adagrad": [("sum", True)],
    "adam": [("exp_avg", False), ("exp_avg_sq", False)],
}
"""The state that they are given: names, and whether it is row-wise; of the dtype of sums."""


class Gradients(NamedTuple):
    """Of a call's ids, in the weights' dtype or that of sums.

    Args:
        parts: the columns of `order` count from the first element of the first.
        stride: elements from one gradient to the next.
        order: of the ids.
        weights: of the ids, in the dtype of sums; None where each counts once.
        given: those of the last bags of each range, or of all.
    """

    parts: Sequence[Tensor]
    stride: int
    order: Order
    weights: Tensor | None = None
    given: Given | None = None

    def columns(self) -> tuple[Any, int, int]:
        """What holds them, the columns, and what is said of `given`; see `update` in `numba_loops`."""
        of_ranges = self.order.columns
        if self.given is None:
            return None, of_ranges.data_ptr(), 0
        matrix, columns, factor = self.given
        first, stride, grad = self.order.num_bags - matrix.shape[0], matrix.stride(0), self.parts[0]
        shift, rest = divmod(matrix.data_ptr() - grad.data_ptr(), grad.element_size())
        assert not rest, "elements lie at multiples of their size"
        here, shift = of_ranges.numpy().tolist(), shift - first * stride
        times = len(here) // len(columns)  # one for each source, where ranges have several
        held, at = longs([*here, *(shift + column for column in columns for _ in range(times))])
        told, of_given = longs(struct.pack("=qqdq", first, stride, factor, len(here)))
        return (held, told), at, of_given


def train(bank: Bank, tables: Summed, gradients: Gradients) -> None:
    """Sum the gradients of each row, and update it by the bank's optimizer."""
    spec, kind = bank.spec, _compiled_kind(bank)
    assert spec is not None, "a bank without optimizer is not updated in the backward pass"
    for part in _parts(bank, tables, gradients):
        if kind is None:  # the optimizer's own function is given the sums
            for region, rows_n, grads_nD in row_gradients(bank, tables, part):
                update(bank, region, rows_n, grads_nD)
        else:
            arrays = (bank.weights, *(bank.state[name] for name in spec.optimizer.state))
            _sum(tables, part, kind, arrays, _rates(bank, tables.in_bank))


def row_gradients(bank: Bank, tables: Summed, gradients: Gradients, into: Into | None = None) -> RowGradients:
    """The sums by row; in `into` where that has their dtype."""
    counts = gradients.order.counts
    by_width: dict[int, list[int]] = {}
    for t in tables.as_stored:
        if counts[t]:
            by_width.setdefault(tables.widths[t], []).append(t)
    packed, num_rows, num_elements, spans = [(0, 0)] * len(counts), 0, 0, []
    for width, members in by_width.items():
        start = num_rows, num_elements
        for t in members:
            packed[t] = num_rows, num_elements
            num_rows, num_elements = num_rows + counts[t], num_elements + counts[t] * width
        spans.append((width, *start, num_rows, num_elements))
    if into is not None and into.sums.dtype == bank.dtype_of_sums:
        rows, sums = into.rows[:num_rows], into.sums[:num_elements]
    else:
        rows = torch.empty(num_rows, dtype=torch.int64, device="cpu")
        sums = bank.weights.new_empty(num_elements, dtype=bank.dtype_of_sums)
    _sum(tables, gradients, _COPY, (sums,), packed=(int64(packed), rows))
    return [
        (bank.regions[width], rows[row:last_row], sums[element:last_element].view(-1, width))
        for width, row, element, last_row, last_element in spans
    ]


def write_gradient(bank: Bank, tables: Summed, gradients: Gradients, flat: Tensor) -> None:
    """The sums where their rows are, in zeros like the bank's weights."""
    for part in _parts(bank, tables, gradients):
        _sum(tables, part, _COPY, (flat,))


def _parts(bank: Bank, tables: Summed, gradients: Gradients) -> Iterator[Gradients]:
    """Those of tables whose ids are in order, and of the tables `Apart` the sums by row."""
    yield gradients
    apart = gradients.order.apart
    if not apart.num_rows:
        return
    (_kept, columns, given), (ids, bounds, _) = gradients.columns(), apart.read
    order = apart.order(torch.zeros_like(gradients.order.columns))
    sums = bank.weights.new_empty(apart.num_elements, dtype=bank.dtype_of_sums)
    marks = torch.empty(apart.num_rows, dtype=torch.int32, device="cpu")
    num_tables, (begins, counts, rows, starts, ordered) = tables.tables.shape[0], order.addresses[1:6]
    fixed = (
        *(*words(ids), *words(bounds), apart.runs.to_sort.data_ptr(), apart.runs.first.data_ptr()),
        *(tables.tables.data_ptr(), tables.num_rows.data_ptr()),
    )
    read = (
        *(apart.row_ends, apart.firsts, address(gradients.weights), gradients.parts[0].data_ptr(), gradients.stride),
        *(gradients.order.shift, columns, given, sums.data_ptr(), marks.data_ptr()),
        *(begins, counts, rows, starts, ordered),
    )
    sum_tables = entry_of("sum_tables", ELEMENTS[gradients.parts[0].dtype])
    parts = min(threads.num_parts(gradients.order.num_ids), num_tables)
    threads.run(lambda i: sum_tables(*fixed, num_tables * i // parts, num_tables * (i + 1) // parts, *read), parts)
    yield Gradients([sums], 1, order)


def _sum(
    tables: Summed,
    gradients: Gradients,
    kind: str,
    arrays: Sequence[Tensor],
    rates: Tensor | None = None,
    packed: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Sum the gradients of each row, and do with it what `kind` says to the first of the arrays and its state."""
    two = "" if gradients.given is None else "two_"
    update_rows = entry_of(f"update_{two}{kind}", elements_of(arrays[0].dtype, gradients.parts[0].dtype))
    order, num_tables = gradients.order, tables.tables.shape[0]
    if rates is None:
        rates = torch.zeros(num_tables, 5, dtype=torch.float64, device="cpu")
    _kept, columns, given = gradients.columns()
    fixed = (
        *(gradients.parts[0].data_ptr(), gradients.stride, order.shift, columns, given),
        *(tables.tables.data_ptr(), num_tables, *order.addresses, address(gradients.weights)),
    )
    to = (
        *([*map(address, arrays), 0, 0][:3]),
        *(rates.data_ptr(), *(map(address, packed) if packed else (0, 0))),
    )
    num_ids, parts = order.num_ids, threads.num_parts(order.num_ids)

    def part(i: int) -> None:
        sums = torch.empty(tables.widest, dtype=torch.float64, device="cpu")
        update_rows(*fixed, num_ids * i // parts, num_ids * (i + 1) // parts, sums.data_ptr(), *to)

    threads.run(part, parts)


def _rates(bank: Bank, in_bank: Sequence[int]) -> Tensor:
    """(tables, 5) float64: what a `Kind` calls rates; of the bank's options as they are now, and its tables' steps."""
    options = bank.options
    lr, eps = float(options["lr"]), float(options.get("eps", 0.0))
    if "betas" not in options:
        return _same_rates(lr, eps, len(in_bank))
    beta1, beta2 = (float(b) for b in options["betas"])
    steps, by_step = bank.steps.tolist(), {}
    for step in set(steps):
        root_correction = sqrt(1 - beta2**step)
        own_eps = eps * (root_correction if options.get("bias_corrected_eps", True) else 1.0)
        rate = lr * root_correction / (1 - beta1**step) if step else inf
        by_step[step] = [rate, own_eps, beta1, beta2, lr * float(options.get("weight_decay", 0.0))]
    return torch.tensor([by_step[steps[t]] for t in in_bank], dtype=torch.float64, device="cpu")


@lru_cache(maxsize=16)
def _same_rates(lr: float, eps: float, num_tables: int) -> Tensor:
    return torch.tensor([lr, eps, 0.0, 0.0, 0.0], dtype=torch.float64, device="cpu").repeat(num_tables, 1)


def _compiled_kind(bank: Bank) -> str | None:
    """The compiled update of the bank's optimizer; None where there is none for its state and the options now set."""
    assert bank.spec is not None
    optimizer = bank.spec.optimizer
    kind = KINDS.get(optimizer.update)
    if kind == "rowwise_adagrad" and any(map(bank.options.get, ("weight_decay", "max_norm"))):
        return None
    found = [(name, tensor.is_row_wise) for name, tensor in optimizer.state.items()]
    as_computed = all(tensor.dtype == bank.dtype_of_sums for tensor in bank.state.values())
    return kind if kind is not None and as_computed and found == _STATES[kind] else None


@cache
def entry_of(name: str, element: str = "") -> Callable[..., int]:
    """A compiled function; see `numba_functions`."""
    from sharders.embedding.lookup.numba_functions import entry

    return entry(name, element)
