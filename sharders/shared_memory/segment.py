"""A *segment*: the memory that one rank writes and the others read.

[Note: exchanges] Every rank numbers its exchanges from 1. For exchange k the writer puts what goes to the others into a
*block*, describes it in row k % SLOTS of its table (for each rank where it starts, how many bytes it has, and where the
answer is wanted), and only then sets `published` to k. A reader that has taken what it wants of exchange k writes k
into entry k % SLOTS of `done` of its own segment. A block is used again when every rank is done with its last exchange
and no tensor refers to it. So each word has one writer, and no lock is shared between processes. A rank writes its own
segment alone, but for answers: see [Note: landings] of landing.py.

[Note: order] What is read must have been written before the word that tells of it. x86-64 keeps the order of stores and
of loads; other processors need barriers that Python has not, so shared memory is not chosen there.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from sharders.shared_memory.mapping import Mapping

SLOTS = 256
"""Exchanges that may be under way at once; one more waits for the oldest: that rank is *crowded*."""

TOKEN_BYTES = 16
_PUBLISHED_AT, _LET_GO_AT, _CROWDED_AT, _DONE_AT, _PAGE = 64, 72, 80, 128, 4096
_TABLE_AT = _DONE_AT + 8 * SLOTS
_SMALLEST_BLOCK = 4096
_TOO_LARGE = 8
"""Times what is needed."""

_WORD = 0xFFFFFFFF


class Segment:
    """One rank's memory, its own or another's.

    Args:
        mapping: of `size` bytes.
        num_ranks: of the channel.
    """

    def __init__(self, mapping: Mapping, num_ranks: int) -> None:
        self._mapping = mapping
        """Lives as long as this."""
        self.address, self.size = mapping.address, mapping.size
        self.published = ctypes.c_uint32.from_address(self.address + _PUBLISHED_AT)
        self.published_address = self.address + _PUBLISHED_AT
        self.let_go = ctypes.c_uint32.from_address(self.address + _LET_GO_AT)
        """Changes when an exchange was let go that a crowded rank may wait for."""
        self.let_go_address = self.address + _LET_GO_AT
        self.is_crowded = ctypes.c_uint32.from_address(self.address + _CROWDED_AT)
        """Not 0 while this rank waits for others to let go."""
        self.done = (ctypes.c_uint64 * SLOTS).from_address(self.address + _DONE_AT)
        self._row = struct.Struct(f"={2 + 3 * num_ranks}Q")
        self.data_at = -(-(_TABLE_AT + self._row.size * SLOTS) // _PAGE) * _PAGE
        self._words = (ctypes.c_char * self.data_at).from_address(self.address)
        everything = _buffer_type(self.size).from_address(self.address)
        everything.keeps = mapping
        with torch.inference_mode(False):  # the first exchange may be an evaluation's, and training writes there later
            self._bytes = torch.frombuffer(everything, dtype=torch.uint8)
        self._elements: dict[torch.dtype, torch.Tensor] = {}
        """The same as elements of other dtypes."""

    @property
    def token(self) -> bytes:
        """Tells that this is the memory that was meant."""
        return ctypes.string_at(self.address, TOKEN_BYTES)

    def sign(self, token: bytes) -> None:
        """Set `token`."""
        ctypes.memmove(self.address, token, TOKEN_BYTES)

    def describe(
        self, number: int, kind: int, starts: Sequence[int], sizes: Sequence[int], landings: Sequence[int]
    ) -> None:
        """Write the row of an exchange: for each rank where its bytes start, how many there are, and where this rank
        wants the answer."""
        at = _TABLE_AT + number % SLOTS * self._row.size
        self._row.pack_into(self._words, at, number, kind, *starts, *sizes, *landings)

    def row(self, number: int) -> tuple[int, ...]:
        """(number, kind, a start for each rank, a size for each rank, a landing for each rank)."""
        return self._row.unpack_from(self._words, _TABLE_AT + number % SLOTS * self._row.size)

    def has_published(self, number: int) -> bool:
        """Whether exchange `number` may be read; the word counts modulo 2 ** 32."""
        return (self.published.value - number) & _WORD < 1 << 31

    def empty(self, start: int, nbytes: int) -> None:
        """See `Mapping`."""
        self._mapping.empty(start, nbytes)

    def view(self, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """(count,) elements that lie in it, from a place on that is a multiple of their size."""
        size, elements = dtype.itemsize, self._elements.get(dtype)
        if elements is None:
            with torch.inference_mode(False):
                elements = self._elements[dtype] = self._bytes[: self.size // size * size].view(dtype)
        return elements[start // size : start // size + count]


class Block:
    """A part of a rank's own segment that one exchange after the other uses.

    Attributes:
        last: number of the last exchange that read from it.
    """

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size, self.last = start, size, 0
        self._buffer = _buffer_type(size)
        self._lease: weakref.ref[Any] | None = None

    @property
    def is_leased(self) -> bool:
        """Whether a tensor lies in it."""
        return self._lease is not None and self._lease() is not None

    def lease(self, address: int, keeps: object) -> Any:
        """The block's memory: it is used as long as the result, or a tensor in it, is referred to."""
        made = self._buffer.from_address(address + self.start)
        made.keeps = keeps
        self._lease = weakref.ref(made)
        return made


