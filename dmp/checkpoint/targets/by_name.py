"""Targets by name: ours in one table, those of other packages by entry point (`dmp.targets`)."""

from __future__ import annotations

from dmp.checkpoint.targets.native import FolderTarget
from dmp.checkpoint.targets.safetensors import SafetensorsTarget
from dmp.checkpoint.targets.target import Target
from dmp.checkpoint.targets.torch_save import TorchFileTarget
from dmp.registry import plugins

_OURS: dict[str, Target] = {"dmp": FolderTarget(), "safetensors": SafetensorsTarget(), "torch": TorchFileTarget()}


def target_names() -> list[str]:
    """Ours first; nothing of another package is loaded."""
    return list({**_OURS, **plugins("dmp.targets")})


def target_named(name: str) -> Target:
    """The target of a name of `target_names`; ours where another package has the same.

    An entry point is a `Target`, or a class that is called without arguments for one.
    """
    if name in _OURS:
        return _OURS[name]
    found = plugins("dmp.targets")[name].load()
    target: Target = found() if isinstance(found, type) else found
    return target
