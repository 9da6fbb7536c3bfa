"""What a wrapped model is made of: one frozen record. Who changes something, as by starting the data-parallel part,
makes another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from dmp.contracts import (
    AnySharder,
    DataParallelWrapper,
    FusedModule,
    FusedParameter,
    ModelPlacement,
    ModuleSharder,
    ParameterInfo,
    hook,
    set_hook,
)
from dmp.env import ShardingEnv
from dmp.errors import ShardError
from dmp.foreign import type_name
from dmp.names import join_name
from dmp.places import is_dtensor, restore_ties, tied_places
from dmp.plans.kept_places import kept_beside
from dmp.plans.plan import ShardingPlan
from dmp.wrap.making.ddp_watch import SplitWatch, Watch
from dmp.wrap.optimizers.fused import FusedOptimizer
from dmp.wrap.values.holders import held
from dmp.wrap.values.since_split import SinceSplit
from dmp.wrap.values.skeleton import all_tensors


@dataclass(frozen=True)
class Owned:
    """A module that a sharder has put into the model.

    Args:
        path: its first path in the model.
        aliases: every path, the first included.
        sharder: who has.
        infos: parameters that it named, by their relative names; others in the module are data-parallel ones.
        kind: class of the module.
    """

    path: str
    aliases: tuple[str, ...]
    sharder: ModuleSharder
    infos: Mapping[str, ParameterInfo]
    kind: type[nn.Module]


@dataclass(frozen=True, eq=False)
class Assembly:
    """A wrapped model.

    Args:
        env: where it runs.
        device: of its parameters.
        plan: in force.
        wrapper: makes the data-parallel part.
        placements: what model sharders split in place.
        module: the model with sharded modules in their places, without any data-parallel wrapper.
        owned: those sharded modules.
        fused: the parameters that are updated in the backward pass.
        running: what a forward runs: the module, in its data-parallel wrapper where it has one.
        skeleton: structure of the module before dense weights were split, on meta, see [Note: in place] of build.py.
        is_data_parallel: whether the data-parallel part was started.
        watch: of what that part has hold of.
        split_watch: of weights that are split in place.
        since_split: what has become of the module since.
        sharders: who could take modules, as given and adopted.
        copies: frozen tables that had a trained one's values when they were wrapped -> that one; on the first rank.
    """

    env: ShardingEnv
    device: torch.device
    plan: ShardingPlan
    wrapper: DataParallelWrapper
    placements: tuple[ModelPlacement, ...]
    module: nn.Module
    owned: tuple[Owned, ...]
    fused: FusedOptimizer
    running: nn.Module
    skeleton: nn.Module | None = None
    is_data_parallel: bool = False
    watch: Watch | None = None
    split_watch: SplitWatch | None = None
    since_split: SinceSplit | None = None
    sharders: tuple[AnySharder, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)

    @property
    def sharded(self) -> list[nn.Module]:
        """The modules that sharders have put into the model."""
        return [self.module.get_submodule(each.path) for each in self.owned]

    @property
    def shards_in_place(self) -> bool:
        """Whether the data-parallel part shards the module in place, see [Note: in place] of build.py."""
        asked = hook(self.wrapper, "shards_in_place")
        return bool(asked and asked(self.env, any(is_dtensor(p) for p in self.module.parameters())))

    def split_dense(self) -> None:
        """Split dense weights in place, ties kept."""
        ties = tied_places(self.module)
        kept = frozenset(kept_beside(self.module)) if self.placements and self.env.tensor_size > 1 else frozenset()
        for placement in self.placements:
            set_hook(placement, "kept", kept)
            placement.apply(self.module)
        restore_ties(ties)

    def sharded_names(self) -> frozenset[str]:
        """Names (under every alias) of all parameters and buffers that sharders own.

        Raises:
            ShardError: something else was put in the place of one of their modules.
        """
        names: set[str] = set()
        for each in self.owned:
            for path, module in self._inside(each):
                for relative, _ in all_tensors(module, remove_duplicate=True):
                    names.update(join_name(alias, join_name(path, relative)) for alias in each.aliases)
        return frozenset(names)

    def _inside(self, owned: Owned) -> list[tuple[str, nn.Module]]:
        """A sharder's module, and its path in what was put around it, whose own weights are no sharder's."""
        module = self._in_place(owned)
        if module is None:
            return []
        found = ((path, each) for path, each in module.named_modules() if isinstance(each, owned.kind))
        return [next(found, ("", module))]

    def _in_place(self, owned: Owned) -> nn.Module | None:
        """What stands in a sharded module's place: it, or what was put around it. One rank may have others."""
        try:
            module = self.module.get_submodule(owned.path)
        except AttributeError:
            module = None
        inside = () if module is None else module.modules()
        if self.env.size > 1 and not any(isinstance(each, owned.kind) for each in inside):
            now = "taken out" if module is None else f"replaced by a {type_name(module)}"
            raise ShardError(
                f"the sharded module at {owned.path!r} was {now} after wrapping: what stands there is neither cut nor "
                "averaged. Change the plain module before it is wrapped, or wrap to_unsharded(model), changed, anew"
            )
        return module

    def unnamed(self) -> frozenset[str]:
        """Names (under every alias) of parameters in sharders' modules that no sharder named: data-parallel ones."""
        names: set[str] = set()
        for each in self.owned:
            for path, module in self._inside(each):
                for relative, _ in module.named_parameters(remove_duplicate=False):
                    if relative not in each.infos:
                        names.update(join_name(alias, join_name(path, relative)) for alias in each.aliases)
        return frozenset(names)


def fused_of(module: nn.Module, owned: tuple[Owned, ...], env: ShardingEnv) -> FusedOptimizer:
    """The optimizer view of what sharded modules update themselves."""
    return FusedOptimizer(fused_parameters(module, owned, env))


def fused_parameters(module: nn.Module, owned: tuple[Owned, ...], env: ShardingEnv) -> Iterator[FusedParameter]:
    """What sharded modules update themselves, under the model's names."""
    for each in owned:
        sharded = module.get_submodule(each.path)
        for f in sharded.fused_parameters() if isinstance(sharded, FusedModule) else ():
            state: Callable[[], dict[str, torch.Tensor]] = partial(_held_state, f.state, env)
            yield replace(f, name=join_name(each.path, f.name), state=state)


def _held_state(state: Callable[[], dict[str, torch.Tensor]], env: ShardingEnv) -> dict[str, torch.Tensor]:
    return held(state(), env)
