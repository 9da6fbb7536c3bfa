"""Offers with their costs: all families of all classes of parameters in one evaluation of the cost model.

Parameters of one *class* (same sharder, shape, optimizer, features and constraint) share their offers, so that a
thousand alike tables are costed once. A class's costs are affine in columns, so that two widths tell all of them; a
third tells whether they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmp import ParameterInfo, Shard, ShardingEnv
from planner.candidates.family import UNIT, Family, even_widths
from planner.candidates.movable import MovableLayout
from planner.candidates.offered import Offer
from planner.costs.protocol import ALL_REDUCE, EXCHANGE, Array, CostProtocol, Integers, ShardInfo, ShardTable
from planner.costs.topology import Topology
from planner.observed.observation import Observation
from planner.observed.row_curve import RowCurve

_ROWS, _COLUMNS = ShardInfo._fields.index("rows"), ShardInfo._fields.index("columns")
_COPIED, _SHARE = ShardInfo._fields.index("replicated"), ShardInfo._fields.index("row_share")
_ON_HOST = ShardInfo._fields.index("host_share")


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
    """

    info: ParameterInfo
    ids_per_sample: float
    curve: RowCurve | None = None


@dataclass(frozen=True, eq=False)
class Costed:
    """Offers and their costs; the arrays have a row for each, as in `CostTable`, grouped by class.

    Args:
        is_affine: costs are, in columns.
        spans: (phases + 1,) ranks that share a phase.
    """

    offers: tuple[Offer, ...]
    owner: Integers
    fixed: Array
    slope: Array
    everywhere: Array
    ragged: dict[int, Array]
    is_affine: bool
    spans: Integers

    def wholes(self, num_ranks: int) -> tuple[Array, Array]:
        """(rows, phases + 1) twice: what each offer, its columns whole where they may be, puts on the rank that it
        loads most, phase by phase; and on all ranks on average."""
        family = np.array([offer.family[1:5] for offer in self.offers], dtype=np.int64).reshape(-1, 4)
        size, pieces, units, _ = (column[:, None] for column in family.T)
        cut = units * self.slope
        mean = (pieces * self.fixed + cut) * self.sharing(size)
        for row, loads in self.ragged.items():
            mean[row] = loads.sum((0, 1)) * self.sharing(size[row]) / size[row]
        return self.fixed + cut + self.everywhere, mean / num_ranks + self.everywhere

    def of_cut(self, row: int, widths: Sequence[int], num_ranks: int) -> tuple[Array, Array]:
        """The same of one that is divisible, cut into pieces of so many units."""
        fixed, slope, common = self.fixed[row], self.slope[row], self.everywhere[row]
        total = (len(widths) * fixed + sum(widths) * slope) * self.sharing(self.offers[row].family.size)
        return fixed + max(widths) * slope + common, total / num_ranks + common

    def pieces(self, row: int, widths: Sequence[int] | None) -> list[Array]:
        """(ranks of a block, or 1 where they are alike, phases + 1) of each piece, without what is everywhere."""
        if row in self.ragged:
            return list(self.ragged[row])
        units = [0] * self.offers[row].family.pieces if widths is None else widths
        return [(self.fixed[row] + width * self.slope[row])[None] for width in units]

    def sharing(self, size: Any) -> Any:
        """Ranks on which a piece puts its load, by phase."""
        return -(-size // self.spans) * self.spans

    def kinds(self, row: int) -> int:
        """Set-ups that an offer needs, a bit each."""
        offer = self.offers[row]
        is_copied = offer.own.is_copied if offer.own is not None else offer.family.is_copied
        return 1 << EXCHANGE | is_copied << ALL_REDUCE


def costed(classes: Sequence[Class], offered: Sequence[Sequence[Offer]], setting: CostSetting) -> Costed:
    """The costs of what each class is offered."""
    offers = tuple(offer for of_class in offered for offer in of_class)
    owner = np.repeat(np.arange(len(classes)), [len(of_class) for of_class in offered])
    known = np.array([_whole(of) for of in classes], dtype=np.float64).reshape(-1, len(ShardInfo._fields))
    regular = np.array([row for row, offer in enumerate(offers) if _is_regular(offer, known[owner[row]])], dtype=int)
    others = sorted(set(range(len(offers))) - set(regular.tolist()))
    shards, widths = _at_three_widths(known[owner[regular]], [offers[row] for row in regular.tolist()], setting.env)
    single = [_shards_of(offers[row], known[owner[row]], classes[owner[row]], setting.env) for row in others]
    every = ShardTable.from_columns(*np.concatenate([shards.reshape(-1, known.shape[1]), *single]).T)
    local, everywhere = setting.model.costs(every, setting.env, setting.topology, setting.batch_size)
    if any(of.curve is not None for of in classes):
        for row, of_row in zip(regular.tolist(), shards.transpose(1, 0, 2), strict=True):
            of_row[:, _SHARE] = _hottest(classes[owner[row]], offers[row].family, of_row[0, _SHARE])
        every = ShardTable.from_columns(*np.concatenate([shards.reshape(-1, known.shape[1]), *single]).T)
        local, _ = setting.model.costs(every, setting.env, setting.topology, setting.batch_size)
    spans = np.append(setting.model.spans(setting.env), 1)
    count, width = len(regular), local.shape[1]
    fixed, slope, common = np.zeros((3, len(offers), width))
    is_affine = _is_affine(local[: 3 * count], widths)
    found = Costed(offers, owner, fixed, slope, common, {}, is_affine, spans)
    _add_regular(found, regular, local[: 3 * count], everywhere[: 3 * count], spans)
    start = 3 * count
    for row, of_row in zip(others, single, strict=True):
        stop = start + len(of_row)
        loads = _loads(found.offers[row], local[start:stop], spans)
        found.fixed[row] = loads.max((0, 1))
        if (loads != found.fixed[row]).any():
            found.ragged[row] = loads
        found.everywhere[row] = everywhere[start:stop].sum(0)
        start = stop
    return found


def _whole(of: Class) -> ShardInfo:
    """The class's parameter as one shard."""
    shape = of.info.shape
    return ShardInfo.of(of.info, Shard((0,) * len(shape), shape, 0), of.ids_per_sample, False)


def _is_regular(offer: Offer, known: Array) -> bool:
    """Whether all pieces of a family are alike."""
    pieces = offer.family.pieces
    return offer.own is None and (pieces == 1 or known[_COLUMNS] % (UNIT * pieces) == 0)


def _blocks_of_rows(known: Array, sizes: Integers, is_copied: NDArray[np.bool_], env: ShardingEnv) -> None:
    """Have entries stand for one rank's rows of blocks of these sizes."""
    rows = np.where(is_copied, known[:, _ROWS], np.ceil(known[:, _ROWS] / sizes))
    known[:, _SHARE] = np.where(known[:, _ROWS] > 0, rows / np.maximum(known[:, _ROWS], 1), known[:, _SHARE])
    known[:, _ROWS], known[:, _COPIED] = rows, is_copied
    inner = env.table_shape[-1] if len(env.table_shape) > 1 else 1
    known[:, _ON_HOST] = np.where(is_copied, 1, 1 / np.minimum(sizes, inner))


def _at_three_widths(known: Array, offers: Sequence[Offer], env: ShardingEnv) -> tuple[Array, Array]:
    """A rank's shard of each family: (3, families, fields) at three widths, and those widths, (3, families)."""
    family = np.array([o.family[1:5] for o in offers], dtype=np.int64).reshape(-1, 4)
    size, pieces, units, least = family.T
    is_copied = np.array([o.family.is_copied for o in offers], dtype=bool)
    _blocks_of_rows(known, size, is_copied, env)
    columns = known[:, _COLUMNS] / pieces
    # A piece of a table whose columns are no multiple of four is costed as if it had those left over.
    over = columns - UNIT * units
    cuts = [np.where(units > 0, UNIT * u + over, columns) for u in (least, (least + units) // 2, units)]
    shards = np.stack([known] * 3)
    shards[:, :, _COLUMNS] = cuts
    return shards, np.stack(cuts)


def _add_regular(found: Costed, rows: Integers, local: Array, everywhere: Array, spans: Integers) -> None:
    """Fill in what families of alike pieces cost, from their costs at three widths."""
    family = np.array([found.offers[row].family[1:5] for row in rows.tolist()], dtype=np.int64).reshape(-1, 4)
    size, pieces, units, least = family.T
    # of a phase that ranks share, what all shards of the piece on them add to it
    local = local.reshape(3, len(rows), local.shape[1]) * np.minimum(size[:, None], spans)
    steps = np.maximum(units - least, 1)[:, None]
    slope = np.where(units[:, None] > least[:, None], (local[2] - local[0]) / steps, 0.0)
    fixed = local[2] - slope * units[:, None]
    found.slope[rows] = slope
    found.fixed[rows] = np.where(fixed < 1e-12 * local[2], 0.0, fixed)
    is_copied = np.array([found.offers[row].family.is_copied for row in rows.tolist()], dtype=bool)
    shards = pieces * np.where(is_copied, 1, size)
    found.everywhere[rows] = everywhere.reshape(3, len(rows), everywhere.shape[1])[2] * shards[:, None]


def _is_affine(local: Array, widths: Array) -> bool:
    """Whether costs at the middle width lie between those at the two others as the width does."""
    low, middle, high = local.reshape(*widths.shape, local.shape[1])
    part = (widths[1] - widths[0]) / np.maximum(widths[2] - widths[0], 1)
    expected = low + (high - low) * part[:, None]
    return bool((np.abs(middle - expected) <= 1e-6 * np.maximum(high, 1e-15)).all())


def _hottest(of: Class, family: Family, even: float) -> float:
    """The share of ids that the row block with most gets: ranks of a family are costed alike, as the slowest."""
    rows = of.info.shape[0] if of.info.shape else 1
    if of.curve is None or family.is_copied or rows == 0:
        return even
    edges = np.minimum(np.arange(family.size + 1) * -(-rows // family.size), rows)
    return float(np.diff(of.curve.below(edges)).max())


def _shards_of(offer: Offer, known: Array, of: Class, env: ShardingEnv) -> Array:
    """The shards of an offer whose pieces or blocks differ: (shards, fields)."""
    if offer.own is None:
        cut = even_widths(int(known[_COLUMNS]), offer.family.pieces)
        shards = np.stack([known] * len(cut))
        shards[:, _COLUMNS] = cut
        sizes = np.full(len(cut), offer.family.size)
        _blocks_of_rows(shards, sizes, np.zeros(len(cut), dtype=bool), env)
        shards[:, _SHARE] = _hottest(of, offer.family, shards[0, _SHARE])
        return shards
    shards = np.stack([known] * len(offer.own.shards))
    cuts = np.array(offer.own.shards, dtype=np.float64)
    shards[:, _ROWS], shards[:, _COLUMNS], shards[:, _ON_HOST], first = cuts.T
    shards[:, _SHARE] = cuts[:, 0] / max(1.0, known[_ROWS])
    if of.curve is not None and not offer.own.is_copied:
        shards[:, _SHARE] = of.curve.below(first + cuts[:, 0]) - of.curve.below(first)
    shards[:, _COPIED] = offer.own.is_copied
    return shards


def _loads(offer: Offer, local: Array, spans: Integers) -> Array:
    """(pieces, ranks in a block, phases + 1) of an offer from its shards' costs."""
    own: MovableLayout | None = offer.own
    size, pieces = offer.family.size, offer.family.pieces
    if own is None:
        return np.repeat((local * np.minimum(size, spans))[:, None], size, axis=1)
    on_ranks = np.zeros((pieces * size, local.shape[1]))
    if own.is_copied:
        on_ranks[:] = local[0]
    else:
        np.add.at(on_ranks, np.array(own.ranks), local)
    loads: Array = on_ranks.reshape(pieces, size, local.shape[1])
    for phase, span in enumerate(spans.tolist()):
        if span > 1:
            groups = loads[:, :, phase].reshape(pieces, -1, min(span, size) if size % min(span, size) == 0 else size)
            loads[:, :, phase] = np.repeat(groups.sum(2), groups.shape[2], axis=1).reshape(pieces, size)
    return loads
