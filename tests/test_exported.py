"""Graphs and quantization of a wrapped model: tables are refused, or passed over, in words; its plain form is not."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dmp import DistributedModelParallel, ShardError, ShardingEnv, row_wise, to_unsharded
from tests.ranks import mesh, run_ranks


class Net(nn.Module):
    """A table into a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.over = nn.EmbeddingBag(10, 4, mode="sum"), nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.over(self.table(ids))
        return out


IDS = torch.tensor([[1, 2], [3, 4]])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tables_are_neither_exported_nor_traced() -> None:
    model = DistributedModelParallel(Net())
    with pytest.raises(ShardError, match=r"table is sharded, and is neither exported nor traced.*to_unsharded"):
        torch.jit.trace(model, (IDS,))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_tables_are_not_scripted() -> None:
    """The first annotation of a class of ours was said to be an unknown type."""
    model = DistributedModelParallel(Net())
    for each in (model, nn.Sequential(model)):
        with pytest.raises(ShardError, match=r"a wrapped model is not compiled by torch.jit.script.*to_unsharded"):
            torch.jit.script(each)
    for each in (model.module, model.module.table):  # type: ignore[union-attr, assignment]
        with pytest.raises(ShardError, match=r"table 'weight' is not compiled by torch.jit.script.*to_unsharded"):
            torch.jit.script(each)
    torch.jit.script(to_unsharded(model))(IDS)
    model(IDS).sum().backward()


def faked() -> None:
    model = DistributedModelParallel(Net(), plan={"table.weight": row_wise()})
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(IDS))


def test_tables_are_not_run_on_fake_tensors() -> None:
    """What has no memory was read by its address, which ended the process."""
    for error in run_ranks(2, faked, expect=ShardError):
        assert "nor run on fake tensors" in str(error)


def traced_then_run(axis: str) -> None:
    """The data-parallel part was made again with symbols for sizes, which stayed in what ranks exchange by."""
    env = ShardingEnv.from_mesh(mesh((2,), (axis,)))
    for module, inputs in ((nn.Linear(4, 1), torch.ones(2, 4)), (Net(), IDS)):
        model = DistributedModelParallel(module, env)
        with pytest.raises(ShardError, match=r"on 2 ranks is neither exported nor traced.*to_unsharded"):
            torch.jit.trace(model, (inputs,))
        with pytest.raises(ShardError, match=r"on 2 ranks is neither exported nor traced.*to_unsharded"):
            torch.export.export(model, (inputs,))
        model(inputs).sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_models_on_several_ranks_are_neither_exported_nor_traced(axis: str) -> None:
    run_ranks(2, traced_then_run, axis)


def moved_to_meta() -> None:
    model = DistributedModelParallel(nn.Sequential(nn.Linear(1, 1), Net()), plan={"1.table.weight": row_wise()})
    before = model.module[1](IDS)
    for moved in (model, nn.Sequential(model), model.module[1].table):
        with pytest.raises(ShardError, match=r"not moved to meta.*to_unsharded"):
            moved.to("meta")
        assert not any(p.is_meta for p in model.parameters())
        assert torch.equal(model.module[1](IDS), before)


def test_tables_are_not_moved_to_meta() -> None:
    """The next forward read at no address, which ended the process."""
    run_ranks(2, moved_to_meta)


@pytest.mark.slow
def test_the_plain_form_is_exported() -> None:
    model = DistributedModelParallel(Net())
    with pytest.raises(ShardError, match=r"table is sharded, and is neither exported nor traced.*to_unsharded"):
        torch.export.export(model, (IDS,))
    exported = torch.export.export(to_unsharded(model), (IDS,))
    torch.testing.assert_close(exported.module()(IDS), model(IDS))


@pytest.mark.slow
def test_dense_weights_are_exported() -> None:
    model = DistributedModelParallel(nn.Linear(4, 1))
    x = torch.ones(2, 4)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_quantization_passes_over_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = DistributedModelParallel(Net())
    with caplog.at_level(logging.WARNING, "dmp"):
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert [r.getMessage().partition(",")[0] for r in caplog.records] == ["quantization leaves table as it is"]
    torch.testing.assert_close(quantized(IDS), model(IDS), rtol=0.05, atol=0.05)
