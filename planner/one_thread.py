"""NumPy's matrix products on one thread while a plan is made.

Those of a search are small. The other threads of OpenBLAS, which NumPy's packages bring, gain it nothing and spin
between two calls: a plan took up to 1.5 times the processor time on 2 cores, and more on more, and no less wall time.
Where NumPy runs on another library, `OMP_NUM_THREADS=1` in the environment does the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

_FOLDERS = (Path("..", "numpy.libs"), Path(".dylibs"))  # beside and in NumPy's own: Linux and Windows, macOS
_NAMES = [f"{prefix}openblas_%s_num_threads{suffix}" for prefix, suffix in product(("scipy_", ""), ("64_", ""))]


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Of the whole process; who finds it on one leaves it so, as a plan within a plan does."""
    found = openblas()
    if found is None or found[0]() == 1:
        yield
        return
    get, put = found
    before = get()
    put(1)
    try:
        yield
    finally:
        put(before)


@cache
def openblas() -> tuple[Callable[[], int], Callable[[int], Any]] | None:
    """How the number of threads of NumPy's own OpenBLAS is read and set; None where it has none."""
    root = Path(np.__file__).parent
    for path in sorted(path for folder in _FOLDERS for path in (root / folder).glob("*openblas*")):
        try:
            library = ctypes.CDLL(str(path.resolve()))  # it is loaded already: this is a handle
        except OSError:
            continue
        for name in _NAMES:
            if hasattr(library, name % "set"):
                return getattr(library, name % "get"), getattr(library, name % "set")
    return None
