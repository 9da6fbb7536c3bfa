"""Vectors, raw memory and prefetching for numba: what its arrays do not say, in a few instructions of LLVM's.

Compiled code is given addresses, as integers, and an `Elements`, which says what lies there. It computes in float32, or
in float64 for float64. A vector is some neighbouring elements; LLVM makes of it whatever registers the CPU has. Every
operation is element by element (`total` is a tree of fixed form), so that bits depend on neither CPU nor alignment,
with one exception: `fma` rounds once where the CPU can.

This file is imported where numba is.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import NumbaTypeError
from numba.extending import NativeValue, intrinsic, models, register_model, typeof_impl, unbox

from sharders.embedding.lookup.numba_layout import FILLED

_LINE_BYTES = 64
_READ, _SECOND_CACHE, _DATA = 0, 2, 1  # what LLVM calls a prefetch
_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


class Elements:
    """What lies at addresses: "float32", "float64", "bfloat16" or "float16". Passed to compiled code.

    Args:
        name: of elements of tables.
        of_gradients: of those of gradients, where they are others.
    """

    def __init__(self, name: str, of_gradients: str | None = None) -> None:
        self.name, self.of_gradients = name, of_gradients or name


class _ElementsType(types.Opaque):  # type: ignore[misc]  # numba has no types
    """Of an `Elements`."""

    def __init__(self, element: str, of_gradients: str) -> None:
        self.element, self.of_gradients = element, of_gradients
        super().__init__(name=f"elements({element}, {of_gradients})")

    @property
    def computed(self) -> Any:
        """numba's type of what is computed."""
        return types.float64 if self.element == "float64" else types.float32


class _Vector(types.Type):  # type: ignore[misc]
    def __init__(self, scalar: Any, lanes: int) -> None:
        self.scalar, self.lanes = scalar, lanes
        super().__init__(name=f"vector({scalar}, {lanes})")


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: _Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(_float(vector.scalar), vector.lanes))


register_model(_ElementsType)(models.OpaqueModel)


@typeof_impl.register(Elements)
def _type_of_elements(elements: Elements, _context: Any) -> _ElementsType:
    return _ElementsType(elements.name, elements.of_gradients)


@unbox(_ElementsType)
def _unbox_elements(_type: Any, _value: Any, c: Any) -> NativeValue:
    return NativeValue(c.context.get_dummy_value())


def _float(scalar: Any) -> Any:
    return ir.DoubleType() if scalar == types.float64 else ir.FloatType()


def _stored(element: str, lanes: int) -> Any:
    """LLVM's type of what lies in memory."""
    of = {"float32": ir.FloatType(), "float64": ir.DoubleType(), "bfloat16": ir.IntType(16), "float16": ir.HalfType()}
    return ir.VectorType(of[element], lanes)


def pointer(builder: Any, address: Any, index: Any, bytes_each: int, to: Any) -> Any:
    """To what lies at an index of what lies at an address."""
    # By a pointer and a step, not by a sum: LLVM sees that neighbours in a loop are neighbours in memory.
    start = builder.inttoptr(address, ir.IntType(8).as_pointer())
    place = builder.gep(start, [builder.mul(index, ir.Constant(ir.IntType(64), bytes_each))])
    return builder.bitcast(place, to.as_pointer())


def _all(vector: Any, value: int) -> Any:
    """A constant vector of integers."""
    return ir.Constant(vector, [value] * vector.count)


@intrinsic(prefer_literal=True)
def zeros(_context: Any, elements: Any, lanes: Any) -> Any:
    """A vector of zeros of what is computed with such elements; `lanes` is a literal."""
    if not isinstance(lanes, types.IntegerLiteral):
        raise NumbaTypeError("lanes are a literal")
    vector = _Vector(elements.computed, lanes.literal_value)

    def code(context: Any, _builder: Any, _signature: Any, _arguments: Any) -> Any:
        return ir.Constant(context.get_value_type(vector), None)

    return vector(elements, lanes), code


@intrinsic
def lanes(_context: Any, vector: Any) -> Any:
    """How many elements a vector has, known when it is compiled."""

    def code(_: Any, _builder: Any, _signature: Any, _arguments: Any) -> Any:
        return ir.IntType(64)(vector.lanes)

    return types.int64(vector), code


@intrinsic
def computed(_context: Any, elements: Any) -> Any:
    """The `Elements` of what is computed with such elements."""
    return _other(elements, str(elements.computed))


@intrinsic
def gradients(_context: Any, elements: Any) -> Any:
    """The `Elements` of gradients of tables of such elements."""
    return _other(elements, elements.of_gradients)


