"""Pieces that may change places: which are on slow ranks, and what the potential gains when they go elsewhere. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.search.cost_table import Array
from planner.search.placement import Part
from planner.search.potential import Potential, powered

_HOT = 48
"""Groups of ranks with a slow one, of which each may part with a piece at the same time,"""
_OF_HOT = 6
"""one of so many."""
_PIECES = 8
"""Of a rank that are looked at."""


class Piece(NamedTuple):
    """One of an item's: its number among them, and what its part says of it."""

    item: int
    number: int
    row: int
    block: int
    width: int


class Pieces:
    """Pieces of a placement as its potential sees them."""

    def __init__(self, potential: Potential) -> None:
        self.potential = potential
        self.placement = potential.placement
        self.problem = self.placement.problem
        self.table = self.problem.table
        self._size: list[int] = self.table.size.tolist()
        self._filled: list[int] = self.table.filled.tolist()

    def on(self, rank: int, phase: int) -> list[Piece]:
        """Pieces that a rank has, or that it shares a phase with, by their load in that phase, largest first."""
        span = int(self.problem.span[phase])
        found = []
        for item, block in self.placement.on(rank, span):
            part = self.placement.parts[item]
            assert part is not None
            if part.row not in self.table.ragged:
                found.append(self.piece(item, part, part.blocks.index(block)))
        loads = self.loads(found)[:, phase].tolist() if found else []
        order = sorted((-load, piece) for load, piece in zip(loads, found, strict=True) if load > 0)
        return [piece for _, piece in order[:_PIECES]]

    def piece(self, item: int, part: Part, index: int) -> Piece:
        return Piece(item, index, part.row, part.blocks[index], part.widths[index])

    def loads(self, pieces: list[Piece]) -> Array:
        """(pieces, phases + 1)"""
        row = np.array([p.row for p in pieces])
        loads: Array = self.table.fixed[row] + np.array([p.width for p in pieces])[:, None] * self.table.slope[row]
        return loads

    def may_move(self, item: int) -> bool:
        problem = self.problem
        return item not in problem.allowed and item not in problem.spread

    def drawn(self, random: np.random.Generator, most: int) -> dict[int, list[Piece]]:
        """A piece of each of some items drawn at random, by size."""
        number = len(self.placement.parts)
        drawn = range(number) if number <= most else np.unique(random.integers(number, size=most)).tolist()
        draws = random.random(len(drawn)).tolist()
        self.potential.work += 1.5 * len(drawn)
        found: dict[int, list[Piece]] = {}
        for item, draw in zip(drawn, draws, strict=True):
            part = self.placement.parts[item]
            if part is not None and self.may_move(item) and part.row not in self.table.ragged:
                index = int(draw * len(part.blocks))
                found.setdefault(self._size[part.row], []).append(self.piece(item, part, index))
        return found

    def on_hot(self, phase: int) -> dict[int, list[Piece]]:
        """Pieces on the slowest rank of each of the groups with the slowest, by size."""
        load, group = self.placement.local[:, phase], self.potential.group
        number = min(_HOT, len(load) // (2 * group))
        hot = load.reshape(-1, group).argmax(1) + np.arange(0, len(load), group)
        hot = hot[np.argsort(-load[hot], kind="stable")[:number]]
        self.potential.work += 100 + 30 * number
        mine: dict[int, list[Piece]] = {}
        for rank in hot.tolist():
            for piece in self.on(rank, phase)[:_OF_HOT]:
                if self.may_move(piece.item) and self._size[piece.row] <= group:
                    mine.setdefault(self._size[piece.row], []).append(piece)
        return mine

    def gains(self, mine: list[Piece], others: list[Piece], size: int) -> Array:
        """(mine, others) by how much the potential grows when two pieces change places."""
        potential, placement = self.potential, self.placement
        here, there = np.array([p.block for p in mine]), np.array([p.block for p in others])
        comes, goes = self._on_ranks(others, size), self._on_ranks(mine, size)
        change = comes[None] - goes[:, None]  # what comes here
        change /= potential.scale
        gains = np.zeros(change.shape[:2])
        span = self.problem.span
        for phase in np.flatnonzero(span > size).tolist():
            width = int(span[phase])
            change[(here * size // width)[:, None] == (there * size // width)[None], :, phase] = 0.0
        weight = potential.weight * potential.multiple(size)
        ranks = np.arange(size)
        for blocks, sign, of in ((here, 1.0, (slice(None), None)), (there, -1.0, (None,))):
            at = (blocks[:, None] * size + ranks).ravel()
            x = ((placement.local[at] + placement.every) / potential.scale).reshape(len(blocks), size, -1)
            before = (powered(x, potential.power) @ weight).sum(1)
            after = x[of] + change if sign > 0 else x[of] - change
            gains += (powered(after, potential.power, after) @ weight).sum(2) - before[of]
            room = (potential.limit[at] - placement.local[at, -1] - placement.every[-1]).reshape(-1, size)
            room = room if change.shape[2] > 1 else room.min(1, keepdims=True)
            gains[(sign * change[..., -1] * potential.scale[-1] > room[of]).any(2)] = np.inf
        potential.work += 60 + 0.008 * gains.size * size * len(weight)
        return gains

    def _on_ranks(self, pieces: list[Piece], size: int) -> Array:
        """(pieces, ranks of a block, phases + 1); one rank stands for all where all blocks are filled."""
        loads, filled = self.loads(pieces)[:, None], [self._filled[p.row] for p in pieces]
        if not self.problem.partly_filled or size <= 2:
            return loads
        every = np.ones((size, loads.shape[2]), dtype=np.bool_)
        found: Array = loads * np.stack([self.problem.partly_filled.get((size, number), every) for number in filled])
        return found

    def can_exchange(self, piece: Piece, other: Piece) -> bool:
        """Whether neither of their items has something already where its piece would come."""
        held, theirs = self.placement.parts[piece.item], self.placement.parts[other.item]
        assert held is not None
        assert theirs is not None
        return piece.item != other.item and other.block not in held.blocks and piece.block not in theirs.blocks

    def exchanged(self, piece: Piece, other: Piece) -> Part:
        """The part of a piece's item with the piece in the place of another's."""
        part = self.placement.parts[piece.item]
        assert part is not None
        blocks = list(part.blocks)
        blocks[piece.number] = other.block
        return Part(part.row, tuple(blocks), part.widths)
