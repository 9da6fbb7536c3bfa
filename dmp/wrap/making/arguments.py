"""What `DistributedModelParallel` is given, checked by each rank before anything is changed."""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass, replace
from enum import Enum
from inspect import signature
from itertools import chain
from types import NoneType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dmp import live_models
from dmp.contracts import ShardedModule, hook
from dmp.env import ShardingEnv, default_env, env_of_torchrec
from dmp.errors import PlanError, ShardError
from dmp.foreign import is_torchrecs, type_name
from dmp.places import is_dtensor
from dmp.ranks.launch import join_launch
from dmp.registry import (
    adopted,
    adopted_planner,
    adopted_wrapper,
    check_sharder_protocol,
    default_data_parallel_wrapper,
    default_sharders,
)
from dmp.wrap.earlier.earlier_optimizers import name_elsewhere
from dmp.wrap.values.skeleton import all_tensors

_taken: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True)
class Arguments:
    """Those of `DistributedModelParallel`; `checked` puts defaults in the places of None, but for plan and planner."""

    module: nn.Module
    env: ShardingEnv
    device: Any
    plan: Any
    sharders: Any
    init_data_parallel: bool
    init_parameters: bool
    wrapper: Any
    planner: Any
    trackers: Any = None

    def checked(self) -> Arguments:
        """The arguments in full, after a look at all that a user can get wrong without knowing sharders or plans.

        Raises:
            ShardError: something of another kind, a device without values, or a module that is wrapped already.
            PlanError: a plan and a planner.
        """
        if not isinstance(self.module, nn.Module):
            is_class = isinstance(self.module, type)
            got = f"the class {type_name(self.module)}: call it" if is_class else type_name(self.module)
            raise ShardError(f"expected a torch.nn.Module to wrap; got {got}")
        _check_device(self.device, self.init_parameters or self.init_data_parallel)
        _check_data_parallel_wrapper(self.wrapper)
        _check_trackers(self.trackers)
        _check_planner(self.planner)
        _check_named(self.module)
        _check_not_wrapped(self.module)
        _check_not_shared(self.module, self.env)
        _check_may_be_trained(self.module)
        _check_plain(self.module)
        sharders = default_sharders() if self.sharders is None else adopted(self.sharders)
        for sharder in sharders:
            check_sharder_protocol(sharder)
        if self.plan is not None and self.planner is not None:
            raise PlanError("pass a plan or a planner, not both; to fix part of a plan: planner.plan(..., pinned=plan)")
        device = self.env.device if self.device is None else torch.device(self.device)
        wrapper = adopted_wrapper(self.wrapper) or default_data_parallel_wrapper()
        planner = adopted_planner(self.planner)
        return replace(self, sharders=sharders, device=device, wrapper=wrapper, planner=planner)

    def facts(self) -> dict[str, str]:
        """What all ranks must share of them: name -> text."""
        return {
            "the mesh": str(self.env).rpartition(", rank")[0],
            "device": self.device.type,
            "whether a plan is given": str(self.plan is not None),
            "planner": type(self.planner).__name__,
            "sharders": ", ".join(map(_shown_sharder, self.sharders)),
            "data_parallel_wrapper": type(self.wrapper).__name__,
            "init_data_parallel": str(bool(self.init_data_parallel)),
            "init_parameters": str(bool(self.init_parameters)),
            "model": _described(self.module),
            "optimizers in the backward pass": _updated_by(self.module),
        }


def environment(env: ShardingEnv | None, device: Any) -> ShardingEnv:
    """The env given, or the default one; whether the device can be had is said when all ranks are there to hear it.

    Raises:
        ShardError: what is no env.
    """
    try:
        kind = None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        kind = None
    if is_torchrecs(env, "ShardingEnv"):
        try:
            return env_of_torchrec(env, kind.type if kind is not None and kind.type != "meta" else None)
        except ValueError as error:
            raise ShardError(f"env: {error}") from error
    if env is not None and not isinstance(env, ShardingEnv):
        raise ShardError(
            f"expected env to be a {type_name(ShardingEnv)} (see ShardingEnv.from_mesh and .from_process_group) or "
            f"TorchRec's; got {type_name(env)}"
        )
    if env is not None:
        return env
    join_launch(kind)
    return default_env(kind.type if kind is not None and kind.type != "meta" else None)


