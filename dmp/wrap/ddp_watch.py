"""Whether a data-parallel wrapper still has hold of the dense parameters: DistributedDataParallel has hooks on them.

A cast (`model.double()`), a move, a parameter or module put in the place of another, one that is frozen or trained from
now on, a new one: each leaves hooks that never run, or none at all, and gradients stay each rank's own. Whoever did it,
to the wrapper, to its module, to a part of it or to a parent, the next forward sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn

from dmp.errors import ShardError
from dmp.names import join_name
from dmp.places import is_dtensor

_Held = Mapping[str, nn.Parameter | None]


class _Structure:
    """Which modules there are, and how many parameters each has."""

    def __init__(self, module: nn.Module) -> None:
        self._held = [(m._modules, dict(m._modules), m._parameters, len(m._parameters)) for m in module.modules()]

    def has_changed(self) -> bool:
        return any(held != were or len(own) != number for held, were, own, number in self._held)


class SplitWatch:
    """Weights that are split in place: torch's FSDP2 takes no new ones, and keeps whole tensors of their first dtype.

    Args:
        module: the model, as it was split.
        averages: gradients are averaged by what was done in place.
    """

    def __init__(self, module: nn.Module, averages: bool) -> None:
        self._module, self._averages, self._structure = module, averages, _Structure(module)
        self._known = {(owner, name) for owner in module.modules() for name in owner._parameters}
        self._dtypes: list[tuple[_Held, str, str, torch.dtype]] | None = None  # from the first forward on

    def check(self, owned: Callable[[], Collection[str]]) -> None:
        """Before a forward; what is whole at the moment is passed over.

        Args:
            owned: names, under every alias, of what sharders own.

        Raises:
            ShardError: a weight of another dtype, or a trained one that is new.
        """
        if self._averages and self._structure.has_changed():
            self._check_new(owned())
        if self._dtypes is None:
            self._dtypes = [
                (owner._parameters, name, join_name(path, name), p.dtype)
                for path, owner in self._module.named_modules()
                for name, p in owner._parameters.items()
                if p is not None and is_dtensor(p)
            ]
        for held, name, path, dtype in self._dtypes:
            p = held.get(name)
            if p is not None and p.dtype is not dtype and is_dtensor(p):
                raise ShardError(
                    f"{path!r} was cast from {dtype} to {p.dtype} after the model had run: FSDP2 cannot follow. Cast "
                    "before wrapping, or back; sharders.FSDPWrapper(mixed_precision=...) computes in another dtype"
                )

    def _check_new(self, owned: Collection[str]) -> None:
        found = [
            (join_name(path, name), p.requires_grad)
            for path, owner in self._module.named_modules()
            for name, p in owner._parameters.items()
            if p is not None and (owner, name) not in self._known and join_name(path, name) not in owned
        ]
        trained = next((name for name, is_trained in found if is_trained), None)
        if trained is not None:
            raise ShardError(
                f"{trained!r} was added after wrapping, where weights are split in place over ranks with batches of "
                "their own: nobody would average its gradients. Add it before wrapping, or freeze it"
            )
        if not found:  # one that is frozen may be trained later
            self._structure = _Structure(self._module)


class Watch:
    """The dense parameters as they were when the data-parallel part was made.

    Args:
        module: the model.
        others: names, under every alias, of what the data-parallel part leaves alone; DTensors are left out too.
    """

    def __init__(self, module: nn.Module, others: Collection[str]) -> None:
        self._module, self._others = module, others
        self._structure, self._seen = _Structure(module), self._found()
        self._device = self._seen[0][2].device if self._seen else None

    def _found(self) -> list[tuple[_Held, str, nn.Parameter, torch.dtype, bool]]:
        return [
            (owner._parameters, name, p, p.dtype, p.requires_grad)
            for path, owner in self._module.named_modules()
            for name, p in owner._parameters.items()
            if p is not None and join_name(path, name) not in self._others and not is_dtensor(p)
        ]

    def is_lost(self) -> bool:
        """Whether a parameter is another one, of another kind, or new."""
        if self._structure.has_changed():
            if [id(p) for _, _, p, *_ in self._found()] != [id(p) for _, _, p, *_ in self._seen]:
                return True
            self._structure = _Structure(self._module)
        for held, name, p, dtype, is_trained in self._seen:
            if held.get(name) is not p or p.dtype is not dtype or p.requires_grad is not is_trained:
                return True
        return bool(self._seen) and self._seen[0][2].device != self._device  # of all, for a model moves as one
