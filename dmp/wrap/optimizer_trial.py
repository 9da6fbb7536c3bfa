"""Whether an optimizer that nobody here knows computes the same on chunks as on whole parameters: it is tried.

Each rank steps by itself, on what it holds. One that takes the norm of a parameter (LAMB, LARS), of all of them, or a
mean over rows takes another number then, and nothing tells. So another instance of its class, with the same options,
makes a few steps on a small parameter, and one more on a part of it, cut as the tables are; where the steps differ, the
optimizer is wrong on chunks.

Terms. A *cut* is what ranks may have of a table: some rows, some columns, both, or nothing of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from dmp.layouts.shard import Shard

BY_ELEMENT = (
    *("SGD", "ASGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SparseAdam"),
    *("Adadelta", "Adagrad", "RMSprop", "Rprop"),
)
"""Of torch.optim: each works on every element by itself."""

BY_BLOCK = ("RowWiseAdagrad",)
"""Of TorchRec: one sum for each row and block of columns, as it is documented."""

_CUTS: Mapping[str, tuple[slice, slice]] = {
    "by rows": (slice(0, 2), slice(None)),
    "by columns": (slice(None), slice(0, 2)),
    "by rows and columns": (slice(0, 2), slice(0, 2)),
    "of which a rank has nothing": (slice(0, 0), slice(None)),
}
_SHAPE, _OTHER = (6, 4), (5, 3)  # of what is cut, and of a parameter beside it
_SCALES = (1.0, 2.0, 0.5, 2.0, 1.0, 2.0, 1e3, 1e-3)
"""Of gradients: those of one size tell apart what is clipped by their spread, the last two what is by their norm; some
optimizers (RAdam) make no step before the sixth."""
_LEAST = 3  # steps that change something
_TOLERANCE = 1e-3  # of a step: state may be kept in fewer bits
Params = list[torch.nn.Parameter]


class Untried(Exception):
    """Why there is nothing to compare."""


def is_known(optimizer: Optimizer) -> bool:
    """Whether nothing has to be tried."""
    kind = type(optimizer)
    of_torch = kind.__name__ in BY_ELEMENT and getattr(torch.optim, kind.__name__) is kind
    return of_torch or (kind.__name__ in BY_BLOCK and kind.__module__.startswith("torchrec."))


def cut_of(shards: Iterable[Shard], size: tuple[int, ...], num_ranks: int) -> set[str]:
    """Names of `_CUTS` that a table's shards have."""
    found, ranks = set(), set()
    for shard in shards:
        ranks.add(shard.rank)
        rows, columns = (own < whole for own, whole in zip(shard.sizes, size, strict=True))
        if rows or columns:
            found.add("by rows and columns" if rows and columns else "by rows" if rows else "by columns")
    return found if len(ranks) == num_ranks else found | {"of which a rank has nothing"}


def wrong_cut(optimizer: Optimizer, group: Mapping[str, Any], cuts: Iterable[str], device: torch.device) -> str | None:
    """The first of these cuts on which a step is another than on the whole; None where it is right on all.

    Raises:
        Untried: no other instance can be made, it does not step, or draws random numbers.
    """
    with torch.random.fork_rng([]), torch.inference_mode(False), torch.enable_grad():
        try:
            make, everything = _maker(optimizer, group), (slice(None), slice(None))
            dtype, whole = _first_whole(make, everything, device)
            if min(sum(bool(step.any()) for step in steps) for steps in whole) < _LEAST:
                raise Untried("its first steps change nothing")
            if not _same(whole, _steps(make, everything, device, 2, dtype)):
                raise Untried("it draws random numbers")
            for cut in sorted(cuts):
                table, other = _steps(make, _CUTS[cut], device, 1, dtype)
                if not _same(([step[_CUTS[cut]] for step in whole[0]], whole[1]), (table, other), whole):
                    return cut
        except Untried:
            raise
        except Exception as error:  # of a class that nobody knows
            raise Untried(f"{type(error).__name__}: {error}") from error
    return None


def _first_whole(make: Callable[[Params], Optimizer], everything: tuple[slice, slice], device: torch.device) -> Any:
    """A dtype that it steps in, and its steps on whole parameters."""
    try:
        return torch.float64, _steps(make, everything, device, 1, torch.float64)
    except RuntimeError:  # it mixes in tensors of torch's default
        return torch.float32, _steps(make, everything, device, 1, torch.float32)


def _maker(optimizer: Optimizer, group: Mapping[str, Any]) -> Callable[[Params], Optimizer]:
    """Makes another instance of its class, with its options and those of the group."""
    kind: Any = type(optimizer)
    named = inspect.signature(kind).parameters
    given = {name: _own(value) for name, value in optimizer.defaults.items() if name in named}
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}

    def make(parameters: Params) -> Optimizer:
        own = {name: _own(value) for name, value in options.items()}
        if "lr" in own and float(own["lr"]) == 0:  # while it warms up
            own["lr"] = torch.full_like(own["lr"], 0.1) if isinstance(own["lr"], torch.Tensor) else 0.1
        made: Optimizer = kind([{**own, "params": parameters}], **given)
        return made

    return make


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _steps(
    make: Callable[[Params], Optimizer], cut: tuple[slice, slice], device: torch.device, seed: int, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What each step adds to the part of a parameter, and to another beside it."""
    drawn = torch.Generator().manual_seed(0)

    def values(scale: float) -> Params:
        table, other = (torch.randn(s, generator=drawn, dtype=torch.float64) * scale for s in (_SHAPE, _OTHER))
        return [torch.nn.Parameter(t.to(device, dtype, copy=True)) for t in (table[cut], other)]

    parameters, added = values(1.0), ([], [])  # type: tuple[Params, tuple[list[torch.Tensor], list[torch.Tensor]]]
    optimizer, steady = make(parameters), [p.detach().clone() for p in parameters]
    torch.default_generator.manual_seed(seed)
    for scale in _SCALES:
        before = [p.detach().clone() for p in parameters]
        for p, grad, common in zip(parameters, values(scale), steady, strict=True):
            p.grad = grad.detach() + scale * common  # one direction stays, or what estimates how far to go stays small
        optimizer.step()
        for steps, p, old in zip(added, parameters, before, strict=True):
            steps.append(p.detach() - old)
    return added


def _same(a: Any, b: Any, scale: Any = None) -> bool:
    """Whether steps are the same, up to what is nothing beside the whole steps."""
    for of_a, of_b, of_whole in zip(a, b, scale or a, strict=True):
        for x, y, whole in zip(of_a, of_b, of_whole, strict=True):
            if x.numel() and not bool((x - y).abs().max() <= _TOLERANCE * whole.abs().max()):
                return False
    return True
