"""Ranks that should have samples of their own, and were all called with the same: a sampler that was forgotten.

`DataLoader(shuffle=True)` without a `DistributedSampler`, under one seed, gives each rank the whole data in one order:
the average of equal gradients is that gradient, the run is no faster than one rank, and the loss looks as it should.
So ranks note what the first forwards are called with, and compare that once, before the first step of an optimizer.
"""

from __future__ import annotations

from typing import Any

import torch

from dmp.bits import checksum
from dmp.env import ShardingEnv
from dmp.nested import tensors_of
from dmp.ranks import gather_words, say_once

FORWARDS = 8
"""So many are looked at: programs may make no step, as those whose tables alone are trained, in the backward pass."""


def note_samples(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a forward that will be trained, one of the first and before a step was made."""
    calls = model._calls
    if len(calls.samples) == FORWARDS or calls.num_steps or model.env.data_size == 1 or not torch.is_grad_enabled():
        return
    if not torch.compiler.is_compiling() and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
        given = tensors_of((args, kwargs), as_held=True)
        calls.samples.append(sum(checksum(t) for _, t in given if _has_values(t)))


def _has_values(tensor: torch.Tensor) -> bool:
    """Of torch's own class, and neither nested, nor of torch.func, nor of a layout whose parts are not known: a look
    ends no program."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_meta
    return is_plain and not (tensor.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def compare_samples(model: Any) -> None:
    """Before the first step of an optimizer; say that all were called with the same, and collective."""
    env: ShardingEnv = model.env
    if env.data_size == 1:
        return
    what = f"the first step on {model._calls.model}: a look at what ranks were called with"
    told = gather_words(what, [sum(model._calls.samples) % (1 << 62), 0], env.everyone)
    if told[0][0] and all(of_rank == told[0] for of_rank in told):
        say_once(
            f"all {env.data_size} ranks that should have samples of their own called {model._calls.model} with the "
            "same ones until the first step of an optimizer: each computes what all compute, and the average is what "
            "one rank alone would have. Is there no sampler? DistributedSampler(dataset, num_replicas=env.data_size, "
            "rank=env.data_rank) gives each rank its part",
            by_first=True,
        )
