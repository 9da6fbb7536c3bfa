"""What a checkpoint's source is: tensors by the keys of [Note: on disk] of `api`, whatever lies there."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch

from dmp.checkpoint.sources.checksums import CheckedRange
from dmp.chunked import ChunkedTensor

FORMAT_VERSION = 3
CHECKSUMS, TENSORS = "checksums.json", "tensors.json"
MODEL, STATE = "model.", "optimizer.state."


class Source(Protocol):
    """Something that holds tensors by the keys of [Note: on disk]."""

    path: Path
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    objects: dict[str, Any]
    about: dict[str, Any]

    def check(self, keys: Collection[str], share: tuple[int, int]) -> list[CheckedRange]:
        """Read the i-th of n shares of these tensors' bytes, where the format has a checksum of them.

        Returns:
            What is yet to be compared, because a checksum is of more than this share.

        Raises:
            CheckpointError: naming the file and the tensor that is damaged.
        """
        ...

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        """Fill the pieces that this rank holds."""
        ...
