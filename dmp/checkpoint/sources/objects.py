"""What a checkpoint holds that is no tensor, checked before anybody relies on its form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dmp.errors import CheckpointError
from dmp.read_values import is_size, shown


def check_about(path: Path, about: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` unless `dmp.json` has what it has in the form that [Note: on disk] gives it."""
    _need(path, about, "column_widths", "column widths by parameter name", _is_widths)
    _need(path, about, "mesh", "an object with names and shape", _is_mesh)
    _need(path, about, "saved_ns", "a time in ns", is_size)


def checked_objects(path: Path, objects: Any) -> dict[str, Any]:
    """What lies in `objects.pt`, or the like of it: extra, other values of the model, optimizer state, param groups.

    Raises:
        CheckpointError: something in another form.
    """
    if not isinstance(objects, dict):
        raise CheckpointError(f"{path} holds a {type(objects).__name__}; expected a dict")
    _need(path, objects, "model", "a dict by name", _is_named)
    _need(path, objects, "state", "a dict of dicts by parameter name", _is_state)
    _need(path, objects, "param_groups", "a list of dicts, each with the names of its params", _is_groups)
    return objects


def _need(path: Path, held: Mapping[str, Any], key: str, expected: str, fits: Callable[[Any], bool]) -> None:
    if key in held and not fits(held[key]):
        raise CheckpointError(f"{path}: {key} is {shown(held[key])}; expected {expected}")


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value))


def _is_state(value: Any) -> bool:
    return _is_named(value) and all(_is_named(of_one) for of_one in value.values())


def _is_groups(value: Any) -> bool:
    return _is_list(value, lambda group: _is_named(group) and _is_list(group.get("params"), _is_text))


def _is_widths(value: Any) -> bool:
    return _is_named(value) and all(_is_list(widths, lambda n: is_size(n) and n > 0) for widths in value.values())


def _is_mesh(value: Any) -> bool:
    return _is_named(value) and _is_list(value.get("names"), _is_text) and _is_list(value.get("shape"), is_size)
