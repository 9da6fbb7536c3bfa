"""What is done with the summed gradient of a row, compiled by numba: the formulas of `row_updates` that are used most.

A row is given block by block, as it is summed, and is changed in registers. Addresses are integers, elements are
counted in those of what they point to. State is kept as it is computed; weights of bfloat16 and float16 are rounded
once, when they are written.
"""

from __future__ import annotations

from math import sqrt
from typing import Any, NamedTuple

from sharders.embedding.lookup.numba_compile import by_blocks, helper
from sharders.embedding.lookup.numba_layout import BLOCKS
from sharders.embedding.lookup.numba_vectors import (
    add,
    computed,
    divide,
    fma,
    lanes,
    load,
    multiply,
    root,
    splat,
    store,
    subtract,
    total,
    zeros,
)


class Kind(NamedTuple):
    """What is done with rows, as helpers that are given `row`: `(at, state_at, width, sums, arrays, rates)`.

    Args:
        of_block: `(elements, summed, column, row)`: with a block of the summed gradient.
        of_row: `(elements, row)`: after the last block.
        num_pointwise: how many of the arrays are read and changed element by element.
        is_row_wise: whether the second array is state by row.

    `at` is the place of the row's first element in the arrays, `state_at` its place in row-wise state, `sums` memory
    for a row of what is computed, `arrays` are addresses of the weights and two tensors of state, `rates` the learning
    rate, eps, both betas, and what of the weights is taken away as decay.
    """

    of_block: Any
    of_row: Any
    num_pointwise: int
    is_row_wise: bool = False


@helper
def inner_product(elements, one, at, others, other, other_at, width):
    """Of two rows of elements, each of its kind."""
    wide, narrow = zeros(elements, 16), zeros(elements, 1)
    column = 0
    while width - column >= 16:
        part = load(elements, zeros(elements, 16), one, at + column)
        wide = fma(part, load(others, zeros(elements, 16), other, other_at + column), wide)
        column += 16
    while column < width:
        part = load(elements, zeros(elements, 1), one, at + column)
        narrow = fma(part, load(others, zeros(elements, 1), other, other_at + column), narrow)
        column += 1
    return total(wide) + total(narrow)


@helper
def _nothing(elements, row):
    pass


@helper
def _copy(elements, summed, column, row):
    store(elements, row[4][0], row[0] + column, summed)


@helper
def _move(elements, table, at, direction, rate):
    weights = load(elements, direction, table, at)
    store(elements, table, at, fma(splat(direction, -rate), direction, weights))


@helper
def _sgd(elements, summed, column, row):
    at, _, _, _, arrays, rates = row
    _move(elements, arrays[0], at + column, summed, rates[0])


@helper
def _adagrad(elements, summed, column, row):
    at, _, _, _, arrays, rates = row
    at += column
    squares = fma(summed, summed, load(computed(elements), summed, arrays[1], at))
    store(computed(elements), arrays[1], at, squares)
    direction = divide(summed, add(root(squares), splat(summed, rates[1])))
    _move(elements, arrays[0], at, direction, rates[0])


@helper
def _adam(elements, summed, column, row):
    at, _, _, _, arrays, rates = row
    at += column
    rate, eps, beta1, beta2, decay = rates
    mean = load(computed(elements), summed, arrays[1], at)
    mean = fma(splat(summed, 1 - beta1), subtract(summed, mean), mean)
    store(computed(elements), arrays[1], at, mean)
    kept = multiply(splat(summed, beta2), load(computed(elements), summed, arrays[2], at))
    square = fma(multiply(splat(summed, 1 - beta2), summed), summed, kept)
    store(computed(elements), arrays[2], at, square)
    weights = load(elements, summed, arrays[0], at)
    direction = divide(mean, add(root(square), splat(summed, eps)))
    moved = fma(splat(summed, -decay), weights, fma(splat(summed, -rate), direction, weights))
    store(elements, arrays[0], at, moved)


@helper
def _rowwise_rate(elements, squares, row):
    """Add a row's squares to its state; the rate of its step."""
    _, state_at, width, _, arrays, rates = row
    one = zeros(elements, 1)
    summed = total(load(computed(elements), one, arrays[1], state_at)) + squares / width
    store(computed(elements), arrays[1], state_at, splat(one, summed))
    return rates[0] / (sqrt(summed) + rates[1])


@helper
def _rowwise_adagrad(elements, summed, column, row):
    at, _, width, sums, arrays, _ = row
    if lanes(summed) == width:  # the whole row, which need not go through memory
        _move(elements, arrays[0], at, summed, _rowwise_rate(elements, total(multiply(summed, summed)), row))
    else:
        store(computed(elements), sums, column, summed)


@helper
def _rest_of_rowwise_adagrad(elements, row):
    at, _, width, sums, arrays, _ = row
    if width not in BLOCKS:
        rate = _rowwise_rate(
            elements, inner_product(computed(elements), sums, 0, computed(elements), sums, 0, width), row
        )
        _descend(elements, width, (at, sums, arrays[0], rate))


@by_blocks
def _descend(elements, like, column, arguments):
    at, sums, table, rate = arguments
    _move(elements, table, at + column, load(computed(elements), like, sums, column), rate)


KINDS = {
    "copy": Kind(_copy, _nothing, 0),
    "sgd": Kind(_sgd, _nothing, 1),
    "adagrad": Kind(_adagrad, _nothing, 2),
    "rowwise_adagrad": Kind(_rowwise_adagrad, _rest_of_rowwise_adagrad, 1, is_row_wise=True),
    "adam": Kind(_adam, _nothing, 3),
}
"""By name; `copy` keeps the gradients in the first array."""
