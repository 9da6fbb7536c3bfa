"""`DistributedModelParallel`: puts a module on a mesh by a plan. It knows sharders and plans, and no tables.

The order: plan -> check plan and agreement of the ranks -> rank 0's values -> tables -> tensor parallel -> ties put
back -> data parallel on what remains -> fill what is on meta. Nothing of the module is changed before everything is
checked.

[Note: in place] Tensor parallelism and some data-parallel wrappers (FSDP2) change dense modules in place, by hooks that
belong to these very modules, so that they cannot be copied or turned back. A *skeleton* made just before, the same
structure on meta around the same sharded tables, is what copies and plain modules are built from.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import is_lazy

from dmp.calls import Calls
from dmp.chunked import PIECE, ChunkedTensor, is_dtensor
from dmp.contracts import (
    DataParallelWrapper,
    FusedModule,
    FusedParameter,
    ModelSharder,
    ModuleSharder,
    ShardedModule,
)
from dmp.env import ShardingEnv, default_env
from dmp.errors import CheckpointError, DmpError, PlanError, RanksError, ShardError
from dmp.layouts.layout import Layout, ParameterSharding
from dmp.plans.discovery import Resolved, Site, check_plan, join, place_dense, say_what_is_read
from dmp.plans.left_out import say_what_is_left
from dmp.plans.plan import ShardingPlan, as_plan
from dmp.ranks.collective import entry, everyone
from dmp.ranks.launch import join_launch
from dmp.registry import (
    check_sharder_protocol,
    default_data_parallel_wrapper,
    default_planner,
    default_sharders,
    replicating_wrapper,
)
from dmp.wrap import live_models as live
from dmp.wrap.agreement import check_agreement, sync_from_first_rank
from dmp.wrap.arguments import check_arguments, check_env, take
from dmp.wrap.ddp_watch import SplitWatch, Watch
from dmp.wrap.earlier_optimizers import marking_replaced
from dmp.wrap.filling import check_made, fill_from_meta, rules_of
from dmp.wrap.forward import Forward
from dmp.wrap.fused import FusedOptimizer
from dmp.wrap.gathered import pieces_shown, state_dict_of_pieces
from dmp.wrap.initial_rules import Rules
from dmp.wrap.initial_values import (
    materialise,
    shared_seed,
)
from dmp.wrap.left_whole import say_what_is_whole
from dmp.wrap.optimizer_guard import guard_optimizers
from dmp.wrap.outer_wrappers import guard_ddp, keep_from_fully_shard
from dmp.wrap.skeleton import all_tensors, copy_values, skeleton_of
from dmp.wrap.state_hooks import misfit, register_state_hooks, with_local_parts
from dmp.wrap.ties import Tie, find_ties, restore_ties


class DistributedModelParallel(nn.Module):
    """Puts any module on a mesh: sharders' modules by the plan, the rest data-parallel.

    Names never change: `state_dict`, `named_parameters` and `named_buffers` have the unsharded module's names on every
    rank. Values present are kept (rank 0's where ranks differ); those on meta depend on (name, seed) alone.
    The module is changed in place: its sharded submodules are replaced.

    Args:
        module: any module; parameters may be on meta.
        env: where to run; the default process group as one axis, or one process when there is none. Where a launcher
            (`torchrun`) started several processes and no group is initialised, it is, by the device's backend.
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
        sharders: Iterable[ModuleSharder | ModelSharder] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        *,
        planner: Any = None,
    ) -> None:
        super().__init__()
        self._env = _environment(env, device)
        with entry(f"wrapping {type(module).__name__}", self._env.group() if self._env.size > 1 else None):
            self._check(
                module, device, plan, sharders, init_data_parallel, init_parameters, data_parallel_wrapper, planner
            )
            with _without_collection(), marking_replaced(self, module):
                self._wrap(module, plan, planner, init_data_parallel, init_parameters)

    def _check(
        self,
        module: nn.Module,
        device: torch.device | str | None,
        plan: Any,
        sharders: Iterable[ModuleSharder | ModelSharder] | None,
        init_data_parallel: bool,
        init_parameters: bool,
        data_parallel_wrapper: DataParallelWrapper | None,
        planner: Any,
    ) -> None:
        """Take the arguments, the same on all ranks."""

        def taken() -> None:
            check_arguments(module, self._env, device, data_parallel_wrapper)
            self._take(module, device, plan, sharders, data_parallel_wrapper, planner)

        _, failure = _attempt(taken)
        facts = {"the arguments": "" if failure is None else f"{type(failure).__name__}: {failure}"}
        if failure is None:
            facts |= {
                "the mesh": str(self._env).rpartition(", rank")[0],
                "device": self._device.type,
                "whether a plan is given": str(plan is not None),
                "planner": type(planner).__name__,
                "sharders": ", ".join(type(s).__name__ for s in self._sharders),
                "data_parallel_wrapper": type(self._data_parallel).__name__,
                "init_data_parallel": str(bool(init_data_parallel)),
                "init_parameters": str(bool(init_parameters)),
                "model": _describe(module),
            }
        check_agreement(facts, self._env)
        if failure is not None:
            raise failure

    def _take(
        self,
        module: nn.Module,
        device: Any,
        plan: Any,
        sharders: Any,
        wrapper: DataParallelWrapper | None,
        planner: Any,
    ) -> None:
        self._device = torch.device(device) if device is not None else self._env.device
        self._data_parallel = wrapper or default_data_parallel_wrapper()
        self._sharders = list(default_sharders() if sharders is None else sharders)
        for sharder in self._sharders:
            check_sharder_protocol(sharder)
        if plan is not None and planner is not None:
            raise PlanError("pass a plan or a planner, not both; to fix part of a plan: planner.plan(..., pinned=plan)")

    def _wrap(
        self, module: nn.Module, plan: Any, planner: Any, init_data_parallel: bool, init_parameters: bool
    ) -> None:
        if plan is None:
            plan = self._planned(module, planner if planner is not None else default_planner())
        resolved = self._resolve(plan, module)
        if init_data_parallel:
            self._check_data_parallel(resolved, module)
        if self._env.size > 1 and self._env.rank == 0:
            say_what_is_read(resolved, module)
            say_what_is_whole(resolved, module, self._env)
            say_what_is_left(resolved, module, self._sharders, self._env)
        self._plan = ShardingPlan(resolved.plan, report=getattr(plan, "report", None))

        rules = rules_of(module, resolved.sites, self._env.rank) if init_parameters else None
        sync_from_first_rank(module, self._env)
        seed = shared_seed(self._env) if init_parameters else 0
        self._calls = Calls()
        self._paths: dict[str, tuple[str, ...]] = {}
        self._claimed: dict[str, frozenset[str]] = {}  # path -> relative names of the parameters that a sharder named
        module = self._shard(module, list(resolved.sites), seed, rules)
        self._unwrapped, self._running = [module], [module]  # in lists, so that they are no children
        self.__dict__["_modules"] = module._modules  # which are: names stay as they are, seen from the wrapper too
        self._is_data_parallel = False
        self._watch: Watch | None = None
        self._split_watch: SplitWatch | None = None
        self._placements = resolved.placements
        self._skeleton: list[nn.Module] = []
        if any(p.layouts for p in self._placements):
            self._skeleton = [skeleton_of(module, self._owned())]
            _move(module, self._device, self._owned())
        self._place()
        sharded = self._owned()
        wraps_meta = init_data_parallel and self._is_in_place()
        if wraps_meta:
            self.init_data_parallel()
        if rules is not None:
            materialise(module, self._device, seed, rules, sharded)
        _move(module, self._device, sharded)
        self._fused_optimizer = FusedOptimizer(self._fused_parameters())
        if init_data_parallel and not wraps_meta:
            self.init_data_parallel()
        self._guard_optimizers()
        take(module)
        live.add(self)
        guard_ddp()
        keep_from_fully_shard(self)

    def _planned(self, module: nn.Module, planner: Any) -> Any:
        """The planner's plan. A planner that raises on one rank alone has left the others in an exchange of its own."""
        if self._env.tensor_size > 1 and self._env.rank:
            # Sharders remember what they found for a model: the check below asks again, and rank 0 plans meanwhile.
            _attempt(lambda: place_dense(module, self._sharders, self._env))
        plan, failure = _attempt(lambda: planner.collective_plan(module, self._sharders, self._env))
        if isinstance(failure, RanksError):
            raise failure
        why = "" if failure is None else f", where the planner raised {type(failure).__name__}: {failure}"
        try:
            check_agreement({}, self._env, f"after planning{why}")
        except RanksError as error:
            raise (failure or error) from error
        if failure is not None:
            raise failure
        return plan

    def _place(self) -> None:
        """Split dense weights in place, ties kept."""
        ties = find_ties(self.module)
        for placement in self._placements:
            placement.apply(self.module)
        restore_ties(ties)

    def _owned(self) -> list[nn.Module]:
        """The modules that sharders have put into the model."""
        return [self.module.get_submodule(path) for path in self._paths]

    def _resolve(self, plan: Any, module: nn.Module) -> Resolved:
        """The plan against model and mesh, on all ranks before anyone goes on."""
        given, failure = _attempt(lambda: as_plan(plan))
        resolved: Resolved | None = None
        if failure is None:
            resolved, failure = _attempt(lambda: check_plan(given, module, self._sharders, self._env))
        facts = {"error": str(failure or ""), "plan": given.to_json() if given else ""}
        if resolved is not None:
            facts["sharded modules"] = "\n".join(f"{s.path}: {type(s.module).__name__}" for s in resolved.sites)
            facts["plan with what sharders chose"] = "\n".join(f"{name}: {e}" for name, e in resolved.plan.items())
        check_agreement(facts, self._env)
        if failure is not None:
            raise failure
        assert resolved is not None
        return resolved

    def _shard(self, module: nn.Module, sites: list[Site], seed: int, rules: Rules | None) -> nn.Module:
        """Replace the module of each site, at all its paths, once all are made; returns the root."""
        made, failure = _attempt(lambda: [self._make(site, rules is not None) for site in sites])
        check_agreement({"error": "" if failure is None else f"{type(failure).__name__}: {failure}"}, self._env)
        if failure is not None:
            raise failure
        modules: list[nn.Module] = made
        for site, new in zip(sites, modules, strict=True):
            if new is not site.module:
                _carry_over(site.module, new)
            if isinstance(new, ShardedModule):
                register_state_hooks(new)
            if hasattr(new, "module_path"):
                new.module_path = site.path  # type: ignore[assignment]
            if hasattr(new, "calls"):
                new.calls = self._calls  # type: ignore[assignment]
            if rules is not None:
                fill_from_meta(site, new, seed, rules)
            for path in site.aliases:
                module = _replace(module, path, new)
            self._paths[site.path] = site.aliases
            self._claimed[site.path] = frozenset(site.infos)
        return module

    def _make(self, site: Site, init_parameters: bool) -> nn.Module:
        entries = {relative: self._plan[name] for relative, name in site.names().items()}
        new = site.sharder.shard(site.module, entries, self._env, self._device)
        _check_same_names(site, new)
        check_made(site, new, init_parameters)
        return new

    def init_data_parallel(self) -> None:
        """Start the data-parallel part, once; later calls do nothing. For lazy modules: after the first forward.

        Raises:
            ShardError: a parameter is still lazy, or on meta.
        """
        if self._is_data_parallel:
            return
        in_place = self._is_in_place()
        for name, parameter in self.module.named_parameters():
            _check_not_lazy(name, parameter)
            if parameter.is_meta and not in_place:
                raise ShardError(f"parameter {name!r} is on meta: pass init_parameters=True, or load values first")
        if in_place and not self._skeleton:
            self._skeleton = [skeleton_of(self.module, self._owned())]
        with marking_replaced(self, self.module):
            self._running = [self._data_parallel_part(self.module)]
        if self.running is not self.module or (self._env.data_size > 1 and not in_place):
            self._watch = Watch(self.module, self._sharded_names())
        self._is_data_parallel = True

    def hold_parameters(self) -> None:
        """Before a forward: the data-parallel part is made again where it has lost parameters, see watch.py.

        Collective where it has; every rank must have done the same to its model.
        """
        if self._watch is not None and self._watch.is_lost():
            self._running, self._is_data_parallel = [self.module], False
            self.init_data_parallel()
        if self._skeleton and self._is_data_parallel:
            if self._split_watch is None:
                self._split_watch = SplitWatch(self.module)
            self._split_watch.check()

    def _check_data_parallel(self, resolved: Resolved, module: nn.Module) -> None:
        """Whether the data-parallel part will run what is left to it, as far as it says beforehand."""
        for name, parameter in module.named_parameters():
            _check_not_lazy(name, parameter)
        check = getattr(self._data_parallel, "check", None)
        if check is not None:
            taken = (
                join(path, name) for s in resolved.sites for path in s.aliases for name, _ in all_tensors(s.module)
            )
            placed = {name: layout for p in resolved.placements for name, layout in p.layouts.items()}
            check(module, self._env, placed, frozenset(taken))

    def _is_in_place(self) -> bool:
        """Whether the data-parallel part shards the module in place, see [Note: in place]."""
        asked = getattr(self._data_parallel, "shards_in_place", None)
        return bool(asked and asked(self._env, any(is_dtensor(p) for p in self.module.parameters())))

    def _data_parallel_part(self, module: nn.Module) -> nn.Module:
        """The module with gradients averaged; weights that the plan replicates on a fully sharded mesh apart."""
        kept, unclaimed = self._kept_whole(), self._unclaimed_names()
        owned = self._sharded_names()
        if self._is_in_place():  # what lies inside a sharder's module cannot be split with the rest
            kept |= unclaimed
        else:
            owned -= unclaimed
        wrapped = self._data_parallel.wrap(module, self._env, self._device, owned | kept)
        if kept:
            others = {name for name, _ in all_tensors(module)} - kept
            wrapped = replicating_wrapper().wrap(wrapped, self._env, self._device, frozenset(others))
        return wrapped

    def _kept_whole(self) -> frozenset[str]:
        """Names, under every alias, of weights that the plan replicates although the mesh would split them."""
        chosen = {n for n in self._plan if self._plan[n].layout.name == "replicate"}
        if not chosen or not self._env.fully_sharded_axes:
            return frozenset()
        ids = {id(p) for name, p in self.module.named_parameters() if name in chosen}
        return frozenset(n for n, p in self.module.named_parameters(remove_duplicate=False) if id(p) in ids)

    def _guard_optimizers(self) -> None:
        """Refuse optimizers that are wrong on pieces; those of tables are marked, DTensors show it themselves."""
        for path in self._paths:
            owned = self.module.get_submodule(path)
            pieces = owned.chunked_state() if isinstance(owned, ShardedModule) and self._env.table_size > 1 else ()
            for name, parameter in owned.named_parameters():
                if name in pieces:
                    parameter._dmp_sharded = PIECE  # type: ignore[attr-defined]
        guard_optimizers()

    @property
    def module(self) -> nn.Module:
        """The module itself, without any data-parallel wrapper around it."""
        return self._unwrapped[0]

    @property
    def skeleton(self) -> nn.Module | None:
        """Structure of the module before dense weights were split, on meta around the live sharded tables; or None."""
        return self._skeleton[0] if self._skeleton else None

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

    forward = Forward()

    @property
    def running(self) -> nn.Module:
        """What forward runs: the module, in its data-parallel wrapper where it has one."""
        return self._running[0]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Without averages of dense gradients, while they accumulate: the next backward outside averages their sum.

        Gradients of tables are exchanged in every backward, which comes to the same.
        """
        with ExitStack() as stack:
            layer = self.running
            while layer is not self.module:
                stack.enter_context(layer.no_sync())  # type: ignore[operator]
                layer = layer.module  # type: ignore[assignment]
            if hasattr(type(layer), "set_requires_gradient_sync"):  # FSDP2
                layer.set_requires_gradient_sync(False)  # type: ignore[operator]
                stack.callback(layer.set_requires_gradient_sync, True)  # type: ignore[arg-type]
            yield

    def train(self, mode: bool = True) -> DistributedModelParallel:
        """As of the module, whose own `train` is called."""
        self.running.train(mode)
        self.training = mode
        return self

    def apply(self, fn: Callable[[nn.Module], Any]) -> DistributedModelParallel:
        """`fn` of every module, the root and this wrapper last."""
        self.module.apply(fn)
        fn(self)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DistributedModelParallel:
        """Moves and casts, by the module's own."""
        self.running._apply(fn, recurse)
        return self

    def share_memory(self) -> DistributedModelParallel:
        """As torch's, where nothing is split: torch has no shared memory for DTensors, and ends the process.

        Raises:
            ShardError: weights that are DTensors.
        """
        if any(is_dtensor(p) for p in self.module.parameters()):
            raise ShardError(
                "weights that are split (DTensors) cannot be shared between processes: to_unsharded(model)"
            )
        super().share_memory()
        return self

    def extra_repr(self) -> str:
        """The module's class."""
        return type(self.module).__name__ if self.__dict__.get("_unwrapped") else ""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The unsharded module's names; sharded parameters as `ChunkedTensor`s of this rank's pieces."""
        return state_dict_of_pieces(self.module, *args, **kwargs)

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], prefix: str = "", strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load whole tensors (each rank takes its pieces) or this plan's own pieces; the dict given is not changed.

        Collective: what does not fit on one rank is raised on all, and no rank has loaded anything then.

        Args:
            prefix: of the names in `state_dict`; names without it belong to others.
            strict: raise on missing and unexpected names, else return them.
            assign: as in torch, for whole parameters that no sharder owns; what is sharded is filled in place, and
                ties stay.

        Returns:
            Missing and unexpected keys, as torch does.

        Raises:
            CheckpointError: names (when strict), shapes, or dtypes (with `assign`) that do not fit, or a sharded
                parameter on meta (without); the model is unchanged.
        """
        given = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        own = self.module.state_dict()
        group = self._env.group() if self._env.size > 1 else None
        found = everyone(lambda: self._check_given(own, given, prefix, strict, assign), group, "load_state_dict")
        missing, unexpected = found[self._env.rank if group is not None else 0]
        if any(each != found[0] for each in found):
            rank = next(rank for rank, each in enumerate(found) if each != found[0])
            raise CheckpointError(
                "load_state_dict: expected the same names on every rank; rank 0 has (missing, unexpected) "
                f"{found[0]}, rank {rank} {found[rank]}; copies would drift apart"
            )
        ties = find_ties(self.module) if assign else []
        tied = [module._parameters[name] for (module, name), *_ in ties]
        if assign:  # which gives storage to what is on meta, as in torch
            own = {k: torch.empty_like(v, device=self._device) if _is_split_on_meta(v) else v for k, v in own.items()}
        try:
            self.module.load_state_dict(with_local_parts(own, given), strict=False, assign=assign)
        except DmpError as error:
            raise CheckpointError(str(error)) from error
        restore_ties([_replaced_first(tie, old) for tie, old in zip(ties, tied, strict=True)])
        if assign and self.running is not self.module:  # its hooks are on the parameters that have been replaced
            self._is_data_parallel = False
            self.init_data_parallel()
        return _IncompatibleKeys(missing, unexpected)

    def _check_given(
        self, own: Mapping[str, Any], given: Mapping[str, Any], prefix: str, strict: bool, assign: bool
    ) -> tuple[list[str], list[str]]:
        """Missing and unexpected names; what `load_state_dict` raises, before anything is filled."""
        missing = [prefix + k for k in own if k not in given]
        unexpected = [prefix + k for k in given if k not in own]
        wrong = [f"{prefix}{k} {misfit(own[k], given[k])}" for k in own if k in given and misfit(own[k], given[k])]
        if not wrong:
            in_place = self._sharded_names() | {k for k, v in own.items() if is_dtensor(v)}
            reasons = {k: _unfillable(own[k], given[k], assign) for k in own if k in given and k in in_place}
            wrong = [f"{prefix}{k} {reason}" for k, reason in reasons.items() if reason]
        if (strict and (missing or unexpected)) or wrong:
            parts = [f"missing keys: {missing}"] * bool(missing and strict)
            parts += [f"unexpected keys: {unexpected}"] * bool(unexpected and strict) + wrong
            raise CheckpointError(f"state dict does not fit {type(self.module).__name__}: " + "; ".join(parts))
        return missing, unexpected

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The unsharded module's names; a sharded parameter holds this rank's pieces, possibly none."""
        with pieces_shown(self.module):
            return iter(list(self.module.named_parameters(prefix, recurse, remove_duplicate)))

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
        with pieces_shown(self.module):  # this is how a parent's `parameters()` comes by
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], *args: Any
    ) -> None:
        """A parent module's load: what is below this wrapper, which torch comes to next, finds itself loaded."""
        given = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        assign = bool(local_metadata.get("assign_to_params_buffers"))
        try:
            self.load_state_dict(given, prefix, strict=False, assign=assign)
        except CheckpointError as error:
            args[-1].append(str(error))
        held = dict([*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)])
        own = self.module.state_dict()
        own.update((k, held[k]) for k, v in own.items() if k in held and not isinstance(v, ChunkedTensor))
        strict, missing, *_ = args
        for name in own:
            if "." not in name:  # of the root itself, which torch does not come to
                missing.extend([prefix + name] * (strict and prefix + name not in given))
                state_dict.pop(prefix + name, None)
            elif prefix + name in given:
                state_dict[prefix + name] = own[name]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def copy(self, device: torch.device | str | None = None) -> DistributedModelParallel:
        """An independent copy on `device` (this one's by default) that shares process groups.

        For an average of weights give torch's `AveragedModel` an `avg_fn`: its `multi_avg_fn`, the default, takes no
        DTensors beside tables.
        """
        return self._copied({}, self._device if device is None else torch.device(device))

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedModelParallel:
        return self._copied(memo, self._device)

    def _copied(self, memo: dict[int, Any], device: torch.device) -> DistributedModelParallel:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        shared = (self._env, self._plan, self._data_parallel, self._sharders, self._placements)
        memo.update({id(each): each for each in shared})
        if device.type != self._device.type and any(is_dtensor(p) for p in self.module.parameters()):
            raise ShardError(
                f"the model's weights are split on a mesh of {self._device.type} devices and cannot be copied to "
                f"{device}; to_unsharded(model) gives a plain module, which a mesh of {device.type} can take"
            )
        rebuilt = (
            "_modules",
            "_is_data_parallel",
            "_fused_optimizer",
            "_unwrapped",
            "_running",
            "_watch",
            "_split_watch",
            "_skeleton",
            "_device",
        )
        new.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in rebuilt})
        new._device, new._is_data_parallel, new._skeleton, new._watch = device, False, [], None
        new._split_watch = None
        if self._skeleton:  # see [Note: in place]
            memo.update({id(owned): copy.deepcopy(owned, memo) for owned in self._owned()})
            new._unwrapped = [copy.deepcopy(self._skeleton[0], memo)]
            new._skeleton = [skeleton_of(new.module, new._owned())]
        else:
            new._unwrapped = [copy.deepcopy(self.module, memo)]
        new._running, new.__dict__["_modules"] = [new.module], new.module._modules
        if device != self._device:
            for moved in new._owned() if new._skeleton else [new.module]:
                moved.to(device)
        new._fused_optimizer = FusedOptimizer(new._fused_parameters())
        if new._skeleton:
            new._place()
        wraps_meta = self._is_data_parallel and new._is_in_place()
        if wraps_meta:
            new.init_data_parallel()
        if new._skeleton:
            copy_values(self.module, new.module, device)
        if self._is_data_parallel and not wraps_meta:
            new.init_data_parallel()
        new._guard_optimizers()
        take(new.module)
        live.add(new)
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

    def _unclaimed_names(self) -> frozenset[str]:
        """Names (under every alias) of parameters in sharders' modules that no sharder named: data-parallel ones."""
        return frozenset(
            join(alias, relative)
            for path, aliases in self._paths.items()
            for relative, _ in self.module.get_submodule(path).named_parameters(remove_duplicate=False)
            if relative not in self._claimed[path]
            for alias in aliases
        )

    def _fused_parameters(self) -> Iterator[FusedParameter]:
        for path in self._paths:
            owned = self.module.get_submodule(path)
            for f in owned.fused_parameters() if isinstance(owned, FusedModule) else ():
                yield FusedParameter(join(path, f.name), f.parameter, f.options, f.state, f.widths)


