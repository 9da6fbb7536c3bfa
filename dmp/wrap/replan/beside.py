"""What lies beside tables: gradients that wait for a step, and the state of ordinary optimizers.

Where a rank has nothing of a table, an optimizer may have no state for it there, and no gradient; under another plan it
has. So ranks tell each other what there is.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from dmp.errors import ShardError
from dmp.wrap.earlier.earlier_optimizers import successors
from dmp.wrap.optimizers.fused import FusedOptimizer
from dmp.wrap.optimizers.keyed import is_wrapper
from dmp.wrap.replan.carried import Carried, Parameter


@dataclass
class Beside:
    """What there is.

    Args:
        gradients: parameter name -> dtype of its gradient.
        state: for each optimizer, parameter name -> state name -> dtype of a tensor shaped as the local parameter, or
            what is the same on all ranks: a number, in a tensor or not.
        held: names of the parameters that any optimizer has, also one that was not passed; of all ranks those that
            none of this rank has.
    """

    gradients: dict[str, torch.dtype] = field(default_factory=dict)
    state: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    held: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> Beside:
        """On this rank, of tables of which it has something: what it keeps of others may be old."""
        ours = {id(p): name for name, p in parameters.items()}
        anywhere = {ours[id(p)] for p in _held_anywhere() if id(p) in ours}
        parameters = {name: p for name, p in parameters.items() if p.numel()}
        gradients = {name: p.grad.dtype for name, p in parameters.items() if p.grad is not None}
        state = []
        for optimizer in optimizers:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            mine = {name: optimizer.state.get(p, {}) for name, p in parameters.items() if id(p) in held}
            state.append({n: {key: _described(v) for key, v in values.items()} for n, values in mine.items()})
        return cls(gradients, state, anywhere)

    @classmethod
    def of_all(cls, told: Sequence[Beside], rank: int) -> Beside:
        """On any rank.

        Args:
            told: by rank.
            rank: this one.

        Raises:
            ShardError: ranks have tensors of several dtypes under one name.
        """
        found = cls({}, [{} for _ in told[0].state], set().union(*(each.held for each in told)) - told[rank].held)
        for each in told:
            _add(found.gradients, each.gradients, "the gradient")
            for whole, of_rank in zip(found.state, each.state, strict=True):
                for name, values in of_rank.items():
                    _add(whole.setdefault(name, {}), values, f"optimizer state of {name!r}")
        return found

    def check_held(self, parameters: Iterable[Parameter]) -> None:
        """That what comes to this rank is in an optimizer, where that of other ranks is.

        Raises:
            ShardError: it is not, and would stay untrained in silence.
        """
        for p in parameters:
            if p.name in self.held and p.new.numel():
                raise ShardError(
                    f"no optimizer of this rank has {p.name!r}, which one of another rank has: none would train the "
                    "part that this rank gets. Make it of all of model.parameters(), also those of which this rank has "
                    "nothing"
                )

    def moved_gradients(self, parameters: Iterable[Parameter], then: list[Callable[[], Any]]) -> Iterator[Carried]:
        """Those of these parameters; `then` takes what puts them in place."""
        for p in parameters:
            if p.name in self.gradients:
                carried, room = p.beside("the gradient", _own(p, "gradient", p.old.grad, self.gradients[p.name]))
                then.append(lambda p=p, room=room: setattr(p.new, "grad", room))  # type: ignore[misc]
                yield carried

    def moved_state(
        self, optimizers: Sequence[Optimizer], parameters: Iterable[Parameter], then: list[Callable[[], Any]]
    ) -> Iterator[Carried]:
        """That of these parameters; `then` takes what puts it in place.

        Raises:
            ShardError: an optimizer that lacks what would be this rank's part.
        """
        by_name = {p.name: p for p in parameters}
        for i, (optimizer, known) in enumerate(zip(optimizers, self.state, strict=True)):
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name in [name for name in known if name in by_name]:
                if by_name[name].new.numel() and id(by_name[name].old) not in held:
                    raise ShardError(
                        f"{type(optimizer).__name__} of this rank lacks {name!r}, which that of another rank has, and "
                        "would not train the part that this rank gets: give it all of model.parameters(), also those "
                        "of which this rank has nothing"
                    )
                p, own, moved = by_name[name], optimizer.state.get(by_name[name].old, {}), {}
                for key, kind in known[name].items():
                    what = f"state {key!r} of {type(optimizer).__name__}"
                    value = own.get(key)
                    if not isinstance(kind, torch.dtype):
                        moved[key] = value if p.old.numel() and value is not None else kind
                    elif p.stays and value is not None and value.shape != p.old.shape:
                        moved[key] = value
                    else:
                        carried, moved[key] = p.beside(what, _own(p, what, value, kind), str(i))
                        yield carried
                then.append(lambda o=optimizer, p=p, moved=moved: _exchange(o, p, moved))  # type: ignore[misc]


def _held_anywhere() -> Iterator[Any]:
    """What this process's optimizers have or, made before the last change of a model, will have at their next step.

    Nobody tells a parameter which optimizers hold it, and one that has not stepped has come by nowhere.
    """
    gc.collect()  # one that was let go, and is in a cycle with its scheduler, may be there on some ranks alone
    for found in gc.get_objects():
        if issubclass(type(found), Optimizer) and not isinstance(found, FusedOptimizer) and not is_wrapper(found):
            yield from successors(p for group in vars(found).get("param_groups", ()) for p in group["params"])


def _described(value: Any) -> Any:
    return value.dtype if isinstance(value, torch.Tensor) and value.dim() else value


def _add(known: dict[str, Any], more: Mapping[str, Any], what: str) -> None:
    for key, value in more.items():
        first = known.setdefault(key, value)
        if isinstance(first, torch.dtype) and value != first:
            raise ShardError(f"ranks have {what} under {key!r} as {first} and as {value}")


def _own(p: Parameter, what: str, value: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What this rank has; nothing, where it has nothing of the table."""
    if value is None and p.old.numel():
        raise ShardError(f"{what} of {p.name!r}: other ranks have one for their part of the table, this rank has none")
    return torch.empty_like(p.old.detach(), dtype=dtype) if value is None else value


def _exchange(optimizer: Optimizer, p: Parameter, state: Mapping[str, Any]) -> None:
    """The new parameter in the old one's places in an optimizer."""
    optimizer.state.pop(p.old, None)
    if state:
        optimizer.state[p.new] = dict(state)
    for group in optimizer.param_groups:
        group["params"][:] = [p.new if held is p.old else held for held in group["params"]]
