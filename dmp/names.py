"""Dotted names of modules and parameters, put together and compared."""

from __future__ import annotations


def join_name(*parts: str) -> str:
    """A name from a prefix and relative names, each of them possibly empty: the root's is."""
    return ".".join(part for part in parts if part)


def is_inside(name: str, path: str) -> bool:
    """Whether this is the module at `path`, or something inside it; everything is inside the root."""
    return not path or name == path or name.startswith(path + ".")
