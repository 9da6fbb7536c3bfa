"""What the tests of checkpoints of other kinds share: a model, its layouts, and files as others write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from dmp import (
    DistributedModelParallel,
    ShardingEnv,
    column_wise,
    row_wise,
    table_wise,
)
from tests import test_torchrec_opinion
from tests.ranks import mesh

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [
    *([test_torchrec_opinion.pytestmark] if not isinstance(test_torchrec_opinion.pytestmark, list) else []),
    # TorchRec gives its state dicts as torch's ShardedTensor, whose writing torch.distributed.checkpoint deprecates.
    pytest.mark.filterwarnings("ignore:.*(TypedStorage|_shard|ShardedTensor).*"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


class Model(nn.Module):
    """Two tables, a tied pair, every kind of leaf: matrix, vector, scalar, buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.users = nn.EmbeddingBag(10, 16, mode="sum")
        self.items = nn.EmbeddingBag(7, 16, mode="sum")
        self.up = nn.Linear(16, 8, bias=False)
        self.down = nn.Linear(16, 8, bias=False)
        self.down.weight = self.up.weight
        self.low = nn.Linear(8, 2, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.randn(()))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        x = self.up(self.users(users)) + self.down(self.items(items))
        return self.low(self.norm(x * self.scale).bfloat16())


LAYOUTS: dict[str, Callable[[int], Any]] = {
    "rows": lambda n: {"users.weight": row_wise(), "items.weight": row_wise()},
    "columns": lambda n: {"users.weight": column_wise(range(n)), "items.weight": table_wise(n - 1)},
}


def sharded(layout: str, seed: int = 1) -> DistributedModelParallel:
    env = ShardingEnv.from_mesh(mesh((dist.get_world_size(),)))
    return DistributedModelParallel(Model(seed), env, plan=LAYOUTS[layout](env.table_size))


def assert_equal(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert state[name].dtype == value.dtype, name
        assert torch.equal(state[name], value), name


def once(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As Hugging Face stores it: a tied weight under one name."""
    return {name: value.clone() for name, value in state.items() if name != "down.weight"}


def save_hugging_face(folder: Path, state: dict[str, torch.Tensor], files: int) -> None:
    folder.mkdir()
    if files == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    places = {name: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(state)}
    for file in set(places.values()):
        save_file({n: t for n, t in state.items() if places[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
