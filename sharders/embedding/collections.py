"""TorchRec's `EmbeddingBagCollection` and `EmbeddingCollection` on a mesh. TorchRec is imported when one is met."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from dmp import ShardError
from sharders.embedding.input_checks import check_lengths
from sharders.embedding.input_dist import Batch
from sharders.embedding.input_faults import Fault, Kind, dtype_index
from sharders.embedding.placement import Table
from sharders.embedding.table_module import InitFn, TableModule, TableSharder, make_table


class ShardedEmbeddingBagCollection(TableModule):
    """Takes a `KeyedJaggedTensor`, gives a `KeyedTensor` with values (B, sum of dims), float32.

    Gradients are means over the data ranks. A table with an in-backward optimizer is updated once for each backward
    through a forward; called twice in a step, it is updated twice.
    """

    def __init__(self, original: Any, *where: Any, **options: Any) -> None:
        super().__init__(original, *where, **options)
        self._unsharded_type = type(original)
        self._configs = original.embedding_bag_configs()
        self._is_weighted = bool(original.is_weighted())
        self._names = list(original._embedding_names)
        self._dims = list(original._lengths_per_embedding)
        self._features = [name for config in self._configs for name in config.feature_names]

    def forward(self, features: Any) -> Any:
        """Pooled embeddings of every feature, keys in the unsharded module's order."""
        from torchrec.sparse.jagged_tensor import KeyedTensor

        values = self._engine.pooled(lambda: keyed_batch(features, self._features, self._is_weighted))
        return KeyedTensor(keys=self._names, values=values.float(), length_per_key=self._dims)

    def embedding_bag_configs(self) -> list[Any]:
        """The tables' configs."""
        return list(self._configs)

    def is_weighted(self) -> bool:
        """Whether inputs carry weights."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        return self._engine.device

    def unsharded(self) -> nn.Module:
        """A plain module of the same structure, on meta."""
        return self._unsharded_type(  # type: ignore[no-any-return]
            tables=self._configs, is_weighted=self._is_weighted, device=torch.device("meta")
        )


class ShardedEmbeddingCollection(TableModule):
    """Takes a `KeyedJaggedTensor`, gives a dict of `JaggedTensor`s with values (N_f, dim).

    Gradients and updates as in `ShardedEmbeddingBagCollection`.
    """

    def __init__(self, original: Any, *where: Any, **options: Any) -> None:
        super().__init__(original, *where, **options)
        self._unsharded_type = type(original)
        self._configs = original.embedding_configs()
        self._need_indices = bool(original.need_indices())
        self._names = [name for names in original.embedding_names_by_table() for name in names]
        self._features = [name for config in self._configs for name in config.feature_names]
        self._embedding_names_by_table = original.embedding_names_by_table()

    def forward(self, features: Any) -> Any:
        """Embeddings of every id of every feature."""
        from torchrec.sparse.jagged_tensor import JaggedTensor

        given: list[Batch] = []  # as it came: per-sample lengths go into the results

        def parse() -> Batch:
            given.append(keyed_batch(features, self._features, False))
            return _as_one_bag(given[0])

        rows = self._engine.rows(parse)
        ids = given[0].values.split(given[0].counts)
        weights = None if features.weights_or_none() is None else features.weights().split(given[0].counts)
        results = {}
        for name, key, values in zip(self._names, given[0].key_of, rows, strict=True):
            own_weights = ids[key] if self._need_indices else None if weights is None else weights[key]
            results[name] = JaggedTensor(values=values, lengths=given[0].lengths[key], weights=own_weights)
        return results

    def embedding_configs(self) -> list[Any]:
        """The tables' configs."""
        return list(self._configs)

    def need_indices(self) -> bool:
        """Whether results carry the ids as weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Dim of the first table."""
        return int(self._configs[0].embedding_dim)

    def embedding_names_by_table(self) -> list[list[str]]:
        """Result names of each table."""
        return [list(names) for names in self._embedding_names_by_table]

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        return self._engine.device

    def unsharded(self) -> nn.Module:
        """A plain module of the same structure, on meta."""
        return self._unsharded_type(  # type: ignore[no-any-return]
            tables=self._configs, need_indices=self._need_indices, device=torch.device("meta")
        )


class _NotImported(nn.Module):
    """In place of TorchRec's classes as long as nobody has imported them: no model holds one."""


