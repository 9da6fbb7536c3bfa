"""TorchRec's `DistributedModelParallel` on the same model, with the plan that is equivalent to ours."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def torchrec_plan(model: nn.Module, layout: str, ranks: int) -> Any:
    """A TorchRec plan for `Model.tables`; kernels are fused, for the tables carry an optimizer."""
    from torchrec.distributed import sharding_plan as kinds
    from torchrec.distributed.types import ShardingPlan

    collection = model.tables
    pooled = hasattr(collection, "embedding_bags")
    tables = [name for name, _ in (collection.embedding_bags if pooled else collection.embeddings).named_children()]
    made = {
        "table_wise": lambda i: kinds.table_wise(i % ranks),
        "row_wise": lambda i: kinds.row_wise(),
        "column_wise": lambda i: kinds.column_wise(list(range(ranks))),
    }
    entries = kinds.construct_module_sharding_plan(
        collection,
        {name: made[layout](i) for i, name in enumerate(tables)},
        local_size=ranks,
        world_size=ranks,
        device_type="cpu",
    )
    return ShardingPlan(plan={"tables": entries})


def torchrec_wrap(model: nn.Module, plan: Any) -> nn.Module:
    """Their wrapper; it replaces `model.tables`."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv

    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plan)  # type: ignore[no-any-return]
