"""What a sharder offers for a parameter, as families, and why some of it may not be chosen.

[Note: representatives]
A sharder's `layouts` gives representatives. Where it has `accepts` too, each stands for its kind: rows on any block of
ranks, columns cut anywhere, as far as `accepts` says yes. Where it has not, it stands for itself alone, elsewhere too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from dmp import (
    Layout,
    ModuleSharder,
    ParameterInfo,
    PlanError,
    ShardError,
    ShardingEnv,
    column_wise,
    data_parallel,
    hook,
    row_wise,
    table_wise,
)
from planner.candidates.constraints import Constraint
from planner.candidates.family import (
    UNIT,
    Family,
    blocks_of,
    copies,
    cut_name,
    even_cuts,
    even_widths,
    has_some,
    is_filled,
    layout_of,
    whole_names,
)
from planner.candidates.movable import MovableLayout, Placed, movable, placed

_MIN_COLUMNS = 32
"""Narrower column blocks are not made unless a constraint allows them, or nothing else is left."""
_OF_TABLES = ("table_wise", "row_wise", "column_wise", "table_row_wise", "grid", "rectangles", "data_parallel")
_OF_DENSE = ("colwise", "rowwise", "sequence", "replicate", "fully_sharded")  # as a table may be one, too
_MOST_OWN = 64
"""Row blocks of more ranks are all costed as the one with most ids."""


class Offer(NamedTuple):
    """A family of layouts, and why it may not be chosen (empty where it may); `own` where it is the sharder's own."""

    family: Family
    objection: str = ""
    own: MovableLayout | None = None

    @property
    def is_copied(self) -> bool:
        """Whether every rank has the whole."""
        return self.family.is_copied if self.own is None else self.own.is_copied

    def example(self, env: ShardingEnv) -> Layout:
        """A layout of the family, on the first blocks, its columns whole where they may be."""
        if self.own is not None:
            return self.own.layout
        return layout_of(self.family, range(self.family.pieces), None, 0, env)


class Answered(NamedTuple):
    """What was offered for a parameter: of another for which the sharder answers the same, that is offered too."""

    said: list[tuple[Layout, bool]]
    offers: list[Offer]


