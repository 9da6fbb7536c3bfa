"""A `KeyedJaggedTensor` as the data path takes it, and what of it does not fit."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from sharders.embedding.batches.batch import Ids
from sharders.embedding.batches.input_checks import INTEGERS
from sharders.embedding.batches.input_faults import Fault, Kind, dtype_index
from sharders.embedding.batches.variable_batch import padded


def keyed_ids(features: Any, names: Sequence[str], is_weighted: bool, is_pooled: bool) -> Ids:
    """A `KeyedJaggedTensor` as the data path takes it; keys in any order, more keys than features are fine.

    Args:
        features: or a `TensorDict` of `JaggedTensor`s.
        names: of the features.
        is_weighted: its weights are used.
        is_pooled: results have a row for each sample; its inverse indices are used.

    Raises:
        Fault: what does not fit.
    """
    if any(kind.__name__ == "TensorDictBase" for kind in type(features).__mro__):
        # As TorchRec's collections do it; weights stay behind.
        features = sys.modules["torchrec.sparse.tensor_dict"].maybe_td_to_kjt(features)
    for method in ("keys", "values", "lengths", "weights_or_none"):
        if not callable(getattr(features, method, None)):
            raise Fault(Kind.INPUT_TYPE)
    keys = features.keys()
    key_of = _places_of(tuple(keys), tuple(names))
    try:
        lengths, values = features.lengths(), features.values()
    except AssertionError:  # all that TorchRec says
        raise Fault(Kind.LENGTHS_MISSING) from None
    if lengths.dtype not in INTEGERS:
        raise Fault(Kind.LENGTH_DTYPE, value=dtype_index(lengths.dtype))
    samples: tuple[int, ...] | None = None
    if features.variable_stride_per_key():
        samples = _samples_of_keys(features, len(keys), lengths.numel(), key_of)
        by_key, samples = padded(lengths, samples, key_of)
    elif not keys or lengths.numel() % len(keys):
        raise Fault(Kind.BATCH_SIZE, value=lengths.numel(), expected=len(keys))
    elif features.stride() * len(keys) != lengths.numel():
        raise Fault(Kind.STRIDE, value=lengths.numel(), expected=features.stride() * len(keys))
    else:
        by_key = lengths.view(len(keys), -1)
    weights = features.weights_or_none() if is_weighted else None
    if is_weighted and weights is None:
        raise Fault(Kind.WEIGHTS_MISSING)
    inverse = None
    if is_pooled and (samples is not None or features.inverse_indices_or_none() is not None):
        rows = [by_key.shape[1] if samples is None else samples[key] for key in key_of]
        inverse = _inverse_of_features(features, names, rows)
    return Ids(values, by_key, key_of, weights, features, samples, inverse)


@lru_cache(maxsize=64)
def _places_of(keys: tuple[str, ...], names: tuple[str, ...]) -> tuple[int, ...]:
    """Of features among the keys; kept, for most batches have the same.

    Raises:
        Fault: keys that are not unique, or lack a feature.
    """
    place = {key: i for i, key in enumerate(keys)}
    if len(place) != len(keys):
        _raise_key_twice(keys, names)
    for f, name in enumerate(names):
        if name not in place:
            raise Fault(Kind.KEY_MISSING, f, len(keys))
    return tuple(place[n] for n in names)


def _raise_key_twice(keys: Sequence[str], names: Sequence[str]) -> None:
    twice = [key for key, num in Counter(keys).items() if num > 1]
    f = next((f for f, name in enumerate(names) if name in twice), -1)
    raise Fault(Kind.KEYS_TWICE if f < 0 else Kind.KEY_TWICE, f, len(keys), len({*keys}))


def _samples_of_keys(features: Any, num_keys: int, num_lengths: int, key_of: Sequence[int]) -> tuple[int, ...]:
    """Of a batch that tells a size for each key and rank; a batch of one rank has one."""
    told = features.stride_per_key_per_rank()
    if len(told) != num_keys or any(not isinstance(of_key, list) for of_key in told):
        raise Fault(Kind.SAMPLES_COUNT, value=len(told), expected=num_keys)
    samples = tuple(sum(of_key) for of_key in told)
    if min(samples, default=0) < 0:
        wrong = samples.index(min(samples))
        f = next((f for f, key in enumerate(key_of) if key == wrong), -1)
        raise Fault(Kind.SAMPLES_NEGATIVE, f, samples[wrong])
    if sum(samples) != num_lengths:
        raise Fault(Kind.SAMPLES_SUM, value=sum(samples), expected=num_lengths)
    return samples


def _inverse_of_features(features: Any, names: Sequence[str], rows: Sequence[int]) -> torch.Tensor | None:
    """(F, B) the batch's inverse indices, by feature; None where it has none and needs none.

    Args:
        rows: of each feature, which the inverse indices count.
    """
    found = features.inverse_indices_or_none()
    is_even = len(set(rows)) <= 1
    if found is None and not is_even:
        f = next(f for f, num in enumerate(rows) if num != rows[0])
        raise Fault(Kind.INVERSE_MISSING, f, rows[f], rows[0])
    if found is None or (is_even and not found[1].numel()):
        return None
    keys, inverse = found
    if inverse.dim() != 2 or len(inverse) != len(keys):
        raise Fault(Kind.INVERSE_SHAPE, value=len(inverse) if inverse.dim() == 2 else -1, expected=len(keys))
    if inverse.dtype not in INTEGERS:
        raise Fault(Kind.INVERSE_DTYPE, value=dtype_index(inverse.dtype))
    place = {key: i for i, key in enumerate(keys)}
    for f, name in enumerate(names):
        if name not in place:
            raise Fault(Kind.INVERSE_KEY, f, len(keys))
    of_features: torch.Tensor = inverse[[place[name] for name in names]]
    extremes = torch.stack(of_features.aminmax(dim=1), 1).tolist() if of_features.numel() else []
    for f, (low, high) in enumerate(extremes):
        if low < 0 or high >= rows[f]:
            raise Fault(Kind.INVERSE_RANGE, f, low if low < 0 else high, rows[f])
    return of_features
