"""`TorchRecSharder`: runs any of TorchRec's sharders, or a user's own of that form, inside our wrapper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from dmp import (
    Layout,
    ParameterInfo,
    ParameterSharding,
    ShardError,
    ShardingEnv,
    type_name,
)
from sharders.embedding.lookup.given_optimizers import optimizer_of, spec_of_fused_params
from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.torchrec.batches import collections_in
from sharders.torchrec.fused_tables import apply_in_backward
from sharders.torchrec.making import Recipe, with_room
from sharders.torchrec.module import TorchRecModule
from sharders.torchrec.refused import check_module, why_not
from sharders.torchrec.sharding_types import representatives, type_of

_MEMBERS = ("module_type", "shard", "shardable_parameters", "sharding_types")


class TorchRecSharder:
    """One of TorchRec's `ModuleSharder`s as one of ours: its sharded module, with our env, plan, names and state.

    For modules that ours has no sharder for. What theirs gets wrong is refused in words, by layout where it is one.

    Args:
        sharder: a `ModuleSharder` of TorchRec's form.

    Raises:
        ShardError: an object that is none.

    Example:
        >>> from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
        >>> TorchRecSharder(FeatureProcessedEmbeddingBagCollectionSharder()).module_type.__name__
        'FeatureProcessedEmbeddingBagCollection'
    """

    def __init__(self, sharder: Any) -> None:
        missing = [name for name in _MEMBERS if not hasattr(sharder, name)]
        if isinstance(sharder, type) or missing:
            what = f"the class {sharder.__name__}: call it" if isinstance(sharder, type) else f"it lacks {missing}"
            raise ShardError(f"TorchRecSharder takes a ModuleSharder of TorchRec's; got {type_name(sharder)}, {what}")
        self._theirs = sharder
        self._who = type_name(sharder)

    @property
    def module_type(self) -> type[nn.Module]:
        """Theirs."""
        kind: type[nn.Module] = self._theirs.module_type
        return kind

    def parameters(self, module: nn.Module) -> Mapping[str, ParameterInfo]:
        """Their shardable parameters."""
        infos = {}
        collections = collections_in(module)
        for name in self._names(module):
            parameter = module.get_parameter(name)
            spec = self._spec(parameter, name)
            infos[name] = ParameterInfo(
                shape=tuple(parameter.shape),
                dtype=parameter.dtype,
                kind="table" if parameter.dim() == 2 and collections else type(module).__name__,
                optimizer=None if spec is None else spec.kind,
                state_bytes=None if spec is None else spec.optimizer.state_bytes(parameter.dtype),
                pooled=not any(hasattr(m, "embedding_configs") for m in module.modules()),
            )
        return infos

    def layouts(self, info: ParameterInfo, env: ShardingEnv) -> Iterable[Layout]:
        """One for each of their sharding types on this kind of device that gives right numbers."""
        types = self._theirs.sharding_types(env.device_type)
        return [x for x in representatives(types, info, env) if self.accepts(info, x, env)]

    def accepts(self, info: ParameterInfo, layout: Layout, env: ShardingEnv) -> bool:
        """Whether it is exactly one of their sharding types, and one that works."""
        return not self.why_not(info, layout, env)

    def why_not(self, info: ParameterInfo, layout: Layout, env: ShardingEnv) -> str:
        """Why a layout is not run; nothing where it is."""
        kind = type_of(layout, info.shape, env, self._types(env))
        return why_not(self._who, kind, info, env)

    def shard(
        self, module: nn.Module, plan: Mapping[str, ParameterSharding], env: ShardingEnv, device: torch.device
    ) -> nn.Module:
        """Their sharded module; on a single process without a group, which theirs needs, the module itself.

        Raises:
            ShardError: what theirs gets wrong.
        """
        names = self._names(module)
        frozen = [name for name in names if not module.get_parameter(name).requires_grad]
        if frozen:
            raise ShardError(f"{self._who} trains every table, and {frozen[0]!r} has requires_grad=False")
        check_module(self._who, module, len(names), env)
        specs = {name: self._spec(module.get_parameter(name), name) for name in names}
        if env.table_group is None:
            return self._alone(module, specs, device)
        recipe = Recipe(
            self._theirs,
            with_room(module, "meta"),
            names,
            {name: plan[name].layout for name in names},
            self._types(env),
            {name: spec for name, spec in specs.items() if spec is not None},
            env,
            device,
        )
        return TorchRecModule(recipe, module)

    def _alone(self, module: nn.Module, specs: Mapping[str, OptimizerSpec | None], device: torch.device) -> nn.Module:
        """The plain module: it is already what it should be, or a copy on the device with the sharder's optimizers."""
        own = dict(module.named_parameters())
        is_ready = all(spec is None or hasattr(own[n], "_in_backward_optimizers") for n, spec in specs.items())
        if is_ready and all(t.device == device for t in [*module.parameters(), *module.buffers()]):
            return module
        new = with_room(module, device)
        values = {**own, **dict(module.named_buffers())}
        for name, tensor in [*new.named_parameters(), *new.named_buffers()]:
            if not values[name].is_meta:
                tensor.data.copy_(values[name].detach())
        for name, spec in specs.items():
            if spec is not None:
                apply_in_backward(new.get_parameter(name), spec, self._who)
        return new

    def _types(self, env: ShardingEnv) -> list[str]:
        """Their sharding types; on a CPU too those that theirs offers for a GPU alone, for its code runs them."""
        return list(
            dict.fromkeys([*self._theirs.sharding_types(env.device_type), *self._theirs.sharding_types("cuda")])
        )

    def _names(self, module: nn.Module) -> dict[str, str]:
        """Parameter name -> their name of it."""
        keys = {id(parameter): key for key, parameter in self._theirs.shardable_parameters(module).items()}
        return {name: keys[id(p)] for name, p in module.named_parameters() if id(p) in keys}

    def _spec(self, parameter: nn.Parameter, name: str) -> OptimizerSpec | None:
        """The optimizer that runs in the backward pass: the parameter's own, else that of the sharder."""
        given = getattr(self._theirs, "fused_params", None) or {}
        return optimizer_of(parameter, name) or spec_of_fused_params(given, f"{self._who}: fused_params")
