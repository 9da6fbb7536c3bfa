"""Faults of a batch as a few integers, so that the rank that finds one can tell all others in the first exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from dmp import InputError

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.complex64,
)  # fmt: skip


class Kind(IntEnum):
    """What is wrong; the message of each is in `message`."""

    NONE = 0
    ID_RANGE = 1
    ID_DTYPE = 2
    LENGTH_NEGATIVE = 3
    LENGTH_SUM = 4
    KEY_MISSING = 5
    WEIGHTS_MISSING = 6
    WEIGHTS_UNEXPECTED = 7
    WEIGHTS_LENGTH = 8
    INPUT_TYPE = 9
    BATCH_SIZE = 10
    LENGTH_DTYPE = 11
    VARIABLE_BATCH = 12
    SHAPE = 13
    OFFSETS = 14
    WEIGHTS_DTYPE = 15
    FROZEN = 16
    UNREADABLE = 17
    LENGTH_LARGE = 18
    ELSEWHERE = 19


@dataclass
class Fault(Exception):
    """One fault: kind, index of the feature (-1: none), the value found, and what it was compared with."""

    kind: Kind
    feature: int = -1
    value: int = 0
    expected: int = 0

    def packed(self) -> list[int]:
        """As the four integers that travel."""
        return [int(self.kind), self.feature, self.value, self.expected]

    @staticmethod
    def unpacked(words: Sequence[int]) -> Fault:
        """Inverse of `packed`."""
        return Fault(Kind(words[0]), words[1], words[2], words[3])

    def error(self, names: Sequence[str], where: str, rank: int) -> InputError:
        """The error that every rank raises."""
        feature = names[self.feature] if 0 <= self.feature < len(names) else "?"
        return InputError(f"bad batch for {where} on rank {rank}: {self.message(feature)}")

    def message(self, feature: str) -> str:
        """In words."""
        value, expected = self.value, self.expected
        texts = {
            Kind.ID_RANGE: f"feature {feature!r} has id {value}; its table has {expected} rows: "
            f"ids must be 0..{expected - 1}",
            Kind.ID_DTYPE: f"ids must be int32 or int64; got {dtype_at(value)}",
            Kind.LENGTH_NEGATIVE: f"feature {feature!r} has a negative length {value}; lengths must be >= 0",
            Kind.ELSEWHERE: "it and the ranks of its copy of the tables call different modules, or in different ways; "
            "their own error says how",
            Kind.LENGTH_LARGE: f"feature {feature!r} has a length {value}, but there are {expected} ids in all",
            Kind.LENGTH_SUM: f"lengths sum to {value}, but there are {expected} ids; the two must be equal",
            Kind.KEY_MISSING: f"feature {feature!r} is missing from the batch, which has {value} keys",
            Kind.WEIGHTS_MISSING: "the module is weighted, but the batch has no weights",
            Kind.WEIGHTS_UNEXPECTED: "the batch has weights, which are for sum pooling only",
            Kind.WEIGHTS_LENGTH: f"there are {value} weights for {expected} ids; the two must be equal",
            Kind.INPUT_TYPE: "the input is not of the type that the unsharded module takes",
            Kind.BATCH_SIZE: f"there are {value} lengths, which is not a multiple of the {expected} keys",
            Kind.LENGTH_DTYPE: f"lengths and offsets must be int32 or int64; got {dtype_at(value)}",
            Kind.VARIABLE_BATCH: f"feature {feature!r} has batch size {value}, others have {expected}; "
            "a batch size of its own for each feature is not supported",
            Kind.SHAPE: f"the input has {value} dims; expected {'2, or 1 with offsets' if expected == 1 else expected}",
            Kind.OFFSETS: f"offsets must begin at 0, not decrease, and not pass the {expected} ids; found {value}",
            Kind.FROZEN: f"requires_grad of the table of feature {feature!r} has changed since it was wrapped; freeze "
            "tables before wrapping, or all of the module's at once",
            Kind.UNREADABLE: "it cannot be read; that rank's own error says why",
            Kind.WEIGHTS_DTYPE: f"weights must be floating point; got {dtype_at(value)}",
        }
        return texts[self.kind]


def dtype_index(dtype: torch.dtype) -> int:
    """Position in `DTYPES`, -1 for another."""
    return DTYPES.index(dtype) if dtype in DTYPES else -1


def dtype_at(index: int) -> str:
    """Name of a dtype that travelled as its position."""
    return str(DTYPES[index]) if 0 <= index < len(DTYPES) else "another dtype"
