"""Plans to and from TorchRec's, by their rectangles. TorchRec is imported when its form is asked for.

[Note: two forms] TorchRec's plan says, for the path of a module and the name of a table, a sharding type, a compute
kernel, and the shards with their ranks, of which some may be empty. Ours says for a parameter's name a layout and,
where TorchRec's plan said it, the kernel. Rectangles are the same in both; a sharding type is TorchRec's name of some.
Copies have the kernel 'dense' in TorchRec, whose others would let them part; that ours are updated in the backward pass
all the same is said by an attribute of ours, which TorchRec does not look at, and which goes with the plan where that
is copied or pickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from dmp.env import ShardingEnv
from dmp.errors import PlanError, ShardError
from dmp.foreign import is_torchrecs, type_name
from dmp.layouts.layout import Layout, ParameterSharding
from dmp.layouts.shard import Shard
from dmp.layouts.sharding_types import COPIED, sharding_types
from dmp.layouts.tables import column_wise, data_parallel, grid, rectangles, row_wise, table_wise
from dmp.names import join_name
from dmp.ranks import say_once

_FUSED = ("fused", "fused_uvm", "fused_uvm_caching", "fused_triton")
_NO_MEANING = ("cache_params", "enforce_hbm", "stochastic_rounding", "bounds_check_mode", "key_value_params")
_INNER = ("_embedding_bag_collection", "_embedding_module")
"""Where TorchRec's modules around a collection hold it; its plans have the path of the outer one."""


@dataclass(frozen=True)
class Setting:
    """What TorchRec's form of a plan says beside layouts and kernels.

    Args:
        env: the mesh.
        shapes: of the parameters.
        fused: names of those that are updated in the backward pass.
    """

    env: ShardingEnv
    shapes: Mapping[str, tuple[int, ...]]
    fused: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module, env: ShardingEnv) -> Setting:
        """That of a plain module."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        fused = (name for name, p in parameters.items() if hasattr(p, "_in_backward_optimizers"))
        return cls(env, {name: tuple(p.shape) for name, p in parameters.items()}, frozenset(fused))


def is_torchrec_plan(plan: Any) -> bool:
    """Whether it is a plan of TorchRec's, for a model or for one module."""
    return is_torchrecs(plan, "ShardingPlan", "EmbeddingModuleShardingPlan")


def entries_of_torchrec(plan: Any, module: nn.Module, env: ShardingEnv | None = None) -> dict[str, ParameterSharding]:
    """Our entries for a plan of TorchRec's.

    Args:
        plan: of the whole model, or of `module` alone.
        module: the model, for its parameters' names and shapes; on meta is fine.
        env: the mesh; with it layouts that name no ranks (`row_wise()`) are found again.

    Raises:
        PlanError: a module or table that the model lacks, a kernel or spec that means nothing here.
    """
    if not is_torchrec_plan(plan):
        raise PlanError(f"expected a ShardingPlan of TorchRec's; got {type_name(plan)}")
    if module is None:
        raise PlanError("TorchRec's plans name tables by module: ShardingPlan.from_torchrec(plan, module)")
    return entries_by_path(plan.plan if is_torchrecs(plan, "ShardingPlan") else {"": plan}, module, env)


def entries_by_path(
    by_path: Mapping[str, Any],
    module: nn.Module,
    env: ShardingEnv | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, ParameterSharding]:
    """Our entries for plans of TorchRec's for some modules.

    Args:
        by_path: module's path -> table -> their `ParameterSharding`.
        shapes: of parameters of which `module` holds a part.

    Raises:
        PlanError: as of `entries_of_torchrec`.
    """
    found: dict[str, ParameterSharding] = {}
    for path, of_module in by_path.items():
        names = _tables_at(path, module, of_module, shapes or {})
        for table, theirs in of_module.items():
            where = f"TorchRec's plan for table {table!r} of module {path!r} ({names[table][0]!r})"
            found[names[table][0]] = _entry(theirs, names[table][1], env, where)
    return found


