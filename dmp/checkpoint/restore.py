"""From a checkpoint's source to a model: checks every name, shape and dtype, then says what to read where.

Nothing is changed before everything has been checked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.checkpoint.sources.checksums import CheckedRange
from dmp.checkpoint.sources.source import MODEL, STATE, Source, split_state
from dmp.chunked import ChunkedTensor, as_chunks, is_dense
from dmp.errors import CheckpointError
from dmp.read_values import shown
from dmp.state.optimizer_state import OwnedState, column_widths, owned_states
from dmp.wrap.optimizers.column_blocks import is_blocked, is_per_block, merge_blocks
from dmp.wrap.wrapper import DistributedModelParallel

_log = logging.getLogger("dmp")
_NOT_RESTORED = {"params", "foreach", "fused", "capturable", "differentiable"}  # how an optimizer runs, not what it is
_SHOWN = 5


class CheckedLoad(NamedTuple):
    """A load that has been checked: what to read, then what to do.

    Args:
        source: of it all.
        targets: key -> where this rank has it read to.
        then: calls when all has been read.
        faults: what does not fit, while it is being checked.
        cast: what is stored in another floating dtype fits: it is rounded to the target's as it is copied.
        passed_over: names that only the source or only the model has, where that is none of the faults; else None.
    """

    source: Source
    targets: dict[str, ChunkedTensor]
    then: list[Callable[[], Any]]
    faults: list[str]
    cast: bool = False
    passed_over: list[str] | None = None

    def differs(self, what: str) -> None:
        """The source and the model do not have the same names."""
        (self.faults if self.passed_over is None else self.passed_over).append(what)

    def check(self, share: tuple[int, int]) -> list[CheckedRange]:
        """Read the i-th of n shares of what all ranks will read, raise where it is damaged; what is to be compared."""
        keys = (key for key in self.source.shapes if key in self.targets or key.startswith("rng."))
        return self.source.check(list(keys), share)

    def run(self) -> None:
        """Change the model: read, and do the rest."""
        with torch.no_grad():
            self.source.read({key: t for key, t in self.targets.items() if t.chunks and t.numel()})
            for step in self.then:
                step()


def prepare(
    source: Source,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    strict: bool = True,
    cast: bool = False,
) -> CheckedLoad:
    """A checked load of weights and optimizer state; `strict` and `cast` as `load_checkpoint` has them.

    Raises:
        CheckpointError: names, shapes or dtypes that do not fit.
    """
    load = CheckedLoad(source, {}, [], [], cast, None if strict else [])
    _prepare_weights(load, model)
    owned = owned_states(model, optimizer)
    if source.objects.get("param_groups") or any(key.startswith(STATE) for key in source.shapes):
        saved = _saved_state(source)
        for o in owned:
            _prepare_state(load, o, column_widths(model, [o]).get(o.name, ()), saved.get(o.name))
        _prepare_options(load, owned)
        if optimizer is not None:
            named = dict(model.named_parameters(remove_duplicate=False))
            for name in sorted(saved.keys() & named.keys() - {o.name for o in owned}):
                if named[name].numel():
                    load.differs(f"optimizer state of {name!r} was saved, but no optimizer here has that parameter")
                else:  # this rank has nothing of that table, which `if p.numel()` leaves out: checked with the others
                    load.targets.update(dict.fromkeys(saved[name].values(), as_chunks(torch.empty(0))))
    elif optimizer is not None:
        why = source.about.get("no_state") or "it holds no optimizer state"
        load.faults.append(f"{why}; pass no optimizer to load the weights alone")
    if load.faults:
        more = f"; and {len(load.faults) - _SHOWN} more" if len(load.faults) > _SHOWN else ""
        said = "; ".join(load.faults[:_SHOWN])
        kind = type(model.module if isinstance(model, DistributedModelParallel) else model).__name__
        raise CheckpointError(f"the checkpoint does not fit {kind}: {said}{more}")
    if load.passed_over:
        load.then.append(partial(_log.warning, "%s, passed over: %s", source.path, "; ".join(load.passed_over)))
    return load


def _prepare_weights(load: CheckedLoad, model: nn.Module) -> None:
    own = model.state_dict()
    same = aliases(model)
    objects: dict[str, Any] = load.source.objects.get("model", {})
    saved = {key.removeprefix(MODEL) for key in load.source.shapes if key.startswith(MODEL)}
    for name, value in own.items():
        if not is_dense(value):
            if name not in objects:
                load.differs(f"missing key {name!r}")
        elif value.is_meta or is_lazy(value):
            load.faults.append(f"{name!r} of the model has no storage to fill; materialise it first")
        elif name not in saved and saved.intersection(same.get(name, ())):
            pass  # a tied weight that was stored once
        else:
            load.targets[MODEL + name] = as_chunks(value)
            if value.numel():
                _compare(load, MODEL + name, f"{name!r}")
    for name in sorted({*saved, *objects} - set(own)):
        load.differs(f"unexpected key {name!r}")
    if load.passed_over and not (saved & set(own)):
        load.faults.append(f"none of its names is the model's: {load.passed_over[0]}")
    if objects:
        known = {name: value for name, value in objects.items() if name in own}
        load.then.append(lambda: model.load_state_dict({**own, **known}))


def aliases(model: nn.Module) -> dict[str, list[str]]:
    """Name -> all names of the same parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: same for same in names.values() for name in same}


