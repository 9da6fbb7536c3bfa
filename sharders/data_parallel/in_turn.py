"""Whether all ranks run the same modules, each at every forward: what the code of their owner says of it.

Ranks gather units together: where one of them is run by some ranks alone, as the expert that this rank's samples ask
for, others give the weights of another unit in its place. Of the same shapes, that was silent; else all ranks wait.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Set
from functools import cache
from typing import Any

from torch import nn

_ITSELF = ("forward", "__call__")
_IS_THERE = re.compile(r"self\.\w+ is not None")
_Of = Callable[[ast.stmt], set[str]]


@cache
def runs_in_turn(owner: Any, name: str, place: int | None = None) -> bool:
    """Whether some loop in the code of a class goes over `self.<name>` and calls each, whatever the values are; or what
    is at a place in each, where these are lists.

    False where the code is not there to be read, where a call is in one branch of an `if` alone, or the loop may end
    early.
    """
    return _always(owner, lambda each: _calls_each(each, name, place))


@cache
def is_optional(owner: Any, name: str) -> bool:
    """Whether the code of a class calls `self.<name>` in branches alone.

    False where it is not seen to be called at all: something else may, or a `forward` that was put in its place.
    """
    anywhere = (node for function in _functions(owner) for node in ast.walk(function))
    own = {f"self.{name}"}

    def runs(each: ast.stmt) -> bool:
        return any(_calls(node, own) for node in _certain(each)) or _calls_each(each, name)

    is_called = any(_calls(node, own) for node in anywhere)
    return is_called and not _always(owner, runs)


@cache
def is_chosen(owner: Any, name: str) -> bool:
    """Whether the code of a class takes one module of `self.<name>`, a dict, by a key that may be another each time."""
    own = f"self.{name}"
    anywhere = [node for function in _functions(owner) for node in ast.walk(function)]
    by_key = (node for node in anywhere if isinstance(node, ast.Subscript) and ast.unparse(node.value) == own)
    return any(not isinstance(node.slice, ast.Constant) for node in by_key)


@cache
def runs_a_part(owner: Any, name: str, index: int) -> bool:
    """Whether the code of a class calls something inside of `self.<name>[<index>]`, as `self.blocks[0].norm(x)` does:
    past that module itself."""
    of = f"self.{name}[{index}]."
    nodes = (node for function in _functions(owner) for node in ast.walk(function))
    called = (node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    return any(func.attr not in _ITSELF and ast.unparse(func).startswith(of) for func in called)


@cache
def goes_back_in(owner: Any) -> str | None:
    """Name of a method of a class, beside its `forward`, that runs a backward pass, as those of reversible layers do:
    through modules that it calls, in the backward pass of the model."""
    own = classes_of(owner)
    for name in dict.fromkeys(name for of in own for name in vars(of)):
        function = None if name in _ITSELF else written(own, name)
        calls = (node.func for node in ast.walk(function or ast.Pass()) if isinstance(node, ast.Call))
        if any(isinstance(func, ast.Attribute) and func.attr == "backward" for func in calls):
            return name
    return None


def _functions(owner: type[nn.Module]) -> Iterator[ast.FunctionDef]:
    """`forward`, and what it surely calls of the same class."""
    own = classes_of(owner)
    names = _done(own, "forward", lambda each: set(_own_calls(each)), {})
    for name in ("forward", *sorted(names - {"forward"})):
        if (function := written(own, name)) is not None:
            yield function


def _always(owner: type[nn.Module], what: Callable[[ast.stmt], bool]) -> bool:
    """Whether each call of `forward` does it, by a statement of its own, or of a method that it calls."""
    return bool(_done(classes_of(owner), "forward", lambda each: {""} if what(each) else set(), {}))


def classes_of(owner: type[nn.Module]) -> tuple[type, ...]:
    """A class of modules and those that it is made of, below torch's."""
    return owner.__mro__[: owner.__mro__.index(nn.Module)]


def _done(own: tuple[type, ...], name: str, of: _Of, known: dict[str, set[str]]) -> set[str]:
    """What each call of a method does, of what statements do, whichever way it takes; nothing where its code is not
    there to be read."""
    if name in known:
        return known[name]
    known[name] = set()  # of a method that calls itself: what it does besides
    function = written(own, name)
    if function is not None:

        def each(statement: ast.stmt) -> set[str]:
            return of(statement).union(*(_done(own, called, of, known) for called in _own_calls(statement)))

        returned, behind = _ways(function.body, each, _left_out(function), set())
        known[name] = _both(returned, behind) or set()
    return known[name]


def _own_calls(statement: ast.stmt) -> Iterator[str]:
    """Calls of methods of the same object that a statement surely makes, by name."""
    for node in _certain(statement):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "self"
        ):
            yield node.func.attr


@cache
def written(own: tuple[type, ...], name: str) -> ast.FunctionDef | None:
    """Code of a method; None where it is not there to be read.

    It is asked for method by method: a class that a call has made, as ours around users' are, has methods that were
    written somewhere, and since Python 3.13 no source of its own.
    """
    method: Any = next((vars(of)[name] for of in own if name in vars(of)), None)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(method, "__func__", method))))
    except (OSError, TypeError, SyntaxError):
        return None
    return next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)


