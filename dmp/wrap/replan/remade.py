"""A sharded module without `resharded` under another plan: made again by its sharder, from an empty plain module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from dmp.chunked import ChunkedTensor
from dmp.contracts import FusedModule, FusedParameter, ShardedModule, hook
from dmp.errors import ShardError
from dmp.layouts.layout import ParameterSharding
from dmp.places import places_of
from dmp.plans.find import Site
from dmp.plans.kept_places import rebind
from dmp.wrap.making.assembly import Assembly, Owned
from dmp.wrap.making.build import carry_over
from dmp.wrap.values.filling import check_made


class Remade:
    """A `dmp.Resharded`: the new module comes into the old one's places.

    Args:
        made: the model.
        owned: the module in it.
        plan: of its parameters, names relative.

    Raises:
        ShardError: a module that cannot be made again, naming it and why.
    """

    def __init__(self, made: Assembly, owned: Owned, plan: Mapping[str, ParameterSharding]) -> None:
        self._made, self._owned = made, owned
        self._old = made.module.get_submodule(owned.path)
        plain = self._empty(self._old, owned)
        self._new = owned.sharder.shard(plain, plan, made.env, made.device)
        site = Site(owned.path, owned.aliases, plain, owned.sharder, owned.infos)
        check_made(site, self._new, plan, made.env, True)

    @staticmethod
    def _empty(old: nn.Module, owned: Owned) -> nn.Module:
        """A plain module as the old one was, on meta."""
        make, why = hook(old, "unsharded"), ""
        if isinstance(old, FusedModule) and any(True for _ in old.fused_parameters()):
            why = "updates parameters in the backward pass, and has no resharded(plan), which would keep their state"
        elif not callable(make):
            why = "has neither resharded(plan) nor unsharded()"
        elif not owned.path:
            why = "is the whole model, and has no resharded(plan)"
        elif beside := sorted(_chunked(old).keys() - dict(old.named_parameters()).keys()):
            why = f"has cut {beside[0]!r} too, which is no parameter, and has no resharded(plan)"
        if why:
            raise ShardError(
                f"{owned.path!r} ({type(old).__name__}, made by {type(owned.sharder).__name__}) cannot change its plan "
                f"in a running model: it {why}. save_checkpoint(path, model), wrap a new model with that plan, "
                "load_checkpoint(path, model)"
            )
        plain: nn.Module = make().to("meta")
        held = dict(old.named_parameters())
        for place in places_of(plain.named_modules()):
            known = held.get(place.full_name)
            if known is not None:
                place.tensor.data = place.tensor.data.to(known.dtype)
                place.tensor.requires_grad_(known.requires_grad)
        return plain

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Those that the sharder names; others stay the very parameters that they are."""
        return {name: p for name, p in self._new.named_parameters() if name in self._owned.infos}

    def chunked_state(self) -> Mapping[str, ChunkedTensor]:
        """See `dmp.ShardedModule`."""
        return _chunked(self._new)

    def fused_parameters(self) -> Iterable[FusedParameter]:
        """None."""
        return ()

    def take_place(self) -> nn.Module:
        """The new module, at every path of the old one, which says so when it is called."""
        old, new, owned = self._old, self._new, self._owned
        own = {place.full_name: place.tensor for place in places_of(old.named_modules())}
        for place in places_of(new.named_modules()):
            if place.store is place.owner._buffers:
                place.tensor.copy_(own[place.full_name])
            elif place.full_name not in owned.infos:  # the data-parallel part has hold of it
                place.store[place.name] = own[place.full_name]
        carry_over(old, new)
        for root in filter(None, (self._made.module, self._made.skeleton)):
            for path in owned.aliases:
                root.set_submodule(path, new)
            rebind(root, {old: new})

        def replaced(*_: Any, **__: Any) -> Any:
            raise ShardError(f"model.reshard(plan) has put another module at {owned.path!r}: call that one")

        old.forward = replaced
        return new


def _chunked(module: nn.Module) -> Mapping[str, ChunkedTensor]:
    return module.chunked_state() if isinstance(module, ShardedModule) else {}


def resharded(made: Assembly, owned: Owned, plan: Mapping[str, ParameterSharding]) -> Any:
    """What a sharded module gives for another plan: by its hook, else made again."""
    make = hook(made.module.get_submodule(owned.path), "resharded")
    return make(plan) if make is not None else Remade(made, owned, plan)