def _compare(load: CheckedLoad, key: str, what: str, widens: bool = False) -> None:
    """Whether the source has what a target takes, and it can be written; `widens`: see `_compare_dtypes`."""
    target = load.targets[key]
    if any(stride == 0 and n > 1 for c in target.chunks for n, stride in zip(c.shape, c.stride(), strict=True)):
        load.faults.append(f"{what} of the model is expanded, its elements share memory: give it memory by .clone()")
    if key not in load.source.shapes:
        del load.targets[key]
        load.differs(f"missing key {what}")
        return
    size, dtype = load.source.shapes[key]
    if size != tuple(target.size()):
        load.faults.append(f"{what} has shape {size}, expected {tuple(target.size())}")
    else:
        _compare_dtypes(load, dtype, target.dtype, what, widens)


def _compare_dtypes(load: CheckedLoad, dtype: torch.dtype, expected: torch.dtype, what: str, widens: bool) -> bool:
    """Whether values of a dtype can be had as another; a fault where not.

    Args:
        widens: without being asked, where nothing is lost: state of tables of 16 bits is float32 for optimizers in the
            backward pass, and has 16 bits for those of torch and in older checkpoints.
    """
    can_cast = dtype.is_floating_point and expected.is_floating_point
    loses_nothing = dtype.itemsize < expected.itemsize
    fits = dtype == expected or (can_cast and (load.cast or (widens and loses_nothing)))
    if not fits:
        way = "; load_checkpoint(..., cast=True) converts it" if can_cast else ""
        load.faults.append(f"{what} has dtype {dtype}, expected {expected}{way}")
    return fits


def _saved_state(source: Source) -> dict[str, dict[str, str]]:
    """Each parameter that had an optimizer -> state's name -> key of the tensor."""
    groups = source.objects.get("param_groups", ())
    keys: dict[str, dict[str, str]] = {name: {} for group in groups for name in group["params"]}
    for key in source.shapes:
        if key.startswith(STATE):
            name, short = split_state(key)
            keys.setdefault(name, {})[short] = key
    return keys