def _left_out(function: ast.FunctionDef) -> Set[str]:
    """Arguments that are None where they are not given."""
    args = [*function.args.posonlyargs, *function.args.args]
    with_default = [*zip(args[len(args) - len(function.args.defaults) :], function.args.defaults, strict=True)]
    with_default += [
        (arg, value) for arg, value in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if value
    ]
    return {arg.arg for arg, value in with_default if ast.unparse(value) == "None"}


def _ways(body: list[ast.stmt], of: _Of, left_out: Set[str], done: set[str]) -> tuple[set[str] | None, set[str] | None]:
    """What is done on all ways that return inside of these statements, and on all that come out behind them; None
    where there is no such way.

    What is computed where an argument was not given, as encoders' outputs are, is on every way: ranks call alike. So
    is what is where the model has something (`if self.head is not None`): their models are alike, and where one
    returns, all do.
    """
    returned: set[str] | None = None
    for statement in body:
        if isinstance(statement, ast.With):
            inside, behind = _ways(statement.body, of, left_out, done)
        elif isinstance(statement, ast.If):
            left, is_none, right = ast.unparse(statement.test).rpartition(" is None")
            inside, behind = _ways(statement.body, of, left_out, done)
            if (is_none and not right and left in left_out) or _IS_THERE.fullmatch(ast.unparse(statement.test)):
                inside, behind = None, done | (_both(inside, behind) or set())
            else:
                also_inside, also_behind = _ways(statement.orelse, of, set(), done)
                inside, behind = _both(inside, also_inside), _both(behind, also_behind)
        else:
            behind = done if isinstance(statement, (ast.While, ast.Try)) else done | of(statement)
            inside = done if _may_return(statement) else None
            if isinstance(statement, ast.Return):
                inside, behind = behind, None
            elif isinstance(statement, ast.Raise):
                behind = None
        returned = _both(returned, inside)
        if behind is None:
            return returned, None
        done = behind
    return returned, done


def _both(one: set[str] | None, other: set[str] | None) -> set[str] | None:
    """What is done on ways of two kinds, each of which may not be there."""
    return other if one is None else one if other is None else one & other


def _may_return(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return False
    return any(isinstance(node, ast.Return) for node in ast.walk(statement))


def _calls_each(statement: ast.stmt, name: str, place: int | None = None) -> bool:
    if isinstance(statement, ast.For):
        if any(isinstance(node, (ast.Break, ast.Continue, ast.Return)) for node in ast.walk(statement)):
            return False
        return _is_called(statement.body, _elements(statement.target, statement.iter, name, place))
    for node in _certain(statement):
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)) and len(node.generators) == 1:
            over = node.generators[0]
            found = _elements(over.target, over.iter, name, place)
            if not over.ifs and any(_calls(each, found) for each in _certain(node.elt)):
                return True
    return False


def _elements(target: ast.expr, over: ast.expr, name: str, place: int | None) -> set[str]:
    """What a loop calls the module that it is at, as code, or what is at a place in it; nothing where it goes over
    something else."""
    in_each = "" if place is None else f"[{place}]"
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Name):
        parts = target.elts if isinstance(target, ast.Tuple) else []
        if over.func.id == "range" and isinstance(target, ast.Name):
            return {f"self.{name}[{target.id}]{in_each}"}
        if over.func.id == "enumerate" and len(parts) == 2:
            return _elements(parts[1], over.args[0], name, place)
        if over.func.id == "zip" and len(parts) == len(over.args):
            return {found for each in zip(parts, over.args, strict=True) for found in _elements(*each, name, place)}
        if over.func.id in ("reversed", "list", "tuple"):
            return _elements(target, over.args[0], name, place)
        return set()
    if isinstance(over, ast.Subscript) and isinstance(over.slice, ast.Slice):
        over = over.value
    if ast.unparse(over) != f"self.{name}":
        return set()
    if place is not None and isinstance(target, ast.Tuple):
        return {ast.unparse(each) for each in target.elts[place : place + 1]}
    return {ast.unparse(target) + in_each}


def _is_called(body: list[ast.stmt], elements: set[str]) -> bool:
    """Whether one of these statements surely calls the module, or hands it to a function that does."""
    for statement in body:
        if isinstance(statement, ast.If):
            if statement.orelse and all(_is_called(side, elements) for side in (statement.body, statement.orelse)):
                return True
        elif isinstance(statement, ast.With):
            if _is_called(statement.body, elements):
                return True
        elif isinstance(statement, (ast.For, ast.While, ast.Try)):
            continue
        elif any(_calls(node, elements) for node in _certain(statement)):
            return True
    return False


def _calls(node: ast.AST, elements: set[str]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return any(ast.unparse(each).removesuffix(".__call__") in elements for each in (node.func, *node.args))


def _certain(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is evaluated with it in any case; of comprehensions, they alone."""
    yield node
    if isinstance(node, (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.GeneratorExp)):
        return
    for child in ast.iter_child_nodes(node):
        yield from _certain(child)
