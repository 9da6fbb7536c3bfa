"""What is done with the summed gradient of a row, compiled by numba: the formulas of `row_updates` that are used most.

Addresses are integers, elements are counted in those of the table. What is computed of bfloat16 and float16 is rounded
once, when it is written.
"""

from __future__ import annotations

from math import sqrt

from sharders.embedding.lookup.numba_compile import by_small_blocks, helper
from sharders.embedding.lookup.numba_vectors import (
    add,
    computed,
    divide,
    fma,
    load,
    multiply,
    root,
    splat,
    store,
    subtract,
    total,
    zeros,
)

COPY, SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM = range(5)


@helper
def finish_row(elements, kind, sums, at, state_at, width, arrays, rates):
    """Update a row, or keep its gradient.

    Args:
        kind: `COPY` into the first array, or which optimizer.
        sums: address of the gradient, in what is computed.
        at: place of the row's first element in the arrays; in state too if that is pointwise.
        state_at: place in row-wise state.
        arrays: addresses of the weights and two tensors of state.
        rates: learning rate, eps, both betas, and what of the weights is taken away as decay.
    """
    row = (sums, at, width)
    if kind == COPY:
        _copy(elements, width, (row, arrays, rates))
    elif kind == SGD:
        _descend(elements, width, (row, arrays, rates))
    elif kind == ADAGRAD:
        _adagrad(elements, width, (row, arrays, rates))
    elif kind == ADAM:
        _adam(elements, width, (row, arrays, rates))
    else:
        rate, eps, _, _, _ = rates
        one = zeros(elements, 1)
        squares = inner_product(computed(elements), sums, 0, sums, 0, width)
        summed = total(load(elements, one, arrays[1], state_at)) + squares / width
        store(elements, arrays[1], state_at, splat(one, summed))
        _descend(elements, width, (row, arrays, (rate / (sqrt(summed) + eps), eps, 0.0, 0.0, 0.0)))


@helper
def inner_product(elements, one, at, other, other_at, width):
    """Of two rows of elements."""
    wide, narrow = zeros(elements, 16), zeros(elements, 1)
    column = 0
    while width - column >= 16:
        part = load(elements, zeros(elements, 16), one, at + column)
        wide = fma(part, load(elements, zeros(elements, 16), other, other_at + column), wide)
        column += 16
    while column < width:
        part = load(elements, zeros(elements, 1), one, at + column)
        narrow = fma(part, load(elements, zeros(elements, 1), other, other_at + column), narrow)
        column += 1
    return total(wide) + total(narrow)


@by_small_blocks
def _copy(elements, like, column, arguments):
    row, arrays, _ = arguments
    sums, at, _ = row
    store(elements, arrays[0], at + column, load(computed(elements), like, sums, column))


@by_small_blocks
def _descend(elements, like, column, arguments):
    row, arrays, rates = arguments
    sums, at, _ = row
    weights = load(elements, like, arrays[0], at + column)
    gradient = load(computed(elements), like, sums, column)
    store(elements, arrays[0], at + column, fma(splat(like, -rates[0]), gradient, weights))


@by_small_blocks
def _adagrad(elements, like, column, arguments):
    row, arrays, rates = arguments
    sums, at, _ = row
    at += column
    gradient = load(computed(elements), like, sums, column)
    squares = fma(gradient, gradient, load(elements, like, arrays[1], at))
    store(elements, arrays[1], at, squares)
    direction = divide(gradient, add(root(squares), splat(like, rates[1])))
    weights = load(elements, like, arrays[0], at)
    store(elements, arrays[0], at, fma(splat(like, -rates[0]), direction, weights))


@by_small_blocks
def _adam(elements, like, column, arguments):
    row, arrays, rates = arguments
    sums, at, _ = row
    at += column
    rate, eps, beta1, beta2, decay = rates
    gradient = load(computed(elements), like, sums, column)
    mean = load(elements, like, arrays[1], at)
    mean = fma(splat(like, 1 - beta1), subtract(gradient, mean), mean)
    store(elements, arrays[1], at, mean)
    kept = multiply(splat(like, beta2), load(elements, like, arrays[2], at))
    square = fma(multiply(splat(like, 1 - beta2), gradient), gradient, kept)
    store(elements, arrays[2], at, square)
    weights = load(elements, like, arrays[0], at)
    direction = divide(mean, add(root(square), splat(like, eps)))
    moved = fma(splat(like, -decay), weights, fma(splat(like, -rate), direction, weights))
    store(elements, arrays[0], at, moved)
