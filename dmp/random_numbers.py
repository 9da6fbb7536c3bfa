"""The generators that code draws from without being given one: torch's of the CPU, Python's, NumPy's."""

from __future__ import annotations

import pickle
import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from dmp.bits import checksum


class RandomNumbers(NamedTuple):
    """Their states.

    Args:
        of_numpy: None where it has not been imported, so that nobody has drawn from it.
    """

    of_torch: torch.Tensor
    of_python: Any
    of_numpy: Any

    @classmethod
    def now(cls) -> RandomNumbers:
        """As they are."""
        numpy = sys.modules.get("numpy")
        return cls(torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state())

    def restore(self) -> None:
        """Have the same numbers drawn again."""
        torch.set_rng_state(self.of_torch)
        random.setstate(self.of_python)
        if self.of_numpy is not None:
            sys.modules["numpy"].random.set_state(self.of_numpy)

    def marks(self) -> tuple[int, int, int]:
        """A number for each, of 32 bits: where they are the same, the same is drawn."""
        python, numpy = (zlib.crc32(pickle.dumps(state)) for state in (self.of_python, self.of_numpy))
        return checksum(self.of_torch) % (1 << 32), python, numpy


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """What draws within takes no numbers from the program that goes on afterwards."""
    state = RandomNumbers.now()
    try:
        yield
    finally:
        state.restore()
