"""What all ranks must share before sharding: the same model and plan, and rank 0's values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.bits import checksum
from dmp.env import ShardingEnv
from dmp.errors import PlanError, ShardError
from dmp.ranks import compare_facts, fail_together
from dmp.wrap.values.skeleton import all_tensors

_MESSAGE = 1 << 22  # elements that travel at once
_WRAPPING = "wrapping a model"
_ORDER = ": all the same in another order (iterating a set gives another one in each process: sort it)"
T = TypeVar("T")


def on_all_ranks(step: Callable[[], T], env: ShardingEnv) -> T:
    """Run a local step of wrapping on every rank; what fails on one of them is raised on all, before anyone goes on.

    Args:
        step: without collectives.

    Raises:
        PlanError: the step failed on some rank; where it fails alike on all, each raises what its step did.
        RanksError: some are in another call.
    """
    return fail_together(step, env.everyone, _WRAPPING, kind=PlanError, as_it_is=True)


def check_agreement(
    facts: Mapping[str, str],
    env: ShardingEnv,
    what: str = _WRAPPING,
    advice: str = "every rank must build the same model with the same plan",
) -> None:
    """Compare `facts` (what -> its text) over all ranks; one small exchange, a second only when they differ.

    Raises:
        PlanError: on every rank: the first fact that differs, the rank, and both texts.
        RanksError: on every rank: some are in another call.
    """
    theirs = compare_facts(facts, env.everyone, what)
    if theirs is None:
        return
    for fact in dict.fromkeys(name for of_rank in theirs for name in of_rank):
        for rank, other in enumerate(theirs):
            if other.get(fact) != theirs[0].get(fact):
                order = _ORDER if _are_in_another_order(theirs[0].get(fact), other.get(fact)) else ""
                raise PlanError(
                    f"ranks disagree on {fact}: rank 0 has {_first_difference(theirs[0].get(fact), other.get(fact))}, "
                    f"rank {rank} has {_first_difference(other.get(fact), theirs[0].get(fact))}{order}; {advice}"
                )
    raise PlanError(f"ranks disagree in {what}; {advice}")


def sync_from_first_rank(module: nn.Module, env: ShardingEnv, apart: Collection[str] = ()) -> list[str]:
    """Give every rank the values of rank 0 where a checksum differs; parameters on meta or lazy are passed over.

    Args:
        apart: names of tensors that are each rank's own.

    Returns:
        Names of the tensors that travelled.
    """
    group = env.group()
    if group is None or env.size == 1:
        return []
    held = {n: t for n, t in all_tensors(module, remove_duplicate=True) if n not in apart}
    tensors = {n: t.detach() for n, t in held.items() if not is_lazy(t) and not t.is_meta}
    if not tensors:
        return []
    mine = torch.tensor([_checksum_of(name, t) for name, t in tensors.items()], device=env.device)
    of_ranks = [torch.empty_like(mine) for _ in range(env.size)]
    dist.all_gather(of_ranks, mine, group=group)
    differs = (torch.stack(of_ranks) != of_ranks[0]).any(0).tolist()
    sent = [name for name, differ in zip(tensors, differs, strict=True) if differ]
    flat = [name for name in sent if tensors[name].layout == torch.strided]
    for name in sent:
        if name not in flat:
            first: list[Any] = [tensors[name] if env.rank == 0 else None]
            dist.broadcast_object_list(first, group=group, group_src=0, device=env.device)
            with torch.no_grad():
                held[name].copy_(first[0])  # not what detach gave, which would take its values for itself
    for _, of_dtype in groupby(sorted(flat, key=lambda n: str(tensors[n].dtype)), key=lambda n: tensors[n].dtype):
        _broadcast([tensors[name] for name in of_dtype], env)
    return sent


def _checksum_of(name: str, tensor: torch.Tensor) -> int:
    try:
        return checksum(tensor)
    except NotImplementedError as error:  # every class of tensors says so in its own words
        raise ShardError(
            f"{name!r} is a {type(tensor).__name__}, which gives no access to its values, as weights that are "
            "quantised (torchao's quantize_) do not: they can be neither split nor kept the same on all ranks. Wrap "
            "the model before that, and quantise dmp.to_unsharded(model) when it is trained"
        ) from error


def _broadcast(tensors: list[torch.Tensor], env: ShardingEnv) -> None:
    """Rank 0's values of tensors of one dtype, in messages of a fixed size: small ones together, large ones cut."""
    flats = [t.reshape(-1) for t in tensors]  # a copy where the tensor is not contiguous, written back below
    pieces = deque(piece for flat in flats for piece in flat.split(_MESSAGE))
    while pieces:
        message = [pieces.popleft()]
        room = _MESSAGE - message[0].numel()
        while pieces and pieces[0].numel() <= room:
            room -= pieces[0].numel()
            message.append(pieces.popleft())
        moved = torch.cat(message).to(env.device)
        dist.broadcast(moved, group=env.group(), group_src=0)
        for piece, value in zip(message, moved.split([p.numel() for p in message]), strict=True):
            piece.copy_(value)
    for tensor, flat in zip(tensors, flats, strict=True):
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))


def _are_in_another_order(text: str | None, other: str | None) -> bool:
    """Whether their lines are the same."""
    return text is not None and other is not None and sorted(text.splitlines()) == sorted(other.splitlines())


def _first_difference(text: str | None, other: str | None, width: int = 160) -> str:
    """What of `text` is around where it first differs from `other`."""
    if text is None or other is None:
        return "nothing" if text is None else text[:width]
    at = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    start = max(0, text.rfind("\n", 0, at) + 1, at - width // 2)
    return repr(text[start : start + width])
