"""Copies of weights that are not the same on all ranks when they are saved: one of them is, and nobody would know.

Averaged gradients keep copies the same. They drift where the model's own code writes into one what its batch gives, or
a program steps by gradients that nobody averaged, or by noise, where it draws as many numbers as its rank's part has.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from dmp.bits import checksum
from dmp.checkpoint.sources.source import MODEL
from dmp.chunked import ChunkedTensor
from dmp.env import ShardingEnv
from dmp.ranks import compare_facts, say_once
from dmp.state.find_wrapped import joint_plan


def say_of_drift(model: nn.Module, tensors: Mapping[str, ChunkedTensor], env: ShardingEnv) -> None:
    """Say so once, on rank 0; collective. Tables are left out: copies of them may be averaged every so many updates.

    Args:
        tensors: what is saved, by key.
    """
    planned = joint_plan(model)
    sums: dict[str, str] = {}
    for name, _ in model.named_parameters():
        value = tensors.get(MODEL + name)
        if (
            value is not None
            and name not in planned
            and len(value.chunks) == 1
            and value.chunks[0].shape == value.shape
        ):
            sums[name] = f"{checksum(value.chunks[0]):x}"
    of_ranks = compare_facts(sums, env.everyone, "save_checkpoint's look at copies")
    if of_ranks is None or env.rank != 0:
        return
    differ = {name: r for r, told in enumerate(of_ranks) for name in sums if name in told and told[name] != sums[name]}
    if differ:
        (name, rank), others = next(iter(differ.items())), len(differ) - 1
        say_once(
            f"{name!r}{f' (and {others} more)' if others else ''} has other values on rank {rank} than on rank 0, "
            "where copies should be the same; one of them is saved. Either the model's code writes into it what its "
            "own batch gives, or steps were taken by gradients that nobody averaged, as under no_sync() and by "
            "torch.autograd.grad, or by random numbers that were drawn in the shapes of tables' parts (noise of "
            "p.shape), which leaves the ranks' generators apart"
        )
