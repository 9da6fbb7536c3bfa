"""What TorchRec's sharded modules get wrong, or cannot do, and is refused here: each was seen, in version 1.8.0.

Wrong numbers without an error are the worst of it: a data-parallel `EmbeddingCollection` returns pooled rows on a CPU,
a data-parallel table with an in-backward optimizer drifts, and so do copies along a replicate axis.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from typing import Any

import torch.distributed as dist
from torch import nn

from dmp import ParameterInfo, ShardError, ShardingEnv, is_torchrecs
from sharders.torchrec.batches import collections_in
from sharders.torchrec.sharding_types import COPIES, hosts

CUT_ROWS = ("row_wise", "table_row_wise", "grid_shard")
"""Their sharding types that cut the rows of a table."""

_OF_HOSTS = ("table_row_wise", "table_column_wise", "grid_shard")


def why_not(who: str, kind: str | None, info: ParameterInfo, env: ShardingEnv) -> str:
    """Why a parameter is not run so; nothing where it is.

    Args:
        who: full name of their sharder.
        kind: of their sharding types; None where the layout is none of these.
    """
    if env.mesh is None and env.size == 1:
        return ""  # the plain module
    if env.table_size < env.size:
        return f"{who} knows no replicate axis: the copies of its tables would part"
    if kind is None:
        return f"{who} has no sharding type that cuts it so"
    if kind in _OF_HOSTS and not _is_whole_world(env):
        return f"{kind} of {who} runs on all processes of the world, by LOCAL_WORLD_SIZE of them on each host"
    if kind == COPIES and info.optimizer is not None:
        return f"a data-parallel table with an in-backward optimizer drifts apart in {who}"
    is_on_cpu = env.device_type == "cpu"
    if kind == COPIES and not info.pooled and is_on_cpu:
        return f"{who} returns pooled rows of a data-parallel table that is not pooled, on a CPU"
    if not info.pooled and info.optimizer is None and is_on_cpu:
        return (
            f"{who} crashes on a CPU for an unpooled table without an in-backward optimizer; apply one "
            "(apply_optimizer_in_backward, or fused_params of the sharder)"
        )
    return ""


def check_module(who: str, module: nn.Module, num_named: int, env: ShardingEnv) -> None:
    """Raise `ShardError` for a module that theirs does not take in full.

    Args:
        num_named: of its parameters that their sharder names.
    """
    tables = sum(len(set(c.tables)) for c in collections_in(module))
    if tables > num_named:
        raise ShardError(
            f"{who} names {num_named} of the {tables} tables of this {type(module).__name__}: tables of one name, in "
            "two towers, are one to it; give them names of their own"
        )
    if is_torchrecs(module, "EmbeddingTower", "EmbeddingTowerCollection") and len(hosts(env)) > 1:
        raise ShardError(
            f"{who} keeps the dense part of a tower on the host of its tables alone, and the results of towers in the "
            f"order of their hosts; this mesh has {len(hosts(env))} hosts. Pass no sharder of towers: the tables in "
            "them are sharded by the collections' own, on any mesh"
        )


def check_together(who: str, module: nn.Module, kinds: Mapping[str, str]) -> None:
    """Raise `ShardError` where tables of one module do not go together.

    Args:
        kinds: their name of a table -> their sharding type.
    """
    for each in module.modules():
        configs = list(each.embedding_bag_configs()) if hasattr(each, "embedding_bag_configs") else []  # type: ignore[operator]
        for config in configs:
            is_mean = str(config.pooling.name) == "MEAN"
            if is_mean and kinds.get(config.name) in CUT_ROWS and sum(len(c.feature_names) for c in configs) > 1:
                raise ShardError(
                    f"{who} gives wrong means for table {config.name!r}, which pools by mean and is cut by rows, "
                    "beside other features: cut no rows of it, or put it into a collection of its own"
                )


def check_state(who: str, theirs: nn.Module, state: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    """Raise `ShardError` where a module of theirs keeps what no checkpoint would have under the plain module's names.

    Args:
        state: its state dict.
        plain: of the unsharded module.
    """
    others = sorted(state.keys() - plain.keys())
    if others:
        raise ShardError(
            f"{who} makes a {type(theirs).__name__} that keeps {others[:3]}, for which the unsharded module has no "
            "name: a checkpoint of the model would be without, and go on wrongly"
        )


def _is_whole_world(env: ShardingEnv) -> bool:
    """Whether TorchRec's hosts, which it takes from the environment, are those of the mesh; as far as there is one."""
    if env.mesh is None:
        return True
    inner = prod(env.table_shape[1:]) if len(env.table_shape) > 1 else env.table_size
    world, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", 8))
    return env.size == world and inner == (local if world % local == 0 else world)
