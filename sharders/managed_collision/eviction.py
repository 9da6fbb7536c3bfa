"""Eviction: all ranks decide together, exactly as one process, which ids enter a map and which leave it.

[Note: the decision]
A new id enters where it is worth more than what leaves for it: the best new one takes the place of the worst that
leaves, and so on, up to the first that would not; equals stay. So all that must be known of a map are its worst
entries, as many as there are new ids at most; each block offers some of its worst, and more as long as all that it has
offered would leave. What is exchanged are new ids and offers; every rank then decides the same from the same.

Then the sequence of entries is put in order again, and cut where it was: entries go to the blocks beside them, or,
while a map fills, to those behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from sharders.channel import Channel
from sharders.managed_collision.entries import gather_blocks, recut
from sharders.managed_collision.id_map import EMPTY, IdMap, block_of
from sharders.managed_collision.policies import COUNTS, LAST_ACCESS

_OFFERED = 64  # by each block at first, at least


@dataclass(frozen=True)
class _Leaving:
    """Entries that leave, the worst first: whose block, where in it, and the row of each."""

    block: torch.Tensor
    at: torch.Tensor
    rows: torch.Tensor


def evict(of: IdMap, ranks: Channel, firsts: torch.Tensor, grow: Callable[[int], None]) -> torch.Tensor:
    """Have a map take what its history says; returns (N,) rows that have another raw id now. Collective.

    Args:
        of: on each of the table ranks its part.
        ranks: the table ranks.
        firsts: first raw id of each block.
        grow: gives it, and its table, so many rows; empty blocks come behind the others.
    """
    new = _new_ids(of, ranks, firsts)
    rows = _rows_wanted(of, ranks, len(new))
    if rows > of.size:
        grow(rows)
        firsts = torch.cat([firsts, firsts.new_full((len(of.blocks) - len(firsts),), EMPTY)])
    _keep_last(of)
    columns = {COUNTS: new[:, 1], LAST_ACCESS: new[:, 2]}
    value = of.policy.score({name: columns[name] for name in of.policy.metadata}, of.step).double()
    order = torch.argsort(value, descending=True, stable=True)
    leaving = _leaving(of, ranks, value[order])
    count = len(leaving.rows)
    entering = new[order[:count]]
    # The best of those that enter takes the place of the best of those that leave.
    fields = [entering[:, 0], leaving.rows.flip(0)]
    fields += [entering[:, 1 + (name == LAST_ACCESS)] for name in of.policy.metadata]
    _rebuild(of, ranks, firsts, leaving, torch.stack(fields, 1))
    return leaving.rows.flip(0)


def _new_ids(of: IdMap, ranks: Channel, firsts: torch.Tensor) -> torch.Tensor:
    """(N, 3) ids of all ranks that are not in the map, their counts and last steps, the most frequent first.

    What the map keeps of those that are in it is brought up to date.
    """
    came = of.take_history()
    table = torch.stack([came["ids"], came[COUNTS], came[LAST_ACCESS]], 1)
    block = block_of(came["ids"], firsts)
    by_block = [table[block == i] for i in of.own]
    if of.policy.keep is not None:
        by_block = _filtered(of, ranks, by_block)
    unknown = []
    for i, here in enumerate(by_block):
        known = of.entries("_mch_sorted_raw_ids", i)
        at = torch.searchsorted(known, here[:, 0].contiguous()).clamp_(max=len(known) - 1)
        is_known = known[at] == here[:, 0]
        found, at = here[is_known], at[is_known]
        for name in of.policy.metadata:
            kept = of.entries(f"_mch_{name}", i)
            kept[at] = kept[at] + found[:, 1] if name == COUNTS else found[:, 2]
        unknown.append(here[~is_known])
    new = torch.cat(gather_blocks(of, ranks, unknown, 3))
    return new[torch.argsort(new[:, 1], descending=True, stable=True)]


def _rows_wanted(of: IdMap, ranks: Channel, num_new: int) -> int:
    """Rows with which no id has to leave for so many new ones, as far as the map may grow."""
    if of.most is None or of.size >= of.most:
        return of.size
    empty = (of.raw_ids == EMPTY).sum().view(1)
    free = int(ranks.all_gather(empty).sum()) - 1
    rows = of.size
    while rows < of.most and free + rows - of.size < num_new:
        rows = min(2 * rows, of.most)
    return rows


def _keep_last(of: IdMap) -> None:
    """The last entry stays empty, see [Note: a map in blocks]."""
    if of.own and of.own[-1] == len(of.blocks) - 1:
        for name in of.policy.metadata:
            of.entries(f"_mch_{name}", len(of.own) - 1)[-1] = EMPTY if name == COUNTS else of.step


def _filtered(of: IdMap, ranks: Channel, by_block: list[torch.Tensor]) -> list[torch.Tensor]:
    """The ids that the policy's filter lets in, which looks at the counts of all; it draws the same on every rank."""
    assert of.policy.keep is not None
    everywhere = gather_blocks(of, ranks, [here[:, 1:2] for here in by_block], 1)
    counts = torch.cat(everywhere)[:, 0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(of.step)
        chosen = of.policy.keep(counts)[0]
    is_kept = torch.zeros_like(counts, dtype=torch.bool)
    is_kept[chosen] = True
    cut = is_kept.split([len(each) for each in everywhere])
    return [here[cut[i]] for i, here in zip(of.own, by_block, strict=True)]


def _leaving(of: IdMap, ranks: Channel, new: torch.Tensor) -> _Leaving:
    """The entries that leave for new ids of these values (N,), the best first."""
    num_new = len(new)
    worst = []
    for i in range(len(of.own)):
        kept = {name: of.entries(f"_mch_{name}", i) for name in of.policy.metadata}
        value = of.policy.score(kept, of.step).double()
        at = len(value) - 1 - torch.argsort(value.flip(0), stable=True)[:num_new]  # of equals the last is the worst
        rows = of.entries("_mch_remapped_ids_mapping", i)[at]
        worst.append(torch.stack([value[at].view(torch.int64), at, rows], 1))
    offered = max(_OFFERED, 2 * num_new // len(of.blocks))
    while True:
        offers = gather_blocks(of, ranks, [each[:offered] for each in worst], 3)
        block = torch.cat([torch.full((len(each),), i, device=new.device) for i, each in enumerate(offers)])
        bits, at, rows = torch.cat(offers).unbind(1)
        # Of equals the last of the sequence is the worst: blocks backwards, and what a block offers as it comes.
        backwards = torch.argsort(block, descending=True, stable=True)
        value = bits.view(torch.float64)[backwards]
        order = backwards[torch.argsort(value, stable=True)][:num_new]
        count = int((new[: len(order)] > bits.view(torch.float64)[order]).sum())
        order = order[:count]
        leave = torch.bincount(block[order], minlength=len(of.blocks)).tolist()
        sizes = [block.size for block in of.blocks]
        if all(n < len(each) or n in (size, num_new) for n, each, size in zip(leave, offers, sizes, strict=True)):
            return _Leaving(block[order], at[order], rows[order])
        offered *= 4


def _rebuild(of: IdMap, ranks: Channel, firsts: torch.Tensor, leaving: _Leaving, entering: torch.Tensor) -> None:
    """Put entries (N, fields) in the places of those that leave, and the sequence in order."""
    to = block_of(entering[:, 0].contiguous(), firsts)
    num = len(of.blocks)
    change = (torch.bincount(to, minlength=num) - torch.bincount(leaving.block, minlength=num)).tolist()
    merged = []
    for i, block in enumerate(of.own):
        fields = of.fields(i)
        stays = torch.ones(len(fields), dtype=torch.bool, device=fields.device)
        stays[leaving.at[leaving.block == block]] = False
        both = torch.cat([fields[stays], entering[to == block]])
        merged.append(both[torch.argsort(both[:, 0], stable=True)])
    starts = list(accumulate((b.size + n for b, n in zip(of.blocks, change, strict=True)), initial=0))
    arrived = recut(of, ranks, merged, starts, of.blocks)
    of.fill(arrived)
