"""How functions are compiled: once per machine where a folder can be written, else once per process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from sharders.embedding.lookup.numba_vectors import zeros


def compiled(function: Callable[..., Any]) -> Any:
    """To be called from Python; it runs without the interpreter's lock, and what was compiled is kept on disk."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder can be written: neither beside the sources nor the user's own
        return njit(nogil=True)(function)


def helper(function: Callable[..., Any]) -> Any:
    """To be called by compiled functions, of which it becomes a part."""
    return njit(nogil=True, forceinline=True)(function)


def by_blocks(function: Callable[..., Any]) -> Any:
    """A helper `(elements, width, arguments)` out of what it does for a block of columns of a row.

    It is given `(elements, like, column, arguments)`, where `like` is zeros of the block's size: 64, 16, 4 or 1.
    """
    of_block = helper(function)

    def of_row(elements: Any, width: int, arguments: Any) -> None:
        column = 0
        while width - column >= 64:
            of_block(elements, zeros(elements, 64), column, arguments)
            column += 64
        while width - column >= 16:
            of_block(elements, zeros(elements, 16), column, arguments)
            column += 16
        while width - column >= 4:
            of_block(elements, zeros(elements, 4), column, arguments)
            column += 4
        while column < width:
            of_block(elements, zeros(elements, 1), column, arguments)
            column += 1

    return helper(of_row)


def by_small_blocks(function: Callable[..., Any]) -> Any:
    """The same in blocks of 16 and 1, for what lies in the first cache: less to compile."""
    of_block = helper(function)

    def of_row(elements: Any, width: int, arguments: Any) -> None:
        column = 0
        while width - column >= 16:
            of_block(elements, zeros(elements, 16), column, arguments)
            column += 16
        while column < width:
            of_block(elements, zeros(elements, 1), column, arguments)
            column += 1

    return helper(of_row)