def _tables_at(
    path: str, module: nn.Module, of_module: Any, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Table -> (parameter's name, shape) of those that a module's plan names."""
    try:
        inside = module.get_submodule(path)
    except AttributeError:
        paths = [name for name, each in module.named_modules() if hasattr(each, "embedding_bags")]
        raise PlanError(
            f"TorchRec's plan has module {path!r}, which the model does not have; modules with tables: {paths[:5]}"
        ) from None
    if not isinstance(of_module, Mapping):
        raise PlanError(f"TorchRec's plan for module {path!r} is a {type_name(of_module)}; expected tables by name")
    local = {name: tuple(p.shape) for name, p in inside.named_parameters(remove_duplicate=False)}
    parameters = {name: shapes.get(join_name(path, name), shape) for name, shape in local.items()}
    by_end: dict[str, list[str]] = {}
    for name in parameters:
        atoms = name.split(".")
        ends = {".".join(atoms[i:]) for i in range(len(atoms))}
        for end in ends | {end.removesuffix(".weight") for end in ends}:
            by_end.setdefault(end, []).append(name)
    found = {}
    for table in of_module:
        names = by_end.get(table, [])
        if len(names) != 1:
            raise PlanError(
                f"TorchRec's plan has table {table!r} of module {path!r}, where "
                + (f"{names} answer to it" if names else f"no parameter answers to it: {list(parameters)[:5]}")
            )
        found[table] = (join_name(path, names[0]), parameters[names[0]])
    return found


def _entry(theirs: Any, shape: tuple[int, ...], env: ShardingEnv | None, where: str) -> ParameterSharding:
    kernel = str(theirs.compute_kernel)
    if kernel not in (*_FUSED, "dense"):
        raise PlanError(f"{where}: the compute kernel {kernel!r} is not known here, but {', '.join(_FUSED)}, dense")
    if kernel not in ("fused", "dense"):
        say_once(f"a plan of TorchRec's names the kernel {kernel!r}: tables lie on their device here, as 'fused' does")
    dtype = getattr(theirs, "output_dtype", None)
    if dtype is not None and str(getattr(dtype, "value", dtype)).lower() != "fp32":
        raise PlanError(f"{where}: results are float32 here; output_dtype={dtype} is not to be had")
    for name in _NO_MEANING:
        if getattr(theirs, name, None) is not None:
            say_once(f"a plan of TorchRec's has {name}, which says how FBGEMM holds tables; it changes nothing here")
    shards = _shards(theirs, where)
    layout = data_parallel() if shards is None else _named(shards, shape, env)
    if getattr(theirs, "updated_in_backward", False):
        return ParameterSharding(layout, None, str(theirs.sharding_type))
    return ParameterSharding(layout, "dense" if kernel == "dense" else "fused", str(theirs.sharding_type))


def _shards(theirs: Any, where: str) -> list[Shard] | None:
    """The rectangles; None for a copy on every rank."""
    spec = theirs.sharding_spec
    if spec is None and theirs.sharding_type == COPIED:
        return None
    metadata = getattr(spec, "shards", None)
    if metadata is None:
        raise PlanError(f"{where}: expected sharding_spec to be an EnumerableShardingSpec; got {type_name(spec)}")
    ranks = theirs.ranks or [None] * len(metadata)
    found = []
    for each, rank in zip(metadata, ranks, strict=True):
        placed = rank if each.placement is None else each.placement.rank()
        if placed is None:
            raise PlanError(f"{where}: no rank is given for the shard at {each.shard_offsets}")
        if all(each.shard_sizes):  # TorchRec has empty ones too, one for each rank
            found.append(Shard(tuple(each.shard_offsets), tuple(each.shard_sizes), placed))
    return found


def _named(shards: Sequence[Shard], shape: tuple[int, ...], env: ShardingEnv | None) -> Layout:
    """The layout with a name that has exactly these rectangles, else the rectangles."""
    ordered = sorted(shards)
    ranks = [s.rank for s in ordered]
    size = env.table_size if env is not None else max(ranks) + 1
    on = env if env is not None else ShardingEnv.abstract((size,), ("dp",), "cpu")
    width = len(ranks) // len({s.offsets[0] for s in ordered})
    in_rows = [ranks[i : i + width] for i in range(0, len(ranks), width)]
    widths = [s.sizes[1] for s in ordered]
    if len(shards) == 1:
        return table_wise(ranks[0])
    choices: list[Callable[[], Layout]] = [row_wise, lambda: row_wise(ranks), lambda: column_wise(ranks)]
    choices += [lambda: column_wise(ranks, widths), lambda: grid(in_rows)]
    return next((make() for make in choices if _resolves(make, shape, on, ordered)), rectangles(shards))


def _resolves(make: Callable[[], Layout], shape: tuple[int, ...], env: ShardingEnv, ordered: list[Shard]) -> bool:
    """Whether a layout has these rectangles; one that this shape, or these ranks, cannot have does not."""
    try:
        return sorted(make().shards(shape, env)) == ordered
    except ShardError:
        return False


def torchrec_plan_of(
    plan: Mapping[str, ParameterSharding], setting: Setting, local_size: int | None = None, *, to_read: bool = False
) -> Any:
    """TorchRec's form of a plan: its `ShardingPlan`.

    Args:
        setting: shapes, mesh, and what is updated in the backward pass.
        local_size: ranks of a host; by default those of the inner table axes where there are two, else what the
            launcher says (`LOCAL_WORLD_SIZE`), else all ranks.
        to_read: rectangles that TorchRec has no sharding type for have our layout's name for one.

    Raises:
        PlanError: a name that the setting lacks, rectangles that TorchRec has no sharding type for.
    """
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, EnumerableShardingSpec, ShardMetadata
    from torchrec.distributed.types import ParameterSharding as Theirs
    from torchrec.distributed.types import ShardingPlan as TheirPlan

    env = setting.env
    local = local_size or _local_size(env)
    found: dict[str, Any] = {}
    for name, entry in plan.items():
        if entry.layout.is_dense:
            continue
        if name not in setting.shapes:
            raise PlanError(f"plan names {name!r}, which the model does not have", table=name)
        types = sharding_types(entry.layout, setting.shapes[name], env, local)
        if not types and to_read:
            types = {entry.layout.name: entry.layout.shards(setting.shapes[name], env)}
        elif not types:
            raise PlanError(f"plan entry {name!r} = {entry}: TorchRec has no sharding type for it", table=name)
        said = entry.sharding_type if entry.sharding_type in types else next(iter(types))
        theirs = types[said]
        is_whole = said == COPIED
        kernel = entry.kernel or ("fused" if name in setting.fused and not is_whole else "dense")
        metadata = [
            ShardMetadata(list(s.offsets), list(s.sizes), _placement(env.device_type, s.rank, local)) for s in theirs
        ]
        spec = None if is_whole else EnumerableShardingSpec(metadata)
        path, table = _path_and_table(name)
        of_module = found.setdefault(path, EmbeddingModuleShardingPlan())
        of_module[table] = made = Theirs(said, kernel, [s.rank for s in theirs], spec)
        if is_whole and entry.kernel is None and name in setting.fused:
            made.updated_in_backward = True  # see [Note: two forms]
    return TheirPlan(found)


def _local_size(env: ShardingEnv) -> int:
    if len(env.table_shape) > 1:
        return env.table_shape[-1]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    return local if local and env.table_size % local == 0 else env.table_size


def _placement(device_type: str, rank: int, local: int) -> str:
    return f"rank:{rank}/{device_type}" + ("" if device_type == "cpu" else f":{rank % local}")


@contextmanager
def named_as_in_torchrec() -> Iterator[None]:
    """Inside, an error about a table names it as TorchRec's plans do, too."""
    try:
        yield
    except PlanError as error:
        if error.table is None:
            raise
        path, table = _path_and_table(error.table)
        both = str(error).replace(f"{error.table!r}", f"{error.table!r} (table {table!r} of module {path!r})", 1)
        raise PlanError(both, table=error.table, rank=error.rank, bytes_short=error.bytes_short) from error


def _path_and_table(name: str) -> tuple[str, str]:
    """TorchRec's path and table of a parameter: `a.embedding_bags.t1.weight` is t1 of a, `b.weight` is weight of b."""
    words = name.split(".")
    if len(words) > 2 and words[-3] in ("embedding_bags", "embeddings") and words[-1] == "weight":
        path, table = words[:-3], words[-2]
    else:
        path, table = words[:-1], words[-1]
    while path and path[-1] in _INNER:
        path = path[:-1]
    return ".".join(path), table