@dataclass(frozen=True, eq=False)
class Asked:
    """One parameter, and what is asked of it.

    Args:
        name: of the parameter, for errors.
        places: families of layouts that were looked up before, by the layouts' ids.
        is_affine: costs are, so that columns may be cut anywhere.
        is_even: ids name all rows alike; else the columns of row blocks are cut evenly, see `has_own_blocks`.
        min_columns: of a column block.
        takes_unfilled: blocks of ranks of which some get no rows are taken too.
        answered: what was offered for parameters before, by all that it depends on but the sharder's answers.
        said: layouts that the sharder was asked about, and its answers.
    """

    name: str
    sharder: ModuleSharder
    info: ParameterInfo
    constraint: Constraint
    env: ShardingEnv
    places: dict[int, tuple[Layout, Placed | None]] = field(default_factory=dict)
    is_affine: bool = True
    is_even: bool = True
    min_columns: int = _MIN_COLUMNS
    takes_unfilled: bool = False
    answered: dict[object, Answered] = field(default_factory=dict)
    said: list[tuple[Layout, bool]] = field(default_factory=list)

    @property
    def columns(self) -> int:
        """To cut: of a parameter of two dims."""
        return self.info.shape[1] if len(self.info.shape) == 2 else 0

    @property
    def least(self) -> int:
        """Units of a piece at least."""
        return -(-self.min_columns // UNIT)

    def runs(self, family: Family, pieces: int = 1, widths: tuple[int, ...] | None = None) -> bool:
        """Whether the sharder has no objection to a family on its first and last blocks.

        Args:
            widths: units of each piece.
        """
        accepts = hook(self.sharder, "accepts")
        last = self.env.table_size // family.size - pieces
        for first in ((0, last) if last else (0,)) if accepts else ():
            example = _example(family, first, pieces, widths, self.columns, self.env)
            self.said.append((example, bool(accepts(self.info, example, self.env))))
            if not self.said[-1][1]:
                return False
        return True

    def likeness(self, layouts: Sequence[Layout]) -> object:
        """What offers depend on beside the sharder's answers; `layouts` are those that it offers."""
        info, of = self.info, self.constraint
        sizes = {block.filled for block in blocks_of(self.env.table_shape)}
        sizes |= {place.family.ranks for layout in layouts if (place := self.placed(layout)) is not None}
        rows = info.shape[0] if info.shape else 1
        return (
            id(self.sharder),
            tuple(map(id, layouts)),
            (len(info.shape), *info.shape[1:], *(size for size in sorted(sizes) if is_filled(rows, size))),
            (of.layouts, of.forbid, of.ranks, self.min_columns, of.min_columns),
            (self.is_affine, self.is_even, info.mixes_columns, info.optimizer),
        )

    def placed(self, layout: Layout) -> Placed | None:
        """See `movable.placed`; a layout object is looked up once."""
        if id(layout) not in self.places:
            self.places[id(layout)] = layout, placed(layout, self.env)
        return self.places[id(layout)][1]


@lru_cache(maxsize=1 << 16)
def _example(
    family: Family, first: int, pieces: int, widths: tuple[int, ...] | None, columns: int, env: ShardingEnv
) -> Layout:
    """A family on consecutive blocks; tables of one width share it."""
    return layout_of(family, range(first, first + pieces), widths, columns, env)


def offers(asked: Asked) -> list[Offer]:
    """Every family of layouts that the sharder offers.

    Raises:
        PlanError: nothing is offered, a constraint names a layout that is not offered or ranks that do not exist, or
            no layout is left.
    """
    name, info, env, constraint = asked.name, asked.info, asked.env, asked.constraint
    if 0 in info.shape:  # no layout is valid of it
        raise PlanError(
            f"{name!r}, shape {tuple(info.shape)}, has no elements, so there is nothing to place: leave it out of the "
            "model",
            table=name,
        )
    if env.table_size == 1:  # where all layouts are the same, sharders offer one
        constraint = replace(constraint, layouts=None, forbid=None)
    if constraint.min_columns is not None:
        asked = replace(asked, min_columns=constraint.min_columns)
    asked = replace(asked, constraint=constraint)
    layouts = [layout for layout in asked.sharder.layouts(info, env) if not layout.is_dense]
    if not layouts:
        who = type(asked.sharder).__name__
        raise PlanError(
            f"{who} offers no layout for {name!r}, shape {info.shape}, on {env}{_why_none(asked)}", table=name
        )
    _check_constraint(asked, layouts)
    key, accepts = asked.likeness(layouts), hook(asked.sharder, "accepts")
    known = asked.answered.get(key)
    if known is not None and all(bool(accepts(info, layout, env)) is yes for layout, yes in known.said):
        return known.offers
    said: list[tuple[Layout, bool]] = []
    found = _offered(replace(asked, said=said), layouts)
    if all(offer.own is None for offer in found):  # of a sharder's own layout the parameter's shape is known
        asked.answered[key] = Answered(said, found)
    return found


def _offered(asked: Asked, layouts: list[Layout]) -> list[Offer]:
    """What is offered for a parameter of which nothing is known.

    Raises:
        PlanError: no layout is left.
    """
    name, info, env, constraint = asked.name, asked.info, asked.env, asked.constraint
    found = _found(asked, layouts)
    if all(offer.objection for offer in found):  # last resorts
        asked = replace(asked, takes_unfilled=True)
        found = _found(asked, layouts)
    if all(offer.objection for offer in found) and constraint.min_columns is None:
        found = _found(replace(asked, min_columns=UNIT), layouts)
    if all(offer.objection for offer in found):
        reasons = "; ".join(f"{offer.example(env)}: {offer.objection}" for offer in found)
        raise PlanError(f"no layout is left for {name!r}, shape {info.shape}: {reasons}", table=name)
    return found


def _found(asked: Asked, layouts: list[Layout]) -> list[Offer]:
    kinds = {layout.name for layout in layouts}
    given = list(_widened(asked, kinds)) if hook(asked.sharder, "accepts") else []
    covered = {offer.family.name for offer in given}
    covered |= {cut_name(offer.family.size) for offer in given if offer.family.units}
    for layout in layouts:
        place = asked.placed(layout)
        if place is not None and not (asked.takes_unfilled or has_some(place.family, asked.info.shape)):
            continue
        if layout.name not in covered or (place is None and not _is_narrow(asked, layout)) or _is_over(asked, layout):
            given.append(_of_layout(asked, layout))
    found: dict[Layout | Family | str, Offer] = {}
    for offer in given:  # of what may not be chosen, one of each name tells why
        key = offer.own.layout if offer.own is not None else offer.family
        found.setdefault(offer.family.name if offer.objection else key, offer)
    return list(found.values())


def _is_narrow(asked: Asked, layout: Layout) -> bool:
    """Whether its column blocks, of which others of that name are known, are narrower than any may be."""
    number = len(layout.named_ranks(asked.env)) if layout.name == cut_name(1) else 0
    return number * asked.min_columns > asked.columns > 0


def _is_over(asked: Asked, layout: Layout) -> bool:
    """Whether it takes all ranks because it names none, and a constraint leaves some that are no block."""
    ranks = asked.constraint.ranks
    return ranks is not None and layout.over(ranks) != layout and placed(layout.over(ranks), asked.env) is None


def _of_layout(asked: Asked, layout: Layout) -> Offer:
    """What a representative stands for by itself."""
    ranks, info, env = asked.constraint.ranks, asked.info, asked.env
    within = layout if ranks is None else layout.over(ranks)
    place = asked.placed(layout) if within is layout else placed(within, env)
    if (
        place is not None
        and within == layout
        and has_some(place.family, asked.info.shape)
        and asked.runs(place.family, place.family.pieces)
    ):
        return Offer(place.family, _objection(asked, place.family.name, place.family))
    own = movable(asked.name, within, asked.sharder, info, env, None if within == layout else ranks)
    family = Family(layout.name, own.block_size, own.num_blocks)
    is_cut = own.narrowest != prod(info.shape[1:])
    objection = _objection(asked, layout.name, family, own.narrowest if is_cut else None)
    if ranks is not None and own.block_size == env.table_size:
        objection = objection or ("" if set(own.ranks) <= set(ranks) else f"constraint: ranks={list(ranks)}")
    return Offer(family, objection, own)


def _widened(asked: Asked, kinds: Collection[str]) -> Iterator[Offer]:
    """What a sharder runs of the kinds that it offers, smallest blocks first."""
    info, env = asked.info, asked.env
    rows = info.shape[0] if info.shape else 1
    units, num_ranks = asked.columns // UNIT, env.table_size

    for block in blocks_of(env.table_shape):
        size, ranks = block
        if not is_filled(rows, ranks):
            continue
        families = [Family.on(block, name) for name in whole_names(ranks, env.table_shape) if name in kinds]
        wholes = [Offer(of, _objection(asked, of.name, of)) for of in families if asked.runs(of)]
        whole = next((offer for offer in wholes if not offer.objection), wholes[0] if wholes else None)
        most = min(units // asked.least, num_ranks // size)
        name = cut_name(size)
        if name not in kinds or most < 2:
            yield from () if whole is None else (whole,)
            continue
        cut = Family.on(block, name, 2)
        objection = _objection(asked, name, cut, asked.min_columns)
        is_open = whole is not None and not whole.objection and not objection
        is_divisible = asked.is_affine and (asked.is_even or not has_own_blocks(size))
        if is_open and is_divisible and all(asked.runs(cut, len(w), w) for w in _odd_cuts(units, asked.least, most)):
            assert whole is not None
            yield Offer(whole.family._replace(units=units, least=asked.least))
            continue
        yield from () if whole is None else (whole,)
        for pieces in even_cuts(most):
            if asked.runs(cut, pieces):
                yield Offer(cut._replace(pieces=pieces), objection)
    copied = copies(num_ranks)
    if copied.name in kinds and asked.runs(copied):
        yield Offer(copied, _objection(asked, copied.name, copied))


def has_own_blocks(size: Any) -> Any:
    """Whether the row blocks of a block of so many ranks are costed one by one, where ids name some rows more often."""
    return (size > 1) & (size <= _MOST_OWN)


def _odd_cuts(units: int, least: int, most: int) -> list[tuple[int, ...]]:
    """Cuts that a sharder runs which runs any: a narrow piece beside a wide one, and as many as may be."""
    return [(units - least, least), (units - least * (most - 1), *[least] * (most - 1))]


def _why_none(asked: Asked) -> str:
    """What the sharder says against the usual layouts of tables, each reason once; nothing where it says nothing."""
    why_not = hook(asked.sharder, "why_not")
    usual = (table_wise(0), row_wise(), column_wise(range(asked.env.table_size)), data_parallel())
    reasons: dict[str, list[str]] = {}
    for layout in usual if why_not else ():
        try:
            reasons.setdefault(why_not(asked.info, layout, asked.env), []).append(layout.name)
        except ShardError:  # it does not fit the shape, or this sharder does not run it
            continue
    return "".join(f"; {' and '.join(kinds)}: {reason}" for reason, kinds in reasons.items() if reason)


def _check_constraint(asked: Asked, layouts: list[Layout]) -> None:
    name, constraint = asked.name, asked.constraint
    known = list(dict.fromkeys(layout.name for layout in layouts))
    wanted = constraint.layouts or known  # of these some meshes, sharders or shapes offer fewer, which are enough
    lacking = [layout for layout in wanted if layout not in (*known, *_OF_TABLES)]
    if lacking or not set(wanted) & set(known):
        raise PlanError(
            f"the constraint on {name!r} asks for layout {(lacking or wanted)[0]!r}; {type(asked.sharder).__name__} "
            f"offers {known} for shape {asked.info.shape}",
            table=name,
        )
    unknown = [banned for banned in constraint.forbid or () if banned not in (*known, *_OF_TABLES, *_OF_DENSE)]
    if unknown:
        raise PlanError(
            f"the constraint on {name!r} forbids {unknown[0]!r}, which is no layout; "
            f"{type(asked.sharder).__name__} offers {known}",
            table=name,
        )
    check_rank_numbers(name, constraint, asked.env.table_size)


def check_rank_numbers(name: str, constraint: Constraint, num_ranks: int) -> None:
    """Raises PlanError where a constraint names ranks that do not exist."""
    outside = [rank for rank in constraint.ranks or () if rank >= num_ranks]
    if outside:
        raise PlanError(
            f"the constraint on {name!r} names rank {outside[0]}; the mesh has table ranks 0..{num_ranks - 1}",
            table=name,
            rank=outside[0],
        )


def _objection(asked: Asked, name: str, family: Family, narrowest: int | None = None) -> str:
    """Why a layout of that name may not be chosen; empty when it may.

    Args:
        narrowest: columns of its narrowest piece, where columns are cut.
    """
    constraint, info = asked.constraint, asked.info
    if constraint.layouts is not None and name not in constraint.layouts:
        return f"constraint: layouts={list(constraint.layouts)}"
    if constraint.forbid is not None and name in constraint.forbid:
        return f"constraint: forbid={list(constraint.forbid)}"
    if narrowest is None and family.pieces > 1 and asked.columns:
        narrowest = even_widths(asked.columns, family.pieces)[-1]
    if narrowest is not None:
        if info.mixes_columns and name not in (constraint.layouts or ()):
            return (
                f"{info.optimizer} updates a row by all its columns, as by a norm or one value of state for each row: "
                "cut columns change numbers; a constraint's layouts may allow it"
            )
        if narrowest < asked.min_columns:
            return f"column blocks of {narrowest}; the constraint min_columns is {asked.min_columns}"
    if constraint.ranks is not None and family.ranks < asked.env.table_size:
        free = _free_blocks(constraint.ranks, family)
        if free < family.pieces:
            return f"constraint: ranks={list(constraint.ranks)} have not the {family.pieces} blocks of {family.ranks}"
    elif constraint.ranks is not None and len(constraint.ranks) < asked.env.table_size:
        return f"constraint: ranks={list(constraint.ranks)}"
    return ""


def _free_blocks(ranks: tuple[int, ...], family: Family) -> int:
    """Blocks all of whose ranks with rows are among some."""
    count: dict[int, int] = {}
    for rank in ranks:
        block, place = divmod(rank, family.size)
        count[block] = count.get(block, 0) + (place < family.ranks)
    return sum(number == family.ranks for number in count.values())
