"""Lookups that are written where they travel from, and gradients that are read where they came, beside partials."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import dmp
from dmp import column_wise, row_wise, table_wise
from sharders.embedding.data_path import way
from sharders.embedding.lookup.kernels import MOST_APART
from sharders.embedding.lookup.numba_kernel import NumbaLookup
from sharders.embedding.results import partials
from sharders.embedding.results.pooled_output import PooledOutputDist
from tests.equality import attach, env_of
from tests.ranks import run_ranks

Found = tuple[int, int, list[torch.Tensor]]


def _trained(in_place: bool, optimizer: str | None, longest: int, clips: bool = False) -> Found:
    """How many lookups were copied to where they travel from, and updates read gradients in place; and results, then
    weights or gradients, of three steps. Sizes of batches differ, one rank has none. From the last one on gradients
    are clipped: the forward knows nothing of it. Not in place is what many ranks do."""
    torch.manual_seed(0)
    dims = {"a": 8, "b": 16, "c": 8, "d": 24, "e": 8}
    configs = [
        EmbeddingBagConfig(num_embeddings=60, embedding_dim=dim, name=name, feature_names=[name, f"{name}2"])
        for name, dim in dims.items()
    ]
    module, env = EmbeddingBagCollection(configs), env_of("dp4")
    if optimizer:
        attach(module, optimizer)
    copied = read_in_place = 0
    put_behind, order = PooledOutputDist._with_partials, NumbaLookup.order_pooled

    def counted(self: Any, wire: torch.Tensor | None, *rest: Any) -> torch.Tensor:
        nonlocal copied
        copied += wire is not None
        return put_behind(self, wire, *rest)

    def ordered(self: Any, read: Any, sources: Any = None) -> Any:
        nonlocal read_in_place
        read_in_place += sources is not None
        return order(self, read, sources)

    most = MOST_APART if in_place else 0
    with (
        mock.patch.object(way, "MOST_APART", most),
        mock.patch.object(partials, "MOST_APART", most),
        mock.patch.object(PooledOutputDist, "_with_partials", counted),
        mock.patch.object(NumbaLookup, "order_pooled", ordered),
    ):
        layouts = [table_wise(1), row_wise(), column_wise([0, 3]), row_wise(), column_wise([0, 1])]
        plan = dict(zip((name for name, _ in module.named_parameters()), layouts, strict=True))
        model, results = dmp.DistributedModelParallel(module, env, plan=plan), []
        keys = [key for name in dims for key in (name, f"{name}2")]
        for step in range(3):
            draw = torch.Generator().manual_seed(10 * step + env.rank)
            samples = (7, 0, 12, 5)[(env.rank + step) % 4]
            lengths = torch.randint(0, longest + 1, (len(keys) * samples,), generator=draw)
            ids = torch.randint(0, 60, (int(lengths.sum()),), generator=draw)
            out = model(KeyedJaggedTensor(keys, ids, lengths=lengths)).values()
            results.append(out.detach().clone())
            if clips and step == 2:
                model.fused_optimizer.param_groups[0].update(gradient_clipping=True, max_gradient=0.01)
            out.square().sum().backward()
    if optimizer:
        return copied, read_in_place, results + list(dmp.full_state_dict(model).values())
    return copied, read_in_place, results + [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam", None])
@pytest.mark.sampled(2)
def test_they_are_the_same_to_the_bit_as_copied_ones(optimizer: str | None) -> None:
    longest = 1 if optimizer != "adam" else 2
    copied = run_ranks(4, _trained, False, optimizer, longest)
    for expected, found in zip(copied, run_ranks(4, _trained, True, optimizer, longest), strict=True):
        assert expected[0] == 3 and expected[1] == 0
        assert found[1] == (3 if found[0] == 0 else 0), "where tables are looked up whole"
        assert all(map(torch.equal, expected[2], found[2]))
    assert [found[0] for found in run_ranks(4, _trained, True, optimizer, longest)] == [0, 0, 3, 0], "rank 2 has none"


def test_gradients_that_are_clipped_since_the_forward_are_put_together() -> None:
    copied, plain = (run_ranks(4, _trained, False, "rowwise_adagrad", 1, clips) for clips in (True, False))
    in_place = run_ranks(4, _trained, True, "rowwise_adagrad", 1, True)
    for expected, other, found in zip(copied, plain, in_place, strict=True):
        assert all(map(torch.equal, expected[2], found[2]))
        assert not all(map(torch.equal, other[2], found[2]))
