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

from dmp.chunked import ChunkedTensor, as_chunks, is_dense
from dmp.env import ShardingEnv
from dmp.errors import ShardError
from dmp.moving.mover import Mover, Moving
from dmp.moving.routes import Rectangle
from dmp.ranks import entry, fail_together, gather_objects, gather_words


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
    listing = {name: (tuple(t.size()), t.dtype, t.rectangles) for name, t in mine.items()}
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

    def ready() -> tuple[dict[str, list[list[Rectangle]]], dict[str, Any]]:
        if problem is not None:
            raise problem
        names = dict.fromkeys([*state, *(name for known in everyone for name in known)]) if keep else ()
        return _who_sends(everyone), {
            name: copied(state[name]) if name in state and name not in mine else receiver(name) for name in names
        }

    senders, result = fail_together(ready, everywhere, what)

    def moving(name: str, old: list[list[Rectangle]]) -> Moving:
        size = next(known[name][0] for known in everyone if name in known)
        whole = [((0,) * len(size), size)]
        new = [whole if rank == 0 or not rank0_only else [] for rank in range(env.table_size)]
        local = dict(zip(mine[name].offsets, mine[name].chunks, strict=True)) if name in mine else {}
        have = [local[at] for at, _ in old[env.table_rank]]
        return Moving(old, new, have, [result[name]] if keep else [], size)

    if takes_part:
        Mover(group, env.device, what).move(moving(name, old) for name, old in senders.items())
    for name in [name for name in out or () if name in result and any(name in known for known in everyone)]:
        if out is not None and result[name] is not out[name]:  # of another dtype
            result[name] = out[name].copy_(result[name])
    return result


def _who_sends(everyone: list[dict[str, Any]]) -> dict[str, list[list[Rectangle]]]:
    """For each tensor the pieces by the rank that sends them; those that every rank holds are nobody's to send."""
    holders: dict[str, dict[Rectangle, list[int]]] = {}
    for rank, known in enumerate(everyone):
        for name, (_, _, pieces) in known.items():
            for piece in pieces:
                holders.setdefault(name, {}).setdefault(piece, []).append(rank)
    for name, (size, _, _) in {n: known[n] for known in everyone for n in known}.items():
        covered = sum(prod(sizes) for _, sizes in holders.get(name, ()))
        if covered != prod(size):
            raise ShardError(f"the ranks' pieces of {name!r} hold {covered} of {prod(size)} elements")
    senders: dict[str, list[list[Rectangle]]] = {name: [[] for _ in everyone] for name in holders}
    for name, held in holders.items():
        for piece, ranks in held.items():
            for rank in ranks if len(ranks) == len(everyone) else ranks[:1]:
                senders[name][rank].append(piece)
    return senders
