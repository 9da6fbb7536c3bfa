"""Parametrizations, pruning and norms of a sharded table's weight are refused, of other weights they work."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from dmp import DistributedModelParallel, ShardError, row_wise, table_wise
from tests.ranks import run_ranks
from tests.wrapped_net import Net


def refused() -> list[str]:
    plan = {"users.weight": table_wise(0), "items.weight": table_wise(0), "more.weight": row_wise()}
    module: Net = DistributedModelParallel(Net(), plan=plan).module
    texts = []
    for make in (
        parametrizations.spectral_norm,
        lambda table: prune.l1_unstructured(table, "weight", 0.5),
        spectral_norm,
        lambda table: prune.global_unstructured([(table, "weight")], prune.L1Unstructured, amount=0.5),
    ):
        with pytest.raises(ShardError) as error:
            make(module.more)
        texts.append(str(error.value))
    module.more.weight_scale = nn.Parameter(torch.ones(()))  # of a user's own
    prune.l1_unstructured(module.over, "weight", 0.5)
    assert (module.over.weight == 0).sum() == module.over.weight.numel() // 2
    assert isinstance(module.more.weight, nn.Parameter) and torch.isfinite(module.more.weight).all()
    return texts


def test_a_table_keeps_its_form() -> None:
    """They were of a rank's part, and the lookup went by what it held."""
    for texts in run_ranks(2, refused):
        assert all("cannot be taken away, parametrized, pruned or normed" in text for text in texts)
