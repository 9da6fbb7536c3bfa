"""Offers with their costs: all families of all classes of parameters in one evaluation of the cost model.

Parameters of one *class* (same sharder, shape, optimizer, features and constraint) share their offers, so that a
thousand alike tables are costed once. A class's costs are affine in columns, so that two widths tell all of them; a
third tells whether they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmp import ParameterInfo, ShardingEnv
from planner.candidates.family import UNIT, Family, even_widths
from planner.candidates.movable import MovableLayout
from planner.candidates.offer_table import Booleans, OfferTable
from planner.candidates.offered import Offer, has_own_blocks
from planner.costs.cost_model import goes_straight
from planner.costs.protocol import Array, CostProtocol, Integers, ShardInfo, ShardTable, is_pooled, kinds_of, setups_of
from planner.costs.step import Cut, costs_of, infos_of, whole
from planner.costs.topology import Topology
from planner.observed.observation import Observation
from planner.observed.row_curve import RowCurve

_ROWS, _COLUMNS = ShardInfo._fields.index("rows"), ShardInfo._fields.index("columns")
_COPIED, _SHARE = ShardInfo._fields.index("replicated"), ShardInfo._fields.index("row_share")
_ON_HOST = ShardInfo._fields.index("host_share")
_BLOCKS = ShardInfo._fields.index("row_blocks")


@dataclass(frozen=True, eq=False)
class CostSetting:
    """What costs depend on beside the parameters.

    Args:
        model: what shards cost.
        batch_size: samples per data rank.
        observed: what sample batches told of ids; None where there were none.
    """

    model: CostProtocol
    env: ShardingEnv
    topology: Topology
    batch_size: float
    observed: Observation | None = None


@dataclass(frozen=True, eq=False)
class Class:
    """What costs depend on of parameters that are alike.

    Args:
        info: of each.
        ids_per_sample: mean number of ids of a sample in all features.
        curve: which rows its ids name; None: all alike.
        named_rows, named_rows_of_rank: see `ShardTable`.
        is_even: row blocks are costed alike, as the one with most ids; else one by one where a block of ranks is not
            large.
    """

    info: ParameterInfo
    ids_per_sample: float
    curve: RowCurve | None = None
    named_rows: float = 0.0
    named_rows_of_rank: float = 0.0
    is_even: bool = True

    @property
    def rows(self) -> int:
        """Of each."""
        return self.info.shape[0] if self.info.shape else 1

    @cached_property
    def known(self) -> ShardInfo:
        """Of one of them, as one shard."""
        return whole(self.info, self.ids_per_sample, self.named_rows, self.named_rows_of_rank)


@dataclass(frozen=True, eq=False)
class Costed:
    """Offers and their costs; the arrays have a row for each, as in `CostTable`, grouped by class.

    Args:
        table: the offers.
        lack, lack_slope: what a block's last rank has less, see [Note: last ranks] in `CostTable`.
        each_cut: (rows, phases + 1) on every rank for each piece of one that is divisible beyond the first. The search
            does not know it: where it is above zero (ids that are sent once for each piece), bounds are a little low.
        kind_bits: (rows,) set-ups that each needs.
        is_affine: costs are, in columns.
        spans: (phases + 1,) ranks that share a phase.
    """

    table: OfferTable
    fixed: Array
    slope: Array
    everywhere: Array
    lack: Array
    lack_slope: Array
    ragged: dict[int, Array]
    each_cut: Array
    kind_bits: Integers
    is_affine: bool
    spans: Integers

    @property
    def offers(self) -> tuple[Offer, ...]:
        """Of all classes."""
        return self.table.offers

    @property
    def owner(self) -> Integers:
        """(rows,) class of each."""
        return self.table.owner

    def on_each_rank(self, row: int) -> Array:
        """(phases + 1,) of an offer that every rank has whole."""
        found: Array = self.fixed[row] + self.everywhere[row]
        return found

    def wholes(self, num_ranks: int) -> tuple[Array, Array]:
        """(rows, phases + 1) twice: what each offer, its columns whole where they may be, puts on the rank that it
        loads most, phase by phase; and on all ranks on average."""
        pieces, units, ranks = (of[:, None] for of in (self.table.pieces, self.table.units, self.table.ranks))
        cut = units * self.slope
        mean = (pieces * self.fixed + cut) * self.sharing(ranks)
        mean -= (pieces * self.lack + units * self.lack_slope) * self.spans
        for row, loads in self.ragged.items():
            mean[row] = loads.sum((0, 1)) * self.sharing(ranks[row]) / ranks[row]
        return self.fixed + cut + self.everywhere, mean / num_ranks + self.everywhere

    def of_cut(self, row: int, widths: Sequence[int], num_ranks: int) -> tuple[Array, Array]:
        """The same of one that is divisible, cut into pieces of so many units."""
        fixed, slope = self.fixed[row], self.slope[row]
        common = self.everywhere[row] + (len(widths) - 1) * self.each_cut[row]
        total = (len(widths) * fixed + sum(widths) * slope) * self.sharing(self.offers[row].family.ranks)
        total -= (len(widths) * self.lack[row] + sum(widths) * self.lack_slope[row]) * self.spans
        return fixed + max(widths) * slope + common, total / num_ranks + common

    def pieces(self, row: int, widths: Sequence[int] | None) -> list[list[tuple[int, Array]]]:
        """Of each piece, the runs of ranks that have the same: how many, and (phases + 1,), without `everywhere`."""
        if row in self.ragged:
            return [_equal_runs(loads) for loads in self.ragged[row]]
        family = self.offers[row].family
        units = [0] * family.pieces if widths is None else widths
        most = [self.fixed[row] + width * self.slope[row] for width in units]
        lacks = [self.lack[row] + width * self.lack_slope[row] for width in units]
        if family.ranks == 1 or not any(lack.any() for lack in lacks):
            return [[(family.ranks, load)] for load in most]
        return [[(family.ranks - 1, load), (1, load - lack)] for load, lack in zip(most, lacks, strict=True)]

    def sharing(self, ranks: Any) -> Any:
        """Ranks on which a piece that has rows on so many of them puts its load, by phase."""
        return -(-ranks // self.spans) * self.spans

    def kinds(self, row: int) -> int:
        """Set-ups that an offer needs, a bit each."""
        return int(self.kind_bits[row])


def costed(classes: Sequence[Class], table: OfferTable, setting: CostSetting) -> Costed:
    """The costs of what each class is offered."""
    offers, owner = table.offers, table.owner
    known = np.array([of.known for of in classes], dtype=np.float64).reshape(-1, len(ShardInfo._fields))
    is_hot = _are_hot(table, classes)
    is_regular = _are_regular(table, is_hot, known)
    rows, others = np.flatnonzero(is_regular), np.flatnonzero(~is_regular).tolist()
    regular = _Regular.of(rows, known[owner[rows]], table, setting.env)
    single = [
        _shards_of(offers[row], known[owner[row]], classes[owner[row]], setting.env, is_hot=bool(is_hot[row]))
        for row in others
    ]
    local, everywhere = _evaluated(regular, single, setting)
    if any(of.curve is not None for of in classes):
        regular.heat(classes, owner[rows])
        local, _ = _evaluated(regular, single, setting)
    spans = np.append(setting.model.spans(setting.env), 1)
    fixed, slope, common, lack, lack_slope, each_cut = np.zeros((6, len(offers), local.shape[1]))
    setups = setups_of(setting.model, setting.env, setting.topology, (of.info for of in classes))
    counted = sum(1 << kind for kind, seconds in enumerate(setups) if np.any(seconds))
    straight = np.zeros(len(offers), dtype=bool)  # settled for all shards of a table alike
    firsts = np.concatenate([regular.shards[0], *(of_row[:1] for of_row in single)])
    straight[[*rows, *others]] = goes_straight(ShardTable.from_columns(*firsts.T), setting.env)
    is_summed = np.array([is_pooled(of.info) for of in classes], dtype=bool)[owner] & table.has_row_blocks
    bits, is_affine = counted & kinds_of(table.is_copied, is_summed, straight), regular.is_affine(local)
    found = Costed(table, fixed, slope, common, lack, lack_slope, {}, each_cut, bits, is_affine, spans)
    _add_regular(found, regular, local, everywhere)
    start = regular.number
    for row, of_row in zip(others, single, strict=True):
        stop = start + len(of_row)
        loads, common = _loads(found.offers[row], local[start:stop], everywhere[start:stop], spans)
        found.fixed[row] = loads.max((0, 1))
        if (loads != found.fixed[row]).any():
            found.ragged[row] = loads
        found.everywhere[row] = common
        start = stop
    return found


def _evaluated(regular: _Regular, single: Sequence[Array], setting: CostSetting) -> tuple[Array, Array]:
    """What the model says of all shards: of regular families at all widths, of their last ranks, of the others."""
    width = len(ShardInfo._fields)
    shards = [regular.shards.reshape(-1, width), regular.last.reshape(-1, width), *single]
    every = ShardTable.from_columns(*np.concatenate(shards).T)
    return costs_of(setting.model, every, setting.env, setting.topology, setting.batch_size)


class _Regular(NamedTuple):
    """Families whose pieces are alike, and a rank's shard of each.

    Args:
        rows: of the offers.
        family: (families, 4) ranks of a block that have rows, pieces, units, least.
        is_copied: (families,).
        shards: (3, families, fields) at three widths.
        widths: (3, families) those.
        uneven: families whose blocks have a last rank with fewer rows.
        last: (2, uneven, fields) its shard, at the first and the last width.
    """

    rows: Integers
    family: Integers
    is_copied: NDArray[np.bool_]
    shards: Array
    widths: Array
    uneven: Integers
    last: Array

    @classmethod
    def of(cls, rows: Integers, known: Array, table: OfferTable, env: ShardingEnv) -> _Regular:
        size, pieces, units, least = family = np.stack(
            [of[rows] for of in (table.ranks, table.pieces, table.units, table.least)]
        )
        is_copied = table.is_copied[rows]
        whole = known[:, _ROWS].copy()
        _blocks_of_rows(known, size, is_copied, env)
        columns = known[:, _COLUMNS] / pieces
        # columns beyond a multiple of four are shared out over all units, so that pieces sum to the whole table
        of_whole = np.maximum(units, 1)
        cuts = [columns * np.where(units > 0, u / of_whole, 1) for u in (least, (least + units) // 2, units)]
        shards = np.stack([known] * 3)
        shards[:, :, _COLUMNS] = cuts
        uneven = np.flatnonzero(~is_copied & (known[:, _ROWS] * size != whole))
        last = shards[::2, uneven]
        _of_last_ranks(last, whole[uneven], size[uneven])
        return cls(rows, family.T, is_copied, shards, np.stack(cuts), uneven, last)

    @property
    def number(self) -> int:
        """Of shards of all."""
        return 3 * len(self.rows) + 2 * len(self.uneven)

    def heat(self, classes: Sequence[Class], owner: Integers) -> None:
        """Have a family's ranks get the ids that the one with most gets, but for the last where it has fewer rows.

        Args:
            owner: (families,) class of each.
        """
        last = dict(zip(self.uneven.tolist(), range(len(self.uneven)), strict=True))
        sizes, known = self.family[:, 0].tolist(), dict[tuple[int, int], float]()
        for index, (of, size, is_copied) in enumerate(zip(owner.tolist(), sizes, self.is_copied.tolist(), strict=True)):
            curve, rows = classes[of].curve, classes[of].rows
            if curve is None:
                continue
            if not is_copied and rows:
                if (of, size) not in known:
                    known[of, size] = _most_of_a_block(curve, rows, size)
                self.shards[:, index, _SHARE] = known[of, size]
            if index in last:
                at = last[index]
                edges = np.array([rows - self.last[0, at, _ROWS], rows])
                self.last[:, at, _SHARE] = float(np.diff(curve.below(edges))[0])

    def is_affine(self, local: Array) -> bool:
        """Whether costs at the middle width lie between those at the two others as the width does."""
        low, middle, high = local[: 3 * len(self.rows)].reshape(*self.widths.shape, local.shape[1])
        part = (self.widths[1] - self.widths[0]) / np.maximum(self.widths[2] - self.widths[0], 1)
        expected = low + (high - low) * part[:, None]
        return bool((np.abs(middle - expected) <= 1e-6 * np.maximum(high, 1e-15)).all())


def _are_hot(table: OfferTable, classes: Sequence[Class]) -> Booleans:
    """(rows,) whether each row block of a family is costed by the ids that it gets."""
    is_even = np.array([of.is_even for of in classes], dtype=bool)[table.owner]
    found: Booleans = ~is_even & ~table.is_copied & ~table.is_own & has_own_blocks(table.size)
    return found


def _are_regular(table: OfferTable, is_hot: Booleans, known: Array) -> Booleans:
    """(rows,) whether all pieces of a family are alike, and their row blocks costed alike."""
    is_alike = (table.pieces == 1) | (known[table.owner, _COLUMNS] % (UNIT * table.pieces) == 0)
    found: Booleans = ~table.is_own & ~is_hot & is_alike
    return found


def _blocks_of_rows(known: Array, sizes: Integers, is_copied: NDArray[np.bool_], env: ShardingEnv) -> None:
    """Have entries stand for one rank's rows of blocks of these sizes."""
    rows = np.where(is_copied, known[:, _ROWS], np.ceil(known[:, _ROWS] / sizes))
    known[:, _SHARE] = np.where(known[:, _ROWS] > 0, rows / np.maximum(known[:, _ROWS], 1), known[:, _SHARE])
    known[:, _ROWS], known[:, _COPIED] = rows, is_copied
    inner = env.table_shape[-1] if len(env.table_shape) > 1 else 1
    known[:, _ON_HOST] = np.where(is_copied, 1, 1 / np.minimum(sizes, inner))
    known[:, _BLOCKS] = sizes


