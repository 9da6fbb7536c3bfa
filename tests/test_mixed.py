"""Models that are both: sharded collections before a transformer equal one process, on every mesh, with one wrapper."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dmp import (
    DistributedModelParallel,
    Layout,
    ShardingEnv,
    clip_grad_norm_,
    data_parallel,
    full_state_dict,
    load_checkpoint,
    row_wise,
    save_checkpoint,
    to_unsharded,
)
from sharders import TensorParallelSharder, default_sharders, jagged_to_dense
from tests.equality import attach
from tests.exchanges import Exchanges
from tests.ranks import mesh as mesh_of
from tests.ranks import run_ranks
from tests.transformers_zoo import LlamaBlock, RMSNorm, rotary

ITEMS, USERS, D, B, T = 50, 20, 16, 5, 6
TABLES = ("items.", "users.")
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "single": ((), ()),
    "shard2": ((2,), ("shard",)),
    "tp2": ((2,), ("tp",)),
    "shard2xtp2": ((2, 2), ("shard", "tp")),
    "dp2xtp2": ((2, 2), ("dp", "tp")),
    "replicate2xtp2": ((2, 2), ("replicate", "tp")),
    "replicate2xshard2": ((2, 2), ("replicate", "shard")),
    "replicate2xshard2xtp2": ((2, 2, 2), ("replicate", "shard", "tp")),
}


class Recommender(nn.Module):
    """Histories of items and a user -> a score for each item (B, ITEMS)."""

    def __init__(self) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

        super().__init__()
        item = EmbeddingConfig(name="item", num_embeddings=ITEMS, embedding_dim=D, feature_names=["history"])
        user = EmbeddingBagConfig(name="user", num_embeddings=USERS, embedding_dim=D, feature_names=["user"])
        self.items, self.users = EmbeddingCollection(tables=[item]), EmbeddingBagCollection(tables=[user])
        self.layers = nn.ModuleList(LlamaBlock(D, 4, 2, 2 * D) for _ in range(2))
        self.norm = RMSNorm(D)
        self.head = nn.Linear(D, ITEMS, bias=False)

    def forward(self, histories: Any, users: Any) -> torch.Tensor:
        rows = self.items(histories)["history"]
        x = jagged_to_dense(rows.values(), rows.lengths(), T) + self.users(users).values().unsqueeze(1)
        positions = rotary(T, D // 4, x.device)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(self.norm(x).mean(1))


def make(optimizer: str | None) -> Recommender:
    torch.manual_seed(0)
    model = Recommender()
    for tables in (model.items, model.users):
        attach(tables, optimizer)
    return model


def make_batch(data_rank: int, step: int) -> tuple[Any, Any, torch.Tensor]:
    from torchrec import KeyedJaggedTensor

    rng = torch.Generator().manual_seed(100 * step + data_rank)
    lengths = torch.randint(0, T + 1, (B,), generator=rng)
    ids = torch.randint(0, ITEMS, (int(lengths.sum()),), generator=rng)
    histories = KeyedJaggedTensor(keys=["history"], values=ids, lengths=lengths)
    users = KeyedJaggedTensor(
        keys=["user"], values=torch.randint(0, USERS, (B,), generator=rng), lengths=torch.ones(B, dtype=torch.int64)
    )
    return histories, users, torch.randint(0, ITEMS, (B,), generator=rng)


def env_of(mesh: str) -> ShardingEnv:
    return ShardingEnv.single() if mesh == "single" else ShardingEnv.from_mesh(mesh_of(*MESHES[mesh]))


def loss_of(model: nn.Module, batch: tuple[Any, Any, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0], batch[1]), batch[2])


def _dense(model: nn.Module) -> torch.optim.Optimizer:
    kept = [p for name, p in model.named_parameters() if not hasattr(p, "_in_backward_optimizers")]
    fused = model.fused_optimizer.fused if isinstance(model, DistributedModelParallel) else {}
    updated = {id(p) for name, p in model.named_parameters() if name in fused}
    return torch.optim.AdamW([p for p in kept if id(p) not in updated], lr=1e-2, eps=1e-5)


def five_steps(mesh: str, optimizer: str | None, sequence_parallel: bool, path: str | None = None) -> None:
    env = env_of(mesh)
    oracle = make(optimizer)
    sharders = [*default_sharders()[:-1], TensorParallelSharder(sequence_parallel=sequence_parallel)]
    model = DistributedModelParallel(make(optimizer), env, sharders=sharders)
    if env.tensor_size > 1:
        assert str(model.plan["layers.0.attention.wq.weight"]) == "colwise()"
    assert {"items.embeddings.item.weight", "users.embedding_bags.user.weight"} <= set(model.plan)
    plain, mine = _dense(oracle), _dense(model)
    for step in range(5):
        batches = [make_batch(r, step) for r in range(env.data_size)]
        losses = [loss_of(oracle, b) for b in batches]
        loss = loss_of(model, batches[env.data_rank])
        torch.testing.assert_close(loss, losses[env.data_rank], atol=1e-5, rtol=1e-5)
        for one, total in ((plain, sum(losses) / len(losses)), (mine, loss)):
            one.zero_grad()
            total.backward()  # type: ignore[union-attr]
        of_dense = [p for group in plain.param_groups for p in group["params"]]
        want = nn.utils.clip_grad_norm_(of_dense, 0.2)
        torch.testing.assert_close(clip_grad_norm_(model, 0.2), want, atol=1e-5, rtol=1e-5)
        plain.step()
        mine.step()
    values = full_state_dict(model)
    assert list(values) == list(oracle.state_dict())
    for name, value in oracle.state_dict().items():
        torch.testing.assert_close(values[name], value, atol=1e-5, rtol=1e-5, msg=f"{name} differs")
    with torch.no_grad():
        served = to_unsharded(model)
        torch.testing.assert_close(served(*batches[0][:2]), oracle(*batches[0][:2]), atol=1e-4, rtol=1e-4)
    if path is not None:
        save_checkpoint(path, model, mine)


@pytest.mark.parametrize(
    ("mesh", "optimizer", "sequence_parallel"),
    [
        ("single", "adagrad", False),
        ("tp2", None, True),
        *(  # on four ranks `test_a_checkpoint_goes_on_elsewhere` takes the same steps
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("shard2", "adagrad", False),
                ("shard2xtp2", "rowwise_adagrad", False),
                ("shard2xtp2", None, True),
                ("dp2xtp2", "adagrad", False),
                ("replicate2xtp2", "adagrad", False),
                ("replicate2xshard2", None, False),
                ("replicate2xshard2xtp2", "adagrad", True),
            )
        ),
    ],
)
def test_equals_one_process(mesh: str, optimizer: str | None, sequence_parallel: bool) -> None:
    run_ranks(max(1, math.prod(MESHES[mesh][0])), five_steps, mesh, optimizer, sequence_parallel)


def _continued(mesh: str, path: str) -> dict[str, torch.Tensor]:
    env = env_of(mesh)
    model = DistributedModelParallel(make("rowwise_adagrad"), env)
    optimizer = _dense(model)
    load_checkpoint(path, model, optimizer)
    loss_of(model, make_batch(0, 9)).backward()  # one batch on all ranks: the mean is its own
    optimizer.step()
    return full_state_dict(model)


def test_a_checkpoint_goes_on_elsewhere(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(4, five_steps, "shard2xtp2", "rowwise_adagrad", False, path)
    (want,) = run_ranks(1, _continued, "single", path)
    for got in run_ranks(2, _continued, "tp2", path) + run_ranks(2, _continued, "shard2", path):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, atol=1e-5, rtol=1e-5, msg=f"{name} differs")


def _counted(layout: Layout) -> int:
    """Collectives of the tables' part alone: what a tensor axis adds is one gather for each module."""
    env, module = env_of("tp2"), make("adagrad")
    plan = {name: layout for name, _ in module.named_parameters() if name.startswith(TABLES)}
    model = DistributedModelParallel(module, env, plan=plan, sharders=default_sharders()[:-1])
    model.eval()
    with torch.no_grad(), Exchanges() as counts:
        model(*make_batch(0, 0)[:2])
    return counts.get_total_counts()


@pytest.mark.filterwarnings("ignore:For backward hooks to be called", "ignore:Full backward hook is firing")
def test_a_tensor_axis_adds_one_exchange_to_each_module() -> None:
    assert run_ranks(2, _counted, row_wise()) == [2 * (2 + 1)] * 2
    assert run_ranks(2, _counted, data_parallel()) == [2 * (1 + 1)] * 2


def _head_is_split(optimizer: str | None) -> None:
    model = DistributedModelParallel(make(optimizer), env_of("tp2"))
    assert str(model.plan["head.weight"]) == "colwise()"
    assert str(model.plan["items.embeddings.item.weight"]) not in ("rowwise(0)", "replicate()")


@pytest.mark.parametrize("optimizer", [None, "adagrad"])
def test_a_collection_is_no_vocabulary_but_its_head_is_split(optimizer: str | None) -> None:
    run_ranks(2, _head_is_split, optimizer)