def _prepare_state(load: CheckedLoad, owned: OwnedState, widths: tuple[int, ...], keys: dict[str, str] | None) -> None:
    """Have one parameter's optimizer state filled.

    Args:
        widths: of its column blocks, where it has several.
        keys: state's name -> key of the tensor; None where it had no optimizer.
    """
    if keys is None:
        if load.source.about.get("names_stateless", True) or not _keeps_nothing(owned):
            load.differs(f"no optimizer state for {owned.name!r}")
        return
    numbers: dict[str, Any] = load.source.objects.get("state", {}).get(owned.name, {})
    if owned.optimizer is not None and 0 in owned.shape and {*keys, *numbers} == {"step"}:  # the rest had no elements
        load.then.append(partial(owned.optimizer.state.pop, owned.parameter, None))
        return
    if owned.optimizer is None or (owned.values and (keys or numbers)):
        lost = {*owned.values} - {*keys, *numbers}
        if owned.optimizer is None and not load.source.about.get("has_steps", True):
            lost.discard("step")  # it goes on from the model's own
        load.faults.extend(f"optimizer state {key!r} of {owned.name!r} is missing" for key in sorted(lost))
    fresh: dict[str, Any] = {}
    for short, key in keys.items():
        _prepare_tensor(load, owned, short, key, widths, fresh)
    for short, number in numbers.items():
        target = owned.values.get(short)
        if isinstance(target, ChunkedTensor):
            load.then.extend(partial(chunk.fill_, number) for chunk in target.chunks)
        elif owned.optimizer is not None:
            fresh[short] = number
    if owned.optimizer is not None:
        state, parameter = owned.optimizer.state, owned.parameter
        if fresh:
            load.then.append(lambda: state.setdefault(parameter, {}).update(fresh))
        elif not (keys or numbers):  # it had not been stepped when it was saved
            load.then.append(lambda: state.pop(parameter, None))


def _keeps_nothing(owned: OwnedState) -> bool:
    """Whether the optimizer has no state of the parameter, ever: then a file that does not name it lacks nothing."""
    if owned.optimizer is None:
        return not owned.values
    return type(owned.optimizer) is torch.optim.SGD and not owned.options["momentum"]


def _prepare_tensor(
    load: CheckedLoad, owned: OwnedState, short: str, key: str, widths: tuple[int, ...], fresh: dict[str, Any]
) -> None:
    """Have one tensor of state read; what the optimizer has not made yet comes into `fresh`."""
    what = f"optimizer state {short!r} of {owned.name!r}"
    target: Any = owned.values.get(short)
    size, dtype = load.source.shapes[key]
    if target is None and owned.optimizer is None:
        load.faults.append(f"unknown {what}")
        return
    saved_widths = load.source.about.get("column_widths", {}).get(owned.name, ())
    has_blocks = is_blocked(target, widths)
    if is_per_block(size, saved_widths):
        is_cut_otherwise = not has_blocks or widths != tuple(saved_widths)
    else:
        saved_widths, is_cut_otherwise = (), has_blocks and size == target.size()[:1]
    if is_cut_otherwise:
        _read_column_blocks(load, key, target, saved_widths, has_blocks, what, owned.optimizer is None)
        return
    if target is None:
        own = owned.parameter.dtype
        is_cast = load.cast and short != "step" and dtype.is_floating_point and own.is_floating_point
        try:
            fresh[short], target = owned.new(short, size, own if is_cast else dtype)
        except CheckpointError as error:
            load.faults.append(str(error))
            return
    if isinstance(target, ChunkedTensor):
        load.targets[key] = target
        _compare(load, key, what, owned.optimizer is None)
    elif size:
        load.faults.append(f"{what} has shape {size}, expected a number")
    else:
        assert owned.optimizer is not None
        number, kind, state = torch.zeros((), dtype=dtype), type(target), owned.optimizer.state[owned.parameter]
        load.targets[key] = as_chunks(number)
        load.then.append(lambda: state.update({short: kind(number.item())}))


