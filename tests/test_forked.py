"""Processes that are forked from a rank, as a loader's workers: they are told, and their rank goes on."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, RanksError, to_unsharded
from tests.ranks import run_ranks


def _forked_worker(is_dense: bool) -> int:
    """What a forked process, as a loader's worker, does with the model: told by `b"told"`, and the rank goes on."""
    module = nn.Linear(3, 1) if is_dense else nn.Sequential(nn.EmbeddingBag(9, 4, mode="sum"), nn.Linear(4, 1))
    model = DistributedModelParallel(module)
    batch = torch.ones(2, 3) if is_dense else torch.zeros(2, 3, dtype=torch.int64)
    model(batch).sum().backward()
    calls = [lambda: model(batch), lambda: to_unsharded(model), lambda: DistributedModelParallel(nn.Linear(2, 1))]
    pid = os.fork()
    if not pid:
        told = 0
        for call in calls:
            try:
                call()
            except RanksError as error:
                told += "was forked from rank" in str(error)
        os._exit(told)
    _, status = os.waitpid(pid, 0)
    model(batch).sum().backward()
    return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize("is_dense", [True, False])
def test_a_forked_process_does_not_take_its_ranks_place(is_dense: bool) -> None:
    assert run_ranks(2, _forked_worker, is_dense) == [3, 3]
