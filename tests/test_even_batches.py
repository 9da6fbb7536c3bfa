"""Batches of which every key has as many ids: cut by one operation, for the same numbers as key by key."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dmp import DistributedModelParallel, ShardingEnv, column_wise, table_wise
from sharders.embedding.ids import input_dist
from tests.ranks import mesh, run_ranks

KEYS, ROWS, DIM, SAMPLES = ("c", "unread", "a", "b"), (7, 5, 3), 8, 4


def steps(layout: str, has_single_ids: bool, is_cut: bool) -> list[torch.Tensor]:
    """Results, gradients of weights and tables, of two steps; the same weights of ids on every rank."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    tables = [
        EmbeddingBagConfig(num_embeddings=rows, embedding_dim=DIM, name=f"t{i}", feature_names=["abc"[i]])
        for i, rows in enumerate(ROWS)
    ]
    torch.manual_seed(3)
    module = EmbeddingBagCollection(tables, is_weighted=True)
    layouts = {"table": lambda i: table_wise(i % 2), "column": lambda i: column_wise([1, 0])}
    plan = {f"embedding_bags.t{i}.weight": layouts[layout](i) for i in range(3)}
    model = DistributedModelParallel(module, ShardingEnv.from_mesh(mesh((2,), ("dp",))), plan=plan)
    found = []
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        lengths = torch.full((len(KEYS), SAMPLES), 1)
        if not has_single_ids:
            lengths = torch.stack([torch.tensor([0, 1, 2, 3])[torch.randperm(SAMPLES)] for _ in KEYS])
        ids = torch.randint(0, min(ROWS), (int(lengths.sum()),))
        weights = torch.rand(ids.numel(), requires_grad=True)
        with mock.patch.object(input_dist, "is_even", input_dist.is_even if is_cut else lambda counts: False):
            values = model(KeyedJaggedTensor([*KEYS], ids, weights, lengths.view(-1))).values()
            (values * torch.rand(values.shape)).sum().backward()
        found += [values.detach(), weights.grad, *(p.grad.clone() for p in model.parameters())]
    return found


def alike(layout: str, has_single_ids: bool) -> None:
    runs = []
    for is_cut in (True, False):
        torch.manual_seed(0)
        runs.append(steps(layout, has_single_ids, is_cut))
    assert len(runs[0]) == 10
    for i, (a, b) in enumerate(zip(*runs, strict=True)):
        assert torch.equal(a, b), (i, a, b)
        assert not a.numel() or a.abs().sum() > 0, i


@pytest.mark.parametrize("has_single_ids", [True, False])
@pytest.mark.parametrize("layout", ["table", "column"])
def test_equals_what_is_cut_key_by_key(layout: str, has_single_ids: bool) -> None:
    run_ranks(2, alike, layout, has_single_ids)
