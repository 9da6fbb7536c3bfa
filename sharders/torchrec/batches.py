"""A batch before TorchRec's module sees it, and its result afterwards: what theirs takes on trust is looked at here.

Theirs settles the order of keys at the first batch, and reads a later one in another order wrongly; an id outside its
table ends one rank and leaves the others waiting; results come in the order of its sharding types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dmp import InputError
from sharders.embedding.batches.input_checks import check_batch
from sharders.embedding.batches.keyed_ids import keyed_ids


@dataclass(frozen=True)
class Collection:
    """A collection of tables in a module, as far as batches and results are concerned.

    Args:
        features: names, in the order of the results.
        rows: of the table of each.
        is_weighted: inputs carry weights.
        results: names of the results, in order.
        tables: names.
    """

    features: tuple[str, ...]
    rows: tuple[int, ...]
    is_weighted: bool
    results: tuple[str, ...]
    tables: tuple[str, ...]

    @classmethod
    def of(cls, module: Any) -> Collection | None:
        """What a module is of it; None where it is no collection."""
        configs = getattr(module, "embedding_bag_configs", None) or getattr(module, "embedding_configs", None)
        if not callable(configs):
            return None
        read = [(name, config.num_embeddings) for config in configs() for name in config.feature_names]
        is_weighted = bool(getattr(module, "is_weighted", lambda: False)())
        by_table = getattr(module, "embedding_names_by_table", None)
        names = [n for table in by_table() for n in table] if by_table else getattr(module, "_embedding_names", ())
        tables = tuple(config.name for config in configs())
        return cls(tuple(n for n, _ in read), tuple(rows for _, rows in read), is_weighted, tuple(names), tables)


def collections_in(module: nn.Module) -> list[Collection]:
    """The outermost collections."""
    found = Collection.of(module)
    return [found] if found else [inner for child in module.children() for inner in collections_in(child)]


def prepared(values: Sequence[Any], collections: Sequence[Collection], takes_weights: bool) -> tuple[list[Any], int]:
    """A forward's arguments with the keys of each KJT in one order, none of them the caller's own; and its batch size.

    Args:
        takes_weights: a weighted collection's weights come with the batch, rather than from a feature processor.

    Raises:
        Fault: what does not fit.
        InputError: likewise.
    """
    keyed = {i: v for i, v in enumerate(values) if hasattr(v, "stride_per_key")}
    if not collections or not keyed:
        return list(values), -1
    result, sizes = list(values), []
    for i, features in keyed.items():
        if features.variable_stride_per_key():
            raise InputError("a batch size of its own for each feature is not supported by TorchRecSharder")
        order: dict[str, None] = {}
        for collection in _read_of(features, collections, alone=len(keyed) == 1):
            ids = keyed_ids(features, list(collection.features), collection.is_weighted and takes_weights, False)
            check_batch(ids, collection.rows, True)
            order |= dict.fromkeys(collection.features)
        result[i] = _in_order(features, list(order))
        sizes.append(features.stride())
    return result, sizes[0]


def _read_of(features: Any, collections: Sequence[Collection], alone: bool) -> Iterator[Collection]:
    """The collections that read a KJT: all where there is but one, else those whose weights and keys fit."""
    is_weighted, keys = features.weights_or_none() is not None, set(features.keys())
    for collection in collections:
        if alone or (collection.is_weighted == is_weighted and keys.issuperset(collection.features)):
            yield collection


def _in_order(features: Any, names: list[str]) -> Any:
    keys = features.keys()
    places = list(range(len(keys))) if not names else [keys.index(name) for name in names]
    return features.permute(places)


def in_unsharded_order(result: Any, collections: Sequence[Collection]) -> Any:
    """A keyed result in the order of the unsharded module's; another one as it is."""
    if isinstance(result, dict):
        names = next((c.results for c in collections if set(c.results) == result.keys()), ())
        return {name: result[name] for name in names} if names else result
    if not (hasattr(result, "keys") and hasattr(result, "length_per_key")):
        return result
    keys = list(result.keys())
    names = next((c.results for c in collections if {*c.results} == {*keys}), tuple(keys))
    if list(names) == keys:
        return result
    parts, widths = (
        result.values().split(result.length_per_key(), 1),
        dict(zip(keys, result.length_per_key(), strict=True)),
    )
    values = torch.cat([parts[keys.index(name)] for name in names], 1)
    return type(result)(keys=list(names), length_per_key=[widths[name] for name in names], values=values)
