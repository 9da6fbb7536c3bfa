"""What a checkpoint's source is: tensors by the keys of [Note: on disk] of `api`, whatever lies there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from dmp.checkpoint.sources.checksums import CheckedRange
from dmp.chunked import ChunkedTensor

FORMAT_VERSION = 3
ABOUT, CHECKSUMS, TENSORS = "dmp.json", "checksums.json", "tensors.json"
MODEL, STATE = "model.", "optimizer.state."
Shapes: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Key or name -> size and dtype."""


class Source(Protocol):
    """Something that holds tensors by the keys of [Note: on disk]: weights `model.<name>`, and more if it has it."""

    path: Path
    """Where it lies, for messages."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """By key, unsharded."""
    objects: dict[str, Any]
    """What is no tensor, as far as there is any: `extra`, `model`, `state` by parameter, `param_groups` by name."""
    about: dict[str, Any]
    """What `dmp.json` says, as far as it is known: `column_widths`, `mesh`, `saved_ns`. Also `holds_more` than one
    model, `has_steps` (False: the state lacks step counts), `names_stateless` (False: parameters whose optimizer has no
    state are not named), `no_state`: why there is none."""

    def check(self, keys: Collection[str], share: tuple[int, int]) -> list[CheckedRange]:
        """Read the i-th of n shares of these tensors' bytes, where the format has a checksum of them.

        Returns:
            What is yet to be compared, because a checksum is of more than this share.

        Raises:
            CheckpointError: naming the file and the tensor that is damaged.
        """
        ...

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        """Fill the chunks that this rank holds, a piece at a time; as `copy_` does, where they are of another dtype."""
        ...


def split_state(key: str) -> tuple[str, str]:
    """(parameter, state's name) of a key of optimizer state."""
    name, _, short = key[len(STATE) :].rpartition(".")
    return name, short
