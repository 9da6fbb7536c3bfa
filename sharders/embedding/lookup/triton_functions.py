"""What triton compiles for a GPU: sums over bags, ids in the order of their rows, sums of gradients with their update.

Each function is given addresses and sizes alone, so that nothing of a batch is waited for. Legend: S row ranges, B bags
of each, N ids, D a range's width. A function takes the ranges whose width fits `BLOCK`, the next power of two, and
leaves others to its other calls. `K` ids are read at once.

`ALIGNED` divides all widths, columns and strides: then the GPU reads up to 16 bytes at once.

[Note: two halves] A call's floats are float32; a number that float64 tables need whole comes as two of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, GRADIENT = (tl.constexpr(kind) for kind in range(5))


@triton.jit(do_not_specialize=["num_bags"])
def sum_bags(
    table, ids, bounds, weights, out,
    members, elements, widths, columns,
    num_bags, stride,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, SUM: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Of one bag of one range: its sum, to where it belongs in `out`."""
    of = tl.load(members + tl.program_id(1))
    bag = tl.program_id(0)
    place = of.to(tl.int64) * num_bags + bag
    first, end = tl.load(bounds + place).to(tl.int64), tl.load(bounds + place + 1).to(tl.int64)
    element, width = tl.load(elements + of), tl.multiple_of(tl.load(widths + of), ALIGNED)
    column = tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], SUM)
    nth = tl.arange(0, K)
    for i in range(first, end, K):
        some = i + nth < end
        rows = element + tl.load(ids + i + nth, mask=some, other=0).to(tl.int64) * width
        rows = tl.multiple_of(rows, ALIGNED)
        values = tl.load(table + rows[:, None] + column[None, :], mask=some[:, None] & inside[None, :], other=0.0)
        values = values.to(SUM)
        if WEIGHTED:
            values *= tl.load(weights + i + nth, mask=some, other=0.0).to(SUM)[:, None]
        total += tl.sum(values, 0)
    to = out + tl.multiple_of(bag.to(tl.int64) * stride + tl.load(columns + of), ALIGNED) + column
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_bags", "num_all"])
def number_ids(ids, bounds, first_rows, keys, bags, num_bags, num_all, BLOCK: tl.constexpr):
    """Of each id in a bag: its row among all of the bank, and the bag, counted over ranges."""
    bag = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = bag < num_all
    first = tl.load(bounds + bag, mask=inside, other=0).to(tl.int64)
    end = tl.load(bounds + bag + 1, mask=inside, other=0).to(tl.int64)
    row = tl.load(first_rows + bag // num_bags, mask=inside, other=0)
    for i in range(0, tl.max(end - first, 0)):
        some = first + i < end
        found = row + tl.load(ids + first + i, mask=some, other=0).to(tl.int64)
        tl.store(keys + first + i, found.to(keys.dtype.element_ty), mask=some)
        tl.store(bags + first + i, bag, mask=some)


@triton.jit(do_not_specialize=["num_bags"])
def weight_gradients(
    table, ids, bounds, grad, out,
    members, elements, widths, columns,
    num_bags, stride,
    BLOCK: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Of each id in one bag of one range: the product of its row and the bag's gradient."""
    of = tl.load(members + tl.program_id(1))
    bag = tl.program_id(0)
    place = of.to(tl.int64) * num_bags + bag
    first, end = tl.load(bounds + place).to(tl.int64), tl.load(bounds + place + 1).to(tl.int64)
    element, width = tl.load(elements + of), tl.load(widths + of)
    column = tl.arange(0, BLOCK)
    inside = column < width
    given = tl.load(grad + bag.to(tl.int64) * stride + tl.load(columns + of) + column, mask=inside, other=0.0).to(SUM)
    for i in range(first, end):
        row = element + tl.load(ids + i).to(tl.int64) * width
        tl.store(out + i, tl.sum(tl.load(table + row + column, mask=inside, other=0.0).to(SUM) * given, 0))


@triton.jit(do_not_specialize=["num_ids", "num_bags"])
def update_rows(
    keys, order, bags, of_ids, weights, grad, table, state, other, num_ids,
    first_rows, elements, widths, columns,
    num_bags, stride,
    lr, lr_rest, eps, eps_rest, decay, decay_rest, beta2, beta2_rest, new1, new1_rest, new2, new2_rest,
    scale, scale_rest,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, NUMBERED: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr,
    PLACES: tl.constexpr, SUM: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """At some places of the ids' order: where a row begins, sum its gradients, and update it, or write the sum.

    Args:
        keys: (N,) the order's rows, of all of the bank.
        order: (N,) the id of each place.
        bags: (N,) of each id the bag, over ranges; the row of the gradient where ids are `NUMBERED`.
        of_ids: (N,) the range of each id, where they are `NUMBERED`: else it follows from the bag.
        table: that is updated, or written to.
        state: pointwise where the table is, or by bank row.
        other: the second moment.
        new1, new2: what is left of beta1 and beta2: a difference of float32 would have few digits.
        scale: of Adam's step, its corrections in one.
    """
    column = tl.arange(0, BLOCK)
    nth = tl.arange(0, K)
    for p in range(PLACES):
        place = tl.program_id(0).to(tl.int64) * PLACES + p
        if place < num_ids:
            key = tl.load(keys + place)
            begins = tl.load(keys + tl.maximum(place - 1, 0)) != key
            begins = begins | (place == 0)
            if begins:
                id = tl.load(order + place)
                bag = tl.load(bags + id).to(tl.int64)
                of = tl.load(of_ids + id).to(tl.int64) if NUMBERED else bag // num_bags
                width = tl.multiple_of(tl.load(widths + of), ALIGNED)
                if (width <= BLOCK) & (2 * width > BLOCK):
                    inside = column < width
                    total = tl.zeros([BLOCK], SUM)
                    at = place
                    goes_on = True
                    while goes_on:
                        there = at + nth < num_ids
                        same = there & (tl.load(keys + at + nth, mask=there, other=-1) == key)
                        id_k = tl.load(order + at + nth, mask=same, other=0)
                        bag_k = tl.load(bags + id_k, mask=same, other=0).to(tl.int64)
                        if NUMBERED:
                            from_k = bag_k * stride
                        else:
                            begin_k = tl.load(columns + bag_k // num_bags, mask=same, other=0)
                            from_k = (bag_k % num_bags) * stride + begin_k
                        from_k = tl.multiple_of(from_k, ALIGNED)
                        both = same[:, None] & inside[None, :]
                        values = tl.load(grad + from_k[:, None] + column[None, :], mask=both, other=0.0).to(SUM)
                        if WEIGHTED:
                            values *= tl.load(weights + id_k, mask=same, other=0.0).to(SUM)[:, None]
                        total += tl.sum(values, 0)
                        goes_on = tl.sum(same.to(tl.int32), 0) == K
                        at += K
                    row = key.to(tl.int64) - tl.load(first_rows + of)
                    where = tl.multiple_of(tl.load(elements + of) + row * width, ALIGNED) + column
                    if KIND == GRADIENT:
                        tl.store(table + where, total.to(table.dtype.element_ty), mask=inside)
                    else:
                        rate = _whole(lr, lr_rest, SUM)
                        small = _whole(eps, eps_rest, SUM)
                        old = tl.load(table + where, mask=inside, other=0.0).to(SUM)
                        if KIND == SGD:
                            step = total
                        if KIND == ADAGRAD:
                            squares = tl.load(state + where, mask=inside, other=0.0).to(SUM) + total * total
                            tl.store(state + where, squares.to(state.dtype.element_ty), mask=inside)
                            step = _over(total, _root(squares) + small)
                        if KIND == ROWWISE_ADAGRAD:
                            mean = _over(tl.sum(total * total, 0), width.to(SUM))
                            square = tl.load(state + key).to(SUM) + mean
                            tl.store(state + key, square.to(state.dtype.element_ty))
                            step = _over(total, tl.zeros([BLOCK], SUM) + (_root(square) + small))
                        if KIND == ADAM:
                            mean = tl.load(state + where, mask=inside, other=0.0).to(SUM)
                            mean += (total - mean) * _whole(new1, new1_rest, SUM)
                            tl.store(state + where, mean.to(state.dtype.element_ty), mask=inside)
                            squares = tl.load(other + where, mask=inside, other=0.0).to(SUM)
                            squares = squares * _whole(beta2, beta2_rest, SUM)
                            squares += total * total * _whole(new2, new2_rest, SUM)
                            tl.store(other + where, squares.to(other.dtype.element_ty), mask=inside)
                            step = _over(mean, _root(squares) + small) * _whole(scale, scale_rest, SUM)
                            step += old * _whole(decay, decay_rest, SUM)
                        tl.store(table + where, (old - rate * step).to(table.dtype.element_ty), mask=inside)


@triton.jit
def _whole(x, rest, SUM: tl.constexpr):
    """See [Note: two halves]."""
    return tl.full([], x, SUM) + tl.full([], rest, SUM)


@triton.jit
def _root(x):
    """Rounded to nearest, as torch's."""
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def _over(x, y):
    """Rounded to nearest, as torch's."""
    if x.dtype == tl.float32:
        return tl.div_rn(x, y)
    else:
        return x / y
