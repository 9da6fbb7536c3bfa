"""Silence while code of others is run for a look at it."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_one_at_a_time = threading.RLock()


@contextmanager
def quiet(level: int = logging.NOTSET) -> Iterator[None]:
    """No warnings, and no log records up to `level`, in the whole process: Python has no such switch for a thread.

    One thread at a time, so that each puts back what it found; a level that another has set meanwhile stays.
    """
    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        level = max(before, level)
        logging.disable(level)
        try:
            yield
        finally:
            if logging.root.manager.disable == level:
                logging.disable(before)
