"""Rows that all ranks of a group hold, cut between these ranks and gathered again: what a tensor axis needs.

[Note: cuts] A tensor's rows are *ranges*, one after the other: the keys of a batch, the features of a result, or one
range of everything. A *cut* has for each range the T + 1 rows between which rank t's rows lie; a rank's own rows are
those of all ranges, one after the other. Cuts follow from sizes that every rank of the group knows, so that
gathering needs one exchange, and none for sizes.

[Note: gradients] Ranks along a tensor axis hold the same activations, hence the same gradients of them: each has the
gradient of its group's one loss, whole. So the way back of gathering is to take the own rows, without an exchange, the
way back of cutting is to gather, and nothing is summed or scaled on either: each is the transpose of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch._compile import _disable_dynamo

from dmp import ShardError, ShardingEnv
from sharders.channel import Channel, Transport, over_group
from sharders.embedding.batches.batch import Batch
from sharders.embedding.exchange.phases import TENSOR, Spent, phase

Cut = list[list[int]]


def tensor_ranks(env: ShardingEnv, transport: Transport = over_group) -> Channel:
    """Channel between the ranks that hold the same samples; the first call for a mesh is collective."""
    if env.mesh is None and env.tensor_size > 1:
        raise ShardError(f"{env} is abstract: it can be planned for, not run on; use ShardingEnv.from_mesh")
    return transport(env.group("tensor") if env.tensor_size > 1 else None, "tables")


def even_cut(counts: Sequence[int], size: int) -> Cut:
    """A cut of ranges with these rows between `size` ranks, as even as whole rows allow; some may get none."""
    cut, start = [], 0
    for n in counts:
        cut.append([start + n * t // size for t in range(size + 1)])
        start += n
    return cut


def rows_of(tensor: torch.Tensor, cut: Cut, rank: int) -> torch.Tensor:
    """Rank `rank`'s rows, copied."""
    return torch.cat([tensor[bounds[rank] : bounds[rank + 1]] for bounds in cut] or [tensor[:0]])


def cut_rows(
    tensors: Sequence[torch.Tensor], cuts: Sequence[Cut], ranks: Channel, spent: Spent | None = None
) -> list[torch.Tensor]:
    """This rank's rows of each tensor. Backward: their gradients are gathered, one exchange for each dtype.

    Args:
        spent: by the call that the way back is part of.
    """
    return list(_CutRows.apply(ranks, cuts, Spent() if spent is None else spent, *tensors))  # type: ignore[no-untyped-call]


def gather_rows(own: Sequence[torch.Tensor], cuts: Sequence[Cut], ranks: Channel) -> list[torch.Tensor]:
    """Tensors of which every rank has its rows; one exchange for each dtype. Backward: the own rows, no exchange."""
    return list(_GatherRows.apply(ranks, cuts, *own))  # type: ignore[no-untyped-call]


def cut_batch(batch: Batch, ranks: Channel, unpooled: bool, spent: Spent) -> Batch:
    """This rank's share of a batch that all ranks have: samples, or where results are rows, ids of each key.

    The gradient of the weights is gathered on the way back, which is the call's that has `spent` so much.
    """
    if unpooled:  # of each key only the number of ids matters: one bag
        # To tell of the counts takes a fifth of adding them up again; elsewhere it would be waited for.
        of_cpu = batch.lengths.is_cpu
        lengths = batch.lengths.new_tensor(batch.counts).view(-1, 1) if of_cpu else batch.lengths.sum(1, keepdim=True)
        batch = replace(batch, lengths=lengths, samples=None)
    if ranks.size == 1:
        return batch
    if unpooled:
        cut = even_cut(batch.counts, ranks.size)
    else:
        (samples,) = even_cut([batch.batch_size], ranks.size)
        cut = cut_of_lengths(batch.lengths, samples)
    counts = tuple(bounds[ranks.rank + 1] - bounds[ranks.rank] for bounds in cut)
    sizes = None
    if unpooled:
        lengths = batch.lengths.new_tensor(counts).view(-1, 1)
    else:
        first, stop = samples[ranks.rank : ranks.rank + 2]
        lengths = batch.lengths[:, first:stop]
        if batch.samples is not None:
            sizes = tuple(min(max(n - first, 0), stop - first) for n in batch.samples)
    weights = None if batch.weights is None else cut_rows([batch.weights], [cut], ranks, spent)[0]
    return Batch(
        rows_of(batch.values, cut, ranks.rank),
        lengths,
        batch.key_of,
        weights,
        samples=sizes,
        counts=counts,
        shortest=batch.shortest,
        longest=batch.longest,
    )


