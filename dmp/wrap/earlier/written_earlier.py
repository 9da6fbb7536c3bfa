"""Parameters that wrapping has replaced, written by who held them before, or in a term of the loss: told, not lost.

A list that was taken before wrapping is initialised after it, weights are copied into it, a penalty reads it. In one
process all of that is the model's; here another parameter stands in each place, and nothing came of it, in silence.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.errors import ShardError
from dmp.places import local_of

_SAMPLES = 8
_AT_ONCE = 4


@dataclass
class _Seen:
    """A replaced parameter as it was when it was last looked at. Kept alive by others, or not at all."""

    parameter: weakref.ref[nn.Parameter]
    name: str
    event: str
    version: int
    values: bytes | None
    """A few of them, on CPUs: what is written by way of `.data` has no version."""
    has_gradient: bool


@dataclass
class _Watch:
    """What is looked after for a model.

    Args:
        turn: whose values come next. Those of a few are compared in each forward, in turns, for of a thousand that
            takes many milliseconds; versions and gradients of all.
    """

    seen: list[_Seen] = field(default_factory=list)
    turn: int = 0


_watches: WeakKeyDictionary[nn.Module, _Watch] = WeakKeyDictionary()


def held_weakly(named: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, weakref.ref[nn.Parameter]]]:
    """Those that have values and that torch does not swap, where they are moved, with others: it refuses weak ones."""
    if torch.__future__.get_swap_module_params_on_conversion():
        return []
    plain = ((name, p) for name, p in named if type(p) is nn.Parameter and p.layout is torch.strided)
    return [(name, weakref.ref(p)) for name, p in plain if not p.is_meta]


def look_after(
    model: nn.Module, now: nn.Module, before: Iterable[tuple[str, weakref.ref[nn.Parameter]]], event: str
) -> None:
    """From now on `check_earlier` of this model tells of those that are not in `now`, nor share memory with what is."""
    kept = {id(p) for p in now.parameters()}
    gone = [(name, ref, p) for name, ref in before if (p := ref()) is not None and id(p) not in kept]
    memory = {_storage(local_of(p)) for p in now.parameters() if not is_lazy(p)} if gone else set()
    watch = _watches.setdefault(model, _Watch())
    watch.seen += [_now(ref, name, event, p) for name, ref, p in gone if _storage(p) not in memory]


def check_earlier(model: nn.Module) -> None:
    """What was written since the last look.

    Raises:
        ShardError: a replaced parameter was written to, or has a gradient. It is told once.
    """
    watch = _watches.get(model)
    if watch is None or not watch.seen:
        return
    held = [(each, p) for each in watch.seen if (p := each.parameter()) is not None and not _is_freed(p)]
    watch.seen = [each for each, _ in held]
    in_turn = {(watch.turn + i) % len(held) for i in range(min(_AT_ONCE, len(held)))}
    watch.turn += _AT_ONCE
    found = [_change(each, p, i in in_turn) for i, (each, p) in enumerate(held)]
    for (each, _), what in zip(held, found, strict=True):
        if what is not None:
            raise ShardError(
                f"{each.name!r} as it was before {each.event} {what} since; another parameter is in its place, which "
                "is looked up and trained, and of which this changes nothing. Values: model.load_state_dict({...}, "
                "strict=False) takes whole tensors, or write what model.named_parameters() has; a term of the loss: "
                "take the parameters from there; to train the model as it was beside this one: wrap a deepcopy of it"
            )


def _change(seen: _Seen, parameter: nn.Parameter, by_value: bool) -> str | None:
    """What has become of it since the last look, which it counts as seen."""
    has_gradient, had_gradient = parameter.grad is not None, seen.has_gradient
    seen.has_gradient = has_gradient
    values = _values(parameter) if by_value else None
    is_other = values is not None and seen.values is not None and values != seen.values  # not where it has been moved
    if parameter._version != seen.version or is_other:
        seen.version, seen.values = parameter._version, _values(parameter)
        return "was written to"
    return "was given a gradient" if has_gradient and not had_gradient else None


def _now(ref: weakref.ref[nn.Parameter], name: str, event: str, parameter: nn.Parameter) -> _Seen:
    return _Seen(ref, name, event, parameter._version, _values(parameter), parameter.grad is not None)


def _values(parameter: nn.Parameter) -> bytes | None:
    if parameter.device.type != "cpu":
        return None
    flat = (parameter.data if parameter.is_contiguous() else parameter.data[:1]).reshape(-1)  # no copy of it all
    few = flat[:: max(1, len(flat) // _SAMPLES)]
    bits: bytes = few.new_empty(len(few)).copy_(few).view(torch.uint8).numpy().tobytes()  # in which nan is nan
    return bits


def _is_freed(parameter: nn.Parameter) -> bool:
    """Whether its owner has let go of its values alone, for their memory."""
    return not parameter.untyped_storage().nbytes()


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
