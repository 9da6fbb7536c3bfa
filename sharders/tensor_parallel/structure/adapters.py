"""Adapted Linears: a Linear with low-rank pairs beside it, as PEFT's LoRA makes them. They are split as the Linear is.

[Note: adapters]
An adapted Linear of `in` to `out` features is a module of Linears alone: the first one it was made around, and pairs
down to a rank that is less than both, and up again, whose results are added to its own. Where the Linear is split by
output features (colwise) the second of a pair is, so that both have the same part of the result; where it is split by
input features (rowwise) the first of a pair is, and sums over the axis, which the second then has whole. Classes and
names decide nothing: shapes do, and what is split is proved as for other models.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from sharders.tensor_parallel.structure.linears import Features, features_of

_LEAST, _MOST = 3, 65
"""Linears of an adapted one: with more it has dozens of adapters, or is a whole model."""


def base_of(module: nn.Module) -> str | None:
    """Name in it of the Linear that an adapted Linear was made around; None of every other module."""
    return None if (found := _parts(module)) is None else found[0]


def in_place(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As `named_modules`, but for an adapted Linear its own Linear, under the path of the whole, and nothing inside."""
    passed = None
    for path, found in module.named_modules():
        if passed is not None and path.startswith(passed):
            continue
        base = base_of(found)
        passed = None if base is None else f"{path}." if path else ""
        yield path, found if base is None else found.get_submodule(base)


def children_in_place(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As `named_children`, likewise."""
    for name, child in module.named_children():
        base = base_of(child)
        yield name, child if base is None else child.get_submodule(base)


def split_in(module: nn.Module, style: str) -> list[str]:
    """Names in a module of what is split where it is `colwise` or `rowwise`: itself; of an adapted one its own Linear,
    then one of each pair.
    """
    found = _parts(module)
    if found is None:
        return [""]
    base, downs, ups = found
    return [base, *(ups if style == "colwise" else downs)]


def _parts(module: nn.Module) -> tuple[str, list[str], list[str]] | None:
    """Names of the Linear, of those that lead down from its input, and of those that lead up to its output."""
    if not any(True for _ in module.children()):
        return None
    linears: dict[str, Features] = {}
    for name, inner in module.named_modules():
        features = features_of(inner)
        if features is not None:
            linears[name] = features
            if len(linears) > _MOST:
                return None
        elif any(p is not None for p in inner._parameters.values()):
            return None
    if len(linears) < _LEAST:
        return None
    (base, first), *pairs = linears.items()
    width, out = first.in_features, first.out_features
    downs = [(n, m.out_features) for n, m in pairs if m.in_features == width and m.out_features < min(width, out)]
    ups = [(n, m.in_features) for n, m in pairs if m.out_features == out and m.in_features < min(width, out)]
    if "." in base or len(downs) + len(ups) != len(pairs) or sorted(r for _, r in downs) != sorted(r for _, r in ups):
        return None
    return base, [n for n, _ in downs], [n for n, _ in ups]
