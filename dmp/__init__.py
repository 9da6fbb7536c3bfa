"""One wrapper that puts any PyTorch model on any device mesh."""

from __future__ import annotations

from dmp.chunked import ChunkedTensor
from dmp.contracts import (
    DataParallelWrapper,
    FusedModule,
    FusedParameter,
    ModuleSharder,
    ParameterInfo,
    ShardedModule,
)
from dmp.discovery import plan_parameters
from dmp.env import ShardingEnv
from dmp.errors import CheckpointError, DmpError, InputError, PlanError, ShardError
from dmp.layout import (
    Layout,
    ParameterSharding,
    Shard,
    check_cover,
    column_wise,
    data_parallel,
    grid,
    is_replicated,
    rectangles,
    row_wise,
    table_row_wise,
    table_wise,
)
from dmp.plan import PlanChange, ShardingPlan
from dmp.registry import register_sharder
from dmp.wrapper import DistributedModelParallel

__all__ = [
    "CheckpointError",
    "ChunkedTensor",
    "DataParallelWrapper",
    "DistributedModelParallel",
    "DmpError",
    "FusedModule",
    "FusedParameter",
    "InputError",
    "Layout",
    "ModuleSharder",
    "ParameterInfo",
    "ParameterSharding",
    "PlanChange",
    "PlanError",
    "Shard",
    "ShardError",
    "ShardedModule",
    "ShardingEnv",
    "ShardingPlan",
    "check_cover",
    "column_wise",
    "data_parallel",
    "grid",
    "is_replicated",
    "plan_parameters",
    "rectangles",
    "register_sharder",
    "row_wise",
    "table_row_wise",
    "table_wise",
]
