"""Ids packed for all ranks, compiled by numba: `FILLED` at once where the CPU can. One by one, those of tables in row
blocks took a tenth of a step.

Addresses are integers. Arrays are int32 where nothing else is said.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sharders.embedding.lookup.numba_blocks import read_integer
from sharders.embedding.lookup.numba_compile import has, helper
from sharders.embedding.lookup.numba_layout import FILLED
from sharders.embedding.lookup.numba_vectors import counted, ones, pointer, read32, read64, write32, write64


@intrinsic
def packs_at_once(_context: Any) -> Any:
    """Whether `choose32` and `choose64` do anything here, known when it is compiled."""

    def code(_: Any, _builder: Any, _signature: Any, _arguments: Any) -> Any:
        return ir.IntType(64)(int(has("avx512f")))

    return types.int64(), code


def _choose(bits: int) -> Any:
    def choose(_context: Any, *arguments: Any) -> Any:
        def code(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            values, place, num, low, count, out, to = arguments
            if not has("avx512f"):
                return ir.IntType(64)(0)
            word, bit, lanes = ir.IntType(32), ir.IntType(1), FILLED
            words, read, chosen = (ir.VectorType(of, lanes) for of in (word, ir.IntType(bits), bit))

            def many(value: Any) -> Any:
                nothing = ir.Constant(words, ir.Undefined)
                one = builder.insert_element(nothing, builder.trunc(value, word), word(0))
                return builder.shuffle_vector(one, nothing, ir.Constant(words, None))

            there = builder.icmp_unsigned("<", ir.Constant(words, [*range(lanes)]), many(num))
            source = pointer(builder, values, place, bits // 8, read)
            load_type = ir.FunctionType(read, [source.type, word, chosen, read])
            load = cgutils.get_or_insert_function(
                builder.module, load_type, f"llvm.masked.load.v{lanes}i{bits}.p0v{lanes}i{bits}"
            )
            found = builder.call(load, [source, word(bits // 8), there, ir.Constant(read, None)])
            found = builder.sub(builder.trunc(found, words) if bits > 32 else found, many(low))
            are_in = builder.and_(there, builder.icmp_unsigned("<", found, many(count)))
            compress = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(words, [words, words, chosen]),
                f"llvm.x86.avx512.mask.compress.v{lanes}i32",
            )
            packed = builder.call(compress, [found, ir.Constant(words, None), are_in])
            builder.store(packed, pointer(builder, out, to, 4, words), align=4)
            return builder.zext(builder.bitcast(are_in, ir.IntType(lanes)), ir.IntType(64))

        return types.int64(*arguments), code

    def typed(context: Any, values: Any, place: Any, num: Any, low: Any, count: Any, out: Any, to: Any) -> Any:
        return choose(context, values, place, num, low, count, out, to)

    return typed


choose32 = intrinsic(_choose(32))
"""Of the first `num` of `FILLED` integers those of `low` and the `count` - 1 behind it: they are written to `out`, side
by side, counted from `low`, and behind them up to `FILLED` words of anything. Returns a bit for each chosen one."""
choose64 = intrinsic(_choose(64))
"""The same of integers of 64 bits, whose low halves are read."""


@intrinsic
def write_bits(_context: Any, address: Any, index: Any, bits: Any) -> Any:
    """Write `FILLED` words, each 1 where its bit is set and 0 elsewhere."""

    def code(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        words = ir.VectorType(ir.IntType(32), FILLED)
        bits = builder.trunc(arguments[2], ir.IntType(FILLED))
        spread = builder.zext(builder.bitcast(bits, ir.VectorType(ir.IntType(1), FILLED)), words)
        builder.store(spread, pointer(builder, arguments[0], arguments[1], 4, words), align=4)

    return types.void(address, index, bits), code


def pack_ids(
    values, value_bytes, lengths, length_bytes, num_samples, starts, weights,
    slots, ends, num_ranks, head, tail, by_slot, by_rank, slot_lengths, out
):  # fmt: skip
    """What goes to each rank: lengths of its slots' bags, then the ids slot by slot, then their weights.

    Args:
        values: int32 or int64, key by key, in range.
        lengths: likewise, (keys, num_samples).
        starts: int64, the first id of each key.
        weights: of the ids, words that are moved with them; 0 where there are none.
        slots: (slots, 3) int64: key, the first row of its block and the end; no end where it is -1: all ids are in it.
        ends: (num_ranks + 1,) int64, of each rank's slots.
        head: words in front of each rank's; with these, each rank's begin at an even word.
        tail: words behind each rank's, which are its own too; not written.
        by_slot: (2, slots) int64, written: ids of each, and of those in row blocks the bags that have some, else 0.
        by_rank: (num_ranks,) int64, written: words of each, without the head.
        slot_lengths: (slots, num_samples), written if it is not 0.
        out: written; `FILLED` words behind all that goes may be overwritten.
    """
    num_slots, at = read64(ends, num_ranks), 0
    for rank in range(num_ranks):
        at += head
        begin, first, stop = at, read64(ends, rank), read64(ends, rank + 1)
        to = at + (stop - first) * num_samples
        for slot in range(first, stop):
            key, low, high = read64(slots, 3 * slot), read64(slots, 3 * slot + 1), read64(slots, 3 * slot + 2)
            of_key, bags, before, filled = read64(starts, key), key * num_samples, to, 0
            others = 0  # bags of another number of ids than one
            for sample in range(num_samples):
                length = read_integer(lengths, bags + sample, length_bytes)
                write32(out, at + sample, length)
                others |= length ^ 1
            if high < 0:
                to += _pack_all(values, value_bytes, of_key, out, at, num_samples, to)
            elif others == 0 and packs_at_once():
                to += _pack_single(values, value_bytes, of_key, num_samples, (low, high, out, at, to))
                filled = to - before
            else:
                for sample in range(num_samples):
                    end = of_key + read32(out, at + sample)
                    num = _pack_bag(values, value_bytes, of_key, end, (low, high, out, to))
                    write32(out, at + sample, num)
                    filled += num > 0
                    to, of_key = to + num, end
            write64(by_slot, slot, to - before)
            write64(by_slot, num_slots + slot, filled)
            if slot_lengths != 0:
                for sample in range(num_samples):
                    write32(slot_lengths, slot * num_samples + sample, read32(out, at + sample))
            at += num_samples
        at = to
        for slot in range(first, stop if weights != 0 else first):
            key, low, high = read64(slots, 3 * slot), read64(slots, 3 * slot + 1), read64(slots, 3 * slot + 2)
            end = at + read64(by_slot, slot)
            of_key = read64(starts, key)
            while at < end:
                value = read_integer(values, of_key, value_bytes)
                write32(out, at, read32(weights, of_key))
                at += (high < 0) | ((value >= low) & (value < high))
                of_key = counted(of_key + 1)
        at += tail
        write64(by_rank, rank, at - begin)
        at += at & 1 if head != 0 else 0


@helper
def _pack_bag(values, value_bytes, first, stop, block):
    """A bag's ids that lie in a row block; returns how many."""
    low, high, out, begin = block
    to = begin
    if packs_at_once():
        if value_bytes == 4:
            while first < stop:
                to += ones(choose32(values, first, stop - first, low, high - low, out, to))
                first = counted(first + FILLED)
        else:
            while first < stop:
                to += ones(choose64(values, first, stop - first, low, high - low, out, to))
                first = counted(first + FILLED)
    else:
        while first < stop:
            value = read_integer(values, first, value_bytes)
            write32(out, to, value - low)
            to += (value >= low) & (value < high)
            first = counted(first + 1)
    return to - begin


@helper
def _pack_single(values, value_bytes, first, num_samples, block):
    """The same of bags of one id, and how many each has there."""
    low, high, out, lengths, begin = block
    sample, to = 0, begin
    while sample < num_samples:
        num = num_samples - sample
        if value_bytes == 4:
            bits = choose32(values, first + sample, num, low, high - low, out, to)
        else:
            bits = choose64(values, first + sample, num, low, high - low, out, to)
        to += ones(bits)
        if num >= FILLED:
            write_bits(out, lengths + sample, bits)
        else:
            for place in range(num):
                write32(out, lengths + sample + place, (bits >> place) & 1)
        sample = counted(sample + FILLED)
    return to - begin


@helper
def _pack_all(values, value_bytes, first, out, lengths, num_samples, to):
    """All ids of a key, whose lengths have been packed; returns how many there are."""
    num = 0
    for sample in range(num_samples):
        num += read32(out, lengths + sample)
    if value_bytes == 4:
        for place in range(num):
            write32(out, to + place, read32(values, first + place))
    else:
        for place in range(num):
            write32(out, to + place, read64(values, first + place))
    return num