def _of_torchrec(name: str) -> type[nn.Module]:
    found: type[nn.Module] = getattr(sys.modules.get("torchrec.modules.embedding_modules"), name, _NotImported)
    return found


class EmbeddingBagCollectionSharder(TableSharder):
    """Shards `torchrec.EmbeddingBagCollection` and subclasses that keep its forward."""

    sharded_type = ShardedEmbeddingBagCollection
    is_pooled = True

    @property
    def module_type(self) -> type[nn.Module]:
        """`torchrec.EmbeddingBagCollection`."""
        return _of_torchrec("EmbeddingBagCollection")

    def tables(self, module: Any) -> list[tuple[Table, InitFn | None]]:
        """One for each config; none for a subclass with a forward of its own."""
        if type(module).forward is not self.module_type.forward:
            return []
        tables = []
        for config in module.embedding_bag_configs():
            mode = str(config.pooling.name).lower()
            if mode not in ("sum", "mean"):
                raise ShardError(f"table {config.name!r} has pooling {config.pooling}; sum and mean are supported")
            if mode == "mean" and module.is_weighted():
                raise ShardError(f"table {config.name!r} of a weighted collection pools by mean; weights need sum")
            name = f"embedding_bags.{config.name}.weight"
            table = make_table(module.get_parameter(name), name, config.feature_names, mean=mode == "mean")
            tables.append((table, config.init_fn))
        return tables


class EmbeddingCollectionSharder(TableSharder):
    """Shards `torchrec.EmbeddingCollection` and subclasses that keep its forward."""

    sharded_type = ShardedEmbeddingCollection
    is_pooled = False

    @property
    def module_type(self) -> type[nn.Module]:
        """`torchrec.EmbeddingCollection`."""
        return _of_torchrec("EmbeddingCollection")

    def tables(self, module: Any) -> list[tuple[Table, InitFn | None]]:
        """One for each config; none for a subclass with a forward of its own."""
        if type(module).forward is not self.module_type.forward:
            return []
        names = [f"embeddings.{config.name}.weight" for config in module.embedding_configs()]
        return [
            (make_table(module.get_parameter(name), name, config.feature_names), config.init_fn)
            for name, config in zip(names, module.embedding_configs(), strict=True)
        ]


def keyed_batch(features: Any, names: list[str], is_weighted: bool) -> Batch:
    """A `KeyedJaggedTensor` as the data path takes it; keys in any order, more keys than features are fine.

    Raises:
        Fault: what does not fit.
    """
    for method in ("keys", "values", "lengths", "weights_or_none"):
        if not callable(getattr(features, method, None)):
            raise Fault(Kind.INPUT_TYPE)
    keys = features.keys()
    place = {key: i for i, key in enumerate(keys)}
    for f, name in enumerate(names):
        if name not in place:
            raise Fault(Kind.KEY_MISSING, f, len(keys))
    if features.variable_stride_per_key():
        strides = features.stride_per_key()
        f = next((f for f, n in enumerate(names) if strides[place[n]] != strides[place[names[0]]]), 0)
        raise Fault(Kind.VARIABLE_BATCH, f, strides[place[names[f]]], strides[place[names[0]]])
    lengths, values = features.lengths(), features.values()
    if lengths.dtype not in (torch.int32, torch.int64):
        raise Fault(Kind.LENGTH_DTYPE, value=dtype_index(lengths.dtype))
    if not keys or lengths.numel() % len(keys):
        raise Fault(Kind.BATCH_SIZE, value=lengths.numel(), expected=len(keys))
    weights = features.weights_or_none() if is_weighted else None
    if is_weighted and weights is None:
        raise Fault(Kind.WEIGHTS_MISSING)
    lengths = lengths.view(len(keys), -1)
    return Batch(values, lengths, tuple(place[n] for n in names), weights, lengths.sum(1).tolist())


def _as_one_bag(batch: Batch) -> Batch:
    """For unpooled lookups only the number of ids of each key matters; lengths are checked all the same."""
    check_lengths(batch)
    lengths = torch.tensor(batch.counts, dtype=batch.lengths.dtype, device=batch.lengths.device).view(-1, 1)
    return Batch(batch.values, lengths, batch.key_of, batch.weights, batch.counts)
