"""TorchRec's `EmbeddingBagCollection` and `EmbeddingCollection` on a mesh. TorchRec is imported when one is met."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dmp import ShardError
from sharders.embedding.as_written import holds_plain_tables, keeps_forward
from sharders.embedding.batches.batch import Ids
from sharders.embedding.batches.keyed_ids import keyed_ids
from sharders.embedding.batches.variable_batch import lengths_of, to_samples
from sharders.embedding.exchange.placement import Table
from sharders.embedding.ids.call import Call
from sharders.embedding.lookup.given_optimizers import OptimizerReader
from sharders.embedding.originals import make_table, parameter_at
from sharders.embedding.table_module import InitFn, TableModule, TableSharder
from sharders.embedding.torchrec_form import make_waited

_log = logging.getLogger("dmp")
_OF_JAGGED = {"_values", "_weights", "_lengths", "_offsets"}
"""What a `JaggedTensor` holds; of another TorchRec's each is made by its constructor."""

_INVERSE_UNUSED = (
    "%s: the batch's inverse indices change nothing in an EmbeddingCollection, as in the unsharded one: each feature "
    "has the rows of its own batch. TorchRec's sharded one would repeat them for each sample; select them by the "
    "inverse indices where that is wanted"
)


class _ShardedCollection(TableModule):
    """What the two share. Takes a `KeyedJaggedTensor`, keys in any order."""

    def __init__(self, original: Any, *where: Any, **options: Any) -> None:
        super().__init__(original, *where, **options)
        self._configs = _configs_of(original)
        self._features = [name for config in self._configs for name in config.feature_names]

    def resize(self, table: int, rows: int) -> None:
        """A table has so many rows by now."""
        self._configs = list(self._configs)
        self._configs[table] = replace(self._configs[table], num_embeddings=rows)

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        return self._engine.device

    def _unsharded(self, **options: Any) -> nn.Module:
        return self._unsharded_type(tables=self._configs, device=torch.device("meta"), **options)


class ShardedEmbeddingBagCollection(_ShardedCollection):
    """Takes a `KeyedJaggedTensor`, gives a `KeyedTensor` with values (B, sum of dims), float32.

    Gradients are means over the data ranks. A table with an in-backward optimizer is updated once for each backward
    through a forward; called twice in a step, it is updated twice, and the gradient of weights of ids, whose backward
    reads the rows, reads those of the second call as the first has left them. FBGEMM's kernels do the same.
    """

    likeness = "torchrec.distributed.embeddingbag:ShardedEmbeddingBagCollection"

    def __init__(self, original: Any, *where: Any, **options: Any) -> None:
        super().__init__(original, *where, **options)
        make_waited()
        self._is_weighted = bool(original.is_weighted())
        self._names = list(original._embedding_names)
        self._dims = [config.embedding_dim for config in self._configs for _ in config.feature_names]

    def ids_of(self, features: Any) -> Ids:
        """Those of a `KeyedJaggedTensor`."""
        return keyed_ids(features, self._features, self._is_weighted, is_pooled=True)

    def result_of(self, call: Call, values: Sequence[torch.Tensor]) -> Any:
        """Pooled embeddings of every feature, keys in the unsharded module's order."""
        from torchrec.sparse.jagged_tensor import KeyedTensor

        pooled = to_samples(values[0].float(), call.whole, self._dims)
        return KeyedTensor(keys=self._names, values=pooled, length_per_key=self._dims)

    def embedding_bag_configs(self) -> list[Any]:
        """The tables' configs."""
        return list(self._configs)

    def is_weighted(self) -> bool:
        """Whether inputs carry weights."""
        return self._is_weighted

    def unsharded(self) -> nn.Module:
        """A plain module of the same structure, on meta."""
        return self._unsharded(is_weighted=self._is_weighted)


