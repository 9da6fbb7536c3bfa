"""How functions are compiled: to machine code of their own, which needs neither numba nor Python when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
from numba import njit, types

from sharders.embedding.lookup.numba_kept import Compiled
from sharders.embedding.lookup.numba_layout import BLOCKS
from sharders.embedding.lookup.numba_vectors import Elements, zeros


def compiled(function: Callable[..., Any], element: str | None) -> Compiled:
    """Of a function of integers, which may return one; the first argument is `Elements` where `element` names them."""
    num_arguments = function.__code__.co_argcount - (element is not None)
    first = [] if element is None else [numba.typeof(Elements(element))]
    signature = (*first, *[types.int64] * num_arguments)
    dispatcher = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    dispatcher.compile(signature)
    module = llvmlite.binding.parse_assembly(dispatcher.inspect_llvm(signature))
    symbol = dispatcher.overloads[signature].fndesc.llvm_func_name
    return Compiled(symbol, element is not None, num_arguments, _machine().emit_object(module))


def _machine() -> Any:
    """LLVM's view of this CPU."""
    binding = llvmlite.binding
    of_host = {"cpu": binding.get_host_cpu_name(), "features": binding.get_host_cpu_features().flatten()}
    target = binding.Target.from_default_triple()
    return target.create_target_machine(**of_host, opt=3, reloc="default", codemodel="jitdefault")


def helper(function: Callable[..., Any]) -> Any:
    """To be called by compiled functions, of which it becomes a part."""
    return njit(error_model="numpy", forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def by_blocks(function: Callable[..., Any]) -> Any:
    """A helper `(elements, width, arguments)` out of what it does for a block of columns of a row.

    It is given `(elements, like, column, arguments)`, where `like` is zeros of the block's size, one of `BLOCKS`. These
    are written out: as a helper for each size, one calling the next, they take a third longer to compile.
    """
    of_block = helper(function)
    first, second, third, fourth, fifth, _ = BLOCKS

    def of_row(elements: Any, width: int, arguments: Any) -> None:
        column = 0
        while width - column >= first:
            of_block(elements, zeros(elements, first), column, arguments)
            column += first
        while width - column >= second:
            of_block(elements, zeros(elements, second), column, arguments)
            column += second
        while width - column >= third:
            of_block(elements, zeros(elements, third), column, arguments)
            column += third
        while width - column >= fourth:
            of_block(elements, zeros(elements, fourth), column, arguments)
            column += fourth
        while width - column >= fifth:
            of_block(elements, zeros(elements, fifth), column, arguments)
            column += fifth
        while column < width:
            of_block(elements, zeros(elements, 1), column, arguments)
            column += 1

    return helper(of_row)
