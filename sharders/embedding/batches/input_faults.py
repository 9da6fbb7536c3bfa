"""Faults of a batch as a few integers, so that the rank that finds one can tell all others in the first exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from dmp import InputError

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.complex64,
)  # fmt: skip


class Kind(Enum):
    """What is wrong, in the words of its message; its place in this list is the number that travels, from 1 on."""

    ID_RANGE = "feature {feature!r} has id {value}; its table has {expected} rows: ids must be 0..{last}"
    ID_DTYPE = "ids must be int32 or int64; got {dtype}"
    ID_DIMS = "ids, and weights of ids, must have 1 dim; got {value}"
    LENGTH_NEGATIVE = "feature {feature!r} has a negative length {value}; lengths must be >= 0"
    LENGTH_LARGE = "feature {feature!r} has a length {value}, but there are {expected} ids in all"
    LENGTH_SUM = "lengths sum to {value}, but there are {expected} ids; the two must be equal"
    LENGTH_DTYPE = "lengths and offsets must be int32 or int64; got {dtype}"
    LENGTHS_MISSING = (
        "it has neither lengths nor offsets; what comes third in KeyedJaggedTensor(keys, values, ...) are weights: "
        "name lengths=..., or offsets=..."
    )
    KEY_MISSING = "feature {feature!r} is missing from the batch, which has {value} keys"
    WEIGHTS_MISSING = "the module is weighted, but the batch has no weights"
    WEIGHTS_UNEXPECTED = "the batch has weights, which are for sum pooling only"
    WEIGHTS_LENGTH = "there are {value} weights for {expected} ids; the two must be equal"
    WEIGHTS_DTYPE = "weights must be floating point; got {dtype}"
    INPUT_TYPE = "the input is not of the type that the unsharded module takes"
    BATCH_SIZE = "there are {value} lengths, which is not a multiple of the {expected} keys"
    STRIDE = "there are {value} lengths; the batch's stride, or its offsets, tell of {expected}"
    KEY_TWICE = "keys must be unique; feature {feature!r} is there more than once"
    KEYS_TWICE = "keys must be unique; of the {value} keys only {expected} differ"
    SAMPLES_COUNT = "stride_per_key_per_rank has {value} rows; expected a list for each of the {expected} keys"
    SAMPLES_NEGATIVE = "feature {feature!r} has a negative batch size {value} in stride_per_key_per_rank"
    SAMPLES_SUM = (
        "batch sizes in stride_per_key_per_rank sum to {value}, but there are {expected} lengths; the two must be equal"
    )
    INVERSE_MISSING = (
        "feature {feature!r} has batch size {value}, others have {expected}; pooled results then need inverse_indices, "
        "which say for each sample which row is its own, and the batch has none (KeyedJaggedTensor.permute drops them)"
    )
    INVERSE_KEY = "feature {feature!r} is missing from the batch's inverse indices, which are of {value} keys"
    INVERSE_SHAPE = (
        "inverse indices must be (keys, samples), with a row for each of their {expected} keys; got {value} rows "
        "(-1: not 2 dims)"
    )
    INVERSE_DTYPE = "inverse indices must be int32 or int64; got {dtype}"
    INVERSE_RANGE = (
        "feature {feature!r} has inverse index {value}; it has batch size {expected}: inverse indices must be 0..{last}"
    )
    RAW_ID = "feature {feature!r} has raw id {value}, which stands for an empty place in a map of raw ids"
    SHAPE = "the input has {value} dims; expected 2, or 1 with offsets"
    OFFSETS = "offsets must begin at 0, not decrease, and not pass the {expected} ids; found {value}"
    FROZEN = (
        "the table of feature {feature!r} was frozen when it was wrapped, and has no state to be trained with; wrap it "
        "trained, and freeze it then, for as long as you like"
    )
    UNREADABLE = "it cannot be read; that rank's own error says why"
    ELSEWHERE = (
        "it and the ranks of its copy of the tables call different modules, or in different ways; "
        "their own error says how"
    )


@dataclass
class Fault(Exception):
    """One fault: kind, index of the feature (-1: none), the value found, and what it was compared with."""

    kind: Kind
    feature: int = -1
    value: int = 0
    expected: int = 0

    def error(self, names: Sequence[str], where: str, rank: int) -> InputError:
        """The error that every rank raises."""
        value, expected = self.value, self.expected
        message = self.kind.value.format(
            feature=names[self.feature] if 0 <= self.feature < len(names) else "?",
            value=value,
            expected=expected,
            last=expected - 1,
            dtype=DTYPES[value] if 0 <= value < len(DTYPES) else "another dtype",
        )
        return InputError(f"bad batch for {where} on rank {rank}: {message}")


def packed(fault: Fault | None) -> list[int]:
    """As the four integers that travel; without a fault the first is 0."""
    if fault is None:
        return [0, 0, 0, 0]
    return [1 + [*Kind].index(fault.kind), fault.feature, fault.value, fault.expected]


def unpacked(words: Sequence[int]) -> Fault | None:
    """Inverse of `packed`."""
    number, feature, value, expected = words
    return Fault([*Kind][number - 1], feature, value, expected) if number else None


def dtype_index(dtype: torch.dtype) -> int:
    """Position in `DTYPES`, -1 for another."""
    return DTYPES.index(dtype) if dtype in DTYPES else -1
