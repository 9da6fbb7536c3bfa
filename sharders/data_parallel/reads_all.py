"""Models whose forward goes over all their parameters, as for a penalty: blocks within are gathered with the root.

`sum(p.norm() for p in self.parameters())` in a forward meets weights of blocks in pieces, beside the root's, which are
whole: an error of torch's, of mixed kinds or without a word. Which methods a forward comes to is told by their names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn

from sharders.data_parallel.in_turn import classes_of, written

_ALL = ("self.parameters", "self.named_parameters")
_OF_NO_VALUE = (".numel()", ".dtype", ".device", ".requires_grad", ".shape", ".size()")


@cache
def reads_all(owner: Any, kinds: frozenset[Any]) -> str | None:
    """Name of a method of a class, or its forward, that goes over all parameters, where some forward comes to it.

    Args:
        kinds: classes of the model's modules.
    """
    reached = _reached(kinds)
    return next((name for name in _methods(owner) if name in reached and _goes_over_all(owner, name)), None)


@cache
def _reached(kinds: frozenset[Any]) -> frozenset[str]:
    """Names of methods that forwards of these classes call, or that such methods do."""
    known = {name for kind in kinds for name in _methods(kind)}
    reached, rest = {"forward"}, ["forward"]
    while rest:
        name = rest.pop()
        called = {each for kind in kinds for each in _called_by(kind, name)}
        rest += (called & known) - reached
        reached |= called & known
    return frozenset(reached)


@cache
def _methods(owner: Any) -> tuple[str, ...]:
    """Of a class and those that it is made of, torch's own aside."""
    own = (of for of in classes_of(owner) if not of.__module__.startswith("torch."))
    return tuple(dict.fromkeys(name for of in own for name, value in vars(of).items() if callable(value)))


@cache
def _called_by(owner: Any, name: str) -> frozenset[str]:
    """Methods of the same object, or of one that it holds; not what a module has from torch, as tensors have."""
    called = (call.func for call in _calls(owner, name) if isinstance(call.func, ast.Attribute))
    own = (func.attr for func in called if ast.unparse(func).startswith("self."))
    return frozenset(each for each in own if not hasattr(nn.Module, each))


def _goes_over_all(owner: Any, name: str) -> bool:
    """Whether a method asks for all parameters, for more than one of them or what needs no values."""
    function = written(classes_of(owner), name)
    harmless = set[ast.AST]()
    for node in ast.walk(function or ast.Pass()):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "next":
            harmless.update(ast.walk(node))
        elif isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.SetComp)):
            asked = ast.unparse(node.elt)
            harmless.update(ast.walk(node) if any(each in asked for each in _OF_NO_VALUE) else ())
    return any(ast.unparse(call.func) in _ALL and call not in harmless for call in _calls(owner, name))


def _calls(owner: Any, name: str) -> Iterator[ast.Call]:
    function = written(classes_of(owner), name) if name in _methods(owner) else None
    return (node for node in ast.walk(function or ast.Pass()) if isinstance(node, ast.Call))
