"""From a checkpoint's source to a model: checks every name, shape and dtype, then says what to read where.

Nothing is changed before everything has been checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.checkpoint.sources.checksums import CheckedRange
from dmp.checkpoint.sources.source import MODEL, STATE, Source, is_per_block, split_state
from dmp.chunked import ChunkedTensor, as_chunks
from dmp.errors import CheckpointError
from dmp.read_values import shown
from dmp.state.optimizer_state import OwnedState, column_widths, owned_states
from dmp.wrap.column_blocks import is_blocked, merge_blocks
from dmp.wrap.wrapper import DistributedModelParallel

_NOT_RESTORED = {"params", "foreach", "fused", "capturable", "differentiable"}  # how an optimizer runs, not what it is
_SHOWN = 5


class CheckedLoad(NamedTuple):
    """A load that has been checked: what to read, then what to do."""

    source: Source
    targets: dict[str, ChunkedTensor]
    then: list[Callable[[], Any]]

    def check(self, share: tuple[int, int]) -> list[CheckedRange]:
        """Read the i-th of n shares of what all ranks will read, raise where it is damaged; what is to be compared."""
        keys = (key for key in self.source.shapes if key in self.targets or key.startswith("rng."))
        return self.source.check(list(keys), share)

    def run(self) -> None:
        with torch.no_grad():
            self.source.read({key: t for key, t in self.targets.items() if t.chunks and t.numel()})
            for step in self.then:
                step()


def prepare(source: Source, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> CheckedLoad:
    """A checked load of weights and optimizer state.

    Raises:
        CheckpointError: names, shapes or dtypes that do not fit.
    """
    load = CheckedLoad(source, {}, [])
    wrong: list[str] = []
    _prepare_weights(load, model, wrong)
    owned = owned_states(model, optimizer)
    if source.objects.get("param_groups") or any(key.startswith(STATE) for key in source.shapes):
        saved = _Saved.of(source)
        for o in owned:
            _prepare_state(load, o, column_widths(model, [o]).get(o.name), saved, wrong)
        _prepare_options(load, owned, wrong)
        if optimizer is not None:
            names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            lost = sorted(saved.owners & names - {o.name for o in owned})
            wrong += [
                f"optimizer state of {name!r} was saved, but no optimizer here has that parameter" for name in lost
            ]
    elif optimizer is not None:
        why = source.about.get("no_state") or "it holds no optimizer state"
        wrong.append(f"{why}; pass no optimizer to load the weights alone")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(f"the checkpoint does not fit {_kind(model)}: " + "; ".join(wrong[:_SHOWN]) + more)
    return load


def _prepare_weights(load: CheckedLoad, model: nn.Module, wrong: list[str]) -> None:
    own = model.state_dict()
    same = aliases(model)
    objects: dict[str, Any] = load.source.objects.get("model", {})
    saved = {key.removeprefix(MODEL) for key in load.source.shapes if key.startswith(MODEL)}
    for name, value in own.items():
        if not isinstance(value, torch.Tensor):
            wrong += [] if name in objects else [f"missing key {name!r}"]
        elif value.is_meta or is_lazy(value):
            wrong.append(f"{name!r} of the model has no storage to fill; materialise it first")
        elif name not in saved and saved.intersection(same.get(name, ())):
            pass  # a tied weight that was stored once
        else:
            target = as_chunks(value)
            problem = _mismatch(load.source, MODEL + name, target, f"{name!r}") if value.numel() else None
            wrong += [problem] if problem else []
            load.targets[MODEL + name] = target
    wrong += [f"unexpected key {name!r}" for name in sorted({*saved, *objects} - set(own))]
    if objects:
        load.then.append(lambda: model.load_state_dict({**own, **objects}))


def aliases(model: nn.Module) -> dict[str, list[str]]:
    """Name -> all names of the same parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: same for same in names.values() for name in same}


