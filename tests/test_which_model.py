"""Several models in one process that look alike: ranks are at the same one, or are told; a copy is another."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, InputError, ShardError, ShardingEnv, data_parallel, row_wise
from sharders.embedding.lookup import kernels
from tests.oracle import attach
from tests.ranks import mesh, run_ranks

IDS = torch.tensor([[1, 2], [3, 9]])


class Net(nn.Module):
    """A table, whose weight is read in the forward where somebody asks for it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.EmbeddingBag(10, 4, mode="sum")
        self.reads = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table(ids)
        return out + self.table.weight.mean() if self.reads else out


def _wrapped(seed: int) -> DistributedModelParallel:
    env = ShardingEnv.from_mesh(mesh((2,)))
    return DistributedModelParallel(Net(seed), env, plan={"table.weight": row_wise()})


def _crossed() -> list[str]:
    """Rank 1 calls another of three models than rank 0; then all call them in one order."""
    first, second = _wrapped(1), _wrapped(2)
    third = copy.deepcopy(second)
    texts = []
    for pair in ((first, second), (second, third), (third, first)):
        with pytest.raises(InputError) as error:
            pair[first.env.rank](IDS)
        texts.append(str(error.value))
    for model, seed in ((first, 1), (second, 2), (third, 2)):
        torch.testing.assert_close(model(IDS), Net(seed)(IDS))
    return texts


def test_ranks_at_models_that_look_alike() -> None:
    told, again = run_ranks(2, _crossed)
    assert told == again
    for text, copied in zip(told, ("", "rank 1 that of copy 1 of ", "rank 0 calls 'table' of copy 1 of "), strict=True):
        assert text.startswith("ranks are not at the same model: rank 0 calls 'table' of ") and copied in text, text


def _copies_read() -> None:
    model = _wrapped(1)
    for each in (model, model.copy(), copy.deepcopy(model), copy.deepcopy(model.copy())):
        each.module.reads = True
        with pytest.raises(ShardError, match=r"table\.weight"):
            each(IDS)


def test_a_copys_tables_are_not_read_either() -> None:
    run_ranks(2, _copies_read)


def _by_a_kernel_of_its_own() -> None:
    """Rank 1 lacks the others' kernels."""
    env, table = ShardingEnv.from_mesh(mesh((2,))), Net(1).table
    for layout, why in ((data_parallel(), "rank 1 has other .* kernels .* same kernel"), (row_wise(), "")):
        names, net = ("torch",) if env.rank else kernels._FASTEST_FIRST, nn.Sequential(copy.deepcopy(table))
        attach(net, "sgd")
        with mock.patch.object(kernels, "_FASTEST_FIRST", names):
            model = DistributedModelParallel(net, env, plan={"0.weight": layout})
        with pytest.raises(InputError, match=why) if why else nullcontext():
            torch.testing.assert_close(model(IDS), table(IDS))


def test_copies_of_tables_are_updated_by_one_kernel() -> None:
    """Else they would part by their rounding; shards are each one rank's own."""
    run_ranks(2, _by_a_kernel_of_its_own)
