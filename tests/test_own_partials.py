"""Gradients of this rank's own partials, read where the model's backward left them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import dmp
from dmp import row_wise
from sharders.embedding.partial_columns import PartialColumns
from sharders.embedding.way import Way
from tests.equality import attach, env_of
from tests.ranks import run_ranks


def _trained(in_place: bool, optimizer: str | None, longest: int) -> tuple[int, list[torch.Tensor]]:
    """Gradients that were picked, and weights or gradients after three steps of bags of so many ids at most."""
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(num_embeddings=40, embedding_dim=8, name="a", feature_names=["x", "y"]),
        EmbeddingBagConfig(num_embeddings=900, embedding_dim=8, name="b", feature_names=["z"]),
    ]
    module, env, picked = EmbeddingBagCollection(configs), env_of("dp2"), 0
    if optimizer:
        attach(module, optimizer)
    pick, find = PartialColumns.pick, Way._find_own_partials

    def counted(*arguments: object) -> None:
        nonlocal picked
        picked += 1
        pick(*arguments)  # type: ignore[arg-type]

    with (
        mock.patch.object(Way, "_find_own_partials", find if in_place else lambda self: None),
        mock.patch.object(PartialColumns, "pick", counted),
    ):
        plan = {name: row_wise() for name, _ in module.named_parameters()}
        model = dmp.DistributedModelParallel(module, env, plan=plan)
        for step in range(3):
            draw = torch.Generator().manual_seed(10 * step + env.rank)
            lengths = torch.randint(0, longest + 1, (3 * 50,), generator=draw)
            ids = torch.randint(0, 40, (int(lengths.sum()),), generator=draw)
            model(KeyedJaggedTensor(["z", "x", "y"], ids, lengths=lengths)).values().square().sum().backward()
    if optimizer:
        return picked, [value.detach().clone() for value in dmp.to_unsharded(model).state_dict().values()]
    return picked, [chunk.grad.clone() for chunk in model.parameters()]


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", None])
def test_they_are_the_same_to_the_bit_as_packed_ones(optimizer: str | None) -> None:
    packed = run_ranks(2, _trained, False, optimizer, 1)
    for (num, expected), (num_of_others, found) in zip(packed, run_ranks(2, _trained, True, optimizer, 1), strict=True):
        assert (num, num_of_others) == (6, 3), "one for each rank and step, or the other's alone"
        assert len(found) == 2 and all(map(torch.equal, expected, found))


def test_those_of_longer_bags_are_packed() -> None:
    (few, weights), _ = run_ranks(2, _trained, True, "rowwise_adagrad", 2)
    assert few == 6 and all(map(torch.equal, weights, run_ranks(2, _trained, False, "rowwise_adagrad", 2)[0][1]))
