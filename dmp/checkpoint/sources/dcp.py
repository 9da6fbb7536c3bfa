"""Any folder of torch's distributed checkpoint, TorchRec's too, as a checkpoint's source.

[Note: names]
Such a folder has a key for each tensor, the path to it in the dict that was saved, and says nothing of what it is. A
key `<head>state.<parameter>.<...>.<state>` is optimizer state if `<parameter>` is, behind one prefix, the name of
another key; what lies beside the prefix is then no part of the model. TorchRec puts the table's name in between, and
calls the first state `momentum1`: `optim.state.ebc.embedding_bags.t0.weight.t0.momentum1`.

[Note: blocks one after another]
Where TorchRec cuts a table of R rows into B column blocks, row-wise Adagrad's state has size (R * B,): a block's values
after another's. It is given out as (R, B), as our own folders hold it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from dmp.checkpoint.sources.checksums import CheckedRange
from dmp.checkpoint.sources.dcp_metadata import read_metadata
from dmp.checkpoint.sources.dcp_pieces import FolderPieces
from dmp.checkpoint.sources.source import MODEL, STATE, split_state
from dmp.checkpoint.sources.stored_piece import fill
from dmp.chunked import ChunkedTensor
from dmp.errors import CheckpointError
from dmp.read_values import some

_log = logging.getLogger("dmp")
_DEPTH = 3  # components of a prefix, at most


class TorchFolder:
    """Weights and optimizer state by [Note: names]; it holds no learning rates that could be told apart."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = read_metadata(path / ".metadata")
        self._pieces = FolderPieces(path, self._entries, ".metadata")
        self._keys = sort_keys(self._entries)
        self.shapes = {ours: self._pieces.shapes[key] for ours, key in self._keys.items()}
        owners = sorted({split_state(ours)[0] for ours in self._keys if ours.startswith(STATE)})
        self.objects: dict[str, Any] = {"param_groups": [{"params": owners}] if owners else []}
        uncounted = [name for name in owners if f"{STATE}{name}.step" not in self._keys]
        if uncounted:
            _log.warning(
                "%s: no step count for %s, as TorchRec saves none: the model's own goes on, so Adam's bias correction "
                "begins anew in a new model",
                path,
                some(uncounted, 1),
            )
        widths: dict[str, tuple[int, ...]] = {}
        for ours, (size, dtype) in self.shapes.items():
            name, _ = split_state(ours)
            found = self._column_widths(MODEL + name, size) if ours.startswith(STATE) else ()
            if found:
                widths[name] = found
            if found and len(size) == 1:
                rows = size[0] // len(found)
                self._check_within_column_blocks(ours, rows)
                self.shapes[ours] = (rows, len(found)), dtype
        self.about: dict[str, Any] = {"holds_more": True, "has_steps": not uncounted, "column_widths": widths}
        self.about["names_stateless"] = False

    def _column_widths(self, weight: str, size: tuple[int, ...]) -> tuple[int, ...]:
        """Of the blocks that a table's state of this size has, one after another (TorchRec's) or as columns (what our
        models give to torch's checkpoint); empty for other state."""
        table, _ = self.shapes[weight]
        if len(table) != 2:
            return ()
        starts = sorted({piece.offset[1] for piece in self._entries[self._keys[weight]].pieces})
        is_blocks = 1 < len(starts) < table[1] and size in ((table[0] * len(starts),), (table[0], len(starts)))
        return tuple(b - a for a, b in pairwise([*starts, table[1]])) if is_blocks else ()

    def _check_within_column_blocks(self, ours: str, rows: int) -> None:
        """A piece that is of two of the blocks one after another has no place in (rows, blocks)."""
        for piece in self._entries[self._keys[ours]].pieces:
            if piece.offset[0] % rows + piece.size[0] > rows:
                raise CheckpointError(
                    f"{self.path}: the piece of {self._keys[ours]!r} at {piece.offset[0]} has {piece.size[0]} values, "
                    f"over the end of a column block of {rows} rows; expected pieces within a block, as TorchRec saves"
                )

    def check(self, keys: Collection[str], share: tuple[int, int]) -> list[CheckedRange]:
        self._pieces.check([self._keys[key] for key in keys], share)
        return []

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        for ours, target in targets.items():
            key = self._keys[ours]
            stored = self._pieces.of(key)
            if len(target.shape) != len(self._entries[key].size):  # [Note: blocks one after another]
                rows = target.shape[0]
                stored = [s._replace(size=(*s.size, 1), offset=divmod(s.offset[0], rows)[::-1]) for s in stored]
            fill(target, stored)


def sort_keys(keys: Iterable[str]) -> dict[str, str]:
    """Our key -> the folder's key; see [Note: names]."""
    keys = list(keys)
    groups: dict[str, list[str]] = {}
    for key in keys:
        parts = key.split(".")
        if "state" in parts[:-2]:
            groups.setdefault(".".join(parts[: parts.index("state") + 1]) + ".", []).append(key)
    grouped = {key for group in groups.values() for key in group}
    weights = [key for key in keys if key not in grouped]
    best: dict[str, tuple[str, str]] = {}
    best_prefix = ""
    for prefix in sorted(prefixes(weights), key=len):
        names = {key[len(prefix) :] for key in weights if key.startswith(prefix)}
        owned: dict[str, tuple[str, str]] = {}
        for head, group in groups.items():
            owners = {key: _owner(key[len(head) :], names) for key in group}
            if all(owners.values()):
                owned.update({key: owner for key, owner in owners.items() if owner})
        if len(owned) > len(best):
            best, best_prefix = owned, prefix
    states = {f"{STATE}{name}.{state}": key for key, (name, state) in _states(best).items()}
    others = [key for key in keys if key not in best and key.startswith(best_prefix)]
    return states | {MODEL + key[len(best_prefix) :]: key for key in others}


def prefixes(names: Iterable[str]) -> set[str]:
    """What names begin with, a few whole components at most, each with its dot; and nothing."""
    found = {""}
    for name in names:
        parts = name.split(".")
        found.update(".".join(parts[:i]) + "." for i in range(1, min(len(parts), _DEPTH + 1)))
    return found


def _owner(rest: str, names: set[str]) -> tuple[str, str] | None:
    parts = rest.split(".")
    for i in range(len(parts) - 1, 0, -1):
        if ".".join(parts[:i]) in names:
            return ".".join(parts[:i]), parts[-1]
    return None


def _states(owned: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """TorchRec names a first state `momentum1` whatever it is: Adam's, where there is a second, else Adagrad's."""
    second = {name for name, state in owned.values() if state in ("momentum2", "exp_avg_sq")}
    names = {"momentum2": "exp_avg_sq", "iter": "step"}
    return {
        key: (name, ("exp_avg" if name in second else "sum") if state == "momentum1" else names.get(state, state))
        for key, (name, state) in owned.items()
    }