def take(module: nn.Module) -> None:
    """From now on neither this module nor one inside it can be wrapped again, but for those without values: an
    activation that is the default of an argument, say, is in every model that was made with it.
    """
    _taken.update(each for each in module.modules() if any(True for _ in chain(each.parameters(), each.buffers())))


def _check_device(device: Any, needs_values: bool) -> None:
    if device is None:
        return
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ShardError(f"expected device to be a torch.device or its name, as 'cpu'; got {device!r}") from error
    if kind == "meta" and needs_values:
        raise ShardError(
            "device='meta' holds no values, so nothing can run on it: leave out device to take the mesh's. A module "
            "whose parameters are on meta is filled on the mesh's device. To see shards without values: "
            "init_parameters=False and init_data_parallel=False; to plan: planner.plan(...)"
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        raise ShardError(f"device={str(device)!r} is not to be had in this process: {error}") from error


def _check_planner(planner: Any) -> None:
    if planner is None or is_torchrecs(planner, "EmbeddingPlannerBase"):
        return
    if isinstance(planner, type) or not callable(getattr(planner, "collective_plan", None)):
        got = f"the class {type_name(planner)}: call it" if isinstance(planner, type) else type_name(planner)
        raise ShardError(f"expected a planner, as planner.ShardingPlanner() is one; got {got}")


def _check_trackers(given: Any) -> None:
    if given is None or (is_torchrecs(given, "ModelTrackerConfigs") and given.raw_id_tracker_config is None):
        return
    raise ShardError(
        f"model_tracker_configs is a {type_name(given)} that asks for a tracker of raw ids, which there is of "
        "HashZchManagedCollisionModule alone, or for none. Which rows are trained "
        "model.init_torchrec_delta_tracker(DeltaTrackerConfig()) tells"
    )


def _check_data_parallel_wrapper(wrapper: Any) -> None:
    if wrapper is None:
        return
    if isinstance(wrapper, type):
        raise ShardError(f"data_parallel_wrapper is the class {wrapper.__name__}; call it: {wrapper.__name__}(...)")
    wrap = getattr(wrapper, "wrap", None)
    form = (
        "expected data_parallel_wrapper to have wrap(module, env, device, ignored), which returns a module, as "
        f"sharders.DDPWrapper() and sharders.FSDPWrapper() do; got {type_name(wrapper)}"
    )
    if not callable(wrap):
        raise ShardError(f"{form}, which has none")
    if is_torchrecs(wrapper, "DefaultDataParallelWrapper") and type(wrapper).__module__.startswith("torchrec."):
        return
    try:
        signature(wrap).bind(nn.Module, None, None, frozenset())
    except TypeError:
        raise ShardError(
            f"{form}, which has wrap{signature(wrap)}: what changes TorchRec's wrapper in place does nothing here"
        ) from None


def _check_named(module: nn.Module) -> None:
    """Some modules of libraries that group parameters have listings of their own."""
    try:
        module.named_parameters(remove_duplicate=False)
    except TypeError as error:
        raise ShardError(
            f"the module to wrap, {type(module).__name__}, has a named_parameters that does not take what torch's takes"
            f" ({error}): wrap the module inside of it, or add the argument"
        ) from None


def _check_not_wrapped(module: nn.Module) -> None:
    """Rank 0's values go to all ranks when a module is wrapped: chunks would be overwritten by other chunks."""
    for path, each in module.named_modules():
        # Asked by name first: of a module that is none, `isinstance` of a protocol takes ten times as long.
        if each not in _taken and not (hasattr(each, "chunked_state") and isinstance(each, ShardedModule)):
            continue
        where = f"its submodule {path!r}" if path else "it"
        raise ShardError(
            f"the module to wrap, {type(module).__name__}, is part of a wrapped model already or holds one: {where} "
            f"({type(each).__name__}) was put on a mesh before, and rank 0's pieces would overwrite the others'. Wrap "
            "the whole model once; to change mesh or plan: to_unsharded(model), or a checkpoint into a new model"
        )


def _check_not_shared(module: nn.Module, env: ShardingEnv) -> None:
    """Each model would train a weight of its own where another was put in its place, and DDP averages one once."""
    if _shared(module, env) is not None:
        gc.collect()  # a model that was let go may be there yet, on some ranks alone
    if (found := _shared(module, env)) is not None:
        raise ShardError(
            f"the module to wrap, {type(module).__name__}, shares {found[0]!r} with a wrapped model, whose "
            f"{found[1]!r} it is: they would train it apart. Wrap one module that has both as attributes, and call its "
            "parts; or wrap a deepcopy, where each is to have its own"
        )


def _shared(module: nn.Module, env: ShardingEnv) -> tuple[str, str] | None:
    """A trained weight that a wrapped model has too, and its name there."""
    averaged = live_models.models if env.data_size > 1 else ()
    elsewhere = {id(p): name for model in averaged for name, p in model.named_parameters()}
    trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    found = ((name, name_elsewhere(p, module) or elsewhere.get(id(p))) for name, p in trained)
    return next(((name, other) for name, other in found if other is not None), None)


def _check_may_be_trained(module: nn.Module) -> None:
    kept = ((name, p) for name, p in module.named_parameters() if p.requires_grad and not is_lazy(p))
    made = [name for name, p in kept if p.is_inference()]
    if made:
        raise ShardError(
            f"{made[0]!r} and {len(made) - 1} more parameters were made under torch.inference_mode(), where "
            "nobody can train them. Make the model outside of it, or, to evaluate alone, model.requires_grad_(False)"
        )


_AVERAGES = ("DistributedDataParallel", "FullyShardedDataParallel")


def _check_plain(module: nn.Module) -> None:
    """What splits or averages dense weights comes of the mesh: two of them do each other's work again, and a look at a
    DTensor's bits, which ranks take to compare their values, may take torch for ever."""
    for path, each in module.named_modules():
        if name := next((c.__name__ for c in type(each).__mro__ if c.__name__ in _AVERAGES), None):
            raise ShardError(
                f"the module to wrap, {type(module).__name__}, is or holds torch's {name} (at {path!r}), which averages"
                " the gradients that a wrapped model averages by itself: wrap the module inside of it"
            )
    if name := next((name for name, t in all_tensors(module) if is_dtensor(t)), None):
        raise ShardError(
            f"the module to wrap, {type(module).__name__}, has {name!r} as a DTensor, as of fully_shard or "
            "parallelize_module: wrap the plain module, on a mesh whose axes say what is split: 'shard' as by "
            "fully_shard, whose options are data_parallel_wrapper=FSDPWrapper(...), 'tp' as by parallelize_module, "
            "whose plan is sharders=[TensorParallelSharder({...}), *default_sharders()]"
        )


def _shown_sharder(sharder: Any) -> str:
    """With its options, but for addresses in memory, which differ between ranks."""
    options = re.sub(r" at 0x[0-9a-f]+", "", str(hook(sharder, "options") or ""))
    return f"{type(sharder).__name__}({options})"


def _described(module: nn.Module) -> str:
    """The model as text, for comparing it over ranks: every parameter and buffer."""
    return "\n".join(
        f"{name}: {'lazy' if is_lazy(t) else (tuple(t.shape), t.dtype, t.is_meta)} {t.requires_grad}"
        for name, t in all_tensors(module, remove_duplicate=True)
    )


def _updated_by(module: nn.Module) -> str:
    """What updates parameters in the backward pass, as text: each rank would train its part, or copy, by its own."""
    lines = []
    for name, p in module.named_parameters():
        given = iter(getattr(p, "_optimizer_kwargs", ()))  # TorchRec's placeholders have no param groups
        for optimizer in getattr(p, "_in_backward_optimizers", ()):
            options = {**next(given, {}), **next(iter(getattr(optimizer, "param_groups", ())), {})}
            told = sorted(key for key, value in options.items() if key != "params" and value is not None)
            shown = ", ".join(f"{key}={_shown(options[key])}" for key in told if options[key] is not False)
            lines.append(f"{name}: {type(optimizer).__name__}({shown})")
    return "\n".join(lines)


def _shown(option: Any) -> str:
    """An option as text that is the same on all ranks where the option is: an object's may hold its address."""
    if isinstance(option, torch.Tensor):
        return str(option.tolist()) if not option.is_meta else str(tuple(option.shape))
    if isinstance(option, (list, tuple)):
        return f"({', '.join(map(_shown, option))})"
    return str(option) if isinstance(option, (bool, int, float, str, Enum, NoneType)) else type(option).__name__
