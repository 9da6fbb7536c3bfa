"""Runs of consecutive ranks, written short: a layout over thousands of ranks is a line of JSON still."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dmp.errors import ShardError
from dmp.read_values import shown

_SHORTEST = 17
_LONGEST = 1 << 20


def shortened(value: Any) -> Any:
    """Ranks as JSON has them: a run is `{"range": [first, stop]}`, rows whose columns are runs `{"zip": [[first,
    stop], ..]}`; what is neither is itself."""
    if not isinstance(value, tuple) or len(value) < _SHORTEST:
        return value
    if _is_run(value):
        return {"range": [value[0], value[-1] + 1]}
    if isinstance(value[0], tuple) and len({len(row) for row in value if isinstance(row, tuple)}) == 1:
        columns = list(zip(*value, strict=True))
        if all(map(_is_run, columns)):
            return {"zip": [[column[0], column[-1] + 1] for column in columns]}
    return value


def lengthened(value: Any) -> Any:
    """Inverse of `shortened`.

    Raises:
        ShardError: what looks like a run and is none.
    """
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"range"}:
        return list(_range(value["range"]))
    if set(value) == {"zip"} and isinstance(value["zip"], list) and value["zip"]:
        columns = [_range(run) for run in value["zip"]]
        if len({len(column) for column in columns}) == 1:
            return [list(row) for row in zip(*columns, strict=True)]
    raise ShardError(
        f'ranks are a list, {{"range": [first, stop]}} or {{"zip": [[first, stop], ..]}}; got {shown(value)}'
    )


def as_python(value: Any) -> str:
    """Ranks as one would write them in Python."""
    short = shortened(value)
    if not isinstance(short, dict):
        return str(list(value) if isinstance(value, tuple) else value)
    if "range" in short:
        return "range({}, {})".format(*short["range"])
    return "list(zip({}))".format(", ".join("range({}, {})".format(*run) for run in short["zip"]))


def _is_run(values: Sequence[Any]) -> bool:
    first, count = values[0], len(values)
    return type(first) is int and tuple(values) == tuple(range(first, first + count))


def _range(bounds: Any) -> range:
    ok = isinstance(bounds, list) and len(bounds) == 2 and all(type(b) is int for b in bounds)
    if not ok or not 0 <= bounds[0] < bounds[1] <= bounds[0] + _LONGEST:
        raise ShardError(f"a run of ranks is [first, stop], at most {_LONGEST} of them; got {shown(bounds)}")
    return range(*bounds)
