"""What a batch shares with its caller's memory, and how long what was worked out of it lives."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, data_parallel, row_wise
from sharders.embedding.ids.call import Call
from tests.ranks import run_ranks

IDS, OFFSETS = torch.tensor([1, 5, 2, 2, 0]), torch.tensor([0, 2, 3])


def bag(plan: Any) -> DistributedModelParallel:
    return DistributedModelParallel(nn.EmbeddingBag(7, 4, mode="sum"), plan={"weight": plan})


def _gradients(plan: Any, wants_gradient: bool, refills: bool) -> tuple[Any, Any]:
    model, given = bag(plan), [IDS.clone(), OFFSETS.clone(), torch.rand(5).requires_grad_(wants_gradient)]
    loss = model(given[0], given[1], per_sample_weights=given[2]).pow(2).sum()
    with torch.no_grad():
        for buffer in given if refills else ():
            buffer.zero_()
    loss.backward()
    return next(model.parameters()).grad, given[2].grad


def _refilled(wants_gradient: bool) -> None:
    for plan in (data_parallel(), row_wise()):
        torch.manual_seed(0)
        expected = _gradients(plan, wants_gradient, False)
        torch.manual_seed(0)
        torch.testing.assert_close(_gradients(plan, wants_gradient, True), expected)


@pytest.mark.parametrize("wants_gradient", [False, True])
def test_a_caller_refills_his_buffers_before_the_backward(wants_gradient: bool) -> None:
    run_ranks(2, _refilled, wants_gradient)


def test_what_was_kept_of_a_batch_goes_with_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[weakref.ref[Call]] = []
    model = bag(row_wise())
    begin = model.module.begin

    def noted(*inputs: Any, **keywords: Any) -> Call:
        call: Call = begin(*inputs, **keywords)  # type: ignore[operator]
        calls.append(weakref.ref(call))
        return call

    monkeypatch.setattr(model.module, "begin", noted)
    losses = []  # as a program does that shows their mean later: each holds its graph
    for _ in range(3):
        losses.append(model(IDS, OFFSETS).sum())
        losses[-1].backward(retain_graph=True)
        assert calls[-1]() is not None
        losses[-1].backward()
    gc.collect()
    assert [call() for call in calls] == [None] * 3
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        losses[0].backward()