def _mismatch(source: Source, key: str, target: ChunkedTensor, shown: str) -> str | None:
    if key not in source.shapes:
        return f"missing key {shown}"
    size, dtype = source.shapes[key]
    if size != tuple(target.size()):
        return f"{shown} has shape {size}, expected {tuple(target.size())}"
    if dtype != target.dtype:
        return f"{shown} has dtype {dtype}, expected {target.dtype}"
    return None


class _Saved(NamedTuple):
    """Optimizer state that a source has.

    Args:
        keys: parameter -> state's name -> key of the tensor.
        owners: parameters that had an optimizer.
    """

    keys: dict[str, dict[str, str]]
    owners: set[str]

    @classmethod
    def of(cls, source: Source) -> _Saved:
        keys: dict[str, dict[str, str]] = {}
        for key in source.shapes:
            if key.startswith(STATE):
                name, short = split_state(key)
                keys.setdefault(name, {})[short] = key
        return cls(keys, {name for group in source.objects.get("param_groups", ()) for name in group["params"]})


def _prepare_state(
    load: CheckedLoad, owned: OwnedState, widths: tuple[int, ...] | None, saved: _Saved, wrong: list[str]
) -> None:
    """Have one parameter's optimizer state filled."""
    numbers: dict[str, Any] = load.source.objects.get("state", {}).get(owned.name, {})
    keys = saved.keys.get(owned.name, {})
    if not keys and owned.name not in saved.owners:
        wrong.append(f"no optimizer state for {owned.name!r}")
        return
    fresh: dict[str, Any] = {}
    if owned.optimizer is None or (owned.values and (keys or numbers)):
        lost = {*owned.values} - {*keys, *numbers}
        if owned.optimizer is None and not load.source.about.get("has_steps", True):
            lost.discard("step")  # it goes on from the model's own
        wrong += [f"optimizer state {key!r} of {owned.name!r} is missing" for key in sorted(lost)]
    for short, key in keys.items():
        shown = f"optimizer state {short!r} of {owned.name!r}"
        target = owned.values.get(short)
        size, dtype = load.source.shapes[key]
        saved_widths = load.source.about.get("column_widths", {}).get(owned.name)
        if target is None and owned.optimizer is None:
            wrong.append(f"unknown {shown}")
            continue
        if is_per_block(size, saved_widths):
            if not (widths and is_blocked(target, widths) and tuple(widths) == tuple(saved_widths)):
                _read_blocks(load, key, target, size, dtype, saved_widths, widths, wrong, shown)
                continue
        elif widths and target is not None and is_blocked(target, widths) and size == (target.size()[0],):
            _read_blocks(load, key, target, size, dtype, None, widths, wrong, shown)
            continue
        if target is None:
            try:
                fresh[short], target = owned.new(short, size, dtype)
            except CheckpointError as error:
                wrong.append(str(error))
                continue
        if not isinstance(target, ChunkedTensor):
            if size:
                wrong.append(f"{shown} has shape {size}, expected a number")
                continue
            number = torch.zeros((), dtype=dtype)
            load.targets[key] = as_chunks(number)
            load.then.append(_setter(owned, short, number, type(target)))
            continue
        problem = _mismatch(load.source, key, target, shown)
        wrong += [problem] if problem else []
        load.targets[key] = target
    for short, number in numbers.items():
        target = owned.values.get(short)
        if isinstance(target, ChunkedTensor):
            load.then.extend(_filler(chunk, number) for chunk in target.chunks)
        elif owned.optimizer is not None:
            fresh[short] = number
    if owned.optimizer is not None:
        optimizer, parameter = owned.optimizer, owned.parameter
        if keys or numbers:
            if fresh:
                load.then.append(lambda: optimizer.state[parameter].update(fresh))
        else:  # it had not been stepped when it was saved
            load.then.append(lambda: optimizer.state.pop(parameter, None))


def _setter(owned: OwnedState, key: str, value: torch.Tensor, kind: type) -> Callable[[], Any]:
    assert owned.optimizer is not None
    state = owned.optimizer.state[owned.parameter]
    return lambda: state.__setitem__(key, kind(value.item()))


def _filler(chunk: torch.Tensor, value: Any) -> Callable[[], Any]:
    return lambda: chunk.fill_(value)


