"""Entries of a map on their way between ranks: to other blocks, to everybody."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from sharders.channel import Channel
from sharders.managed_collision.id_map import Block, History, IdMap, block_of


def move(of: IdMap, ranks: Channel, blocks: Sequence[Block]) -> None:
    """Have a map's entries, and its history, where its table's rows are by now. Collective."""
    starts = [*(block.start for block in of.blocks), of.size]
    of.cut(blocks, recut(of, ranks, [of.fields(i) for i in range(len(of.own))], starts, blocks))
    own = [torch.tensor([[first]], device=of.raw_ids.device) for first in of.firsts()]
    firsts = torch.cat(gather_blocks(of, ranks, own, 1)).view(-1)
    kept = [torch.stack([ids, torch.full_like(ids, step)], 1) for ids, step in of.history.ids]
    here = torch.cat(kept) if kept else torch.empty(0, 2, dtype=torch.int64, device=of.raw_ids.device)
    owner = torch.tensor([block.owner for block in of.blocks], device=here.device)[
        block_of(here[:, 0].contiguous(), firsts)
    ]
    parts = [here[owner == rank].reshape(-1) for rank in range(ranks.size)]
    sizes = [len(part) for part in parts]
    ones = [1] * ranks.size
    told: list[int] = ranks.all_to_all(torch.tensor(sizes, device=here.device), ones, ones).wait().tolist()
    came = ranks.all_to_all(torch.cat(parts), sizes, told).wait().view(-1, 2)
    ids = [(came[came[:, 1] == step, 0], step) for step in came[:, 1].unique().tolist()]
    of.history = History(of.history.room, of.history.taken, ids)


def recut(
    of: IdMap, ranks: Channel, merged: Sequence[torch.Tensor], starts: Sequence[int], blocks: Sequence[Block]
) -> list[torch.Tensor]:
    """The entries (N, fields) of this rank's blocks of `blocks`; one exchange.

    Args:
        merged: of this rank's blocks as they are now, whatever their lengths.
        starts: where each block of the map begins by these lengths, and the end.
        blocks: as they are to be.
    """
    width = len(of.entry_buffers)
    own = {block: i for i, block in enumerate(of.own)}
    targets = [i for i, block in enumerate(blocks) if block.owner == ranks.rank]
    pieces: list[list[torch.Tensor]] = [[] for _ in range(ranks.size)]
    sizes = [0] * ranks.size
    placed: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks.size)]
    for source, (first, end) in enumerate(pairwise(starts)):
        for target, block in enumerate(blocks):
            a, b = max(first, block.start), min(end, block.stop)
            if a >= b:
                continue
            if source in own:
                pieces[block.owner].append(merged[own[source]][a - first : b - first].reshape(-1))
            if block.owner == ranks.rank:
                sender = of.blocks[source].owner
                sizes[sender] += (b - a) * width
                placed[sender].append((targets.index(target), a - block.start, b - a))
    send = torch.cat([piece for of_rank in pieces for piece in of_rank] or [of.raw_ids[:0]])
    came = ranks.all_to_all(send, [sum(map(len, of_rank)) for of_rank in pieces], sizes).wait().split(sizes)
    result = [of.raw_ids.new_empty(blocks[i].size, width) for i in targets]
    for of_rank, places in zip(came, placed, strict=True):
        cut = of_rank.view(-1, width).split([n for _, _, n in places])
        for (i, at, n), fields in zip(places, cut, strict=True):
            result[i][at : at + n] = fields
    return result


def gather_blocks(of: IdMap, ranks: Channel, own: Sequence[torch.Tensor], width: int) -> list[torch.Tensor]:
    """(N, fields) of every block of a map, from the ranks that have them; two exchanges.

    Args:
        own: of this rank's blocks.
        width: fields of each.
    """
    device = of.raw_ids.device
    lengths = torch.zeros(len(of.blocks), dtype=torch.int64)
    for i, here in zip(of.own, own, strict=True):
        lengths[i] = len(here)
    counts: list[int] = ranks.all_gather(lengths.to(device)).sum(0).tolist()
    held = [[i for i, block in enumerate(of.blocks) if block.owner == rank] for rank in range(ranks.size)]
    totals = [sum(counts[i] for i in of_rank) for of_rank in held]
    send = torch.cat([*own, torch.zeros(max(totals) - totals[ranks.rank], width, dtype=torch.int64, device=device)])
    came = ranks.all_gather(send.reshape(-1)).view(ranks.size, -1, width)
    result: list[torch.Tensor] = [send[:0]] * len(of.blocks)
    for of_rank, blocks, total in zip(came, held, totals, strict=True):
        for i, here in zip(blocks, of_rank[:total].split([counts[b] for b in blocks]), strict=True):
            result[i] = here
    return result
