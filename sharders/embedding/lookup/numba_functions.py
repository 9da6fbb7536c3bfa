"""Entry points of what numba compiles, by name: made at their first use on a machine, and kept as machine code.

A process that finds them kept loads them without numba, whose import costs most of a second. Calls take integers, most
of them addresses, and drop the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import llvmlite.binding

from dmp import ranks
from sharders.embedding.lookup.numba_kept import Compiled, kept

_log = logging.getLogger("dmp")
_OF_IDS = {
    **dict.fromkeys(("expand_bags", "expand_parts", "expand_runs", "lay_out", "sort_tables"), "numba_sort"),
    **dict.fromkeys(("choose", "compact", "spread"), "numba_distinct"),
    **dict.fromkeys(("split_by_blocks", "by_slot", "count_bags", "check_ids"), "numba_blocks"),
    "pack_ids": "numba_pack",
}
"""Functions that know nothing of elements, and their files."""
_FILES = {
    **_OF_IDS,
    "place_columns": "numba_columns",
    **dict.fromkeys(("add_partials", "pick_gradients"), "numba_partials"),
    "sum_tables": "numba_dense",
}
"""All others are in `numba_loops`."""

_OF_CPU = "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX"
"""Where users tell numba what CPU to compile for."""
_engines: list[Any] = []  # they hold the code
_UPDATE, _TWO = "update_", "two_"
COMPILED = (
    "blocks",
    "columns",
    "compile",
    "dense",
    "distinct",
    "layout",
    "loops",
    "pack",
    "partials",
    "sort",
    "updates",
    "vectors",
)
"""Files of what is compiled, or says how."""


@cache
def entry(name: str, element: str) -> Callable[..., int]:
    """A function of one of the `COMPILED`, or `update_`, `two_` where gradients lie in two places, and a kind of
    `numba_updates`.

    Args:
        element: name of an `Elements`; functions that know ids alone are the same for all.

    Raises:
        ModuleNotFoundError: numba is not installed.
        NotImplementedError: this CPU does not know such elements.
    """
    if find_spec("numba") is None:
        raise ModuleNotFoundError("No module named 'numba'")
    of = None if name in _OF_IDS else element
    return _entry(name, of)


@cache
def _entry(name: str, element: str | None) -> Callable[..., int]:
    binding = llvmlite.binding
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    of_host = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    told = [f"{name}={os.environ[name]}" for name in _OF_CPU if name in os.environ]
    about = (*of_host, *told, version("numba"), version("llvmlite"))
    here = hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]
    of_machine = "-".join(filter(None, ("lookup", name, element, here)))
    with ranks.at_work("compiling lookup kernels"):  # or waiting for another process that does
        return _loaded(kept(of_machine, _sources()[:16], lambda: _made(name, element)))


def _made(name: str, element: str | None) -> Compiled:
    """Compile it, which imports numba."""
    ranks.say_once("lookup kernels are compiled, once on this machine; this takes some seconds")
    started = perf_counter()
    from sharders.embedding.lookup import numba_loops, numba_updates
    from sharders.embedding.lookup.numba_compile import compiled

    if name.startswith(_UPDATE):
        kind = name.removeprefix(_UPDATE)
        reads_two = kind.startswith(_TWO)
        function = numba_loops.update_of(numba_updates.KINDS[kind.removeprefix(_TWO)], reads_two)
    else:
        function = getattr(import_module(f"{__package__}.{_FILES.get(name, 'numba_loops')}"), name)
    result = compiled(function, element)
    _log.info("lookup kernel %s for %s is compiled, in %.1f s", name, element or "ids", perf_counter() - started)
    return result


def _loaded(found: Compiled) -> Callable[..., int]:
    binding = llvmlite.binding
    target = binding.Target.from_default_triple()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target.create_target_machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(found.code))
    engine.finalize_object()
    _engines.append(engine)
    # By numba's convention: where the result goes, where an exception would (there are none), `Elements` if it takes
    # them, of which nothing is passed, and the arguments.
    words = [ctypes.c_int64] * found.num_arguments
    leading = [ctypes.c_void_p] * (2 + found.takes_elements)
    call = ctypes.CFUNCTYPE(ctypes.c_int32, *leading, *words)(engine.get_function_address(found.symbol))
    nothing = [None] * found.takes_elements

    def function(*arguments: int) -> int:
        result, exception = ctypes.c_int64(), ctypes.c_int64()
        call(ctypes.addressof(result), ctypes.addressof(exception), *nothing, *arguments)
        return result.value

    return function


@cache
def _sources() -> str:
    """Of what is compiled, which is all that numba is imported for."""
    read = [Path(__file__).with_name(f"numba_{name}.py").read_bytes() for name in COMPILED]
    return hashlib.sha256(b"".join(read)).hexdigest()
