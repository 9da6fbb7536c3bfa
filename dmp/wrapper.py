"""`DistributedModelParallel`: puts a module on a mesh by a plan. It knows sharders and plans, and no tables.

The order: find what sharders take -> plan -> check plan and agreement of the ranks -> rank 0's values -> shard -> fill
what is on meta -> data parallel on what remains. Nothing of the module is changed before everything is checked.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import is_lazy

from dmp.agreement import check_agreement, sync_from_first_rank
from dmp.chunked import ChunkedTensor
from dmp.contracts import DataParallelWrapper, FusedModule, FusedParameter, ModuleSharder, ShardedModule
from dmp.discovery import Site, check_plan, find_sites, join
from dmp.env import ShardingEnv, default_env
from dmp.errors import CheckpointError, DmpError, PlanError, ShardError
from dmp.fused import FusedOptimizer
from dmp.initial import check_can_materialise, fill_chunks, fill_from_reset, materialise, shared_seed
from dmp.layout import Layout, ParameterSharding
from dmp.plan import ShardingPlan, as_plan
from dmp.registry import (
    check_sharder_protocol,
    default_data_parallel_wrapper,
    default_planner,
    default_sharders,
)


class DistributedModelParallel(nn.Module):
    """Puts any module on a mesh: sharders' modules by the plan, the rest data-parallel.

    Names never change: `state_dict`, `named_parameters` and `named_buffers` have the unsharded module's names on every
    rank. Values present are kept (rank 0's where ranks differ); those on meta depend on (name, seed) alone.
    The module is changed in place: its sharded submodules are replaced.

    Args:
        module: any module; parameters may be on meta.
        env: where to run; the default process group as one axis, or one process when there is none.
        device: of the parameters; the mesh's by default.
        plan: a `ShardingPlan` or a dict parameter name -> layout; the planner's by default.
        sharders: who takes which module; every registered one by default.
        init_data_parallel: False delays the data-parallel part until `init_data_parallel()` (lazy modules).
        init_parameters: allocate and fill parameters that are on meta.
        data_parallel_wrapper: runs what no sharder owns; DistributedDataParallel by default.
        planner: makes the plan when there is none: `collective_plan(module, sharders, env)`.

    Raises:
        PlanError: a plan that does not fit, ranks that disagree, or a model that fits no plan.
        ShardError: a module that its sharder cannot run.

    Example:
        >>> model = DistributedModelParallel(torch.nn.Linear(2, 1))
        >>> model(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | str | None = None,
        plan: ShardingPlan | Mapping[str, ParameterSharding | Layout] | None = None,
        sharders: Iterable[ModuleSharder] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        *,
        planner: Any = None,
    ) -> None:
        super().__init__()
        with _without_collection():
            self._init(
                module, env, device, plan, sharders, init_data_parallel, init_parameters, data_parallel_wrapper, planner
            )

    def _init(
        self,
        module: nn.Module,
        env: ShardingEnv | None,
        device: torch.device | str | None,
        plan: ShardingPlan | Mapping[str, ParameterSharding | Layout] | None,
        sharders: Iterable[ModuleSharder] | None,
        init_data_parallel: bool,
        init_parameters: bool,
        data_parallel_wrapper: DataParallelWrapper | None,
        planner: Any,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ShardError(f"expected a torch.nn.Module to wrap; got {type(module).__name__}")
        if env is not None and not isinstance(env, ShardingEnv):
            raise ShardError(f"expected env to be a ShardingEnv (see ShardingEnv.from_mesh); got {type(env).__name__}")
        self._env = env if env is not None else default_env(torch.device(device).type if device else None)
        self._device = torch.device(device) if device is not None else self._env.device
        self._data_parallel = data_parallel_wrapper or default_data_parallel_wrapper()
        self._sharders = list(default_sharders() if sharders is None else sharders)
        for sharder in self._sharders:
            check_sharder_protocol(sharder)

        sites, failure = _attempt(lambda: find_sites(module, self._sharders))
        sites = sites or []
        check_agreement({"error": str(failure or ""), "model": _describe(module, sites)}, self._env)
        if failure is not None:
            raise failure
        if plan is None:
            planner = planner if planner is not None else default_planner()
            plan = planner.collective_plan(module, self._sharders, self._env)
        elif planner is not None:
            raise PlanError("pass a plan or a planner, not both; to fix part of a plan: planner.plan(..., pinned=plan)")
        given, failure = _attempt(lambda: as_plan(plan))
        check_agreement({"error": str(failure or ""), "plan": given.to_json() if given else ""}, self._env)
        if failure is not None:
            raise failure
        assert given is not None
        self._plan = ShardingPlan(check_plan(given, module, sites, self._env), report=given.report)

        if init_parameters:
            check_can_materialise(module, [s.module for s in sites if _fills_itself(s)])
        sync_from_first_rank(module, self._env)
        seed = shared_seed(self._env) if init_parameters else 0
        self._paths: dict[str, tuple[str, ...]] = {}
        module = self._shard(module, sites, seed, init_parameters)
        sharded = [module.get_submodule(path) for path in self._paths]
        if init_parameters:
            materialise(module, self._device, seed, skip=sharded)
        _move(module, self._device, sharded)
        self._wrapped: nn.Module = module
        self._unwrapped = [module]  # in a list, so that it is not a second child
        self._is_data_parallel = False
        self._fused_optimizer = FusedOptimizer(self._fused_parameters())
        if init_data_parallel:
            self.init_data_parallel()

    def _shard(self, module: nn.Module, sites: list[Site], seed: int, init_parameters: bool) -> nn.Module:
        """Replace the module of each site, at all its paths, once all are made; returns the root."""
        made, failure = _attempt(lambda: [self._make(site) for site in sites])
        check_agreement({"error": "" if failure is None else f"{type(failure).__name__}: {failure}"}, self._env)
        if failure is not None:
            raise failure
        modules: list[nn.Module] = made
        for site, new in zip(sites, modules, strict=True):
            if new is not site.module:
                _carry_over(site.module, new)
            if isinstance(new, ShardedModule):
                _register_state_hooks(new)
            if hasattr(new, "module_path"):
                new.module_path = site.path  # type: ignore[assignment]
            if init_parameters:
                _fill_from_meta(site, new, seed)
            for path in site.aliases:
                module = _replace(module, path, new)
            self._paths[site.path] = site.aliases
        return module

    def _make(self, site: Site) -> nn.Module:
        entries = {relative: self._plan[name] for relative, name in site.names().items()}
        new = site.sharder.shard(site.module, entries, self._env, self._device)
        _check_same_names(site, new)
        return new

    def init_data_parallel(self) -> None:
        """Start the data-parallel part, once; later calls do nothing. For lazy modules: after the first forward.

        Raises:
            ShardError: a parameter is still lazy, or on meta.
        """
        if self._is_data_parallel:
            return
        for name, parameter in self.module.named_parameters():
            if is_lazy(parameter):
                raise ShardError(
                    f"parameter {name!r} of a lazy module has no shape yet: pass init_data_parallel=False, run one "
                    "forward, then call init_data_parallel()"
                )
            if parameter.is_meta:
                raise ShardError(f"parameter {name!r} is on meta: pass init_parameters=True, or load values first")
        self._wrapped = self._data_parallel.wrap(self.module, self._env, self._device, self._sharded_names())
        self._is_data_parallel = True

    @property
    def module(self) -> nn.Module:
        """The module itself, without any data-parallel wrapper around it."""
        return self._unwrapped[0]

    @property
    def plan(self) -> ShardingPlan:
        """The plan in force."""
        return self._plan

    @property
    def env(self) -> ShardingEnv:
        """Where the model runs."""
        return self._env

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self._device

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The parameters that are updated in the backward pass: their options (`lr`, ...) and state."""
        return self._fused_optimizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return self._wrapped(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The unsharded module's names; sharded parameters as `ChunkedTensor`s of this rank's pieces."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], prefix: str = "", strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load whole tensors (each rank takes its pieces) or this plan's own pieces; the dict given is not changed.

        Args:
            prefix: of the names in `state_dict`; names without it belong to others.
            strict: raise on missing and unexpected names, else return them.
            assign: as in torch, for parameters that no sharder owns; collective where they are data-parallel already.

        Returns:
            Missing and unexpected keys, as torch does.

        Raises:
            CheckpointError: names (when strict) or shapes that do not fit; the model is unchanged.
        """
        given = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        own = self.module.state_dict()
        missing = [prefix + k for k in own if k not in given]
        unexpected = [prefix + k for k in given if k not in own]
        wrong = [f"{prefix}{k} {_misfit(own[k], given[k])}" for k in own if k in given and _misfit(own[k], given[k])]
        if (strict and (missing or unexpected)) or wrong:
            parts = [f"missing keys: {missing}"] * bool(missing and strict)
            parts += [f"unexpected keys: {unexpected}"] * bool(unexpected and strict) + wrong
            raise CheckpointError(f"state dict does not fit {type(self.module).__name__}: " + "; ".join(parts))
        try:
            self.module.load_state_dict(given, strict=False, assign=assign)
        except DmpError as error:
            raise CheckpointError(str(error)) from error
        if assign and self._is_data_parallel:  # its hooks are on the parameters that have been replaced
            self._is_data_parallel = False
            self.init_data_parallel()
        return _IncompatibleKeys(missing, unexpected)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The unsharded module's names; a sharded parameter holds this rank's pieces, possibly none."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The unsharded module's names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This wrapper and the module's modules under the unsharded module's names, in a parent module too."""
        memo = set() if memo is None else memo
        if self not in memo or not remove_duplicate:
            memo.add(self)
            yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A parent module's load: from here on it looks for names as they are below this wrapper."""
        where = next(name for name, m in super().named_modules() if m is self.module)
        for key in [k for k in state_dict if k.startswith(prefix)]:
            state_dict[f"{prefix}{where}.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def copy(self, device: torch.device | str | None = None) -> DistributedModelParallel:
        """An independent copy on `device` (this one's by default) that shares process groups."""
        return self._copied({}, self._device if device is None else torch.device(device))

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedModelParallel:
        return self._copied(memo, self._device)

    def _copied(self, memo: dict[int, Any], device: torch.device) -> DistributedModelParallel:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        memo.update({id(shared): shared for shared in (self._env, self._plan, self._data_parallel, self._sharders)})
        rebuilt = ("_modules", "_is_data_parallel", "_fused_optimizer")
        new.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in rebuilt})
        new.__dict__["_modules"] = {"_wrapped": new.module}
        if device != self._device:
            new._device = device
            new.module.to(device)
        new._is_data_parallel = False
        new._fused_optimizer = FusedOptimizer(new._fused_parameters())
        if self._is_data_parallel:
            new.init_data_parallel()
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DistributedModelParallel holds process groups and cannot be pickled; save_checkpoint(path, model) or "
            "torch.save(full_state_dict(model)) keep its values, copy.deepcopy(model) copies it"
        )

    def __getattr__(self, name: str) -> Any:
        """Attributes of the module show through, so that its user code works on the wrapper too."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            unwrapped = self.__dict__.get("_unwrapped")
            if not unwrapped:
                raise
            return getattr(unwrapped[0], name)

    def _sharded_names(self) -> frozenset[str]:
        """Names (under every alias) of all parameters and buffers that sharders own."""
        names: set[str] = set()
        for path, aliases in self._paths.items():
            owned = self.module.get_submodule(path)
            for relative, _ in [*owned.named_parameters(), *owned.named_buffers()]:
                names.update(join(alias, relative) for alias in aliases)
        return frozenset(names)

    def _fused_parameters(self) -> Iterator[FusedParameter]:
        for path in self._paths:
            owned = self.module.get_submodule(path)
            for f in owned.fused_parameters() if isinstance(owned, FusedModule) else ():
                yield FusedParameter(join(path, f.name), f.parameter, f.options, f.state)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Wrapping a thousand tables makes a million objects that stay: each full collection on the way costs 0.3 s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _attempt(make: Any) -> tuple[Any, Exception | None]:
    """Result and error of a local step, so that all ranks can compare errors before anyone raises."""
    try:
        return make(), None
    except Exception as error:
        return None, error


def _describe(module: nn.Module, sites: list[Site]) -> str:
    """The model as text, for comparing it over ranks: sites in order, then every parameter and buffer."""
    lines = [f"{s.path}: {type(s.module).__name__}" for s in sites]
    for name, t in [*module.named_parameters(), *module.named_buffers()]:
        lines.append(f"{name}: {'lazy' if is_lazy(t) else (tuple(t.shape), t.dtype, t.is_meta)} {t.requires_grad}")
    return "\n".join(lines)


def _check_same_names(site: Site, new: nn.Module) -> None:
    """One owner and unchanged names: the sharder kept every parameter's and buffer's name and added none."""
    for kind in ("named_parameters", "named_buffers"):
        before = {name for name, _ in getattr(site.module, kind)()}
        after = {name for name, _ in getattr(new, kind)()}
        if before != after:
            raise ShardError(
                f"{type(site.sharder).__name__}.shard changed {kind} of {site.path!r}: missing "
                f"{sorted(before - after)}, new {sorted(after - before)}; a sharded module keeps the names"
            )


def _carry_over(old: nn.Module, new: nn.Module) -> None:
    """Training mode and the hooks that users put on the module."""
    new.train(old.training)
    for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(new, kind).update(getattr(old, kind))
    new._is_full_backward_hook = old._is_full_backward_hook
    for kind in ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"):
        getattr(new, kind).update(getattr(old, kind))


def _misfit(own: Any, given: Any) -> str:
    """Why `given` cannot be loaded where `own` is, or nothing."""
    if not isinstance(own, torch.Tensor) or is_lazy(own):
        return ""
    if not isinstance(given, torch.Tensor):
        return f"is a {type(given).__name__}, expected a tensor of shape {tuple(own.shape)}"
    if given.shape != own.shape:
        return f"has shape {tuple(given.shape)}, expected {tuple(own.shape)}"
    if isinstance(given, ChunkedTensor):
        pieces = zip(own.chunks, own.offsets, strict=True) if isinstance(own, ChunkedTensor) else None
        if pieces is None or not all(given._holds(chunk, at) for chunk, at in pieces):
            return "is in pieces of another plan: use save_checkpoint and load_checkpoint, or full_state_dict"
    return ""


def _register_state_hooks(module: nn.Module) -> None:
    if getattr(module, "_dmp_state_hooks", False):
        return
    module._dmp_state_hooks = True  # type: ignore[assignment]
    module.register_state_dict_post_hook(_give_chunks)
    module.register_load_state_dict_pre_hook(_take_chunks)


def _give_chunks(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name, chunked in module.chunked_state().items():
        if prefix + name in state_dict:
            state_dict[prefix + name] = chunked


def _take_chunks(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
    """Copy the given values into the local pieces, and hand torch the local parameter itself.

    With `assign` a whole parameter is filled in place too: the module looks rows up in the storage that it has.
    """
    chunked, is_assigned = module.chunked_state(), metadata.get("assign_to_params_buffers")
    for name, local in module.named_parameters():
        given = state_dict.get(prefix + name)
        if given is None or not (name in chunked or is_assigned):
            continue
        if name in chunked:
            chunked[name].fill_from(given)
        else:
            local.data.copy_(given)
        state_dict[prefix + name] = local


def _fills_itself(site: Site) -> bool:
    """Whether every parameter of the site has an `init_fn`; else the module's own reset is needed."""
    return all(info.init_fn is not None for info in site.infos.values())


