"""Parameters that wrapping has replaced, written by who held them before, or in a term of the loss: told, not lost.

A list that was taken before wrapping is initialised after it, weights are copied into it, a penalty reads it. In one
process all of that is the model's; here another parameter stands in each place, and nothing came of it, in silence.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.errors import ShardError
from dmp.places import local_of

_SAMPLES = 8


class _Seen(NamedTuple):
    """A replaced parameter as it was when it was last looked at. Kept alive by others, or not at all."""

    parameter: weakref.ref[nn.Parameter]
    name: str
    event: str
    version: int
    values: list[str] | None
    """A few of them, on CPUs: what is written by way of `.data` has no version."""
    has_gradient: bool


_seen: WeakKeyDictionary[nn.Module, list[_Seen]] = WeakKeyDictionary()


def held_weakly(named: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, weakref.ref[nn.Parameter]]]:
    """Those that have values and that torch does not swap, where they are moved, with others: it refuses weak ones."""
    if torch.__future__.get_swap_module_params_on_conversion():
        return []
    return [(name, weakref.ref(p)) for name, p in named if type(p) is nn.Parameter and not p.is_meta]


def look_after(
    model: nn.Module, now: nn.Module, before: Iterable[tuple[str, weakref.ref[nn.Parameter]]], event: str
) -> None:
    """From now on `check_earlier` of this model tells of those that are not in `now`, nor share memory with what is."""
    kept = {id(p) for p in now.parameters()}
    gone = [(name, ref, p) for name, ref in before if (p := ref()) is not None and id(p) not in kept]
    memory = {_storage(local_of(p)) for p in now.parameters() if not is_lazy(p)} if gone else set()
    new = [_now(ref, name, event) for name, ref, p in gone if _storage(p) not in memory]
    _seen[model] = [each for each in (*_seen.get(model, ()), *new) if each is not None]


def check_earlier(model: nn.Module) -> None:
    """What was written since the last look.

    Raises:
        ShardError: a replaced parameter was written to, or has a gradient. It is told once.
    """
    seen = _seen.get(model)
    if not seen:
        return
    now = [_now(each.parameter, each.name, each.event) for each in seen]
    _seen[model] = [each for each in now if each is not None]
    for before, after in zip(seen, now, strict=True):
        if after is None or (after.has_gradient <= before.has_gradient and not _is_written(before, after)):
            continue
        what = "was written to" if _is_written(before, after) else "was given a gradient"
        raise ShardError(
            f"{after.name!r} as it was before {after.event} {what} since; another parameter is in its place, which is "
            "looked up and trained, and of which this changes nothing. Values: model.load_state_dict({...}, "
            "strict=False) takes whole tensors, or write what model.named_parameters() has; a term of the loss: take "
            "the parameters from there"
        )


def _is_written(before: _Seen, after: _Seen) -> bool:
    return after.version != before.version or (bool(after.values) and after.values != before.values)


def _now(ref: weakref.ref[nn.Parameter], name: str, event: str) -> _Seen | None:
    parameter = ref()
    if parameter is None:
        return None
    values = None
    if parameter.device.type == "cpu":
        flat = (parameter.data if parameter.is_contiguous() else parameter.data[:1]).reshape(-1)  # no copy of it all
        values = [repr(v) for v in flat[:: max(1, len(flat) // _SAMPLES)].tolist()]  # in which nan is nan
    return _Seen(ref, name, event, parameter._version, values, parameter.grad is not None)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
