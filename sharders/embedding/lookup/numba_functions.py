"""The compiled functions for one dtype, ready to be called; they are compiled at the first use on a machine, and kept.

Calls take addresses and numbers, nothing of numba's. What is compiled depends on the sources and the CPU alone.
"""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import llvmlite.binding
import numba
from numba import types

from sharders.embedding.lookup import numba_distinct, numba_loops, numba_sort
from sharders.embedding.lookup.numba_vectors import SOURCES, Elements

_log = logging.getLogger("dmp")


@dataclass(frozen=True)
class Functions:
    """Entry points: first `elements` or `words`, then ints but for those that are said."""

    elements: Elements
    words: Elements
    """First argument of those below that know ids alone."""

    sum_bags: Callable[..., None]
    update: Callable[..., None]
    """Both betas are floats."""

    weight_gradients: Callable[..., None]
    copy_rows: Callable[..., None]
    expand_bags: Callable[..., int]
    expand_runs: Callable[..., None]
    sort_tables: Callable[..., None]
    choose: Callable[..., int]
    compact: Callable[..., int]
    spread: Callable[..., None]


@cache
def functions(name: str) -> Functions:
    """For elements of this name; see `Elements`."""
    elements, words = Elements(name), Elements("float32")
    started = perf_counter()
    with _turn(name) as first:
        result = Functions(
            elements,
            words,
            _entry(numba_loops.sum_bags, elements),
            _entry(numba_loops.update, elements, beta1=types.float64, beta2=types.float64),
            _entry(numba_loops.weight_gradients, elements),
            _entry(numba_loops.copy_rows, elements),
            _entry(numba_sort.expand_bags, words),
            _entry(numba_sort.expand_runs, words),
            _entry(numba_sort.sort_tables, words),
            _entry(numba_distinct.choose, words),
            _entry(numba_distinct.compact, words),
            _entry(numba_distinct.spread, words),
        )
    if first:
        _log.info("lookup kernels for %s are compiled, in %.1f s", name, perf_counter() - started)
    return result


def _entry(dispatcher: Any, elements: Elements, **others: Any) -> Callable[..., Any]:
    names = dispatcher.py_func.__code__.co_varnames[1 : dispatcher.py_func.__code__.co_argcount]
    signature = (numba.typeof(elements), *(others.get(name, types.int64) for name in names))
    entry: Callable[..., Any] = dispatcher.compile(signature)
    return entry


@contextmanager
def _turn(name: str) -> Iterator[bool]:
    """One process of a machine compiles, the others wait for what it keeps; gives whether this is the one."""
    folder = numba_loops.sum_bags.stats.cache_path
    if folder is None:
        _log.warning("lookup kernels for %s are compiled in every process: numba finds no folder to keep them in", name)
        yield False
        return
    about = (llvmlite.binding.get_host_cpu_name(), platform.python_version(), numba.__version__, SOURCES)
    done = Path(folder) / "-".join(["lookup", name, *about])
    with _locked(done.with_name(done.name + ".lock")):
        first = not done.exists()
        if first:
            _log.warning("lookup kernels for %s are compiled, once on this machine; this takes some seconds", name)
        yield first
        if first:
            done.touch()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed, or the process ends
        yield
