"""Repeated blocks of a model, and the *units* that fully sharded data parallelism gathers one at a time.

[Note: blocks and units]
A *block* is one of several siblings of one class in a `ModuleList` or `Sequential`: a transformer's layer. Activation
checkpointing and compilation work per block. A *unit* is a module whose parameters are gathered together: a block by
default, or what the model's own plan or the user says. What is in no unit is gathered with the root.
A *dense* parameter is one that no sharder of tables owns.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from dmp import NameIndex, ShardError, is_inside, join_name
from sharders.data_parallel.in_turn import goes_back_in, is_chosen, is_optional, runs_a_part, runs_in_turn
from sharders.data_parallel.reads_all import reads_all

_log = logging.getLogger("dmp")
Units = Iterable[str | type[nn.Module]]
_STACK_NAMES = ("layers", "layer", "blocks", "block", "h")  # of a ModuleList that is a stack even with one layer
_LARGE_NUMEL = 1 << 20  # from here on a leaf is worth a collective of its own; below, it is part of something larger


def repeated_blocks(module: nn.Module, ignored: Collection[str] = ()) -> dict[str, nn.Module]:
    """Path -> block, outermost ones only, each module once; those without dense parameters are left out.

    Args:
        module: the model.
        ignored: names of the parameters that others own.
    """
    dense = {id(p) for name, p in module.named_parameters() if name not in ignored}
    found: dict[str, nn.Module] = {}
    _collect(module, "", dense, found, set())
    return found


def _collect(
    module: nn.Module,
    path: str,
    dense: set[int],
    found: dict[str, nn.Module],
    seen: set[int],
    beside: Counter[type[nn.Module]] | None = None,
) -> None:
    """Blocks inside of a module; `beside` counts classes in lists like it in one list, as of (attention, MLP) each."""
    seen.add(id(module))
    is_stack = isinstance(module, nn.ModuleList) and path.rpartition(".")[2] in _STACK_NAMES
    in_row = isinstance(module, (nn.ModuleList, nn.Sequential))
    worthy = [in_row and _is_worth_a_block(child, dense) for child in module._modules.values()]
    times = beside or Counter(
        type(c) for c, w in zip(module._modules.values(), worthy, strict=True) if c is not None and w
    )
    inner = [each for each in module._modules.values() if isinstance(each, nn.ModuleList)]
    in_lists = Counter(type(c) for each in inner for c in each.children() if _is_worth_a_block(c, dense))
    for (name, child), is_worthy in zip(module._modules.items(), worthy, strict=True):
        if child is None or id(child) in seen:
            continue
        child_path = join_name(path, name)
        if is_worthy and (is_stack or times[type(child)] > 1):
            seen.add(id(child))
            found[child_path] = child
        else:
            is_inner = isinstance(module, nn.ModuleList) and isinstance(child, nn.ModuleList)
            _collect(child, child_path, dense, found, seen, in_lists if is_inner else None)


def _is_worth_a_block(module: nn.Module | None, dense: set[int]) -> bool:
    if module is None or not _has_forward(module):
        return False
    own = [p.numel() for p in module.parameters() if id(p) in dense]
    return bool(own) and (bool(module._modules) or sum(own) >= _LARGE_NUMEL)


def _has_forward(module: nn.Module) -> bool:
    """Whether it is called itself, so that hooks on it run; a ModuleList only holds others."""
    return type(module).forward is not nn.Module.forward


def find_units(module: nn.Module, units: Units | None, ignored: Collection[str] = ()) -> dict[str, nn.Module]:
    """Path -> unit, inner units before those that hold them.

    Args:
        module: the model.
        units: path patterns (`layers.*`, see `NameIndex`) and classes of modules; by default the `fsdp_plan` of the
            Hugging Face models inside, else the repeated blocks, and of those only the ones that all ranks run, as far
            as can be seen, and that share no parameter with anything outside.
        ignored: names of the parameters that others own.

    Raises:
        ShardError: a pattern or class that names no module with dense parameters, a module that is never called, or
            that shares a parameter with what is outside it.
    """
    if units is None:
        found = _by_plan(module, ignored) or units_in_turn(module, repeated_blocks(module, ignored))[0]
        shared = _shared(module, found, ignored)
        found = {path: m for path, m in found.items() if id(m) not in shared}
    else:
        found = _by_choice(module, (units,) if isinstance(units, (str, type)) else units, ignored)
        for path, m in found.items():
            if pair := _shared(module, found, ignored).get(id(m)):
                raise ShardError(
                    f"unit {path!r} shares parameter {pair[0]!r} with {pair[1]!r}, which is outside it; a shared "
                    "parameter is gathered with the root: leave this module out of units="
                )
    return dict(sorted(found.items(), key=lambda item: -item[0].count(".")))


def units_in_turn(
    module: nn.Module, blocks: Mapping[str, nn.Module]
) -> tuple[dict[str, nn.Module], dict[str, type[nn.Module]]]:
    """Blocks of which all ranks run each, as far as can be seen, see in_turn.py; path -> owner of what holds others."""
    kept, others, kinds = {}, dict[str, type[nn.Module]](), _kinds(module)
    for path, block in blocks.items():
        unsure = dict(_unsure_above(module, path))
        others.update(unsure)
        if not unsure and not _run_in_part(module, path, kinds):
            kept[path] = block
    return kept, others


def _kinds(module: nn.Module) -> frozenset[Any]:
    return frozenset(type(each) for each in module.modules())


def _run_in_part(module: nn.Module, path: str, kinds: frozenset[Any]) -> str:
    """Who runs or reads something inside of a module past itself, when its own weights may be in pieces, in words: they
    are gathered with the root's then. A forward around it, or a method of its own, in a backward pass.

    Args:
        kinds: classes of all modules.
    """
    kind: Any = type(module.get_submodule(path))
    if method := goes_back_in(kind):
        return f"{kind.__name__}.{method}() runs a backward pass of its own through parts of it"
    above = ["", *(path[:at] for at, letter in enumerate(path) if letter == ".")]
    for holder in (cast("Any", type(module.get_submodule(each))) for each in above):
        if method := reads_all(holder, kinds):
            return f"{holder.__name__}.{method}() goes over all parameters, as for a penalty"
    stack, _, place = path.rpartition(".")
    around, _, name = stack.rpartition(".")
    if not stack or not place.isdigit():
        return ""
    is_run = runs_a_part(cast("Any", type(module.get_submodule(around))), name, int(place))
    return "the model runs a part of it by itself too" if is_run else ""


def say_of_unsure(module: nn.Module, ignored: Collection[str], units: Collection[str]) -> None:
    """Which blocks are no units, and why."""
    blocks = {path: block for path, block in repeated_blocks(module, ignored).items() if path not in units}
    kinds = _kinds(module)
    reasons: dict[str, list[str]] = {}
    for path in blocks:
        if why := _run_in_part(module, path, kinds):
            reasons.setdefault(why, []).append(path)
    for why, (path, *more) in reasons.items():
        others = f" (and {len(more)} more)" if more else ""
        _log.warning("%r%s is gathered with the root, not by itself: %s", path, others, why)
    for path, owner in units_in_turn(module, blocks)[1].items():
        inside = {f"{block.rpartition('.')[0]}.*" for block in blocks if is_inside(block, path)}
        _log.warning(
            "the modules of %r are gathered with what holds them, not one at a time: the code of %s does not show that "
            "each is run at every forward, and where some rank runs others they would not fit together. If each is, "
            "say FSDPWrapper(units=%r)",
            path,
            owner.__name__,
            sorted(inside),
        )


def _unsure_above(module: nn.Module, path: str) -> Iterator[tuple[str, type[nn.Module]]]:
    """Path of each module around this one that some rank may not run, or of whose modules; and the class of its owner.

    The owner of what is in a `ModuleDict` is what has that.
    """
    parts, owner = path.split("."), module
    of, prefix = module, ""  # whose code it is, and what it calls the dict or list that it goes through
    for depth, part in enumerate(parts[:-1], 1):
        child = owner._modules[part]
        assert child is not None
        here, kind = ".".join(parts[:depth]), cast("Any", type(of))
        if isinstance(child, nn.ModuleList) and isinstance(owner, nn.ModuleList):
            if not (parts[depth].isdigit() and runs_in_turn(kind, prefix[:-1], int(parts[depth]))):
                yield here, kind
        elif isinstance(child, nn.ModuleList):
            is_judged_inside = isinstance(child._modules[parts[depth]], nn.ModuleList)
            if not (is_judged_inside or part in _STACK_NAMES or runs_in_turn(kind, prefix + part)):
                yield here, kind
        elif isinstance(child, nn.ModuleDict):
            if is_chosen(kind, prefix + part):
                yield here, kind
        elif is_optional(kind, prefix + part) or (prefix and is_optional(kind, f"{prefix[:-1]}[{part!r}]")):
            yield here, kind
        if isinstance(child, nn.ModuleDict | nn.ModuleList):
            owner, prefix = child, f"{prefix}{part}."
        else:
            owner, of, prefix = child, child, ""


def _by_choice(module: nn.Module, units: Units, ignored: Collection[str]) -> dict[str, nn.Module]:
    candidates = dict(_with_dense(module, ignored))
    paths = NameIndex(candidates)
    found: dict[str, nn.Module] = {}
    for unit in units:
        if isinstance(unit, str):
            matched = {path: candidates[path] for path in paths.matching(unit)}
        else:
            matched = {path: m for path, m in candidates.items() if isinstance(m, unit)}
        if not matched:
            kinds = sorted({type(m).__name__ for m in candidates.values()})
            hint = paths.hint(unit) if isinstance(unit, str) else f"there are {kinds}"
            raise ShardError(
                f"units: no module with dense parameters fits {unit!r}; expected path patterns or classes of modules "
                f"of this model: {hint}"
            )
        for path, m in matched.items():
            if not _has_forward(m):
                raise ShardError(
                    f"units: {path!r} is a {type(m).__name__}, which is never called itself; name its children: "
                    f"'{path}.*'"
                )
        found.update(matched)
    return found


def _by_plan(module: nn.Module, ignored: Collection[str]) -> dict[str, nn.Module]:
    """What Hugging Face models say of themselves; nothing where their plan does not name their blocks.

    `keep_full_weight` asks for what the root does already: gathered once, kept until its backward.
    """
    found: dict[str, nn.Module] = {}
    outermost: dict[str, Any] = {}
    for path, m in module.named_modules():
        if hasattr(type(m), "fsdp_plan") and m.fsdp_plan and not any(is_inside(path, p) for p in outermost):
            outermost[path] = m
    candidates = dict(_with_dense(module, ignored)) if outermost else {}
    paths = NameIndex(candidates)
    for path, planned in outermost.items():
        base = getattr(planned, "base_model_prefix", "")
        matched: dict[str, dict[str, nn.Module]] = {}
        for pattern, style in planned.fsdp_plan.items():
            for prefix in (path, join_name(path, base)):
                full = join_name(prefix, pattern)
                hits = {p: candidates[p] for p in paths.matching(full) if _has_forward(candidates[p])}
                if hits and ("*" in pattern or style == "free_full_weight"):
                    matched.setdefault(pattern, hits)
        if any("*" in pattern for pattern in matched):
            for hits in matched.values():
                found.update(hits)
    return found


def _with_dense(module: nn.Module, ignored: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of each submodule, but the root, that holds dense parameters."""
    dense = {id(p) for name, p in module.named_parameters() if name not in ignored}
    for path, m in module.named_modules():
        if path and any(id(p) in dense for p in m.parameters()):
            yield path, m


