"""Collectives of the data path. One process, with or without a group, runs the same code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def all_to_all(
    send: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Send `send_sizes[i]` elements of the flat `send` to rank i; returns what came, in rank order, flat."""
    if group is None or len(send_sizes) == 1:
        return send
    received = send.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, send, list(receive_sizes), list(send_sizes), group=group)
    return received


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum over the group's ranks, in place."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, group=group)
