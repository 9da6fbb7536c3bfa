"""Copies of weights that are not the same on all ranks: they are trained apart, one of them is saved, and nobody would
know.

Wrapping makes copies the same, and averaged gradients keep them so. They part where a program writes other values on
each rank, as of one rank's file or by random numbers, where the model's own code writes into one what its batch gives,
and where steps are taken by gradients that nobody averaged. Ranks look before the first step of an optimizer, ever
more rarely before later ones, and whenever a checkpoint is saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from dmp.bits import checksum
from dmp.env import ShardingEnv
from dmp.places import is_dtensor, local_of
from dmp.ranks import compare_facts, say_once

_CAUSES = (
    "they are trained apart, and one is saved. Either they were written on each rank by itself, as from a file that "
    "one rank read, or drawn by generators that differ from rank to rank (model.apply(init) after wrapping under other "
    "seeds; noise of p.shape, which draws as many numbers as a rank's part has), or the model's code writes into them "
    "what its own batch gives, or steps were taken by gradients that nobody averaged, as under no_sync() and by "
    "torch.autograd.grad, or that were changed on each rank by itself, as by noise"
)
OF_NO_MODEL = (
    "it is no wrapped model's, as weights of a loss are that lies beside it, and nobody averages its gradients. Wrap "
    "one module that has both as attributes, or average p.grad over the ranks before each step"
)
"""Of what an optimizer has beside a model's weights."""

_told: set[tuple[str, str]] = set()


def look_for_drift(
    named: Iterable[tuple[str, torch.Tensor]], env: ShardingEnv, when: str, causes: str = _CAUSES
) -> None:
    """Say which differ, on the first of the ranks that should have the same, and once of each call; collective.

    Args:
        named: the weights, but for tables: copies of these may be averaged every so many updates.
        when: the call that looks.
        causes: of what is found, and what to do.
    """
    for axes, sums in _sums(named, env).items():
        group = env.everyone if axes == env.names else env.axis_group(*axes)
        of_ranks = compare_facts(sums, group, f"{when}: a look at copies of weights") if sums else None
        if group is None or of_ranks is None or group.rank() != 0:
            continue
        ranked = enumerate(of_ranks)
        differ = {name: r for r, told in ranked for name, own in sums.items() if told.get(name, own) != own}
        (name, other), more = next(iter(differ.items()), ("", 0)), len(differ) - 1
        if differ and (when, name) not in _told:
            _told.add((when, name))
            one, other = (dist.get_global_rank(group, rank) for rank in (0, other))
            say_once(
                f"{name!r}{f' (and {more} more)' if more else ''} has other values on rank {other} than on rank {one}, "
                f"where copies should be the same, in {when}: {causes}"
            )


def _sums(named: Iterable[tuple[str, torch.Tensor]], env: ShardingEnv) -> Mapping[tuple[str, ...], dict[str, str]]:
    """Checksums by the axes along which ranks should have the same: all, or the one along which parts are copied."""
    found: dict[tuple[str, ...], dict[str, str]] = {env.names: {}}
    for name, value in named:
        if is_lazy(value) or value.is_meta:  # which has no values yet
            continue
        axes = [env.names]
        if is_dtensor(value) and not all(each.is_replicate() for each in value.placements):
            names = zip(value.device_mesh.mesh_dim_names or (), value.placements, strict=False)
            axes = [(axis,) for axis, placement in names if placement.is_replicate() and axis in env.names]
        for each in axes:
            found.setdefault(each, {})[name] = f"{checksum(local_of(value)):x}"
    return found
