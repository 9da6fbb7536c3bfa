"""Phases under their names: the two stages of an exchange are one line of a report."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Merged(NamedTuple):
    """The names of phases, each once, in the order of a step; and which of the model's phases go under each."""

    names: tuple[str, ...]
    into: NDArray[np.int64]

    @classmethod
    def of(cls, phases: tuple[str, ...]) -> Merged:
        """Of a cost model's phases, some of which may have the same name."""
        names = tuple(dict.fromkeys(phases))
        return cls(names, np.array([names.index(name) for name in phases], dtype=np.int64))

    def phases(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(..., phases) added up to (..., names)."""
        found = np.zeros((*values.shape[:-1], len(self.names)))
        for column, name in enumerate(self.into):
            found[..., name] += values[..., column]
        return found

    def loads(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(..., phases + 1) of which the last is bytes, to (..., names + 1)."""
        return np.concatenate([self.phases(values[..., :-1]), values[..., -1:]], axis=-1)