def _fill_from_meta(site: Site, new: nn.Module, seed: int) -> None:
    on_meta = [name for name, p in site.module.named_parameters() if p.is_meta]
    if not on_meta:
        return
    if not isinstance(new, ShardedModule):
        return
    chunked, local = new.chunked_state(), dict(new.named_parameters())
    rest: dict[str, ChunkedTensor] = {}
    for name in on_meta:
        target = chunked.get(name)
        if target is None:  # whole on every rank
            target = ChunkedTensor(local[name].shape, [local[name].detach()], [(0,) * local[name].dim()])
        init_fn = site.infos[name].init_fn if name in site.infos else None
        if init_fn is not None:
            fill_chunks(target, init_fn, join(site.path, name), seed)
        else:
            rest[name] = target
    if rest:
        fill_from_reset(rest, site.module, site.path, seed)


def _replace(root: nn.Module, path: str, new: nn.Module) -> nn.Module:
    if not path:
        return new
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, new)
    return root


def _move(module: nn.Module, device: torch.device, skip: list[nn.Module]) -> None:
    """Bring what no sharder owns to the device; lazy and meta tensors stay."""
    owned = {id(t) for s in skip for t in [*s.parameters(), *s.buffers()]}
    for t in [*module.parameters(), *module.buffers()]:
        if id(t) not in owned and not is_lazy(t) and not t.is_meta and t.device != device:
            t.data = t.data.to(device)