def _environment(env: ShardingEnv | None, device: Any) -> ShardingEnv:
    """The env given, or the default one; whether the device can be had is said when all ranks are there to hear it."""
    check_env(env)
    if env is not None:
        return env
    where, _ = _attempt(lambda: torch.device(device) if device is not None else None)
    join_launch(where)
    return default_env(where.type if where is not None and where.type != "meta" else None)


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


def _describe(module: nn.Module) -> str:
    """The model as text, for comparing it over ranks: every parameter and buffer."""
    return "\n".join(
        f"{name}: {'lazy' if is_lazy(t) else (tuple(t.shape), t.dtype, t.is_meta)} {t.requires_grad}"
        for name, t in [*module.named_parameters(), *module.named_buffers()]
    )


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


def _replaced_first(tie: Tie, old: nn.Parameter | None) -> Tie:
    return sorted(tie, key=lambda place: place[0]._parameters[place[1]] is old)


def _check_not_lazy(name: str, parameter: nn.Parameter) -> None:
    if is_lazy(parameter):
        raise ShardError(
            f"parameter {name!r} of a lazy module has no shape yet: pass init_data_parallel=False, run one "
            "forward, then call init_data_parallel()"
        )


def _is_split_on_meta(value: Any) -> bool:
    return is_dtensor(value) and value.is_meta


def _unfillable(own: torch.Tensor, given: torch.Tensor, assign: bool) -> str:
    """Why a value that fits a sharded parameter cannot go where that lies, or nothing."""
    if assign and given.dtype != own.dtype:
        return f"has dtype {given.dtype}, expected {own.dtype}: what is sharded is filled in place; cast one of them"
    if not assign and _is_split_on_meta(own):
        return "is on meta and would stay empty: pass assign=True, or init_parameters=True when wrapping"
    return ""


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
