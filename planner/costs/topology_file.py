"""The files that topologies are kept in: JSON with a version, a user's own or one of the machines beside this file."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from dmp import shown

FORMAT, VERSION = "dmp topology", 1
_MACHINES = files("planner.costs") / "machines"


def topology_names() -> list[str]:
    """The machines that come with the planner."""
    if not _MACHINES.is_dir():
        return []
    return sorted(Path(entry.name).stem for entry in _MACHINES.iterdir() if entry.name.endswith(".json"))


def machine(name: str) -> Path:
    """The file of a machine that comes with the planner, for `read`."""
    return Path(str(_MACHINES / f"{name}.json"))


def read(path_or_name: str | Path) -> tuple[str, dict[str, Any]]:
    """What a file says, and how it is called in messages.

    Raises:
        ValueError: no such file or machine, another kind of file, another version.
    """
    path = Path(path_or_name)
    known = topology_names()
    if path.is_file():
        where, text = str(path), path.read_bytes()
    elif str(path_or_name) in known:
        where, text = f"the topology {path}", (_MACHINES / f"{path}.json").read_bytes()
    else:
        raise ValueError(
            f"no topology {str(path_or_name)!r}: expected a file that Topology.save or `python -m dmp calibrate` "
            f"wrote, or one of the machines {known}"
        )
    try:
        data = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON: {error!s:.300}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(
            f'{where} is no topology: expected {{"format": "{FORMAT}", "version": {VERSION}, ...}}; got {shown(data)}'
        )
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise ValueError(f"{where} has version {shown(data.get('version'))}; this version of dmp reads {VERSION}")
    return where, {name: value for name, value in data.items() if name not in ("format", "version")}


def write(path: str | Path, figures: dict[str, Any]) -> None:
    """Write what `read` gives back."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **figures}, indent=2, allow_nan=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number")