def _read_column_blocks(
    load: CheckedLoad, key: str, target: Any, saved_widths: Sequence[int], has_blocks: bool, what: str, widens: bool
) -> None:
    """Row-wise state between other column blocks: read this rank's rows, take the mean, give it to every own block."""
    size, dtype = load.source.shapes[key]
    if not isinstance(target, ChunkedTensor) or not (has_blocks or target.dim() == 1) or target.size()[0] != size[0]:
        shape = tuple(target.size()) if isinstance(target, torch.Tensor) else "no such state"
        load.faults.append(f"{what} has one value per row and column block, {size}; expected {shape}")
        return
    if not _compare_dtypes(load, dtype, target.dtype, what, widens):
        return
    rows: dict[int, int] = {}  # first row -> how many, of the longest block that begins there
    for chunk, offset in zip(target.chunks, target.offsets, strict=True):
        if chunk.numel():
            rows[offset[0]] = max(rows.get(offset[0], 0), chunk.shape[0])
    offsets = [(start, *(0 for _ in size[1:])) for start in rows]
    read = {start: torch.empty((count, *size[1:]), dtype=target.dtype) for start, count in rows.items()}
    load.targets[key] = ChunkedTensor(size, list(read.values()), offsets, target.dtype)

    def spread() -> None:
        for chunk, offset in zip(target.chunks, target.offsets, strict=True):
            if chunk.numel():
                values = read[offset[0]][: chunk.shape[0]]
                merged = merge_blocks(values, saved_widths) if saved_widths else values
                chunk.copy_(merged.unsqueeze(1).expand_as(chunk) if chunk.dim() == 2 else merged)

    load.then.append(spread)


def _prepare_options(load: CheckedLoad, owned: Iterable[OwnedState]) -> None:
    """Learning rates and the like: each param group takes the options that its parameters were saved with."""
    saved = {name: group for group in load.source.objects.get("param_groups", ()) for name in group["params"]}
    groups: dict[int, tuple[dict[str, Any], list[str]]] = {}
    passed_over: dict[str, set[str]] = {}
    for o in owned:
        if o.optimizer is not None:
            unknown = saved.get(o.name, {}).keys() - o.options.keys() - _NOT_RESTORED - {"initial_lr"}
            passed_over.setdefault(type(o.optimizer).__name__, set()).update(unknown)
        groups.setdefault(id(o.options), (o.options, []))[1].append(o.name)
    for options, names in groups.values():
        found = {name: saved[name] for name in names if name in saved}
        taken: dict[str, Any] = {}
        for name, group in found.items():
            for key, value in group.items():
                if key in _NOT_RESTORED or (key not in options and key != "initial_lr"):
                    continue
                if key in options and not _is_like(options[key], value):
                    load.faults.append(
                        f"{key} of {name!r} was saved as {shown(value)}, expected the like of {options[key]}"
                    )
                    continue
                if key in taken and not _equal(taken[key], value):
                    load.faults.append(
                        f"{key} of {next(iter(found))!r} was {taken[key]} and of {name!r} {value}, but here they share "
                        "a param group"
                    )
                taken.setdefault(key, value)
        load.then.append(partial(_update, options, taken))
    for kind, unknown in passed_over.items():
        if unknown:
            text = (
                "the optimizer that was saved has %s, which %s has not: they, and state that it does not read, are lost"
            )
            load.then.append(partial(_log.warning, text, ", ".join(sorted(unknown)), kind))


def _is_like(own: Any, value: Any) -> bool:
    """Whether an option can stand for another; a tensor of one number is a number."""
    if own is None or value is None:
        return True
    if isinstance(own, (tuple, list)) and isinstance(value, (tuple, list)):
        return len(own) == len(value) and all(map(_is_like, own, value))
    return _kind(own) == _kind(value)


def _kind(option: Any) -> type:
    is_number = option.numel() == 1 if isinstance(option, torch.Tensor) else isinstance(option, (int, float))
    return float if is_number and not isinstance(option, bool) else type(option)


def _equal(a: Any, b: Any) -> bool:
    return bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b))) if isinstance(a, torch.Tensor) else bool(a == b)


def _update(options: dict[str, Any], taken: dict[str, Any]) -> None:
    for key, value in taken.items():
        own = options.get(key)
        if isinstance(own, torch.Tensor):
            own.fill_(float(value))
        else:
            options[key] = value