def _other(elements: Any, name: str) -> Any:
    def code(context: Any, _builder: Any, _signature: Any, _arguments: Any) -> Any:
        return context.get_dummy_value()

    return _ElementsType(name, name)(elements), code


@intrinsic
def splat(_context: Any, like: Any, value: Any) -> Any:
    """A vector, shaped as `like`, of one value."""

    def code(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        value_type = arguments[1].type
        scalar = _float(like.scalar)
        value = arguments[1]
        if value_type != scalar:
            value = builder.fptrunc(value, scalar) if scalar == ir.FloatType() else builder.fpext(value, scalar)
        one = builder.insert_element(ir.Constant(arguments[0].type, ir.Undefined), value, ir.IntType(32)(0))
        mask = ir.Constant(ir.VectorType(ir.IntType(32), like.lanes), None)
        return builder.shuffle_vector(one, ir.Constant(one.type, ir.Undefined), mask)

    return like(like, value), code


@intrinsic
def load(_context: Any, elements: Any, like: Any, address: Any, index: Any) -> Any:
    """Elements `index`, `index + 1`, ... at an address, as many as `like` has, as what is computed."""

    def code(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        element, size = elements.element, _BYTES[elements.element]
        place = pointer(builder, arguments[2], arguments[3], size, _stored(element, like.lanes))
        return _widened(builder, builder.load(place, align=size), element, like.lanes)

    return like(elements, like, address, index), code


def _widened(builder: Any, value: Any, element: str, lanes: int) -> Any:
    floats = ir.VectorType(ir.FloatType(), lanes)
    if element == "float16":
        return builder.fpext(value, floats)
    if element == "bfloat16":
        words = ir.VectorType(ir.IntType(32), lanes)
        return builder.bitcast(builder.shl(builder.zext(value, words), _all(words, 16)), floats)
    return value


def _narrowed(builder: Any, value: Any, element: str, lanes: int) -> Any:
    if element == "float16":
        return builder.fptrunc(value, ir.VectorType(ir.HalfType(), lanes))
    if element == "bfloat16":  # to the nearest, ties to even; NaN stays one
        words = ir.VectorType(ir.IntType(32), lanes)
        bits = builder.bitcast(value, words)
        odd = builder.and_(builder.lshr(bits, _all(words, 16)), _all(words, 1))
        rounded = builder.add(builder.add(bits, odd), _all(words, 0x7FFF))
        kept = builder.select(builder.fcmp_unordered("uno", value, value), _all(words, 0x7FC00000), rounded)
        return builder.trunc(builder.lshr(kept, _all(words, 16)), ir.VectorType(ir.IntType(16), lanes))
    return value


def _store(streams: bool) -> Any:
    def store(_context: Any, elements: Any, address: Any, index: Any, value: Any) -> Any:
        def code(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            element, lanes, size = elements.element, value.lanes, _BYTES[elements.element]
            place = pointer(builder, arguments[1], arguments[2], size, _stored(element, lanes))
            align = min(lanes * size, _LINE_BYTES) if streams else size
            done = builder.store(_narrowed(builder, arguments[3], element, lanes), place, align=align)
            if streams:
                done.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
            return None

        return types.void(elements, address, index, value), code

    return store


store = intrinsic(_store(False))
stream = intrinsic(_store(True))


def _operator(name: str) -> Any:
    def operator(_context: Any, a: Any, b: Any) -> Any:
        def code(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return getattr(builder, name)(*arguments)

        return a(a, b), code

    return operator


add = intrinsic(_operator("fadd"))
subtract = intrinsic(_operator("fsub"))
multiply = intrinsic(_operator("fmul"))
divide = intrinsic(_operator("fdiv"))


def _suffix(vector: Any) -> str:
    return f"v{vector.lanes}f{64 if vector.scalar == types.float64 else 32}"


@intrinsic
def fma(_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once where the CPU can."""

    def code(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        of = arguments[0].type
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(of, [of] * 3), f"llvm.fmuladd.{_suffix(a)}"
        )
        return builder.call(function, arguments)

    return a(a, b, c), code


@intrinsic
def root(_context: Any, a: Any) -> Any:
    """Square roots."""

    def code(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        of = arguments[0].type
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(of, [of]), f"llvm.sqrt.{_suffix(a)}")
        return builder.call(function, arguments)

    return a(a), code


@intrinsic
def total(_context: Any, a: Any) -> Any:
    """The sum of a vector's elements: halves are added until one is left."""

    def code(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        (value,), lanes = arguments, a.lanes
        word = ir.IntType(32)
        while lanes > 1:
            lanes //= 2
            nothing = ir.Constant(value.type, ir.Undefined)
            low, high = (
                builder.shuffle_vector(
                    value, nothing, ir.Constant(ir.VectorType(word, lanes), [*range(first, first + lanes)])
                )
                for first in (0, lanes)
            )
            value = builder.fadd(low, high)
        return builder.extract_element(value, word(0))

    return a.scalar(a), code


def _word(bits: int, writes: bool) -> Any:
    """Reading or writing one integer at an address."""

    def access(_context: Any, address: Any, index: Any, *value: Any) -> Any:
        word = ir.IntType(bits)

        def code(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            place = pointer(builder, arguments[0], arguments[1], bits // 8, word)
            if writes:
                given = arguments[2]
                builder.store(builder.trunc(given, word) if bits < 64 else given, place, align=bits // 8)
                return None
            read = builder.load(place, align=bits // 8)
            return builder.sext(read, ir.IntType(64)) if bits < 64 else read

        return (types.void if writes else types.int64)(address, index, *value), code

    if writes:
        return lambda context, address, index, value: access(context, address, index, value)
    return lambda context, address, index: access(context, address, index)


read32 = intrinsic(_word(32, False))
read64 = intrinsic(_word(64, False))
write32 = intrinsic(_word(32, True))
write64 = intrinsic(_word(64, True))


@intrinsic
def fill32(_context: Any, address: Any, index: Any, value: Any) -> Any:
    """Write one integer to `FILLED` places, from a place on: of few, without a loop of another length each time."""

    def code(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        words = ir.VectorType(word, FILLED)
        nothing = ir.Constant(words, ir.Undefined)
        one = builder.insert_element(nothing, builder.trunc(arguments[2], word), word(0))
        many = builder.shuffle_vector(one, nothing, ir.Constant(words, None))
        builder.store(many, pointer(builder, arguments[0], arguments[1], 4, words), align=4)

    return types.void(address, index, value), code


@intrinsic
def read_float64(_context: Any, address: Any, index: Any) -> Any:
    """A float64 of an array."""

    def code(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load(pointer(builder, arguments[0], arguments[1], 8, ir.DoubleType()), align=8)

    return types.float64(address, index), code


@intrinsic
def read32_at(_context: Any, address: Any) -> Any:
    """The int32 at an address, which may be the low half of an int64."""

    def code(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        read = builder.load(builder.inttoptr(arguments[0], word.as_pointer()), align=4)
        return builder.sext(read, ir.IntType(64))

    return types.int64(address), code


@intrinsic
def counted(_context: Any, value: Any) -> Any:
    """The integer itself, of which the compiler knows nothing: a loop that it counts is not unrolled.

    Loops over few ids, whose number is another each time, are slower unrolled: one more branch that cannot be foreseen.
    """

    def code(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        return builder.asm(ir.FunctionType(word, [word]), "", "=r,0", arguments, False)

    return types.int64(value), code


def _bits(name: str) -> Any:
    def count(_context: Any, a: Any) -> Any:
        def code(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            word = ir.IntType(64)
            more = [ir.IntType(1)(0)] if name == "cttz" else []
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(word, [word, *(m.type for m in more)]), f"llvm.{name}.i64"
            )
            return builder.call(function, [*arguments, *more])

        return types.int64(types.int64), code

    return count


ones = intrinsic(_bits("ctpop"))
lowest = intrinsic(_bits("cttz"))


@intrinsic
def fetch(_context: Any, elements: Any, like: Any, address: Any, index: Any) -> Any:
    """Ask for the elements that `load` would read, into the second cache.

    The first has room for few requests under way: with rows asked for there the update took 1.2 to 1.6 times as long.
    What is written later is asked for alike: asking to write it made the CPU wait.
    """

    def code(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        size = _BYTES[elements.element]
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, word, word, word]), "llvm.prefetch.p0i8"
        )
        place = pointer(builder, arguments[2], arguments[3], size, ir.IntType(8))
        for line in range(-(-like.lanes * size // _LINE_BYTES)):
            at = builder.gep(place, [word(line * _LINE_BYTES)])
            builder.call(function, [at, word(_READ), word(_SECOND_CACHE), word(_DATA)])
        return None

    return types.void(elements, like, address, index), code


@intrinsic
def fence(_context: Any) -> Any:
    """After streaming: other threads see what was written."""

    def code(_: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return None

    return types.void(), code
