"""Whole tensors out of the ranks' chunks, a few MB at a time.

[Note: pieces and copies]
Every tensor of a model is seen as a `ChunkedTensor`: a table's chunks, a DTensor's local shard, or a plain tensor as
one chunk that every rank holds. What all table ranks hold is copied locally; the rest is sent by the first rank that
holds it. Replicas of the tables are not asked: they hold the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from dmp.chunked import ChunkedTensor, as_chunks, is_dense
from dmp.env import ShardingEnv
from dmp.errors import ShardError
from dmp.moving.buffers import Batch, batches, cut_out, num_bytes, places, room_in
from dmp.moving.routes import Rectangle
from dmp.ranks import entry, fail_together, gather_objects, gather_words

_BUFFER_BYTES = 4 << 20


def gather(
    state: Mapping[str, Any],
    env: ShardingEnv,
    *,
    rank0_only: bool = False,
    cpu: bool = True,
    out: Mapping[str, torch.Tensor] | None = None,
    what: str = "gathering whole tensors",
) -> dict[str, Any]:
    """Every tensor whole. Names that only some table ranks have are complete on all of them.

    One exchange tells that all ranks are here, one who holds what, one whether every rank is ready to receive; then
    pieces travel in buffers of a few MB.

    Args:
        state: name -> tensor, or any other object, which is copied.
        env: whose table ranks hold the pieces.
        rank0_only: the others return `{}`.
        cpu: the result is on the CPU; else each tensor is where this rank has its chunks, or on the env's device.
        out: where to put the values, by name, instead of new tensors.
        what: the call, for messages.

    Raises:
        RanksError: ranks are in other calls.
        CheckpointError: on every rank of `env`: pieces that do not cover a tensor, or no memory for the result.
    """
    with entry(what, env.everyone):
        return _gather(state, env, rank0_only, cpu, out, what)


def _gather(
    state: Mapping[str, Any],
    env: ShardingEnv,
    rank0_only: bool,
    cpu: bool,
    out: Mapping[str, torch.Tensor] | None,
    what: str,
) -> dict[str, Any]:
    mine: dict[str, ChunkedTensor] = {}
    everywhere = env.everyone
    problem: Exception | None = None
    try:
        mine = {name: as_chunks(t) for name, t in state.items() if is_dense(t)}
    except ShardError as error:  # the others wait in the exchange
        problem = error
    takes_part = not rank0_only or env.replica_of(env.rank) == 0
    keep = not rank0_only or env.rank == 0
    group = env.table_group if env.table_size > 1 else None
    listing = {
        name: (tuple(t.size()), t.dtype, [(at, tuple(c.shape)) for at, c in zip(t.offsets, t.chunks, strict=True)])
        for name, t in mine.items()
    }
    gather_words(what, [0, 0], everywhere)
    everyone = gather_objects(what, listing, group) if takes_part else []

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        return value.to("cpu" if cpu else value.device, copy=True)  # a sparse one, not all of which deepcopy takes

    def receiver(name: str) -> torch.Tensor:
        size, dtype, _ = next(known[name] for known in everyone if name in known)
        if out is not None and name in out and out[name].dtype is dtype:
            return out[name]
        where = torch.device("cpu") if cpu else mine[name].device if name in mine else env.device
        return torch.empty(size, dtype=dtype, device=where)

    def ready() -> tuple[dict[int | None, list[tuple[str, Rectangle]]], dict[str, Any]]:
        if problem is not None:
            raise problem
        names = dict.fromkeys([*state, *(name for known in everyone for name in known)]) if keep else ()
        return _who_sends(everyone), {
            name: copied(state[name]) if name in state and name not in mine else receiver(name) for name in names
        }

    sends, result = fail_together(ready, everywhere, what)
    local = {(name, at): chunk for name, t in mine.items() for at, chunk in zip(t.offsets, t.chunks, strict=True)}
    buffer = torch.empty(0, dtype=torch.uint8, device=env.device)  # one for all: the allocator would keep several
    for owner, rectangles in sends.items():
        is_here = owner in (None, env.table_rank)
        have = [local[name, at] for name, (at, _) in rectangles] if is_here else []
        room = [cut_out(result[name], (0,) * len(of[0]), of) for name, of in rectangles] if keep else []
        for to, value in zip(room, have, strict=True) if keep and is_here else ():
            to.copy_(value)
        if owner is None or (rank0_only and (owner == 0 or env.table_rank not in (0, owner))):
            continue
        for batch in batches(have if is_here else room, _BUFFER_BYTES):
            buffer, sent = room_in(buffer, num_bytes(batch))
            _transfer(batch, sent, owner, env, rank0_only)
    for name in [name for name in out or () if name in result and any(name in known for known in everyone)]:
        if out is not None and result[name] is not out[name]:  # of another dtype
            result[name] = out[name].copy_(result[name])
    return result


def _who_sends(everyone: list[dict[str, Any]]) -> dict[int | None, list[tuple[str, Rectangle]]]:
    """Pieces by the rank that sends them; under None those that every rank holds already."""
    holders: dict[tuple[str, Rectangle], list[int]] = {}
    for rank, known in enumerate(everyone):
        for name, (_, _, pieces) in known.items():
            for piece in pieces:
                holders.setdefault((name, piece), []).append(rank)
    covered: dict[str, int] = {}
    sends: dict[int | None, list[tuple[str, Rectangle]]] = {}
    for (name, piece), ranks in holders.items():
        covered[name] = covered.get(name, 0) + prod(piece[1])
        sends.setdefault(None if len(ranks) == len(everyone) else ranks[0], []).append((name, piece))
    for name, (size, _, _) in {n: known[n] for known in everyone for n in known}.items():
        if covered.get(name, 0) != prod(size):
            raise ShardError(f"the ranks' pieces of {name!r} hold {covered.get(name, 0)} of {prod(size)} elements")
    return sends


def _transfer(batch: Batch, buffer: torch.Tensor, owner: int, env: ShardingEnv, rank0_only: bool) -> None:
    """Send one buffer from its owner, whose pieces these are, to every rank, or to rank 0, and place what came."""
    group, is_owner = env.table_group, owner == env.table_rank
    for piece, place in places([batch], [len(buffer)], buffer) if is_owner else ():
        place.copy_(piece)
    if not rank0_only:
        dist.broadcast(buffer, group=group, group_src=owner)
    elif is_owner:
        dist.send(buffer, group=group, group_dst=0)
    else:
        dist.recv(buffer, group=group, group_src=owner)
    for piece, place in places([batch], [len(buffer)], buffer) if not is_owner else ():
        piece.copy_(place)