def _of_last_ranks(known: Array, whole: Array, size: Integers) -> None:
    """Have entries that stand for one rank's rows of blocks stand for the last rank's.

    Args:
        known: (..., entries, fields).
        whole: (entries,) rows of the whole table.
    """
    rows = whole - known[..., _ROWS] * (size - 1)
    known[..., _SHARE] *= rows / np.maximum(known[..., _ROWS], 1)
    known[..., _ROWS] = rows


def _add_regular(found: Costed, regular: _Regular, local: Array, everywhere: Array) -> None:
    """Fill in what families of alike pieces cost, from their costs at three widths."""
    rows, count, width = regular.rows, len(regular.rows), local.shape[1]
    size, pieces, units, least = regular.family.T
    cut, last = 3 * count, slice(3 * count, regular.number)
    alone = local[:cut].reshape(3, count, width)
    # of a phase that ranks share, what all shards of the piece on them add to it
    most = alone * np.minimum(size[:, None], found.spans)
    found.fixed[rows], found.slope[rows] = _line(most[0], most[2], units, least)
    beyond = found.slope[rows, -1] * np.where(units > 0, 1 - UNIT * units / np.maximum(regular.widths[2], 1), 0)
    found.slope[rows, -1] -= beyond  # one piece will have them all: there must be room for them in any
    found.fixed[rows, -1] += beyond * units
    shards = pieces * np.where(regular.is_copied, 1, size)
    common = everywhere[:cut].reshape(3, count, width)[2]
    found.everywhere[rows] = common * shards[:, None]
    at, uneven = regular.uneven, rows[regular.uneven]
    less = np.maximum(alone[::2, at] - local[last].reshape(2, len(at), width), 0)
    lack, lack_slope = _line(less[0], less[1], units[at], least[at])
    is_one = size[at, None] <= found.spans  # group of ranks that share the phase: all of the piece's load is on it
    found.fixed[uneven] -= np.where(is_one, lack, 0)
    found.slope[uneven] -= np.where(is_one, lack_slope, 0)
    found.lack[uneven], found.lack_slope[uneven] = np.where(is_one, 0, lack), np.where(is_one, 0, lack_slope)
    rest = common[at] - everywhere[last].reshape(2, len(at), width)[1]
    found.everywhere[uneven] -= rest * pieces[at, None]
    of_all = everywhere[:cut].reshape(3, count, width)
    each, _ = _line(of_all[0] * size[:, None], of_all[2] * size[:, None], units, least)
    of_last = everywhere[last].reshape(2, len(at), width)
    less_each, _ = _line(of_all[0, at] - of_last[0], of_all[2, at] - of_last[1], units[at], least[at])
    each[at] -= less_each
    found.each_cut[rows] = np.where((units > least)[:, None], np.maximum(each, 0), 0)