class Pool:
    """The blocks of a rank's own segment: as many as are used at once, which persist.

    Sizes that grow make new ones, and give the memory of those that have become too small back; what is small takes no
    large one, which would then be made again.

    Args:
        mine: the segment.
        is_done: whether every rank has done with an exchange.
    """

    def __init__(self, mine: Segment, is_done: Callable[[int], bool]) -> None:
        self._mine, self._is_done = mine, is_done
        self._blocks: list[Block] = []  # by size
        self._end = mine.data_at

    def take(self, nbytes: int) -> tuple[Block, Any]:
        """A free block of at least so many bytes, and its lease.

        Raises:
            MemoryError: the segment is full.
        """
        most = max(_SMALLEST_BLOCK, _TOO_LARGE * nbytes)
        for block in self._blocks:
            if nbytes <= block.size <= most and self._is_free(block):
                break
        else:
            block = self._add(nbytes)
        return block, block.lease(self._mine.address, self._mine)

    def block_at(self, address: int) -> Block | None:
        """The block that an address lies in."""
        at = address - self._mine.address
        return next((b for b in self._blocks if b.start <= at < b.start + b.size), None)

    def _is_free(self, block: Block) -> bool:
        return not block.is_leased and self._is_done(block.last)

    def _add(self, nbytes: int) -> Block:
        """An eighth more than is asked for, so that sizes that vary a little do not make many."""
        size = max(_SMALLEST_BLOCK, 1 << (nbytes + nbytes // 8 - 1).bit_length())
        step = max(_SMALLEST_BLOCK, size >> 3)
        size = -(-(nbytes + nbytes // 8) // step) * step
        if self._end + size > self._mine.size:
            raise MemoryError(
                f"an exchange of {nbytes} bytes does not fit into the {self._mine.size} bytes of this rank's shared "
                "memory; DMP_SHARED_MEMORY=0 sends through connections instead"
            )
        for smaller in self._blocks:
            if smaller.size * _TOO_LARGE > size > smaller.size > _SMALLEST_BLOCK and self._is_free(smaller):
                self._mine.empty(smaller.start, smaller.size)
        block = Block(self._end, size)
        self._end += size
        self._blocks.append(block)
        self._blocks.sort(key=lambda each: each.size)
        return block


@cache
def _buffer_type(nbytes: int) -> Any:
    """A class of Python's, for these have attributes and take weak references."""

    class Buffer(ctypes.Array[ctypes.c_char]):
        _type_ = ctypes.c_char
        _length_ = nbytes

    return Buffer


def tensor_in(buffer: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    """(count,) elements at the start of leased memory."""
    return torch.frombuffer(buffer, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
