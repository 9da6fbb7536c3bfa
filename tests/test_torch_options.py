"""Options of torch's own modules that make no tables: right on every mesh, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, PlanError, ShardError, ShardingEnv
from tests.beside_plain import trains
from tests.ranks import mesh, run_ranks

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "dp": ((2,), ("dp",)),
    "shard": ((2,), ("shard",)),
    "tp": ((2,), ("tp",)),
    "hsdp": ((2, 2), ("replicate", "shard")),
}


class Net(nn.Module):
    """Looked-up rows into a layer."""

    def __init__(
        self, looked_up: Callable[[], nn.Module], layer: Callable[[nn.Module], nn.Module] = lambda m: m
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = looked_up()
        self.layer, self.out = layer(nn.Linear(4, 6)), nn.Linear(6, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.layer(self.rows(ids)).relu())
        return out


KINDS: dict[str, Callable[[], Net]] = {
    "sparse rows": lambda: Net(lambda: nn.Embedding(10, 4, sparse=True)),
    "sparse bags": lambda: Net(lambda: nn.EmbeddingBag(10, 4, mode="sum", sparse=True)),
    "weight norm by hooks": lambda: Net(lambda: nn.Embedding(10, 4), nn.utils.weight_norm),
}
RESCALING: dict[str, Callable[[], Net]] = {
    "rows": lambda: Net(lambda: nn.Embedding(10, 4, max_norm=0.5)),
    "bags": lambda: Net(lambda: nn.EmbeddingBag(10, 4, max_norm=0.5)),
}


def _trains(model: nn.Module, whole: nn.Module, env: ShardingEnv) -> None:
    trains(model, whole, env, lambda g: torch.randint(0, 10, (env.data_size, 3, 2), generator=g))


def _run(kinds: Any, on: str) -> None:
    for name, make in kinds.items():
        env, module, whole = ShardingEnv.from_mesh(mesh(*MESHES[on])), make(), make()
        model = DistributedModelParallel(module, env)
        _trains(model, whole, env)
        if "hooks" not in name:  # torch copies no weight that a forward has computed
            _trains(copy.deepcopy(model), whole, env)


def _right(on: str) -> None:
    _run(KINDS, on)


def _rescaling_right(on: str) -> None:
    _run(RESCALING, on)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("on", ["dp", "shard", pytest.param("hsdp", marks=pytest.mark.slow)])
def test_sparse_gradients_and_computed_weights(on: str) -> None:
    """FSDP2 has no way to reduce a sparse gradient; a computed weight is no leaf, and is not copied."""
    run_ranks(4 if on == "hsdp" else 2, _right, on)


def _rescaling(kind: str, on: str) -> None:
    DistributedModelParallel(RESCALING[kind](), ShardingEnv.from_mesh(mesh(*MESHES[on])))


@pytest.mark.parametrize("kind", RESCALING)
def test_a_forward_that_rescales_rows_runs_on_one_data_rank(kind: str) -> None:
    """Each rank would rescale those of its own ids: copies parted, without a word."""
    for on in ("dp", "shard"):
        for error in run_ranks(2, _rescaling, kind, on, expect=(ShardError, PlanError)):
            assert "at 'rows' has max_norm=0.5: its forward rescales" in str(error)
    run_ranks(2, _rescaling_right, "tp")