def cut_of_lengths(lengths: torch.Tensor, samples: Sequence[int]) -> Cut:
    """Cut of the ids of bags, key-major, that follows a cut of the samples.

    Args:
        lengths: (K, B).
        samples: T + 1 bounds, 0 to B.
    """
    num_keys, batch_size = lengths.shape
    ends = torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.reshape(-1).cumsum(0)])
    at = torch.tensor([[k * batch_size + s for s in samples] for k in range(num_keys)], dtype=torch.int64)
    cut: Cut = ends[at.to(lengths.device)].tolist() if num_keys else []
    return cut


def checksum(batch: Batch) -> int:
    """A 63-bit number that tells batches apart by ids, lengths and their order, for ranks that should have the same."""
    total = batch.batch_size * 31 + len(batch.counts)
    inverse = () if batch.inverse is None else (batch.inverse.reshape(-1),)
    for words in (batch.values, batch.lengths.reshape(-1), *inverse):
        mixed = torch.arange(1, words.numel() + 1, device=words.device).mul_(-0x61C8864680B583EB).add_(words)
        mixed = mixed.mul_(-0x40A7B892E31B1A47)
        total = total * 0x9E3779B1 + int((mixed ^ (mixed >> 29)).sum())
    return total % (1 << 63)


class _CutRows(torch.autograd.Function):
    """Forward: own rows of the tensors. Backward: gathered; see [Note: gradients]."""

    @staticmethod
    def forward(
        ctx: Any, ranks: Channel, cuts: Sequence[Cut], spent: Spent, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.ranks, ctx.cuts, ctx.spent = ranks, cuts, spent
        return tuple(rows_of(t, cut, ranks.rank) for t, cut in zip(tensors, cuts, strict=True))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        wanted = ctx.needs_input_grad[3:]
        with phase(ctx.spent, TENSOR):
            gathered = iter(_gather([*compress(grads, wanted)], [*compress(ctx.cuts, wanted)], ctx.ranks))
        return None, None, None, *(next(gathered) if wants else None for wants in wanted)


class _GatherRows(torch.autograd.Function):
    """Forward: all ranks' rows put together. Backward: the own ones; see [Note: gradients]."""

    @staticmethod
    def forward(ctx: Any, ranks: Channel, cuts: Sequence[Cut], *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.ranks, ctx.cuts = ranks, cuts
        return tuple(_gather(own, cuts, ranks))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        of_all = zip(grads, ctx.cuts, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(rows_of(g, cut, ctx.ranks.rank) if wants else None for g, cut, wants in of_all)


@_disable_dynamo  # an exchange, of memory that is read by its address
def _gather(tensors: Sequence[torch.Tensor], cuts: Sequence[Cut], ranks: Channel) -> list[torch.Tensor]:
    """All ranks' rows put together; tensors of one dtype travel in one exchange, padded to the largest rank's."""
    result = list(tensors)
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        indices = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        shapes = [tensors[i].shape[1:] for i in indices]
        rows = [[sum(b[t + 1] - b[t] for b in cuts[i]) for i in indices] for t in range(ranks.size)]
        sizes = [[n * shape.numel() for n, shape in zip(of_rank, shapes, strict=True)] for of_rank in rows]
        longest = max(sum(of_rank) for of_rank in sizes)
        own = [tensors[i].reshape(-1) for i in indices]
        padding = own[0].new_zeros(longest - sum(sizes[ranks.rank]))
        send = torch.cat([*own, padding]) if padding.numel() or len(own) > 1 else own[0]
        if len(indices) == len(cuts[indices[0]]) == 1 and all(of_rank == rows[0] for of_rank in rows):
            # It comes in order; and is no view, to autograd: it may be changed in place.
            result[indices[0]] = ranks.all_gather(send).view(ranks.size * rows[0][0], *shapes[0]).data
            continue
        everything = ranks.all_gather(send)
        came = [of_rank[: sum(n)].split(n) for of_rank, n in zip(everything, sizes, strict=True)]
        for place, i in enumerate(indices):
            # Rank by rank and there range by range, to range by range and there rank by rank.
            by_rank = [
                of_rank[place].view(rows[t][place], *shapes[place]).split([b[t + 1] - b[t] for b in cuts[i]])
                for t, of_rank in enumerate(came)
            ]
            in_order = [of_rank for of_range in zip(*by_rank, strict=True) for of_rank in of_range]
            result[i] = torch.cat(in_order) if in_order else tensors[i].clone()
    return result
