"""One wrapper that puts any PyTorch model on any device mesh."""

from __future__ import annotations

from dmp.checkpoint import load_checkpoint, save_checkpoint
from dmp.chunked import ChunkedTensor
from dmp.clip import clip_grad_norm_
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
from dmp.gather import full_state_dict, to_unsharded
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
from dmp.optimizer_state import full_optimizer_state_dict
from dmp.plan import PlanChange, ShardingPlan
from dmp.registry import register_sharder
from dmp.verify import verify
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
    "clip_grad_norm_",
    "column_wise",
    "data_parallel",
    "full_optimizer_state_dict",
    "full_state_dict",
    "grid",
    "is_replicated",
    "load_checkpoint",
    "plan_parameters",
    "rectangles",
    "register_sharder",
    "row_wise",
    "save_checkpoint",
    "table_row_wise",
    "table_wise",
    "to_unsharded",
    "verify",
]
