"""Sharders and planners by name: our own from a short table of strings, strangers' by registration or entry point.

Nothing is imported before it is needed, so that `import dmp` costs little more than `import torch`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from torch import nn

from dmp.contracts import AnySharder, ModelSharder, ModuleSharder, ParameterInfo
from dmp.errors import ShardError
from dmp.foreign import is_torchrecs, type_name
from dmp.read_values import shown

_BUILT_IN_SHARDERS = (
    "sharders:EmbeddingBagCollectionSharder",
    "sharders:EmbeddingCollectionSharder",
    "sharders:EmbeddingBagSharder",
    "sharders:EmbeddingSharder",
    "sharders:FusedEmbeddingBagCollectionSharder",
    "sharders:FusedEmbeddingCollectionSharder",
    "sharders:ManagedCollisionEmbeddingBagCollectionSharder",
    "sharders:ManagedCollisionEmbeddingCollectionSharder",
    "sharders:TensorParallelSharder",
)
_registered: list[AnySharder] = []


def register_sharder(sharder: AnySharder) -> AnySharder:
    """Make `sharder` one of the defaults of this process; the last registered for a module type wins.

    Raises:
        ShardError: something that lacks the protocol's members.
    """
    check_sharder_protocol(sharder)
    _registered.append(sharder)
    return sharder


def check_sharder_protocol(sharder: Any) -> None:
    """Raise `ShardError` naming what `sharder` lacks of the `ModuleSharder` or `ModelSharder` protocol."""
    if not isinstance(sharder, type) and isinstance(sharder, ModelSharder):
        return
    missing = [m for m in ("module_type", "parameters", "layouts", "shard") if not hasattr(sharder, m)]
    if isinstance(sharder, type):
        raise ShardError(f"expected a sharder object; got the class {sharder.__name__}: call it, {sharder.__name__}()")
    if missing:
        raise ShardError(f"{type_name(sharder)} is not a ModuleSharder: it lacks {', '.join(missing)}")
    if not (isinstance(sharder.module_type, type) and issubclass(sharder.module_type, nn.Module)):
        raise ShardError(
            f"{type(sharder).__name__}.module_type must be a class of nn.Module; got {sharder.module_type}"
        )


def default_sharders() -> list[AnySharder]:
    """Built-in sharders, then those of entry points (`dmp.sharders`), then registered ones; later ones win.

    They are the wrapper's where it is given none.
    """
    built_in = [load(path)() for path in _BUILT_IN_SHARDERS]
    plugins = [_instance(point) for point in _points("dmp.sharders")]
    return [*built_in, *plugins, *_registered]


def adopted(sharders: Iterable[Any]) -> list[Any]:
    """Sharders with TorchRec's among them as ours alone."""
    if not isinstance(sharders, Iterable):
        raise ShardError(f"expected a list of sharders, as default_sharders() gives; got {shown(sharders)}")
    given = list(sharders)
    if not any(is_torchrecs(sharder, "ModuleSharder") for sharder in given):
        return given
    found: list[Any] = load("sharders.torchrec.adopt:adopt")(given)
    return found


def adopted_wrapper(wrapper: Any) -> Any:
    """A data-parallel wrapper, TorchRec's default one as ours."""
    if not is_torchrecs(wrapper, "DefaultDataParallelWrapper"):
        return wrapper
    return load("sharders.torchrec.data_parallel:adopt_wrapper")(wrapper)


def adopted_planner(planner: Any) -> Any:
    """A planner, TorchRec's as ours."""
    return load("planner:from_torchrec")(planner) if is_torchrecs(planner, "EmbeddingPlannerBase") else planner


def default_planner() -> Any:
    """A planner from the entry points (`dmp.planners`) when there is one, else the built-in one."""
    points = _points("dmp.planners")
    return points[-1].load()() if points else load("planner:ShardingPlanner")()


def of_planner(name: str) -> Any:
    """A public name of the built-in planner's package."""
    return load(f"planner:{name}")


def calibration() -> tuple[Any, tuple[Any, ...]]:
    """The built-in planner's `calibrate`, and what it measures of the built-in sharders: its `Probes`."""
    names = ("Probe", "means", "exchange_seconds", "lookup_seconds", "step_seconds")
    return load("planner.costs.calibrate:calibrate"), tuple(load(f"sharders.embedding.probe:{name}") for name in names)


def default_data_parallel_wrapper() -> Any:
    """The built-in wrapper for what no sharder owns."""
    return load("sharders:FSDPWrapper")()


def replicating_wrapper() -> Any:
    """The built-in wrapper for weights that a plan replicates on a mesh that splits the others."""
    return load("sharders.data_parallel.ddp:WholeWrapper")()


def by_module_type(sharders: Iterable[AnySharder]) -> dict[type[nn.Module], ModuleSharder]:
    """The module sharders by what they take; the last for a type wins."""
    return {s.module_type: s for s in sharders if not isinstance(s, ModelSharder)}


def sharder_for(module: nn.Module, by_type: Mapping[type[nn.Module], ModuleSharder]) -> ModuleSharder | None:
    """The module sharder whose `module_type` is nearest in the module's MRO; None when there is none."""
    return next((by_type[t] for t in type(module).__mro__ if t in by_type), None)


def with_optimizer_facts(info: ParameterInfo) -> ParameterInfo:
    """`info` with what is known of its optimizer by name, where the sharder gave no more than a registered one."""
    if info.optimizer is None or None not in (info.state_bytes, info.mixes_columns):
        return info
    known = load("sharders.embedding.lookup.optimizers:facts")(info.optimizer, info.dtype)
    state_bytes = info.state_bytes if info.state_bytes is not None or known is None else known[0]
    mixes = info.mixes_columns
    if mixes is None:
        mixes = known[1] if known is not None else bool(state_bytes and state_bytes[1] > 0)
    return replace(info, state_bytes=state_bytes, mixes_columns=mixes)


def load(path: str) -> Any:
    """Object at `package.module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def plugins(group: str) -> dict[str, EntryPoint]:
    """Name -> entry point of an installed package; nothing of it is loaded yet."""
    return {point.name: point for point in _points(group)}


@cache
def _points(group: str) -> tuple[EntryPoint, ...]:
    """Entry points of installed packages; read once, for each time all packages' metadata is searched."""
    return tuple(entry_points(group=group))


def _instance(point: Any) -> AnySharder:
    loaded = point.load()
    sharder: AnySharder = loaded() if isinstance(loaded, type) else loaded
    check_sharder_protocol(sharder)
    return sharder
