"""How functions are compiled: to machine code of their own, which needs neither numba nor Python when it runs."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding
import numba
from numba import njit, types
from numba.core.registry import cpu_target

from sharders.embedding.lookup.numba_kept import Compiled
from sharders.embedding.lookup.numba_layout import BLOCKS
from sharders.embedding.lookup.numba_vectors import Elements, zeros


def compiled(function: Callable[..., Any], element: str | None) -> Compiled:
    """Of a function of integers, which may return one; the first argument is `Elements` where `element` names them,
    of tables and of gradients: see `numba_training.elements_of`.

    Raises:
        NotImplementedError: the CPU that is compiled for does not know such elements.
    """
    names = [] if element is None else element.split("_")
    if "float16" in names and platform.machine() in ("x86_64", "AMD64") and not has("f16c"):
        raise NotImplementedError("this CPU has no instructions for float16")
    num_arguments = function.__code__.co_argcount - (element is not None)
    first = [numba.typeof(Elements(*names))] if names else []
    signature = (*first, *[types.int64] * num_arguments)
    dispatcher = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    dispatcher.compile(signature)
    module = llvmlite.binding.parse_assembly(dispatcher.inspect_llvm(signature))
    symbol = dispatcher.overloads[signature].fndesc.llvm_func_name
    return Compiled(symbol, element is not None, num_arguments, _machine().emit_object(module))


def has(feature: str) -> bool:
    """Whether what is compiled may use it. Not what this CPU has, of which the user may name a part to numba
    (`NUMBA_CPU_NAME`, `NUMBA_CPU_FEATURES`, `NUMBA_ENABLE_AVX`): LLVM ends the process at an instruction too many.
    """
    return f"+{feature}" in _cpu()[1].split(",")


@cache
def _cpu() -> tuple[str, str]:
    """Name and features of the CPU that numba compiles for."""
    _, name, features = cpu_target.target_context.codegen().magic_tuple()
    return name, features


def _machine() -> Any:
    """LLVM's view of that CPU."""
    name, features = _cpu()
    target = llvmlite.binding.Target.from_default_triple()
    return target.create_target_machine(name, features, opt=3, reloc="default", codemodel="jitdefault")


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
