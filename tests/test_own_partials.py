"""A rank's own partials: rows read from its tables, and gradients where the model's backward left them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import dmp
from dmp import row_wise
from sharders.embedding.data_path.way import Way
from sharders.embedding.results import partial_columns
from sharders.embedding.results.partial_columns import PartialColumns
from sharders.embedding.results.partials import Partials
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


def _results(reads_tables: bool, longest: int, threads: int) -> tuple[int, list[torch.Tensor]]:
    """How often own partials were looked up, and the results of two batches."""
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(num_embeddings=40, embedding_dim=8, name="a", feature_names=["x", "y"]),
        EmbeddingBagConfig(num_embeddings=900, embedding_dim=24, name="b", feature_names=["z"]),
    ]
    module, env, looked_up = EmbeddingBagCollection(configs), env_of("dp2"), 0
    look_up, own_rows = Partials.look_up_own, Partials.own_rows

    def counted(*arguments: object) -> None:
        nonlocal looked_up
        looked_up += 1
        look_up(*arguments)  # type: ignore[arg-type]

    with (
        mock.patch.object(Partials, "own_rows", own_rows if reads_tables else None),
        mock.patch.object(Partials, "look_up_own", counted),
        mock.patch.object(partial_columns.threads, "num_parts", return_value=threads),
    ):
        plan = {name: row_wise() for name, _ in module.named_parameters()}
        model, found = dmp.DistributedModelParallel(module, env, plan=plan), []
        for step in range(2):
            draw = torch.Generator().manual_seed(10 * step + env.rank)
            lengths = torch.randint(0, longest + 1, (3 * 50,), generator=draw)
            ids = torch.randint(0, 40, (int(lengths.sum()),), generator=draw)
            found.append(model(KeyedJaggedTensor(["z", "x", "y"], ids, lengths=lengths)).values().detach().clone())
    return looked_up, found


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_are_read_from_tables_where_bags_have_one_id(threads: int) -> None:
    expected = run_ranks(2, _results, False, 1, threads)
    for (num, values), (of_tables, found) in zip(expected, run_ranks(2, _results, True, 1, threads), strict=True):
        assert (num, of_tables) == (2, 0) and all(map(torch.equal, values, found))
    assert [num for num, _ in run_ranks(2, _results, True, 2, threads)] == [2, 2]
