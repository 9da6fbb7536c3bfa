"""The wrapped models inside a module: what takes a model takes a parent of some too, under the parent's names."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from dmp import live_models as live
from dmp.contracts import FusedParameter
from dmp.env import ShardingEnv
from dmp.errors import ShardError
from dmp.foreign import type_name
from dmp.names import join_name
from dmp.plans.plan import ShardingPlan
from dmp.state.dtensor_ranks import env_of_dtensors
from dmp.wrap.wrapper import DistributedModelParallel


def wrapped_in(model: nn.Module) -> dict[str, DistributedModelParallel]:
    """Path -> wrapped model; the module itself is at `""`.

    Raises:
        ShardError: no module: parameters, a state dict, an optimizer.
    """
    if not isinstance(model, nn.Module):
        raise ShardError(f"expected the wrapped model, or a torch.nn.Module around it; got {type_name(model)}")
    if isinstance(model, DistributedModelParallel):
        return {"": model}
    return {path: m for path, m in model.named_modules() if isinstance(m, DistributedModelParallel)}


def in_force(model: nn.Module) -> dict[str, DistributedModelParallel]:
    """`wrapped_in`, and of a wrapped model's own `module` the model: what is asked of one is asked of the other."""
    found, around = wrapped_in(model), next((each for each in live.models if each.module is model), None)
    return found if around is None else {"": around}


def common_env(model: nn.Module) -> ShardingEnv | None:
    """Where the wrapped models in it run; None where there are none.

    Raises:
        ShardError: several, on different meshes.
    """
    envs: list[tuple[str, ShardingEnv]] = [(path, m.env) for path, m in in_force(model).items()]
    for path, env in envs[1:]:
        first, expected = envs[0]
        if env != expected:
            raise ShardError(
                f"the wrapped models {first!r} and {path!r} are on different meshes, {expected} and {env}; "
                "give each of them by itself"
            )
    return envs[0][1] if envs else None


def known_env(model: nn.Module) -> ShardingEnv | None:
    """Of the wrapped models in it, or of one that it is a part of, or where its DTensors are; None where nothing tells
    of other ranks."""
    env = common_env(model)
    if env is not None:
        return env
    for wrapped in live.models:
        if any(part is model for part in wrapped.module.modules()):
            of_all: ShardingEnv = wrapped.env
            return of_all
    return env_of_dtensors(model)


def env_of(model: nn.Module) -> ShardingEnv:
    """`known_env`, or this process alone."""
    return known_env(model) or ShardingEnv.single()


def joint_plan(model: nn.Module) -> ShardingPlan:
    """The plans in force, in one; empty where nothing is wrapped."""
    models = in_force(model)
    if "" in models:
        return models[""].plan
    return ShardingPlan({join_name(path, name): m.plan[name] for path, m in models.items() for name in m.plan})


def unsharded_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters that no sharder has put in a place of its own."""
    owned = {join_name(path, name) for path, m in in_force(model).items() for name in m._made.sharded_names()}
    return ((name, p) for name, p in model.named_parameters() if name not in owned)


def fused_parameters(model: nn.Module) -> dict[str, FusedParameter]:
    """Parameters that wrapped models update in the backward pass, by name."""
    return {
        join_name(path, name): f for path, m in in_force(model).items() for name, f in m.fused_optimizer.fused.items()
    }
