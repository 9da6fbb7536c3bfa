"""Dotted names of parameters or modules: put together, compared, and found by the one meaning of a wildcard in them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase


def join_name(*parts: str) -> str:
    """A name from a prefix and relative names, each of them possibly empty: the root's is."""
    return ".".join(part for part in parts if part)


def around(path: str) -> list[str]:
    """The path, and those of all that is around it; the root's comes last."""
    words = path.split(".") if path else []
    return [".".join(words[:count]) for count in range(len(words), -1, -1)]


def is_inside(name: str, path: str) -> bool:
    """Whether this is the module at `path`, or something inside it; everything is inside the root."""
    return not path or name == path or name.startswith(path + ".")


class NameIndex:
    """Dotted names in order, to be found by name at once, and by a pattern among those of its length and last word.

    The rule for every pattern that a user writes (keys of constraints, of tensor-parallel plans, names of FSDP units):
    it is compared component by component, and `*` stands for one component of a dotted name or within one, as `?` and
    `[...]` stand for a character in one. So `layers.*.wq` is `layers.0.wq`, but neither `layers.0.attention.wq` nor
    `model.layers.0.wq`. What is a name as it stands is that name alone.

    Args:
        names: that a pattern may mean.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)
        self._near: dict[tuple[int, str | None], list[tuple[str, list[str]]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def matching(self, pattern: str) -> list[str]:
        """Names that the pattern means, in order."""
        if pattern in self._names or not _has_wildcard(pattern):
            return [pattern] if pattern in self._names else []
        if not self._near:
            for name in filter(None, self._names):
                words = name.split(".")
                for last in (words[-1], None):
                    self._near.setdefault((len(words), last), []).append((name, words))
        wanted = pattern.split(".")
        last = None if _has_wildcard(wanted[-1]) else wanted[-1]
        near = self._near.get((len(wanted), last), [])
        return [name for name, words in near if all(map(fnmatchcase, words, wanted))]

    def hint(self, pattern: str) -> str:
        """Of a pattern that matches nothing: what was meant perhaps, else what there is, and the rule."""
        names, last = [*filter(None, self._names)], pattern.rpartition(".")[2]
        same_end = [name for name in names if fnmatchcase(name.rpartition(".")[2], last)] if last.strip("*") else []
        close = same_end[:3] or get_close_matches(pattern, names, n=3, cutoff=0.5)
        listed = ", ".join(map(repr, close or names[:6]))
        rule = " ('*' stands for one component of a dotted name, or within one)" * _has_wildcard(pattern)
        return f"did you mean {listed}?{rule}" if close else f"there are {listed or 'none'}{rule}"


def _has_wildcard(pattern: str) -> bool:
    return any(c in pattern for c in "*?[")