class ShardedEmbeddingCollection(_ShardedCollection):
    """Takes a `KeyedJaggedTensor`, gives a dict of `JaggedTensor`s with values (N_f, dim).

    Gradients and updates as in `ShardedEmbeddingBagCollection`.
    """

    likeness = "torchrec.distributed.embedding:ShardedEmbeddingCollection"

    def __init__(self, original: Any, *where: Any, **options: Any) -> None:
        super().__init__(original, *where, **options)
        self._need_indices = bool(original.need_indices())
        self._embedding_names_by_table = original.embedding_names_by_table()
        self._names = [name for names in self._embedding_names_by_table for name in names]
        self._has_told = False

    def ids_of(self, features: Any) -> Ids:
        """Those of a `KeyedJaggedTensor`; its weights and inverse indices are left alone, as by the unsharded one."""
        ids = keyed_ids(features, self._features, False, is_pooled=False)
        if not self._has_told and ids.source.inverse_indices_or_none() is not None:
            self._has_told = True
            if self._engine.env.rank == 0:
                _log.warning(_INVERSE_UNUSED, self._engine.name)
        return ids

    def result_of(self, call: Call, values: Sequence[torch.Tensor]) -> Any:
        """Embeddings of every id of every feature."""
        batch, made = call.whole, _JaggedTensors()
        ids = batch.source.values().split(batch.counts) if self._need_indices else None
        lengths = batch.lengths.unbind() if batch.samples is None else None
        return {  # as the unsharded one: float32 whatever the tables have
            name: made.next(
                rows if rows.dtype is torch.float32 else rows.float(),
                lengths_of(batch, key) if lengths is None else lengths[key],
                None if ids is None else ids[key],
            )
            for name, key, rows in zip(self._names, batch.key_of, values, strict=True)
        }

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

    def unsharded(self) -> nn.Module:
        """A plain module of the same structure, on meta."""
        return self._unsharded(need_indices=self._need_indices)


class _JaggedTensors:
    """Makes `JaggedTensor`s of one dtype of lengths, which only the first is asked for: 70 microseconds of 26."""

    def __init__(self) -> None:
        from torchrec.sparse.jagged_tensor import JaggedTensor

        self._type, self._first = JaggedTensor, None

    def next(self, values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None) -> Any:
        """One more."""
        if self._first is None or vars(self._first).keys() != _OF_JAGGED:
            made = self._first = self._type(values=values, lengths=lengths, weights=weights)
            return made
        made = self._type.__new__(self._type)
        vars(made).update(_values=values, _lengths=lengths, _weights=weights, _offsets=None)
        return made


class _NotImported(nn.Module):
    """In place of TorchRec's classes as long as nobody has imported them: no model holds one."""


class CollectionSharder(TableSharder):
    """What the sharders of collections share. Subclasses name TorchRec's class, the dict of its tables, and the class
    of each where that is torch's."""

    module_in = "torchrec.modules.embedding_modules"
    type_name: str
    tables_in: str
    table_type: type[nn.Module] | None = None

    @property
    def module_type(self) -> type[nn.Module]:
        """TorchRec's class."""
        imported = sys.modules.get(self.module_in)
        found: type[nn.Module] = getattr(imported, self.type_name, _NotImported)
        return found

    def tables(self, module: Any) -> list[tuple[Table, InitFn | None]]:
        """One for each config; none where more than these is in the module or done by it."""
        configs = _configs_of(module)
        names = {f"{self.tables_in}.{config.name}.weight" for config in configs}
        held = {name for name, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())}
        if not keeps_forward(module, self.module_type) or held != names or not self._is_as_configured(module, configs):
            return []
        tables, optimizers = [], OptimizerReader()
        for config in configs:
            name = f"{self.tables_in}.{config.name}.weight"
            is_mean = self.is_pooled and _pools_by_mean(config, module.is_weighted())
            table = make_table(parameter_at(module, name), name, config.feature_names, optimizers, mean=is_mean)
            tables.append((table, config.init_fn))
        return tables

    def _is_as_configured(self, module: Any, configs: Sequence[Any]) -> bool:
        if self.table_type is None:
            return True
        names, told = module._feature_names, [list(config.feature_names) for config in configs]
        is_plain = holds_plain_tables(module.get_submodule(self.tables_in), self.table_type, configs)
        return is_plain and [list(of_table) for of_table in names] == told


class EmbeddingBagCollectionSharder(CollectionSharder):
    """Shards `torchrec.EmbeddingBagCollection` and subclasses that keep its forward."""

    sharded_type = ShardedEmbeddingBagCollection
    is_pooled = True
    type_name, tables_in, table_type = "EmbeddingBagCollection", "embedding_bags", nn.EmbeddingBag


class EmbeddingCollectionSharder(CollectionSharder):
    """Shards `torchrec.EmbeddingCollection` and subclasses that keep its forward."""

    sharded_type = ShardedEmbeddingCollection
    is_pooled = False
    type_name, tables_in, table_type = "EmbeddingCollection", "embeddings", nn.Embedding


def _configs_of(collection: Any) -> list[Any]:
    pooled = getattr(collection, "embedding_bag_configs", None)
    return list(pooled() if pooled else collection.embedding_configs())


def _pools_by_mean(config: Any, is_weighted: bool) -> bool:
    mode = str(config.pooling.name).lower()
    if mode not in ("sum", "mean"):
        raise ShardError(f"table {config.name!r} has pooling {config.pooling}; sum and mean are supported")
    if mode == "mean" and is_weighted:
        raise ShardError(f"table {config.name!r} of a weighted collection pools by mean; weights need sum")
    return mode == "mean"
