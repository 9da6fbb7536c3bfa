"""Terms of the loss over a table's own values, such as a penalty: right where the ranks' parts add up, else an error.

Each rank reads its part of a table. Of a sum over elements, p.square().sum(), it so gets the gradient of its elements,
and all is right; of a norm, a mean or a maximum it gets that of another function, in silence. So a parameter that is
cut looks whether its gradient is what the lookup gave alone. Where something came beside, the graph of the loss is
walked, once the pass is done, from the table to the loss. Passes without such a term pay a look for each table.
Of a table that every rank has whole each rank's term is right, and of its own batch, as where scores of all items are
taken: its gradient is averaged over the ranks, as dense weights' are, by an exchange in the passes that have one.

What a term is multiplied by may be of a rank's batch: of a part of a table only its owner's would count. So the number
that comes to a term in the backward pass is averaged over the ranks, at the first node that has no dimensions and of
which only linear ones read: there it is of the same shape on all ranks, and of no table. For that the graph is looked
through before the pass, a microsecond a node.

Terms. What a node of the graph computes from a table is a function of the *whole*, which one rank has; one for each of
its *elements*, or *rows* where those are whole; or a *sum* over these, of which only sums may be made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from math import prod
from typing import Any, NamedTuple

import torch

from dmp import Shard, ShardError, ranks
from sharders.embedding.weights.among import Among
from sharders.embedding.weights.operations import is_pointwise, operations
from sharders.embedding.weights.seen_part import hand_out, told_gradient

_MARK = "_dmp_version"  # of a gradient: as which version the lookup gave it


class _Kind(Enum):
    """What a node computes of tables; see the top of the file."""

    NOTHING = 0
    WHOLE = 1
    ROWS = 2
    ELEMENTS = 3
    SUMS = 4
    """Over rows or columns: there may be another number of them on each rank."""
    SUM = 5


class _Value(NamedTuple):
    """Of a node: what it computes, and of which tables."""

    kind: _Kind
    tables: frozenset[int] = frozenset()


_NOTHING = _Value(_Kind.NOTHING)


class _Part:
    """What a parameter knows of its table. Not kept where it is pickled."""

    def __init__(self, kind: _Kind, columns: int, name: Callable[[], str], among: Callable[[], Among]) -> None:
        self.kind, self.columns, self.name, self.among = kind, columns, name, among

    def __reduce__(self) -> Any:
        return type(None), ()


_met: list[torch.Tensor] = []
"""Parameters to which more has come than what was looked up."""

_reached: list[torch.Tensor] = []
"""Parameters to which anything has come."""


def watch(
    parameter: torch.Tensor,
    shards: Sequence[Shard],
    size: tuple[int, int],
    is_copied: bool,
    name: Callable[[], str],
    among: Callable[[], Among],
) -> None:
    """From now on a term of the loss that is wrong on this part of a table is a `ShardError` at its backward pass.

    Args:
        parameter: this rank's part; it gets its gradients from lookups that `mark` them.
        shards: of the table, on all ranks.
        size: of the table.
        is_copied: every rank has the whole table: what comes beside the lookup is of a rank's batch, and averaged.
        name: of the table, for messages; may not hold the parameter.
        among: ranks that have a part of it, or it.
    """
    ranks.around_backward(_look_at_terms)
    rows_are_whole = all(shard.sizes[1] == size[1] for shard in shards)
    kind = _Kind.WHOLE if len(shards) == 1 else _Kind.ROWS if rows_are_whole else _Kind.ELEMENTS
    is_watched = hasattr(parameter, "_dmp_part")
    parameter._dmp_part = _Part(_Kind.NOTHING if is_copied else kind, size[1], name, among)  # type: ignore[attr-defined]
    if is_watched:
        return

    @torch.utils.hooks.unserializable_hook  # type: ignore[untyped-decorator]
    def look(gradient: torch.Tensor) -> torch.Tensor | None:
        part: _Part = parameter._dmp_part  # type: ignore[attr-defined]
        if part.kind is not _Kind.NOTHING:
            _reached.append(parameter)
        if getattr(gradient, _MARK, -1) != gradient._version:
            if part.kind is _Kind.NOTHING:
                return part.among().mean(gradient, part.name())
            _met.append(parameter)
        elif hasattr(gradient, _MARK):
            delattr(gradient, _MARK)
        has_users = len(parameter._backward_hooks or ()) > 1 or parameter._post_accumulate_grad_hooks
        if not has_users or part.kind is _Kind.NOTHING:
            return None
        return told_gradient(gradient, parameter, part.name, part.columns)  # their hooks come after this one

    look._dmp_own = True
    was = parameter.requires_grad
    parameter.requires_grad_(True).register_hook(look)  # a frozen one takes none, and may be trained later
    parameter.requires_grad_(was)


def mark(gradients: Sequence[torch.Tensor | None]) -> None:
    """These are what the lookup gives to parameters that are watched."""
    for gradient in gradients:
        if gradient is not None:
            setattr(gradient, _MARK, gradient._version)


def _look_at_terms(own: Any, outputs: Any, *args: Any, **options: Any) -> Any:
    """A backward pass, see `ranks.around_backward`."""
    roots = [out.grad_fn if isinstance(out, torch.Tensor) else out.node for out in outputs]
    handles = _meet_at_terms(roots) if any(True for _ in _parts_below(roots)) else []
    try:
        result = own(outputs, *args, **options)
        if _met:
            _check(roots)
        for parameter in _reached:
            _hand_out(parameter)
        return result
    finally:
        _met.clear()
        _reached.clear()
        for handle in handles:
            handle.remove()


def _parts_below(roots: Sequence[Any]) -> Iterator[_Part]:
    """Parts of tables that are read past their lookup by what is computed at these nodes."""
    stack, known = [root for root in roots if root is not None], set()
    while stack:
        node = stack.pop()
        if node in known or node.__class__.__name__ == _LOOKUP:
            continue
        known.add(node)
        below = node.next_functions
        if below:
            stack += [n for n, _ in below[::-1] if n is not None]
        elif (part := _part_of(node)) is not None:
            yield part


def _part_of(node: Any) -> _Part | None:
    """Of a leaf: the part of a table that it is."""
    part = getattr(getattr(node, "variable", None), "_dmp_part", None)
    return None if part is None or part.kind is _Kind.NOTHING else part


def _meet_at_terms(roots: Sequence[Any]) -> list[Any]:
    """Have ranks average what comes to each term, where it is one number; returns handles that take this back."""
    known: dict[Any, _Value] = {}
    of_tables: dict[Any, list[Any]] = {}  # node -> those below it that are, too
    for node, value in _values(roots, known):
        known[node] = value or _NOTHING  # refused once the pass is done, if it is gone through
        below = [n for n, _ in node.next_functions if n is not None and known[n].kind is not _Kind.NOTHING]
        if known[node].kind is not _Kind.NOTHING and below:
            of_tables[node] = below
    is_read: set[Any] = set()  # by what is not linear: what comes to it depends on the values of the rank that has them
    for node, below in reversed(of_tables.items()):
        if node in is_read or not _is_linear(node):
            is_read.update(below)
    constants: dict[Any, float] = {}
    have_met: set[Any] = set()
    handles = []
    for node, below in of_tables.items():
        if have_met.issuperset(below):
            have_met.add(node)
            continue
        constants[node] = sum(constants.get(n, 0.0) for n in below) + _constant(node, {known[n].kind for n in below})
        if node not in is_read and not _has_dims(node):
            have_met.add(node)
            handles.append(node.register_prehook(_averages(node, constants[node])))
    return handles


def _hand_out(parameter: torch.Tensor) -> None:
    part: _Part = parameter._dmp_part  # type: ignore[attr-defined]
    hand_out(parameter, part.name, part.columns)


def _is_linear(node: Any) -> bool:
    name = _operation(node)
    return name in _LINEAR or (name in ("mul", "div") and sum(n is not None for n, _ in node.next_functions) == 1)


def _has_dims(node: Any) -> bool:
    return len(node._input_metadata) != 1 or len(node._input_metadata[0].shape) > 0


def _constant(node: Any, kinds: set[_Kind]) -> float:
    """What an operation multiplies tables by, as far as that is the same for all rows."""
    total = 0.0
    for (input_, _), name in zip(node.next_functions, ("_saved_self", "_saved_other"), strict=False):
        saved = getattr(node, name, None) if input_ is None else None
        if isinstance(saved, torch.Tensor):
            is_for_columns = saved.ndim == 1 and len(node._input_metadata[0].shape) == 2
            if saved.ndim == 0:  # a number in the user's code: torch's sum of it reads other memory
                total += float(saved)
            elif is_for_columns and kinds <= {_Kind.WHOLE, _Kind.ROWS}:
                total += float(saved.double().sum())
    return total


def _averages(node: Any, within: float) -> Callable[[tuple[Any, ...]], Any]:
    part = next(_parts_below([node]))

    def average(gradients: tuple[Any, ...]) -> Any:
        (gradient,) = gradients
        if gradient is None:
            return None
        if gradient.requires_grad:
            raise ShardError(
                f"the loss has a term over values of table {part.name()!r} itself, multiplied by what has a gradient, "
                "which is averaged over the ranks: create_graph=True does not go through that"
            )
        return (part.among().mean_of_number(gradient, part.name(), within),)

    return average


def _check(roots: Sequence[Any]) -> None:
    """Raise for the first term that is wrong on parts of tables."""
    known: dict[Any, _Value] = {}
    read: set[str] = set()
    for node, value in _values(roots, known):
        if value is not None:
            known[node] = value
            if (part := _part_of(node)) is not None:
                read.add(part.name())
        else:
            raise ShardError(
                f"the loss has a term over values of table {next(_parts_below([node])).name()!r} itself, by "
                f"{_operation(node)}: each rank has a part of the table, and would train it by the norm, mean or "
                "other function of its part alone. Terms whose parts add up are right, p.square().sum() and "
                "p.abs().sum() and sums of such, as is an optimizer's weight_decay. For others every rank needs "
                "the whole table: data_parallel() in the plan"
            )
    if read:  # not where gradients were only asked for, by torch.autograd.grad
        ranks.say_once(
            f"the loss has terms over values of tables themselves ({', '.join(sorted(read))}): it trains them as in "
            "one process, but its number on each rank has of these terms that of the rank's own part, and is no mean "
            "of the global loss"
        )


def _values(roots: Sequence[Any], known: dict[Any, _Value]) -> Iterator[tuple[Any, _Value | None]]:
    """Nodes, each after those that it computes from, and what they do; who takes them puts them among the known."""
    for root in roots:
        for node in _from_leaves(root, known):
            if hasattr(node, "variable"):
                part = _part_of(node)
                yield node, _NOTHING if part is None else _Value(part.kind, frozenset([id(node.variable)]))
            else:
                yield node, _value(node, [None if n is None else known[n] for n, _ in node.next_functions])


def _from_leaves(root: Any, known: dict[Any, _Value]) -> Iterator[Any]:
    """Nodes of the graph that are not known, each after those that it computes from; what was looked up is known."""
    stack = [] if root is None else [(root, False)]
    while stack:
        node, is_ready = stack.pop()
        if node in known:
            continue
        if node.name() == _LOOKUP:
            known[node] = _NOTHING
            continue
        waits = [(n, False) for n, _ in node.next_functions if n is not None and n not in known]
        if is_ready or not waits:
            yield node
        else:
            stack += [(node, True), *waits]


_LOOKUP = "_Lookup" + "Backward"  # as torch names nodes of the engine's function

_MOVED = frozenset(
    ("view", "unsafeview", "reshape", "reshapealias", "t", "transpose", "permute", "clone", "alias", "tocopy")
    + ("squeeze", "unsqueeze", "expand", "unbind", "split", "contiguous")
)
"""Operations, by their names without underscores, that change no values."""

_STAYS = frozenset(("alias", "clone", "contiguous", "tocopy"))
"""Those of them after which rows are where they were."""

_OF_AS_MANY = frozenset(("mean", "select", "slice", "index"))

_PRODUCTS = frozenset(("mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "linear", "matmul"))

_LINEAR = _MOVED | _OF_AS_MANY | {"cat", "stack", "add", "sub", "rsub", "neg", "sum"}
"""What sums may be made into; by those of `_OF_AS_MANY` where there are as many of them on each rank."""


def _value(node: Any, inputs: Sequence[_Value | None]) -> _Value | None:
    """What a node computes from what its inputs do (None: constants); None where its gradient is another on a part."""
    given = [value for value in inputs if value is not None]
    of_tables = [value for value in given if value.kind is not _Kind.NOTHING]
    if not of_tables:
        return _NOTHING
    name = _operation(node)
    if name is None:
        ranks.say_once(
            f"the loss has a term over a table's own values, by {node.name().removesuffix('Backward')}, which is not "
            "torch's: it gets this rank's part of the table, and is right where the terms of all parts add up to that "
            "of the whole"
        )
        return _NOTHING
    kinds, tables = {value.kind for value in of_tables}, frozenset[int]().union(*(v.tables for v in of_tables))
    is_alone = len(of_tables) == len(given)
    if name in _PRODUCTS and len(given) < len(inputs):
        return None  # scores of a batch, which each rank takes of its own by its own part
    if kinds == {_Kind.WHOLE} and len(tables) == 1 and is_alone:
        return _Value(_Kind.WHOLE, tables)
    if _Kind.WHOLE in kinds and _has_rows(node, inputs):
        kinds = kinds - {_Kind.WHOLE} | {_Kind.ELEMENTS}
    kind = _kind(node, name, kinds, is_alone, len(given) == 1 and (name == "mul" or inputs[0] is not None))
    return None if kind is None else _Value(kind, tables)


def _has_rows(node: Any, inputs: Sequence[_Value | None]) -> bool:
    """Whether what one rank has whole is more than a number there: others have it with another number of rows, none,
    and what is put beside would get its gradient from these."""
    of = zip(node.next_functions, inputs, strict=True)
    return any(v is not None and v.kind is _Kind.WHOLE and len(_shape(n, at)) > 0 for (n, at), v in of)


def _kind(node: Any, name: str, kinds: set[_Kind], is_alone: bool, may_scale: bool) -> _Kind | None:
    """Of a value of several tables, or parts of one; None where its gradient is another on a part.

    Args:
        name: of the operation.
        kinds: of the inputs that are of tables.
        is_alone: no other input is trained.
        may_scale: its one input that is no constant may be multiplied.
    """
    is_linear = name in _LINEAR or (may_scale and name in ("mul", "div"))
    if kinds <= {_Kind.WHOLE, _Kind.SUM}:
        return _Kind.SUM if is_linear else None
    if kinds & {_Kind.SUM, _Kind.SUMS}:
        if not is_linear or kinds != {_Kind.SUMS} or not is_alone or name in _OF_AS_MANY:
            return None
        return _Kind.SUM if name == "sum" and not _dims(node) else _Kind.SUMS
    if name in ("cat", "stack"):
        return _Kind.ELEMENTS
    if not is_alone and not node.name().startswith("Foreach"):  # those of lists take each tensor by itself
        return None  # what is trained beside would get its gradient from a part
    kept = _Kind.ROWS if kinds == {_Kind.ROWS} else _Kind.ELEMENTS
    reduction = getattr(node, "_saved_reduction", None)
    if name == "sum" or reduction == _REDUCES_BY_SUM:
        return _Kind.SUM if not _dims(node) else _Kind.ELEMENTS if _is_by_row(node, kept) else _Kind.SUMS
    if _is_of_more(node, name):
        return None
    if reduction == _REDUCES_NOT or name in _STAYS or is_pointwise(name):
        return kept
    return _Kind.ELEMENTS if name in _MOVED or _is_by_row(node, kept) else None


def _is_of_more(node: Any, name: str) -> bool:
    """Whether each value of a table is put beside each of others: of the table, of which a rank has a part, or of a
    batch, which is one for each rank."""
    if not is_pointwise(name) or len(node.next_functions) < 2:
        return False
    below = [_elements(n, at) for n, at in node.next_functions if n is not None]
    return _elements(node, 0) > max(below)


def _elements(node: Any, output: int) -> int:
    return prod(_shape(node, output))


def _shape(node: Any, output: int) -> Sequence[int]:
    shaped = getattr(node, "variable", None)
    shape: Sequence[int] = (node._input_metadata[output] if shaped is None else shaped).shape
    return shape


_REDUCES_NOT, _REDUCES_BY_SUM = 0, 2  # as torch's losses keep it


def _is_by_row(node: Any, kind: _Kind) -> bool:
    return kind is _Kind.ROWS and _dims(node) in ({1}, {-1})


def _dims(node: Any) -> set[int]:
    """Those that an operation goes over; none where it says none, or goes over all."""
    dims = getattr(node, "_saved_dim", None)
    found = dims if isinstance(dims, tuple) else () if dims is None else (dims,)
    return {d - 2**64 if d >= 2**63 else d for d in found}  # as torch shows negative ones


def _operation(node: Any) -> str | None:
    """Of torch's, without underscores; None where somebody has written the function himself."""
    name = node.name().rstrip("0123456789").removesuffix("Backward").lower().replace("_", "").removeprefix("foreach")
    return name if name in operations() else None
