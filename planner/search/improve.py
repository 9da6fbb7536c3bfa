"""Improvement of a placement: units that pass to another rank, exchanges, and items that are put down anew. Pure.

Where hosts are many, many of them exchange pieces at the same time: what that gains is a sum over the ranks that it
touches, so that exchanges which touch no host in common gain what they gain alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from planner.search.cost_table import Array
from planner.search.packing import Packer
from planner.search.pieces import Piece, Pieces
from planner.search.placement import Part
from planner.search.potential import ALL_IN_SCOPE, powered
from planner.search.problem import Ranks

_ENOUGH = 1e-7
"""A step must gain this share of the potential."""
_OTHER = 0.7
"""How often another rank than the slowest is looked at,"""
_NEARLY = 0.03
"""one that is so little faster."""
_ANEW = 0.3
"""How often items are put down anew when nothing else helps."""
_TOGETHER = 4
"""Items that are put down anew at once, at most."""
_NEAR = 0.7
"""How often they are those of two ranks only."""
_MOVED = 3
"""Pieces of which units may pass elsewhere, in a step."""
_DRAWN = 64
"""Items whose pieces are looked at for an exchange."""
_DRAWN_FOR_MANY = 128
"""Items whose pieces are looked at where many exchange,"""
_LOOKED_THROUGH = 1000
"""and exchanges that gain, the best first."""
_MANY_GROUPS = 16
"""Groups from which on many exchange at the same time,"""
_WORTH_IT = 3
"""as long as so many gain,"""
_PAUSE = 8
"""else after so many steps of that phase again."""
_SHAKEN = 5
"""Items that are shaken at most,"""
_DRAWN_CUTS = 2
"""so many of them in other cuts;"""
_SMOOTH = 8
"""the power then."""


_Move = tuple[Part, int, int, int | None, int | None]
"""Arguments of `_moved`."""


class Improver:
    """Steps that lower the potential of a placement."""

    def __init__(self, packer: Packer) -> None:
        self.packer = packer
        self.potential = packer.potential
        self.placement = packer.placement
        self.table = packer.problem.table
        self._size: list[int] = self.table.size.tolist()
        self.pieces = Pieces(self.potential)
        self.value = self.potential.weigh()
        groups = len(self.placement.local) // self.potential.group
        self._pause = [0 if groups >= _MANY_GROUPS else 1 << 60] * len(packer.problem.span)

    def step(self, number: int, random: np.random.Generator) -> None:
        """Something on the slowest rank of a phase: units pass elsewhere, or a few items are put down anew."""
        self.potential.work += 150
        phases = len(self.packer.problem.span)
        phase = number % phases
        self._pause[phase] -= 1
        if self._pause[phase] < 0:
            if self.exchange_many(phase, random) >= _WORTH_IT:
                return
            self._pause[phase] = _PAUSE
        load = self.placement.local[:, phase]
        rank = int(load.argmax())
        if random.random() < _OTHER:  # one of those that are nearly as slow
            near = np.flatnonzero(load >= load[rank] - _NEARLY * abs(load[rank] + self.placement.every[phase]))
            rank = int(near[int(random.integers(len(near)))])
        if self.transfer(rank, phase, random) or self.exchange(rank, phase, random) or random.random() > _ANEW:
            return
        span = int(self.packer.problem.span[phase])
        here = [item for item, _ in self.placement.on(rank, span)]
        if not here:
            return
        items = [here[int(random.integers(len(here)))]]
        other = int(random.integers(len(self.placement.local)))
        others = [item for item, _ in self.placement.on(other, span)]
        pool = list(dict.fromkeys(others + here)) if random.random() < _NEAR else range(len(self.placement.parts))
        items += [pool[i] for i in random.integers(len(pool), size=int(random.integers(_TOGETHER))).tolist()]
        items = list(dict.fromkeys(items))
        self.replace([items[i] for i in random.permutation(len(items)).tolist()])

    def shake(self, parts: list[Part | None], random: np.random.Generator) -> None:
        """Go back to a placement, and put a few items down anew, of which some in cuts drawn at random, gain or not.

        Steps that must gain end where none does; from beside it they may end lower.
        """
        self.placement.become(parts)
        number = len(self.placement.parts)
        items = np.unique(random.integers(number, size=int(random.integers(2, _SHAKEN + 1)))).tolist()
        old = [(item, self.placement.remove(item)) for item in items]
        self.potential.work += 100 + 30 * len(items) + number
        self.potential.aim(_SMOOTH)
        done = []
        for place, i in enumerate(random.permutation(len(items)).tolist()):
            if not (place < _DRAWN_CUTS and self.packer.draw(items[i], random)) and not self.packer.insert(items[i]):
                break
            done.append(items[i])
        if len(done) == len(items) and self.placement.fits():
            return
        for item in done:
            self.placement.remove(item)
        for item, part in old:
            self.placement.add(item, part)

    def accept(self, changes: list[tuple[int, Part]]) -> bool:
        """Make changes; take them back where the potential does not fall."""
        old = [(item, self.placement.swap(item, part)) for item, part in changes]
        fits = self.placement.fits()
        value = self.potential.weigh() if fits else np.inf
        if value < self.value * (1 - _ENOUGH):
            self.value = value
            return True
        for item, part in reversed(old):
            self.placement.swap(item, part)
        return False

    def transfer(self, rank: int, phase: int, random: np.random.Generator) -> bool:
        """Let units of a piece on the rank pass to where they add least; False when that is no gain."""
        best: tuple[float, int, _Move] | None = None
        pieces = [piece for piece in self.pieces.on(rank, phase) if self.pieces.may_move(piece.item)]
        if not pieces:
            return False
        if len(pieces) > _MOVED:
            pieces = [pieces[i] for i in random.permutation(len(pieces))[:_MOVED].tolist()]
        self.potential.look(also=np.array([rank]))
        for piece in pieces:
            for gain, move in self._transfers(piece):
                if best is None or gain < best[0]:
                    best = gain, piece.item, move
        return best is not None and best[0] < 0 and self.accept([(best[1], _moved(*best[2]))])

    def _transfers(self, piece: Piece) -> list[tuple[float, _Move]]:
        """The best way to move each number of units of a piece, and what the potential grows by."""
        potential, table = self.potential, self.table
        part = self.placement.parts[piece.item]
        assert part is not None
        row, width = part.row, part.widths[piece.number]
        size, least, units = int(table.size[row]), int(table.least[row]), int(table.units[row])
        if (size > potential.group and potential.num_ranks > ALL_IN_SCOPE) or size == potential.num_ranks:
            return []
        block = part.blocks[piece.number]
        if potential.num_ranks <= ALL_IN_SCOPE:
            here = block
        else:
            here = int(np.searchsorted(potential.ranks, block * size)) // size
        moved = [width] if not units else [d for d in (1, 2, 4, 8, 16, 32) if d <= width - least] + [width]
        fixed, slope = table.fixed[row], table.slope[row]
        taken = np.stack([d * slope if d < width or not units else width * slope for d in moved])
        taken[-1] = fixed + width * slope
        weight = potential.weight * potential.multiple(size)
        x = np.repeat(potential.x[None], len(moved), 0)
        mask = self.packer.problem.partly_filled.get((size, filled := int(table.filled[row])))
        low, stop = self._lower(x, taken / potential.scale, here, size, mask)
        xq = np.repeat(potential.xq[None], len(moved), 0)
        xq[:, low:stop] = powered(x[:, low:stop], potential.power)
        down = ((xq - potential.xq) @ potential.weight).sum(1)
        blocks = x.shape[1] // size
        put = ((fixed + np.array(moved)[:, None] * slope) / potential.scale)[:, None]
        new = x + (put if mask is None else put * np.tile(mask, (blocks, 1)))
        grown = ((powered(new, potential.power) - xq) @ weight).reshape(len(moved), blocks, size).sum(2)
        room = potential.room.reshape(-1, size)[:, :filled].min(1)
        needed = fixed[-1] + np.array(moved) * slope[-1]
        potential.work += 120 + 0.02 * x.size
        grown[room < needed[:, None]] = np.inf
        grown[:, here] = np.inf
        first: Sequence[int] = range(blocks)
        where: Mapping[int, int] | None = None
        if potential.num_ranks > ALL_IN_SCOPE:
            first = (potential.ranks[::size] // size).tolist()
            where = {b: i for i, b in enumerate(first)}
        others = [
            (k, b if where is None else where[b])
            for k, b in enumerate(part.blocks)
            if k != piece.number and (where is None or b in where)
        ]
        grown[:, [at for _, at in others]] = np.inf
        found: list[tuple[float, _Move]] = []
        for i, d in enumerate(moved):
            if (d >= least or not units) and len(part.blocks) < len(potential.placement.local) // size:
                to = int(grown[i].argmin())
                if np.isfinite(grown[i, to]):
                    found.append((float(down[i] + grown[i, to]), (part, piece.number, d, first[to], None)))
            if units and others:
                at = np.array([at for _, at in others])
                ranks = (at[:, None] * size + np.arange(size)).ravel()
                put = d * slope / potential.scale
                put = put if mask is None else put * np.tile(mask, (len(at), 1))
                more = powered(x[i, ranks] + put, potential.power) - xq[i, ranks]
                cost = (more @ weight).reshape(-1, size).sum(1)
                cost[room[at] < d * slope[-1]] = np.inf
                to = int(cost.argmin())
                if np.isfinite(cost[to]):
                    found.append((float(down[i] + cost[to]), (part, piece.number, d, None, others[to][0])))
        return found

    def _lower(self, x: Array, taken: Array, here: int, size: int, mask: Ranks | None) -> tuple[int, int]:
        """Take loads away from a block, and from the ranks that share phases with it: the first of all these, and the
        one after the last.

        Args:
            mask: of a block that is not filled: (size, phases + 1), see `reached`.
        """
        span = self.packer.problem.span
        low = here * size
        first, stop = low, low + size
        x[:, low : low + size] -= taken[:, None] if mask is None else taken[:, None] * mask
        for phase in np.flatnonzero(span > size).tolist():
            width = int(span[phase])
            start = low // width * width
            x[:, start : start + width, phase] -= taken[:, None, phase]
            x[:, low : low + size, phase] += taken[:, None, phase]
            first, stop = min(first, start), max(stop, start + width)
        return first, stop

    def exchange(self, rank: int, phase: int, random: np.random.Generator) -> bool:
        """Let a piece on the rank change places with one elsewhere, of some drawn at random; False when no gain."""
        others = self.pieces.drawn(random, _DRAWN)
        mine: dict[int, list[Piece]] = {}
        for piece in self.pieces.on(rank, phase):
            if self.pieces.may_move(piece.item):
                mine.setdefault(self._size[piece.row], []).append(piece)
        best: tuple[float, Piece, Piece] | None = None
        for size in mine.keys() & others.keys() if self.potential.num_ranks > 1 else ():
            found = self._best_exchange(mine[size], others[size], size)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        if best is None or best[0] >= 0:
            return False
        _, one, other = best
        return self.accept(
            [(one.item, self.pieces.exchanged(one, other)), (other.item, self.pieces.exchanged(other, one))]
        )

    def exchange_many(self, phase: int, random: np.random.Generator) -> int:
        """Let pieces on many of the slowest ranks change places with some drawn at random; how many did.

        Ranks of one group take part in one exchange only, so that what each gains is known.
        """
        mine = self.pieces.on_hot(phase)
        others = self.pieces.drawn(random, _DRAWN_FOR_MANY)
        found: list[tuple[float, Piece, Piece]] = []
        for size in mine.keys() & others.keys():
            gains = self.pieces.gains(mine[size], others[size], size)
            flat = np.flatnonzero(gains.ravel() < -_ENOUGH * self.value)
            values = gains.ravel()[flat].tolist()
            found += [
                (value, mine[size][i // gains.shape[1]], others[size][i % gains.shape[1]])
                for value, i in zip(values, flat.tolist(), strict=True)
            ]
        return self._accept_many(sorted(found)[:_LOOKED_THROUGH])

    def _accept_many(self, found: list[tuple[float, Piece, Piece]]) -> int:
        """Make those exchanges that do not touch what one before has changed; all are taken back if that is no gain."""
        group, touched, items = self.potential.group, set[int](), set[int]()
        old: list[tuple[int, Part]] = []
        for _, one, other in found:
            where = {piece.block * self._size[piece.row] // group for piece in (one, other)}
            if where & touched or items & {one.item, other.item} or not self.pieces.can_exchange(one, other):
                continue
            for item, part in (
                (one.item, self.pieces.exchanged(one, other)),
                (other.item, self.pieces.exchanged(other, one)),
            ):
                old.append((item, self.placement.swap(item, part)))
            touched |= where
            items |= {one.item, other.item}
        self.potential.work += 40 * len(old)
        value = self.potential.weigh() if old and self.placement.fits() else np.inf
        if value < self.value:
            self.value = value
            return len(old) // 2
        for item, part in reversed(old):
            self.placement.swap(item, part)
        return 0

    def _best_exchange(self, mine: list[Piece], others: list[Piece], size: int) -> tuple[float, Piece, Piece] | None:
        if size == self.potential.num_ranks:
            return None
        gains = self.pieces.gains(mine, others, size)
        while True:
            i, j = divmod(int(gains.argmin()), gains.shape[1])
            if not gains[i, j] < 0:
                return None
            if self.pieces.can_exchange(mine[i], others[j]):
                return float(gains[i, j]), mine[i], others[j]
            gains[i, j] = np.inf

    def replace(self, items: list[int]) -> bool:
        """Take items up and put them down anew, the last first; False when that is no gain."""
        old = [(item, self.placement.remove(item)) for item in items]
        self.potential.work += 30 * len(items)
        self.potential.weigh()
        done = []
        for item in items:
            if not self.packer.insert(item):
                break
            done.append(item)
        value = self.potential.weigh() if len(done) == len(items) else np.inf
        if value < self.value * (1 - _ENOUGH):
            self.value = value
            return True
        for item in done:
            self.placement.remove(item)
        for item, part in old:
            self.placement.add(item, part)
        self.potential.weigh()
        return False


def _moved(part: Part, index: int, units: int, block: int | None, other: int | None) -> Part:
    """A part with units of one piece moved to a new block, or to another of its pieces."""
    pieces = dict(zip(part.blocks, part.widths, strict=True))
    source = part.blocks[index]
    pieces[source] -= units
    to = part.blocks[other] if other is not None else block
    assert to is not None
    pieces[to] = pieces.get(to, 0) + units
    if pieces[source] == 0:
        del pieces[source]
    order = sorted(pieces.items(), key=lambda piece: (-piece[1], piece[0]))
    return Part(part.row, tuple(b for b, _ in order), tuple(w for _, w in order))
