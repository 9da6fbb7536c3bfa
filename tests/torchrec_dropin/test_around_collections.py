"""Modules around collections (feature processors, towers): ordinary modules here, their tables ours, on any mesh."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import dmp
from dmp import DistributedModelParallel, column_wise, data_parallel, row_wise, table_wise
from sharders import EmbeddingBagCollectionSharder
from sharders.testing import check_sharder
from sharders.torchrec.adopt import adopt
from tests.equality import env_of
from tests.ranks import run_ranks
from tests.results import loss_of
from tests.torchrec_dropin.test_torchrec_sharder import _fused_params
from tests.torchrec_dropin.their_modules import make_batch, make_module, their_sharder

# TorchRec's modules of towers' neighbours script themselves when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def _battery(kind: str) -> None:
    check_sharder(
        EmbeddingBagCollectionSharder(), lambda: make_module(kind), lambda rank, step: make_batch(kind, rank, step)
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["fp", "fp_collection", "towers"])
def test_the_battery(kind: str, size: int) -> None:
    run_ranks(size, _battery, kind, timeout=300)


def _trained(kind: str, mesh: str) -> None:
    """As a script has it: TorchRec's sharder, an optimizer of all parameters that have none in the backward pass."""
    env, plain = env_of(mesh), make_module(kind)
    tables = [name for name, _ in plain.named_parameters() if "embedding_bags" in name]
    layouts = [row_wise(), column_wise([0, 1]), table_wise(1), data_parallel()]
    plan = {name: layouts[i % 4] for i, name in enumerate(tables)}
    fused = their_sharder(kind) if kind == "fp" else their_sharder(kind, fused_params=_fused_params("exact_sgd"))
    model = DistributedModelParallel(make_module(kind), env=env, plan=plan, sharders=[fused])
    assert len(model.fused_optimizer.fused) == (0 if kind == "fp" else len(tables))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(3):
        loss_of(model(*make_batch(kind, env.data_rank, step))).backward()
        whole: Any = sum(loss_of(plain(*make_batch(kind, rank, step))) for rank in range(env.data_size))
        (whole / env.data_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in dmp.full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], msg=name)


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("fp", "dp2"),
        ("towers", "dp2"),
        pytest.param("towers", "host2xlocal2", marks=pytest.mark.slow),
        pytest.param("fp", "replicate2xshard2", marks=pytest.mark.slow),
    ],
)
def test_torchrecs_sharder_of_what_is_around_them(kind: str, mesh: str) -> None:
    run_ranks(2 if mesh == "dp2" else 4, _trained, kind, mesh)


def test_an_optimizer_that_is_overruled_is_told(caplog: pytest.LogCaptureFixture) -> None:
    sharders = [their_sharder("ebc", fused_params=_fused_params("exact_sgd"))]
    sharders.append(their_sharder("towers", fused_params=_fused_params("exact_adagrad")))
    with caplog.at_level(logging.WARNING, "dmp"):
        adopt(sharders)
    assert "not by the OptimizerSpec(kind='adagrad'" in caplog.text
