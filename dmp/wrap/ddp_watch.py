"""Whether a data-parallel wrapper still has hold of the dense parameters: DistributedDataParallel has hooks on them.

A cast (`model.double()`), a move, a parameter put in the place of another, one that is frozen or trained from now on, a
new one: each leaves hooks that never run, or none at all, and gradients stay each rank's own. Whoever did it, to the
wrapper, to its module, to a part of it or to a parent, the next forward sees it.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from dmp.errors import ShardError
from dmp.names import join_name
from dmp.places import is_dtensor


class SplitWatch:
    """DTensors as they were at the first forward: torch's FSDP2 keeps whole tensors of that dtype from then on.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._seen = [
            (owner._parameters, name, join_name(path, name), p.dtype)
            for path, owner in module.named_modules()
            for name, p in owner._parameters.items()
            if p is not None and is_dtensor(p)
        ]

    def check(self) -> None:
        """Before a forward; what is whole at the moment is passed over.

        Raises:
            ShardError: a weight of another dtype.
        """
        for held, name, path, dtype in self._seen:
            p = held.get(name)
            if p is not None and p.dtype is not dtype and is_dtensor(p):
                raise ShardError(
                    f"{path!r} was cast from {dtype} to {p.dtype} after the model had run: FSDP2 cannot follow. Cast "
                    "before wrapping, or back; sharders.FSDPWrapper(mixed_precision=...) computes in another dtype"
                )


class Watch:
    """The dense parameters as they were when the data-parallel part was made.

    Args:
        module: the model.
        others: names, under every alias, of what the data-parallel part leaves alone; DTensors are left out too.
    """

    def __init__(self, module: nn.Module, others: Collection[str]) -> None:
        self._seen = [
            (owner._parameters, name, p, p.dtype, p.requires_grad)
            for path, owner in module.named_modules()
            for name, p in owner._parameters.items()
            if p is not None and join_name(path, name) not in others and not is_dtensor(p)
        ]
        self._device = self._seen[0][2].device if self._seen else None
        held = [held for m in module.modules() for held in (m._parameters, m._modules)]
        self._sizes = [(each, len(each)) for each in held]

    def is_lost(self) -> bool:
        """Whether a parameter is another one, of another kind, or new."""
        if any(len(held) != size for held, size in self._sizes):
            return True
        for held, name, p, dtype, is_trained in self._seen:
            if held.get(name) is not p or p.dtype is not dtype or p.requires_grad is not is_trained:
                return True
        return bool(self._seen) and self._seen[0][2].device != self._device  # of all, for a model moves as one
