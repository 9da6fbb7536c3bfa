"""A batch: ids as a module's adapter hands them in, and as the data path takes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from sys import maxsize
from typing import Any

import torch


@dataclass(frozen=True)
class Ids:
    """What a module has read of its input: a KJT, by its parts.

    Args:
        values: (N,) ids, key-major.
        lengths: (K, B) ids of each key and sample; padded where a key has fewer samples.
        key_of: for each feature the row of `lengths` that it reads.
        weights: (N,) per-id weights, or None.
        source: the input, for what of it goes into the module's results.
        samples: of each key, where they differ: see [Note: variable batch]; None where they are B.
        inverse: (F, B') of each feature and sample the row; None where rows are samples.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    key_of: tuple[int, ...]
    weights: torch.Tensor | None = None
    source: Any = None
    samples: tuple[int, ...] | None = None
    inverse: torch.Tensor | None = None


@dataclass(frozen=True)
class Batch(Ids):
    """Ids that were checked, and counted: the one time that counts are read back from the device.

    Args:
        counts: ids of each key.
        shortest: no bag has fewer ids,
        longest: none more.
    """

    counts: tuple[int, ...] = ()
    shortest: int = 0
    longest: int = maxsize

    @property
    def batch_size(self) -> int:
        """Samples, of the feature that has most."""
        return self.lengths.shape[1]

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Samples: one number for all features, or one for each."""
        sizes = (self.batch_size,) if self.samples is None else tuple(self.samples[key] for key in self.key_of)
        return sizes if max(sizes) == self.batch_size else (self.batch_size,)

    @cached_property
    def starts(self) -> list[int]:
        """First id of each key, then the number of ids."""
        return [0, *accumulate(self.counts)]

    @cached_property
    def places(self) -> torch.Tensor:
        """(N,) 0, 1, 2, ...: where each id is."""
        return torch.arange(self.values.numel(), device=self.values.device)