def _read_blocks(
    load: CheckedLoad,
    key: str,
    target: Any,
    size: tuple[int, ...],
    dtype: torch.dtype,
    saved_widths: list[int] | None,
    widths: tuple[int, ...] | None,
    wrong: list[str],
    shown: str,
) -> None:
    """Row-wise state between other column blocks: read this rank's rows, take the mean, give it to every own block."""
    to_blocks = widths is not None and is_blocked(target, widths)
    if not isinstance(target, ChunkedTensor) or not (to_blocks or target.dim() == 1) or target.size()[0] != size[0]:
        shape = tuple(target.size()) if isinstance(target, torch.Tensor) else "no such state"
        wrong.append(f"{shown} has one value per row and column block, {size}; expected {shape}")
        return
    if dtype != target.dtype:
        wrong.append(f"{shown} has dtype {dtype}, expected {target.dtype}")
        return
    rows = sorted({(o[0], c.shape[0]) for c, o in zip(target.chunks, target.offsets, strict=True) if c.numel()})
    offsets = [(start, *(0 for _ in size[1:])) for start, _ in rows]
    read = {start: torch.empty((count, *size[1:]), dtype=dtype) for start, count in rows}
    load.targets[key] = ChunkedTensor(size, list(read.values()), offsets, dtype)

    def spread() -> None:
        for chunk, offset in zip(target.chunks, target.offsets, strict=True):
            if chunk.numel():
                values = read[offset[0]][: chunk.shape[0]]
                merged = merge_blocks(values, saved_widths) if saved_widths else values
                chunk.copy_(merged.unsqueeze(1).expand_as(chunk) if chunk.dim() == 2 else merged)

    load.then.append(spread)


def _prepare_options(load: CheckedLoad, owned: Iterable[OwnedState], wrong: list[str]) -> None:
    """Learning rates and the like: each param group takes the options that its parameters were saved with."""
    saved = {name: group for group in load.source.objects.get("param_groups", ()) for name in group["params"]}
    groups: dict[int, tuple[dict[str, Any], list[str]]] = {}
    for o in owned:
        groups.setdefault(id(o.options), (o.options, []))[1].append(o.name)
    for options, names in groups.values():
        found = {name: saved[name] for name in names if name in saved}
        taken: dict[str, Any] = {}
        for name, group in found.items():
            for key, value in group.items():
                if key in _NOT_RESTORED or (key not in options and key != "initial_lr"):
                    continue
                if key in options and not _is_like(options[key], value):
                    wrong.append(f"{key} of {name!r} was saved as {shown(value)}, expected the like of {options[key]}")
                    continue
                if key in taken and not _equal(taken[key], value):
                    wrong.append(
                        f"{key} of {next(iter(found))!r} was {taken[key]} and of {name!r} {value}, but here they share "
                        "a param group"
                    )
                taken.setdefault(key, value)
        load.then.append(_updater(options, taken))


def _is_like(own: Any, value: Any) -> bool:
    """Whether an option can stand for another; a tensor of one number is a number."""
    if own is None or value is None:
        return True
    kinds = [
        "number" if isinstance(v, (int, float)) or (isinstance(v, torch.Tensor) and v.numel() == 1) else type(v)
        for v in (own, value)
    ]
    if isinstance(own, (tuple, list)) and isinstance(value, (tuple, list)):
        return len(own) == len(value) and all(map(_is_like, own, value))
    return kinds[0] == kinds[1] and isinstance(own, bool) == isinstance(value, bool)


def _equal(a: Any, b: Any) -> bool:
    return bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b))) if isinstance(a, torch.Tensor) else bool(a == b)


def _updater(options: dict[str, Any], taken: dict[str, Any]) -> Callable[[], Any]:
    def update() -> None:
        for key, value in taken.items():
            own = options.get(key)
            if isinstance(own, torch.Tensor):
                own.fill_(float(value))
            else:
                options[key] = value

    return update


def _kind(model: nn.Module) -> str:
    return type(model.module if isinstance(model, DistributedModelParallel) else model).__name__
