"""TorchRec's `DistributedModelParallel` on the same model, with the plan that is equivalent to ours."""

from __future__ import annotations

import logging
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.bench.workload import HOSTS, MIXED


def torchrec_plan(model: nn.Module, layout: str, ranks: int, path: str = "tables") -> Any:
    """A TorchRec plan for the collection at a path; kernels are fused, for the tables carry an optimizer."""
    from torchrec.distributed import sharding_plan as kinds
    from torchrec.distributed.types import ShardingPlan

    collection: Any = model.get_submodule(path)
    pooled = hasattr(collection, "embedding_bags")
    tables = [name for name, _ in (collection.embedding_bags if pooled else collection.embeddings).named_children()]
    made = {
        "table_wise": lambda i: kinds.table_wise(i % ranks),
        "row_wise": lambda i: kinds.row_wise(),
        "column_wise": lambda i: kinds.column_wise(list(range(ranks))),
        "mixed": lambda i: made[MIXED[i % len(MIXED)]](i),
        "table_row_wise": lambda i: kinds.table_row_wise(i % HOSTS),
    }
    of_host = ranks // HOSTS if layout == "table_row_wise" else ranks
    entries = kinds.construct_module_sharding_plan(
        collection,
        {name: made[layout](i) for i, name in enumerate(tables)},
        local_size=of_host,
        world_size=ranks,
        device_type="cpu",
    )
    return ShardingPlan(plan={path: entries})


def torchrec_wrap(model: nn.Module, plan: Any, hosts: int = 1) -> nn.Module:
    """Their wrapper; it replaces `model.tables`.

    Args:
        hosts: on which the ranks are said to be; where TorchRec makes groups by it, the first call decides.
    """
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv

    logging.getLogger("torchrec").setLevel(logging.ERROR)  # it warns of each group that it makes
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(dist.get_world_size() // hosts)):
        return DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plan)  # type: ignore[no-any-return]