def _shared(module: nn.Module, units: Mapping[str, nn.Module], ignored: Collection[str]) -> dict[int, tuple[str, str]]:
    """id of each unit that shares a parameter with another unit or the root -> its name there and elsewhere."""
    unit_ids = {id(m) for m in units.values()}
    first: dict[int, tuple[int | None, str]] = {}
    shared: dict[int, tuple[str, str]] = {}

    def visit(m: nn.Module, path: str, unit: int | None) -> None:
        unit = id(m) if id(m) in unit_ids else unit
        for relative, p in m._parameters.items():
            name = f"{path}{relative}"
            if p is None or name in ignored:
                continue
            other, other_name = first.setdefault(id(p), (unit, name))
            if other != unit:
                for one, mine, theirs in ((unit, name, other_name), (other, other_name, name)):
                    if one is not None:
                        shared.setdefault(one, (mine, theirs))
        for relative, child in m._modules.items():
            if child is not None:
                visit(child, f"{path}{relative}.", unit)

    visit(module, "", None)
    return shared


def checkpoint_blocks(blocks: Mapping[str, nn.Module], which: bool | Callable[[str, nn.Module], bool]) -> None:
    """Recompute the activations of these blocks in the backward pass, instead of keeping them; names stay.

    Args:
        blocks: path -> block.
        which: True for all, or a choice by path and module.
    """
    # Private: the only checkpointing that changes neither names nor the model's code.
    from torch.distributed._composable import checkpoint_activation
    from torch.distributed._composable.checkpoint_activation import checkpoint

    checkpoint_activation._no_hook = _WithoutHooks  # type: ignore[assignment]
    for path, block in blocks.items():
        if checkpoint.state(block) is not None:
            continue  # it is wrapped again, as a copy or with other weights to train
        if which is True or (callable(which) and which(path, block)):
            checkpoint(block)
            # First of the hooks on inputs: a recompute starts from the block's own inputs, which the others then change
            # again (sequence parallelism takes its chunk of them).
            hooks: Any = block._forward_pre_hooks
            hooks.move_to_end(next(reversed(hooks)), last=False)


class _WithoutHooks:
    """Around a block's forward in a backward pass, in which its checkpoint does not begin again.

    torch's own is entered once, though each pass computes the block again: a second one, by `retain_graph` or through a
    penalty on gradients, ended in an AttributeError of contextlib.
    """

    def __init__(self, module: nn.Module, around: AbstractContextManager[Any] | None = None) -> None:
        from torch.distributed._composable.checkpoint_activation import checkpoint

        self._around = nullcontext() if around is None else around
        self._state: Any = checkpoint.state(module)
        self._were: list[bool] = []

    def __enter__(self) -> None:
        self._around.__enter__()
        self._were.append(self._state.enable_hook)
        self._state.enable_hook = False

    def __exit__(self, *error: Any) -> bool | None:
        self._state.enable_hook = self._were.pop()
        return self._around.__exit__(*error)


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point tensors that `module` is called with: what a table gives keeps the table's own dtype."""

    def cast(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(cast_one, args)), {name: cast_one(value) for name, value in kwargs.items()}

    def cast_one(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    module.register_forward_pre_hook(cast, with_kwargs=True)
