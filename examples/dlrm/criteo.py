"""The Criteo display-advertising format: a streaming reader for click logs of any size, plain or gzip.

A line is a label (0 or 1), 13 integers and 26 categories of 8 hexadecimal digits, separated by tabs; an integer or a
category may be empty.

Terms:
    window: a fixed number of bytes of the (decompressed) file. Window k holds the lines that *start* in it, and they
        are global batch k: the same lines whatever the number of ranks, about `batch_size` of them (a window is as wide
        as `batch_size` mean lines, as the head of the file has them). So every rank takes the same number of steps.
    share: rank r of n takes the lines that start in the r-th of n equal byte ranges of every window. It reads those
        bytes and the end of their last line. (A gzip stream can only be decompressed from its start: there each rank
        decompresses all of it, and parses its share.)
    part: "train" or "heldout", by the checksum of the line's own bytes: the same split for every world size, batch size
        and order of lines.

The ranks' shares of a batch differ by a few lines; `steps.py` counts the rows in all, by which a loss is averaged.
Memory does not grow with the file: a reader holds one share of a window. Parsing is numpy over whole shares.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

NUM_DENSE = 13
NUM_SPARSE = 26
NUM_FIELDS = 1 + NUM_DENSE + NUM_SPARSE
FEATURES = [f"cat_{i}" for i in range(NUM_SPARSE)]
HELD_OUT = 0.1  # share of the lines kept from training

_MAX_LINE_BYTES = 4096  # more than eight times the longest line that the format can have
_MAX_DIGITS = 18  # an integer of so many digits fits 64 bits
_HEAD_BYTES = 1 << 20  # what the mean length of a line is taken from
_NEWLINE, _RETURN, _TAB, _MINUS, _ZERO = (np.uint8(ord(c)) for c in "\n\r\t-0")

_BAD = np.uint8(0x80)
_NIBBLE = np.full(256, _BAD, dtype=np.uint8)  # byte of a hexadecimal digit -> its value, or _BAD
for _digit in "0123456789abcdefABCDEF":
    _NIBBLE[ord(_digit)] = int(_digit, 16)
_ANY_BAD = np.uint64(0x8080808080808080)


@dataclass(frozen=True)
class Batch:
    """One rank's rows of one global batch."""

    dense: Tensor
    """(B, 13) float32: sign(x) * log(1 + |x|), an empty field 0."""
    sparse: KeyedJaggedTensor
    """26 keys `cat_0` ... `cat_25`; a bag holds one row number, or none where the field is empty."""
    labels: Tensor
    """(B,) float32, 0 or 1."""

    def to(self, device: torch.device) -> Batch:
        return Batch(self.dense.to(device), self.sparse.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Fields:
    """Parsed lines as numpy arrays; B counts the well-formed lines alone."""

    labels: np.ndarray  # (B,) uint8
    dense: np.ndarray  # (B, 13) int64, an empty field 0
    categories: np.ndarray  # (B, 26) uint64, the hexadecimal value, an empty field 0
    present: np.ndarray  # (B, 26) bool, False where the category is empty
    well_formed: np.ndarray  # (lines,) bool


class MalformedLine(ValueError):
    """A line that is not in the format; `on_error="skip"` goes on without it."""


class CriteoReader:
    """Iterates over one rank's batches of one part of a click log; every iteration starts again at the first.

    Args:
        path: a plain or gzip file (told by its first bytes, not by its name).
        rows: rows of every table, or 26 numbers; categories are hashed to them.
        batch_size: about how many lines of the part a global batch has, over all ranks.
        rank, num_ranks: which share of each batch this process reads.
        part: "train", "heldout" or "all".
        held_out: share of the lines that are held out.
        on_error: "error" raises at the first malformed line, "skip" counts it in `skipped` and goes on.

    Raises:
        FileNotFoundError, IsADirectoryError, ValueError (empty file): at construction.
        MalformedLine: while iterating, with its number.
        ValueError: while iterating, at a damaged gzip stream.

    Example:
        >>> for batch in CriteoReader("clicks.tsv.gz", rows=10_000, batch_size=1024):
        ...     logits = model(batch.dense, batch.sparse)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rows: int | Sequence[int],
        batch_size: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        part: str = "train",
        held_out: float = HELD_OUT,
        on_error: str = "error",
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank must lie in [0, {num_ranks}), got {rank}")
        if not 0 <= held_out <= 1:
            raise ValueError(f"held_out must lie in [0, 1], got {held_out}")
        if on_error not in ("error", "skip"):
            raise ValueError(f"on_error must be 'error' or 'skip', got {on_error!r}")
        shares = {"train": 1 - held_out, "heldout": held_out, "all": 1.0}
        if part not in shares:
            raise ValueError(f"part must be one of {sorted(shares)}, got {part!r}")
        self.path = os.fspath(path)
        self.rows = rows_per_table(rows)
        self.rank, self.num_ranks = rank, num_ranks
        self.part, self.held_out = part, held_out
        self.on_error = on_error
        self.skipped = 0
        """Malformed lines that this rank met in the last iteration."""
        head = open_bytes(self.path).read_at(0, _HEAD_BYTES)
        if not head:
            raise ValueError(f"{self.path} is empty: no click log")
        line_bytes = (head.rfind(b"\n") + 1) / head.count(b"\n") if b"\n" in head else len(head)
        self.window_bytes = max(1, round(batch_size * line_bytes / max(shares[part], 1e-3)))

    @property
    def num_steps(self) -> int | None:
        """Global batches in the file, the same on every rank; None for gzip, which does not say how long it is."""
        size = open_bytes(self.path).size
        return None if size is None else -(-size // self.window_bytes)

    def __iter__(self) -> Iterator[Batch]:
        return self.windows()

    def windows(self, first: int = 0) -> Iterator[Batch]:
        """The batches from global batch `first` on."""
        self.skipped = 0
        file = open_bytes(self.path)
        width = self.window_bytes
        window = first
        while file.read_at(window * width, 1):
            begin = window * width + self.rank * width // self.num_ranks
            end = window * width + (self.rank + 1) * width // self.num_ranks
            yield self._batch(*lines_starting_in(file, begin, end))
            window += 1

    def _batch(self, data: bytes, starts: np.ndarray, ends: np.ndarray, base: int) -> Batch:
        if self.part != "all":
            held_out = is_held_out(data, starts, ends, self.held_out)
            mine = held_out if self.part == "heldout" else ~held_out
            starts, ends = starts[mine], ends[mine]
        fields = parse(data, starts, ends)
        bad = np.flatnonzero(~fields.well_formed)
        if len(bad) and self.on_error == "error":
            start, end = int(starts[bad[0]]), int(ends[bad[0]])
            raise MalformedLine(
                f"{self.path}, line {line_number(self.path, base + start)}: {why_malformed(data[start:end])}"
            )
        self.skipped += len(bad)
        ids = hash_to_rows(fields.categories, self.rows)
        sparse = KeyedJaggedTensor(
            keys=FEATURES,
            values=torch.from_numpy(ids.T[fields.present.T]),  # feature by feature, as a KeyedJaggedTensor wants it
            lengths=torch.from_numpy(fields.present.T.astype(np.int32).ravel()),
        )
        dense = torch.from_numpy(np.sign(fields.dense) * np.log1p(np.abs(fields.dense))).float()
        return Batch(dense, sparse, torch.from_numpy(fields.labels).float())


def rows_per_table(rows: int | Sequence[int]) -> list[int]:
    """26 numbers of rows from one, or from 26."""
    each = [rows] * NUM_SPARSE if isinstance(rows, int) else list(rows)
    if len(each) != NUM_SPARSE:
        raise ValueError(f"rows must be one number or {NUM_SPARSE}, got {len(each)} numbers")
    for number in each:
        if not 0 < number < 1 << 31:
            raise ValueError(f"rows must lie in [1, 2**31), got {number}")
    return each


def hash_to_rows(categories: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """Row numbers (B, 26) int64 of category values (B, 26) uint64.

    Mixed by the finaliser of SplitMix64 with another salt for each feature, so that like values share no pattern.
    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    salt = np.arange(1, NUM_SPARSE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = categories + salt
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) >> np.uint64(32)
    return ((x * np.asarray(rows, dtype=np.uint64)) >> np.uint64(32)).astype(np.int64)


def is_held_out(data: bytes, starts: np.ndarray, ends: np.ndarray, held_out: float) -> np.ndarray:
    """(lines,) bool: whether each line belongs to the held-out part, by the CRC-32 of its bytes."""
    view = memoryview(data)
    pairs = zip(starts.tolist(), ends.tolist(), strict=True)
    checksums = np.fromiter((zlib.crc32(view[start:end]) for start, end in pairs), dtype=np.uint32, count=len(starts))
    return checksums % np.uint32(10_000) < round(held_out * 10_000)


def parse(data: bytes, starts: np.ndarray, ends: np.ndarray) -> Fields:
    """Parses the lines data[start:end], all at once; those that `why_malformed` has something against are left out."""
    padded = np.frombuffer(data + bytes(_MAX_DIGITS + 8), dtype=np.uint8)
    tabs = np.flatnonzero(padded == _TAB)
    first_tab = np.searchsorted(tabs, starts)
    well_formed = np.searchsorted(tabs, ends) - first_tab == NUM_FIELDS - 1
    lines = np.flatnonzero(well_formed)

    inner = (
        tabs[first_tab[lines, None] + np.arange(NUM_FIELDS - 1)]
        if len(lines)
        else np.empty((0, NUM_FIELDS - 1), dtype=np.int64)
    )
    begin = np.concatenate([starts[lines, None], inner + 1], axis=1)  # (B, 40)
    length = np.concatenate([inner, ends[lines, None]], axis=1) - begin

    labels = padded[begin[:, 0]] - _ZERO
    label_ok = (length[:, 0] == 1) & (labels <= 1)
    dense, dense_ok = _integers(padded, begin[:, 1 : 1 + NUM_DENSE], length[:, 1 : 1 + NUM_DENSE])
    categories, categories_ok = _hexadecimals(padded, begin[:, 1 + NUM_DENSE :])
    present = length[:, 1 + NUM_DENSE :] > 0
    categories_ok = ~present | (categories_ok & (length[:, 1 + NUM_DENSE :] == 8))

    ok = label_ok & dense_ok.all(axis=1) & categories_ok.all(axis=1)
    well_formed[lines] = ok
    return Fields(labels[ok], dense[ok], np.where(present, categories, 0)[ok], present[ok], well_formed)


def _integers(padded: np.ndarray, begin: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decimal fields -> (values int64, whether each is one); an empty field is 0."""
    negative = (length > 0) & (padded[begin] == _MINUS)
    begin, digits = (begin + negative).ravel(), (length - negative).ravel()
    values = np.zeros(begin.shape, dtype=np.int64)
    ok = (digits <= _MAX_DIGITS) & ((digits > 0) | (length.ravel() == 0))
    fields = np.flatnonzero(ok & (digits > 0))
    place = 0
    while len(fields):
        digit = padded[begin[fields] + place] - _ZERO  # wraps around below "0"
        ok[fields[digit > 9]] = False
        values[fields] = values[fields] * 10 + digit
        place += 1
        fields = fields[digits[fields] > place]
    return np.where(negative, -values.reshape(length.shape), values.reshape(length.shape)), ok.reshape(length.shape)


def _hexadecimals(padded: np.ndarray, begin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 bytes at each position -> (32-bit values as uint64, whether all 8 are hexadecimal digits)."""
    nibbles = _NIBBLE[padded]
    eight_at: np.ndarray = np.ndarray(
        (len(nibbles) - 7,), dtype=">u8", buffer=nibbles.data, strides=(1,)
    )  # first digit highest
    x = eight_at[begin].astype(np.uint64)
    ok = (x & _ANY_BAD) == 0
    x = (x | (x >> np.uint64(4))) & np.uint64(0x00FF00FF00FF00FF)
    x = (x | (x >> np.uint64(8))) & np.uint64(0x0000FFFF0000FFFF)
    return (x | (x >> np.uint64(16))) & np.uint64(0xFFFFFFFF), ok


def why_malformed(line: bytes) -> str:
    """What is wrong with a line that `parse` left out, for the person who has to mend the file."""
    if not line:
        return "an empty line"
    if len(line) >= _MAX_LINE_BYTES:
        return f"no end of line within {_MAX_LINE_BYTES} bytes"
    fields = line.decode("utf-8", errors="backslashreplace").split("\t")
    if len(fields) != NUM_FIELDS:
        return f"expected {NUM_FIELDS} fields separated by tabs, got {len(fields)}"
    if fields[0] not in ("0", "1"):
        return f"label is {_shown(fields[0])}, expected 0 or 1"
    for i, field in enumerate(fields[1 : 1 + NUM_DENSE]):
        if not re.fullmatch(rf"(-?[0-9]{{1,{_MAX_DIGITS}}})?", field):
            expected = f"a whole number of at most {_MAX_DIGITS} digits, or nothing"
            return f"integer {i} of {NUM_DENSE} is {_shown(field)}, expected {expected}"
    for i, field in enumerate(fields[1 + NUM_DENSE :]):
        if not re.fullmatch("([0-9a-fA-F]{8})?", field):
            return f"category {i} of {NUM_SPARSE} is {_shown(field)}, expected 8 hexadecimal digits, or nothing"
    raise AssertionError(f"parse() left out a line that is well-formed: {line!r}")


def _shown(field: str) -> str:
    return repr(field if len(field) <= 40 else field[:40] + "...")


class BytesByOffset(Protocol):
    """A file as the reader wants it."""

    size: int | None

    def read_at(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset`; fewer at the end of the file."""
        ...


def open_bytes(path: str) -> BytesByOffset:
    """Opens a plain or gzip file.

    Raises:
        FileNotFoundError, IsADirectoryError: when there is no such file.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a directory, expected one file of clicks (`ClickLogs` takes folders)")
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file")
    with open(path, "rb") as file:
        magic = file.read(2)
    return _Gzip(path) if magic == b"\x1f\x8b" else _Plain(path)


class _Plain:
    def __init__(self, path: str) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (closed with the object)
        self.size = os.fstat(self._file.fileno()).st_size

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def read_at(self, offset: int, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, offset)


class _Gzip:
    """The decompressed stream, read forward: at most `_BACK` bytes before the highest offset asked for."""

    _BACK = 2 * _MAX_LINE_BYTES
    _CHUNK_BYTES = 1 << 18

    def __init__(self, path: str) -> None:
        self.size = None
        self._path = path
        self._file = gzip.open(path, "rb")  # noqa: SIM115  (closed with the object)
        self._base = 0
        self._held = bytearray()  # the stream's bytes from self._base on

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def read_at(self, offset: int, size: int) -> bytes:
        assert offset >= self._base, (offset, self._base)
        while self._base + len(self._held) < offset + size:
            passed = min(offset - self._BACK - self._base, len(self._held))
            if passed > 0:
                del self._held[:passed]
                self._base += passed
            try:
                chunk = self._file.read(self._CHUNK_BYTES)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                read = self._base + len(self._held)
                where = f"near byte {read:,} of the decompressed data"
                raise ValueError(f"{self._path}: truncated or damaged gzip stream, {where} ({error})") from error
            if not chunk:
                break
            self._held += chunk
        at = offset - self._base
        return bytes(self._held[at : at + size])


def lines_starting_in(file: BytesByOffset, begin: int, end: int) -> tuple[bytes, np.ndarray, np.ndarray, int]:
    """The lines whose first byte lies in [begin, end).

    Line ends are not part of a line. A line that does not end within `_MAX_LINE_BYTES` after `end` is cut there.

    Returns:
        (data, starts, ends, base): line i is data[starts[i]:ends[i]], and data[0] is byte `base` of the file.
    """
    base = max(begin - 1, 0)
    data = file.read_at(base, end - base + _MAX_LINE_BYTES)
    last = end - 1 - base  # the last position where one of our lines can start or end
    first = 0 if begin == 0 else data.find(b"\n", 0, last) + 1
    none = np.empty(0, dtype=np.int64)
    if begin == end or first >= len(data) or (begin > 0 and first == 0):
        return b"", none, none, base
    stop = data.find(b"\n", last)
    if stop < 0:
        stop = len(data) - data.endswith(b"\n")
    newlines = np.flatnonzero(np.frombuffer(data, dtype=np.uint8, count=stop - first, offset=first) == _NEWLINE) + first
    starts = np.concatenate([[first], newlines + 1])
    ends = np.concatenate([newlines, [stop]])
    returns = np.frombuffer(data, dtype=np.uint8)[ends - 1] == _RETURN
    return data, starts, ends - (returns & (ends > starts)), base


def line_number(path: str, offset: int) -> int:
    """The number, from 1, of the line that holds the byte at `offset`; reads the file from its start."""
    file = open_bytes(path)
    at, number = 0, 1
    while at < offset:
        chunk = file.read_at(at, min(offset - at, _HEAD_BYTES))
        number += chunk.count(b"\n")
        at += len(chunk)
    return number
