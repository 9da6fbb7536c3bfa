"""Where a module's tensors are held: every place of each, so that one in several places is replaced in all of them.

A *tie* is a parameter in several places, which must stay one whatever is done to each place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import nn

from dmp.errors import ShardError
from dmp.names import join_name

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@contextmanager
def taking_hooks(parameter: torch.Tensor) -> Iterator[None]:
    """A frozen one takes none, and may be trained later: trained meanwhile."""
    was = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(was)


class Place(NamedTuple):
    """One place of a tensor in a model.

    Attributes:
        path: of the module that holds it; its first one where it has several.
        owner: that module.
        store: the dict of that module which holds it: its parameters, buffers, or attributes.
        name: in that dict.
        tensor: what was there when the place was found.
    """

    path: str
    owner: nn.Module
    store: dict[str, Any]
    name: str
    tensor: torch.Tensor

    @property
    def full_name(self) -> str:
        return join_name(self.path, self.name)


def places_of(modules: Iterable[tuple[str, nn.Module]], *, attributes: bool = False) -> Iterator[Place]:
    """Every place of the parameters and buffers that modules hold themselves.

    Args:
        modules: such as `model.named_modules()`.
        attributes: tensors that are plain attributes too.
    """
    for path, owner in modules:
        stores: list[dict[str, Any]] = [owner._parameters, owner._buffers, *[vars(owner)] * attributes]
        for store in stores:
            for name, tensor in list(store.items()):
                if isinstance(tensor, torch.Tensor):
                    yield Place(path, owner, store, name, tensor)


def tied_places(model: nn.Module) -> list[list[Place]]:
    """The places of each parameter that has several."""
    found: dict[int, list[Place]] = {}
    for place in places_of(model.named_modules()):
        if place.store is place.owner._parameters:
            found.setdefault(id(place.tensor), []).append(place)
    return [places for places in found.values() if len(places) > 1]


def restore_ties(ties: Iterable[list[Place]]) -> None:
    """Put ties back that have been cut: torch distributes and assigns the weight of each module by itself.

    Args:
        ties: of `tied_places`, before they were. What took the parameter's place first comes into all of its places.

    Raises:
        ShardError: a tied weight was split in two ways.
    """
    for places in ties:
        held = [place.store[place.name] for place in places]
        kept = next((i for i, place in enumerate(places) if held[i] is not place.tensor), 0)
        for place, mine in zip(places, held, strict=True):
            if getattr(mine, "placements", None) != getattr(held[kept], "placements", None):
                first, one, other = places[kept], getattr(held[kept], "placements", "whole"), type(place.owner).__name__
                raise ShardError(
                    f"a weight that {type(first.owner).__name__}.{first.name} and {other}.{place.name} share was split "
                    f"in two ways: {one}, {getattr(mine, 'placements', 'whole')}"
                )
            place.store[place.name] = held[kept]


def replace_tensors(
    places: Iterable[Place], make: Callable[[Place], torch.Tensor], kept: Mapping[int, str] | None = None
) -> None:
    """Put `make(place)` in each place; made once for a tensor with several, which stays one.

    Args:
        kept: id of each tensor that is held elsewhere too -> where: such a one stays, and becomes what is made.

    Raises:
        ShardError: torch swaps none that something else still holds, by a weak reference or for a backward pass.
    """
    made: dict[int, torch.Tensor] = {}
    for place in list(places):  # the old ones stay alive meanwhile: no new one takes the id of one
        old = place.tensor
        if id(old) not in made:
            made[id(old)] = new = make(place)
            if kept and id(old) in kept:
                try:
                    torch.utils.swap_tensors(old, new)
                except RuntimeError as error:
                    raise ShardError(
                        f"{kept[id(old)]} keeps {place.full_name!r} beside its place, and would go on reading what it "
                        f"is now: {error}. Read it by its place, or build the model on a real device"
                    ) from error
                made[id(old)] = old
        place.store[place.name] = made[id(old)]


_PLAIN = (torch.Tensor, nn.Parameter)


def room_for(old: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Uninitialised memory on the device for what `old` is or stands for on meta; a parameter where that is one."""
    if old.is_meta and type(old) in _PLAIN and old.layout is torch.strided and old.is_contiguous():
        # Of what is on meta torch works out an `empty_like` in Python, which takes ten times as long.
        new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=device)
    else:
        new = torch.empty_like(old.detach(), device=device)
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether it is a DTensor; asked without importing torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(value: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; another tensor as it is."""
    return value.to_local() if is_dtensor(value) else value