def _line(low: Array, high: Array, units: Integers, least: Integers) -> tuple[Array, Array]:
    """What is there at no units, and for each, from what is there at least and at all of them."""
    is_cut, steps = (units > least)[:, None], np.maximum(units - least, 1)[:, None]
    slope = np.where(is_cut, (high - low) / steps, 0.0)
    fixed = high - slope * units[:, None]
    return np.where(np.abs(fixed) < 1e-12 * high, 0.0, fixed), slope


def _hottest(of: Class, family: Family, even: float) -> float:
    """The share of ids that the row block with most gets: ranks of a family are costed alike, as the slowest."""
    rows = of.rows
    if of.curve is None or family.is_copied or rows == 0:
        return even
    return _most_of_a_block(of.curve, rows, family.ranks)


def _most_of_a_block(curve: RowCurve, rows: int, size: int) -> float:
    """The share of ids that the one with most gets of so many blocks of rows."""
    edges = np.minimum(np.arange(size + 1) * -(-rows // size), rows)
    below = curve.below(edges)
    return float((below[1:] - below[:-1]).max())


def _shards_of(offer: Offer, known: Array, of: Class, env: ShardingEnv, *, is_hot: bool) -> Array:
    """The shards of an offer whose pieces or blocks differ: (shards, fields).

    Args:
        is_hot: see `_are_hot`.
    """
    if offer.own is None:
        cut = even_widths(int(known[_COLUMNS]), offer.family.pieces)
        shards = np.stack([known] * len(cut))
        shards[:, _COLUMNS] = cut
        sizes = np.full(len(cut), offer.family.ranks)
        if is_hot:
            return _hot_blocks(shards, of, offer.family, env)
        _blocks_of_rows(shards, sizes, np.zeros(len(cut), dtype=bool), env)
        last = shards.copy()
        _of_last_ranks(last, np.full(len(cut), known[_ROWS]), sizes)
        shards[:, _SHARE] = _hottest(of, offer.family, shards[0, _SHARE])
        return np.concatenate([shards, last])
    if offer.own.is_copied:
        return np.array([of.known._replace(replicated=True)], dtype=np.float64)
    own = Cut(of.known, offer.own.shards, of.info.shape, None if of.curve is None else of.curve.below)
    return np.array(infos_of(own, env), dtype=np.float64)


def _hot_blocks(pieces: Array, of: Class, family: Family, env: ShardingEnv) -> Array:
    """Each rank's row block of each piece: (ranks * pieces, fields)."""
    assert of.curve is not None
    total, ranks = of.info.shape[0], family.ranks
    edges = np.minimum(np.arange(ranks + 1) * -(-total // ranks), total)
    _blocks_of_rows(pieces, np.full(len(pieces), ranks), np.zeros(len(pieces), dtype=bool), env)
    found = np.stack([pieces] * ranks)
    found[:, :, _ROWS] = np.diff(edges)[:, None]
    found[:, :, _SHARE] = np.diff(of.curve.below(edges))[:, None]
    return found.reshape(-1, found.shape[-1])


def _loads(offer: Offer, local: Array, everywhere: Array, spans: Integers) -> tuple[Array, Array]:
    """(pieces, ranks in a block, phases + 1) of an offer from its shards' costs, and (phases + 1,) on all ranks."""
    own: MovableLayout | None = offer.own
    size, pieces, ranks = offer.family.size, offer.family.pieces, offer.family.ranks
    of_pieces = np.zeros((pieces, size, local.shape[1]))
    if own is None and len(local) == pieces * ranks:  # each rank's
        of_pieces[:, :ranks] = local.reshape(ranks, pieces, -1).swapaxes(0, 1)
        return _together(of_pieces, spans), everywhere.sum(0)
    if own is None:  # a full rank's of each piece, then a last rank's
        of_pieces[:, : ranks - 1] = local[:pieces, None]
        of_pieces[:, ranks - 1] = local[pieces:]
        common = everywhere[:pieces].sum(0) * (ranks - 1) + everywhere[pieces:].sum(0)
        return _together(of_pieces, spans), common
    on_ranks = np.zeros((pieces * size, local.shape[1]))
    if own.is_copied:
        on_ranks[:] = local[0]
    else:
        np.add.at(on_ranks, np.array(own.ranks), local)
    return _together(on_ranks.reshape(pieces, size, local.shape[1]), spans), everywhere.sum(0)


def _together(loads: Array, spans: Integers) -> Array:
    """Loads with phases that ranks share added up over those, in place."""
    pieces, size, _ = loads.shape
    for phase, span in enumerate(spans.tolist()):
        if span > 1:
            groups = loads[:, :, phase].reshape(pieces, -1, min(span, size) if size % min(span, size) == 0 else size)
            loads[:, :, phase] = np.repeat(groups.sum(2), groups.shape[2], axis=1).reshape(pieces, size)
    return loads


def _equal_runs(loads: Array) -> list[tuple[int, Array]]:
    """Of (ranks, phases + 1) how many neighbours have the same, and what."""
    edges = [0, *(np.flatnonzero((loads[1:] != loads[:-1]).any(1)) + 1).tolist(), len(loads)]
    return [(stop - start, loads[start]) for start, stop in pairwise(edges)]
