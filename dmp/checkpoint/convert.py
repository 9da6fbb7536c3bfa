"""From one kind of checkpoint to another in one process, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dmp.checkpoint.place import place_of
from dmp.checkpoint.renaming import renamed
from dmp.checkpoint.sources.checksums import compare
from dmp.checkpoint.sources.detect import open_source
from dmp.checkpoint.sources.source import MODEL, STATE
from dmp.checkpoint.targets.target import target_named


def convert(source: Path, target: Path, kind: str, rename: Mapping[str, str] | None = None) -> str:
    """Read a checkpoint of any kind, write one of `kind`, a name of `target_names`.

    Returns:
        What was done, in a line.

    Raises:
        CheckpointError: a source that cannot be read or is damaged, or a target that is there already.
        OSError: a target that cannot be written.
    """
    target = place_of(target, "convert(source, dest)")
    to = target_named(kind)
    read = renamed(open_source(place_of(source, "convert(source, dest)")), rename)
    weights = [key for key in read.shapes if key.startswith(MODEL)]
    state = [key for key in read.shapes if key.startswith(STATE)]
    to.check(target)
    compare(read.check(weights if to.weights_only else list(read.shapes), (0, 1)))
    target.parent.mkdir(parents=True, exist_ok=True)
    to.write(read, target)
    if not to.weights_only:
        return f"{len(weights)} weights and {len(state)} tensors of optimizer state to {target}"
    left = f"; {len(state)} tensors of optimizer state were left out" if state else ""
    return f"{len(weights)} weights to {target}{left}"
