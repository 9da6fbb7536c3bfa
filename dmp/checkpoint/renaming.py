"""Names in a checkpoint, fitted to a model's: by what the user says, then by a prefix that all of them share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from dmp.checkpoint.sources.checksums import CheckedRange
from dmp.checkpoint.sources.dcp import prefixes
from dmp.checkpoint.sources.source import MODEL, STATE, Source, split_state
from dmp.chunked import ChunkedTensor
from dmp.errors import CheckpointError
from dmp.names import is_inside, join_name

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]


def renamed(source: Source, rename: Rename | None) -> Source:
    """The same source under new names of parameters, and of their optimizer state.

    Args:
        rename: a function, or old name -> new name, where a name is a parameter's or a module's; a module's new name
            may be empty.

    Raises:
        CheckpointError: an old name that is not there, or two that get one name.
    """
    if rename is None:
        return source
    if callable(rename):
        return _Renamed(source, rename)
    for old in rename:
        if not any(is_inside(name, old) for name in _names(source)):
            raise CheckpointError(f"rename has {old!r}, which is neither a parameter nor a module of {source.path}")

    def new(name: str) -> str:
        old = max((old for old in rename if is_inside(name, old)), key=len, default=None)
        return name if old is None else join_name(rename[old], name[len(old) :].removeprefix("."))

    return _Renamed(source, new)


def fitted(source: Source, names: Collection[str]) -> Source:
    """The same source under the model's names, where one prefix more or less makes them fit; the log says which.

    In a source that may hold more than a model, what is not under the prefix is left out.
    """
    names, saved = set(names), _names(source)
    partial = bool(source.about.get("holds_more"))
    strips = {p for p in prefixes(saved) if partial or all(name.startswith(p) for name in saved)} - {""}
    adds = {p for p in prefixes(names) if all(name.startswith(p) for name in names)} - {""}
    fits = {("", ""): len(names & saved)}
    fits |= {(p, ""): len(names & {name[len(p) :] for name in saved if name.startswith(p)}) for p in sorted(strips)}
    fits |= {("", p): len(names & {p + name for name in saved}) for p in sorted(adds)}
    strip, add = max(fits, key=lambda pair: (fits[pair], pair == ("", ""), -len(pair[0] + pair[1])))
    if not (strip or add):
        return source
    said = f"without the prefix {strip!r}" if strip else f"with the prefix {add!r}"
    logging.getLogger("dmp").info("%s: its names fit the model %s", source.path, said)
    return _Renamed(source, lambda name: add + name[len(strip) :] if name.startswith(strip) else None)


def _names(source: Source) -> set[str]:
    held = {key.removeprefix(MODEL) for key in source.shapes if key.startswith(MODEL)}
    return held | set(source.objects.get("model", ()))


class _Renamed:
    """A source under other names; a name that becomes None is left out."""

    def __init__(self, source: Source, new: Callable[[str], str | None]) -> None:
        self.path = source.path
        self._source = source
        self._old: dict[str, str] = {}
        for key in source.shapes:
            ours = _new_key(key, new)
            if ours in self._old:
                raise CheckpointError(f"{key!r} and {self._old[ours]!r} of {source.path} would both be named {ours!r}")
            if ours is not None:
                self._old[ours] = key
        self.shapes = {ours: source.shapes[key] for ours, key in self._old.items()}

        def by_name(values: Mapping[str, Any]) -> dict[str, Any]:
            return {ours: value for name, value in values.items() if (ours := new(name)) is not None}

        objects = source.objects
        groups = [
            {**group, "params": [ours for name in group["params"] if (ours := new(name)) is not None]}
            for group in objects.get("param_groups", ())
        ]
        state, model = by_name(objects.get("state", {})), by_name(objects.get("model", {}))
        self.objects = {**objects, "state": state, "model": model, "param_groups": groups}
        self.about = {**source.about, "column_widths": by_name(source.about.get("column_widths", {}))}

    def check(self, keys: Collection[str], share: tuple[int, int]) -> list[CheckedRange]:
        return self._source.check([self._old[key] for key in keys], share)

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        self._source.read({self._old[key]: target for key, target in targets.items()})


def _new_key(key: str, new: Callable[[str], str | None]) -> str | None:
    if key.startswith(MODEL):
        name = new(key[len(MODEL) :])
        return None if name is None else MODEL + name
    if key.startswith(STATE):
        owner, state = split_state(key)
        name = new(owner)
        return None if name is None else f"{STATE}{name}.{state}"
    return key
