"""`DistributedModelParallel`: the wrapped model as a module. It holds the record of what it is made of, and the calls
that are under way; how that is built, copied and filled is in the files beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from dmp import live_models as live
from dmp.calls import Calls, alone
from dmp.collection import without_collection
from dmp.contracts import AnySharder, DataParallelWrapper, Planner, set_hook
from dmp.env import ShardingEnv
from dmp.errors import CheckpointError, ShardError
from dmp.layouts.layout import Layout, ParameterSharding
from dmp.places import is_dtensor
from dmp.plans.plan import ShardingPlan
from dmp.ranks import calls_so_far, entry
from dmp.wrap.earlier.earlier_optimizers import marking_replaced
from dmp.wrap.earlier.parameter_hooks import carrying_hooks
from dmp.wrap.forward import Forward, refuse_scripting
from dmp.wrap.grad_sync import GradSync, without_averages
from dmp.wrap.making.agreement import check_agreement, on_all_ranks
from dmp.wrap.making.arguments import Arguments, environment, take
from dmp.wrap.making.assembly import Assembly
from dmp.wrap.making.build import build, mark_chunks
from dmp.wrap.making.copying import copied, refuse_pickling
from dmp.wrap.making.data_parallel import check_data, check_split, has_lost_hold, start_later, stopped, unknown
from dmp.wrap.making.loading import load, loaded
from dmp.wrap.optimizers.fused import FusedOptimizer
from dmp.wrap.optimizers.keyed import keyed, part_of
from dmp.wrap.outer_wrappers import keep_from_fully_shard, name_of, repr_of
from dmp.wrap.replan.reshard import Resharding, reshard
from dmp.wrap.stand_ins import stand_in
from dmp.wrap.torchrec_members import torchrec_member
from dmp.wrap.values.gathered import chunks_shown
from dmp.wrap.values.taken import note_taken


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
        data_parallel_wrapper: runs what no sharder owns; by default `sharders.FSDPWrapper`: FSDP2 where the mesh has an
            axis for it, else DistributedDataParallel.
        model_tracker_configs: TorchRec's; of its trackers none but `init_torchrec_delta_tracker(config)` is run here.
        planner: makes the plan when there is none, a `Planner`; `planner.ShardingPlanner` by default.

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
        sharders: Iterable[AnySharder] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        model_tracker_configs: Any = None,
        *,
        planner: Planner | None = None,
    ) -> None:
        super().__init__()
        env = environment(env, device)
        starts, wrapper, trackers = init_data_parallel, data_parallel_wrapper, model_tracker_configs
        asked = Arguments(module, env, device, plan, sharders, starts, init_parameters, wrapper, planner, trackers)
        with entry(f"wrapping {type(module).__name__}", env.everyone):
            given = on_all_ranks(asked.checked, env)
            check_agreement(given.facts(), env)
            self._calls = Calls(f"the model that was wrapped at call {calls_so_far(env.everyone)}")
            trained = torch.inference_mode(False)  # parameters that it makes could not be
            with trained, without_collection(), marking_replaced(self, module), carrying_hooks(self, module):
                self._take(build(given, self._calls))

    def _hold(self, made: Assembly) -> None:
        self._made = made
        self._calls.fused, self._calls.part = made.fused.param_groups, part_of(made.fused)
        self.__dict__["_modules"] = made.module._modules  # its children are this one's: names stay as they are

    def _take(self, made: Assembly) -> None:
        """Hold a new model, of which optimizers and wrappers of torch's must know."""
        self._hold(made)
        mark_chunks(made)
        stand_in()
        take(made.module)
        live.add(self)
        keep_from_fully_shard(self)

    def init_data_parallel(self) -> None:
        """Start the data-parallel part, once; later calls do nothing. For lazy modules: after the first forward.

        Raises:
            ShardError: a parameter is still lazy, or on meta.
        """
        if not self._made.is_data_parallel:
            with marking_replaced(self, self.module), carrying_hooks(self, self.module):
                self._hold(start_later(self._made))

    def hold_parameters(self) -> None:
        """Before a forward: the data-parallel part is made again where it has lost parameters, see ddp_watch.py.

        Collective where it has; every rank must have done the same to its model.

        Raises:
            PlanError, RanksError: they have not.
            ShardError: beside weights that are split, one was cast to another dtype or added; or a model that was
                wrapped on meta.
        """
        if self.device.type == "meta":
            raise ShardError("the model was wrapped with device='meta': it has shards and no values, and cannot run")
        check_split(self._made)
        if has_lost_hold(held := self._made):
            try:
                self._hold(stopped(held))
                self.init_data_parallel()
            except BaseException:  # what there was may fit again: who goes on without it averages nothing
                self._hold(held)
                raise

    @alone("reshard", at_rest=True)
    def reshard(
        self,
        plan: ShardingPlan | Mapping[str, ParameterSharding | Layout] | Any = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | str | None = None,
        *,
        changed_shard_to_params: Mapping[str, Any] | None = None,
        sharded_module_fqn: str | None = None,
    ) -> Resharding:
        """Change the plan of the running model in place: any layouts of its tables to any others.

        Collective. Weights, accumulated gradients and optimizer state go from rank to rank by the intersection of old
        and new rectangles: only what changes its rank travels, a few MB at a time, and a rank needs memory for its new
        shards and one buffer beside the old ones. Training goes on to the bit where the layouts allow (row-wise state
        in other column blocks is taken from their mean, as from a checkpoint). The model, its modules and
        `fused_optimizer` stay the same objects, learning rates and schedulers go on; a table's parameter is another
        one, as after wrapping. A copy of the model keeps its plan, and its rows are others then: average the two
        (`AveragedModel`) only after the same `reshard` of both. Everything is checked on all ranks before anything
        is changed.

        Args:
            plan: entries for some tables, or all; those that it does not name keep theirs. TorchRec's plans too.
            optimizer: the ordinary optimizers (one, or a list) that hold tables' parameters: their state moves along
                and their groups get the new parameters. One that is left out and has state for them refuses to step.
            changed_shard_to_params, sharded_module_fqn: as of TorchRec's `reshard`, which has them first and second: a
                dict of module's path -> (volume, its plan), and the path of one of them.

        Returns:
            The plan in force, which parameters have moved, and the bytes that each rank has sent.

        Raises:
            PlanError: a plan that does not fit, or makes tables of dense weights or the other way around; ranks that
                disagree. What fails on one rank is raised on all; the model is unchanged.
            ShardError: a forward or backward pass is under way, or a module or state that cannot be moved.

        Example:
            >>> model = DistributedModelParallel(torch.nn.EmbeddingBag(4, 2), plan={"weight": row_wise()})
            >>> model.reshard({"weight": table_wise(0)}).sent_bytes
            (0,)
        """
        with (
            torch.inference_mode(False),  # in which parameters could not be trained afterwards
            entry("model.reshard", self.env.everyone),
            marking_replaced(self, self.module, by_reshard=True),
        ):
            path, given = sharded_module_fqn, changed_shard_to_params if plan is None else plan
            if isinstance(optimizer, str):
                path, optimizer = optimizer, None
            made, done = reshard(self._made, given, path, optimizer, self._calls)
            self._hold(made)
            live.say_who_keeps_another_plan(self)
            mark_chunks(made)
        return done

    @property
    def module(self) -> nn.Module:
        """The module itself, without any data-parallel wrapper around it."""
        return self._made.module

    @property
    def skeleton(self) -> nn.Module | None:
        """Structure of the module before dense weights were split, on meta around the live sharded tables; or None."""
        return self._made.skeleton

    def give_changes(self, plain: nn.Module) -> None:
        """What was changed since the skeleton, of which `plain` is made: see since_split.py."""
        if self._made.since_split is not None:
            self._made.since_split.give(self.module, plain)

    @property
    def plan(self) -> ShardingPlan:
        """The plan in force."""
        return self._made.plan

    @property
    def _plan(self) -> ShardingPlan:
        """As TorchRec's users read it."""
        return self.plan

    @property
    def env(self) -> ShardingEnv:
        """Where the model runs."""
        return self._made.env

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self._made.device

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The parameters that are updated in the backward pass: their options (`lr`, ...) and state."""
        live.look()
        return keyed(self._made.fused)

    @property
    def sharded_modules(self) -> dict[str, nn.Module]:
        """Path -> each module that a sharder has put into the model."""
        return {owned.path: self.module.get_submodule(owned.path) for owned in self._made.owned}

    def unknown_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters that were added and that no forward has met, by name: their gradients are each rank's own."""
        return unknown(self._made)

    forward = Forward()

    @property
    def running(self) -> nn.Module:
        """What forward runs: the module, in its data-parallel wrapper where it has one."""
        return self._made.running

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Without averages of dense gradients, while they accumulate: the next backward outside averages their sum.

        Gradients of tables are exchanged in every backward, which comes to the same.
        """
        with without_averages(self):
            yield

    require_backward_grad_sync = GradSync()

    def train(self, mode: bool = True) -> DistributedModelParallel:
        """As of the module, whose own `train` is called."""
        self.running.train(mode)
        self.training = mode
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the module, whose own `zero_grad` is called."""
        with chunks_shown(self.module):
            self.module.zero_grad(set_to_none)

    def apply(self, fn: Callable[[nn.Module], Any]) -> DistributedModelParallel:
        """`fn` of every module, the root and this wrapper last."""
        self.module.apply(fn)
        fn(self)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DistributedModelParallel:
        """Moves and casts, by the module's own; not to meta where there are sharded modules, which run on no values."""
        if self._made.owned and self.device.type != "meta" and fn(torch.empty(0, device=self.device)).is_meta:
            raise ShardError(
                "a wrapped model with sharded modules is not moved to meta, where tensors have no values: "
                "dmp.to_unsharded(model) is a plain module, which can be"
            )
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
        return type(self.module).__name__ if "_made" in self.__dict__ else ""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The unsharded module's names; sharded parameters as `ChunkedTensor`s of this rank's chunks."""
        check_data(self._made)
        with chunks_shown(self.module, as_state=True):
            state = self.module.state_dict(*args, **kwargs)
            note_taken(self._calls, state, kwargs.get("prefix", ""))
        return state

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], prefix: str = "", strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load whole tensors (each rank takes its chunks) or this plan's own chunks; the dict given is not changed.

        Collective: what does not fit on one rank is raised on all, and no rank has loaded anything then.

        Args:
            prefix: of the names in `state_dict`; names without it belong to others. A bool is `strict`, as in torch.
            strict: raise on missing and unexpected names, else return them.
            assign: as in torch, for whole parameters that no sharder owns; what is sharded is filled in place, and
                ties stay.

        Returns:
            Missing and unexpected keys, as torch does.

        Raises:
            CheckpointError: names (when strict), shapes, or dtypes (with `assign`) that do not fit, a sharded
                parameter on meta (without), or other values on some rank of what is whole; the model is unchanged.
        """
        keys = load(self._made, self._calls, state_dict, prefix, strict, assign)
        if assign and self.running is not self.module:  # its hooks are on the parameters that have been replaced
            self._hold(stopped(self._made))
            self.init_data_parallel()
        return keys

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The unsharded module's names; a sharded parameter holds this rank's chunks, possibly none."""
        with chunks_shown(self.module):
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
        with chunks_shown(self.module):  # this is how a parent's `parameters()` comes by
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], *args: Any
    ) -> None:
        """A parent module's load: what is below this wrapper, which torch comes to next, finds itself loaded."""
        given = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        assign = bool(local_metadata.get("assign_to_params_buffers"))
        strict, missing, _, problems = args
        try:
            self.load_state_dict(given, prefix, strict=False, assign=assign)
        except CheckpointError as error:
            problems.append(str(error))
        loaded(self, state_dict, prefix, missing if strict else None)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def copy(self, device: torch.device | str | None = None) -> DistributedModelParallel:
        """An independent copy on `device` (this one's by default) that shares process groups."""
        return self._copied({}, self.device if device is None else torch.device(device))

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedModelParallel:
        return self._copied(memo, self.device)

    def _copied(self, memo: dict[int, Any], device: torch.device) -> DistributedModelParallel:
        new = memo[id(self)] = type(self).__new__(type(self))
        made = copied(self._made, memo, device)
        own = {name: value for name, value in self.__dict__.items() if name not in ("_modules", "_made")}
        new.__dict__.update(copy.deepcopy(own, memo))
        for module in made.sharded:
            set_hook(module, "calls", new._calls)
        live.copies_of[new] = live.copies_of.setdefault(self, object())
        new._take(made)
        return new

    __reduce_ex__, __prepare_scriptable__, _get_name, __repr__ = refuse_pickling, refuse_scripting, name_of, repr_of

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own where its class has one, as of models that train themselves; else torch's."""
        is_own = type(self._made.module).compile is not nn.Module.compile
        return self._made.module.compile(*args, **kwargs) if is_own else super().compile(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the module show through, so that its user code works on the wrapper too."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            made = self.__dict__.get("_made")
            if made is None:
                raise
            try:
                return getattr(made.module, name)
            except AttributeError:
                if (found := torchrec_member(self, made, name)) is None:
                    raise
                return found

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("module", "_dmp_wrapped_module") and isinstance(value, nn.Module):
            raise ShardError(
                f"model.{name} of a wrapped model is not replaced: change modules in place, or before wrapping; "
                "torch.compile(model) and DistributedModelParallel(..., data_parallel_wrapper=) take the whole"
            )
        made = self.__dict__.get("_made")
        is_parameter = isinstance(value, nn.Parameter)  # a new one too: here nothing would find it
        if made is None or not (is_parameter or self._is_modules(name)):
            super().__setattr__(name, value)
        else:  # what is read here is the module's, whose code reads it too
            setattr(made.module, name, value)

    def _is_modules(self, name: str) -> bool:
        """Whether an attribute is the module's, and not this wrapper's own."""
        return name not in self.__dict__ and not hasattr(type(self), name) and hasattr(self._made.module, name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """The module's, which a forward reads and a state dict holds."""
        self._made.module.register_parameter(name, param)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """The module's, likewise."""
        self._made.module.register_buffer(name, tensor, persistent)
