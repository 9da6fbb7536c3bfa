"""The generators that code draws from without being given one: torch's of the CPU, Python's, NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


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


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """What draws within takes no numbers from the program that goes on afterwards."""
    state = RandomNumbers.now()
    try:
        yield
    finally:
        state.restore()
