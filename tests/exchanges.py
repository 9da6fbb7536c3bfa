"""Counts what ranks exchange, whatever carries it: torch's collectives, and exchanges through memory they share."""

from __future__ import annotations

from contextlib import ExitStack
from functools import wraps
from typing import Any
from unittest import mock

from torch.distributed.tensor.debug import CommDebugMode

from sharders.shared_memory.memory_channel import MemoryChannel

_METHODS = ("all_to_all", "answer", "all_gather", "sum")


class Exchanges(ExitStack):
    """What this rank begins while the block runs.

    Attributes:
        through_memory: of these, those that are no collectives of torch's.
    """

    def __enter__(self) -> Exchanges:
        super().__enter__()
        self.through_memory = 0
        self._collectives = self.enter_context(CommDebugMode())
        for name in _METHODS:
            self.enter_context(mock.patch.object(MemoryChannel, name, self._counting(getattr(MemoryChannel, name))))
        return self

    def get_total_counts(self) -> int:
        """Collectives and exchanges."""
        return int(self._collectives.get_total_counts()) + self.through_memory

    def _counting(self, method: Any) -> Any:
        @wraps(method)
        def counted(*args: Any, **options: Any) -> Any:
            self.through_memory += 1
            return method(*args, **options)

        return counted
