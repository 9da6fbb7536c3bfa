"""TorchRec's `FusedEmbeddingBagCollection` and `FusedEmbeddingCollection` on a mesh: their optimizer is part of them.

Unsharded, each updates its tables in its own backward pass, by FBGEMM; here the data path of all tables does, with that
optimizer, its options, and what it has gathered before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from dmp import ShardError
from sharders.embedding.collections import (
    CollectionSharder,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)
from sharders.embedding.exchange.placement import Table
from sharders.embedding.lookup.given_optimizers import spec_of_fused_params
from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.embedding.table_module import InitFn, TableModule


class _ShardedFused(TableModule):
    """What the two share beside their collection, which comes next in their MRO: the optimizer."""

    def __init__(self, original: Any, *where: Any, **options: Any) -> None:
        super().__init__(original, *where, **options)
        self._optimizer: tuple[Any, dict[str, Any]] = (original.optimizer_type(), original.optimizer_kwargs())

    def _unsharded(self, **options: Any) -> nn.Module:
        kind, kwargs = self._optimizer
        return super()._unsharded(optimizer_type=kind, optimizer_kwargs=kwargs, **options)  # type: ignore[misc, no-any-return]

    def optimizer_type(self) -> Any:
        """The class that the collection was made with."""
        return self._optimizer[0]

    def optimizer_kwargs(self) -> dict[str, Any]:
        """The options that it was made with; those in force are in the model's `fused_optimizer`."""
        return self._optimizer[1]

    @staticmethod
    def gathered(original: Any, names: Iterable[str]) -> Mapping[str, Mapping[str, Any]]:
        """What its optimizer has gathered of tables before this module took its place."""
        found: dict[str, Mapping[str, Any]] = {}
        for lookup in original._emb_modules:
            tables, tbe = lookup._embedding_tables, lookup._emb_module
            for table, state in zip(tables, tbe.get_optimizer_state(), strict=False):  # none where it has no state
                found.setdefault(table.name, {"step": tbe.iter[0], **state})
        return {name: found[table] for name in names if (table := name.split(".")[-2]) in found}


class ShardedFusedEmbeddingBagCollection(_ShardedFused, ShardedEmbeddingBagCollection):
    """As `ShardedEmbeddingBagCollection`; every table is updated in the backward pass."""

    likeness = "torchrec.distributed.fused_embeddingbag:ShardedFusedEmbeddingBagCollection"


class ShardedFusedEmbeddingCollection(_ShardedFused, ShardedEmbeddingCollection):
    """As `ShardedEmbeddingCollection`; every table is updated in the backward pass."""

    likeness = "torchrec.distributed.fused_embedding:ShardedFusedEmbeddingCollection"


class _FusedSharder(CollectionSharder):
    """What the sharders of the two share."""

    module_in = "torchrec.modules.fused_embedding_modules"

    def tables(self, module: Any) -> list[tuple[Table, InitFn | None]]:
        """One for each config, with the module's optimizer.

        Raises:
            ShardError: an optimizer that ours does not have; results that the module itself names wrongly.
        """
        found = super().tables(module)
        _check_order(module)
        return [(replace(table, optimizer=_spec_of(module)), init_fn) for table, init_fn in found]


class FusedEmbeddingBagCollectionSharder(_FusedSharder):
    """Shards `torchrec`'s `FusedEmbeddingBagCollection`."""

    sharded_type = ShardedFusedEmbeddingBagCollection
    is_pooled = True
    type_name, tables_in = "FusedEmbeddingBagCollection", "embedding_bags"


class FusedEmbeddingCollectionSharder(_FusedSharder):
    """Shards `torchrec`'s `FusedEmbeddingCollection`, which is for GPUs, also on a CPU where it was made on meta."""

    sharded_type = ShardedFusedEmbeddingCollection
    is_pooled = False
    type_name, tables_in = "FusedEmbeddingCollection", "embeddings"


def _spec_of(module: Any) -> OptimizerSpec | None:
    """The optimizer that FBGEMM runs in the module, with the learning rate that it has now."""
    from torchrec.modules.fused_embedding_modules import convert_optimizer_type_and_kwargs

    found = convert_optimizer_type_and_kwargs(module.optimizer_type(), module.optimizer_kwargs())
    assert found is not None, "the module was made with it"
    kind, options = found
    rate = next(iter(module._emb_modules))._emb_module.learning_rate_tensor
    options = options if rate.is_meta else {**options, "learning_rate": float(rate)}
    return spec_of_fused_params({**options, "optimizer": kind}, type(module).__name__)


def _check_order(module: Any) -> None:
    """Its results come by groups of tables of one pooling and dtype, and are named in the order of its configs."""
    looked_up = [table.name for tables in module._key_to_tables.values() for table in tables]
    named = [config.name for config in (getattr(module, "embedding_bag_configs", None) or module.embedding_configs)()]
    if looked_up != named and hasattr(module, "embedding_bag_configs"):
        raise ShardError(
            f"{type(module).__name__} names results by its configs, {named}, and looks up its tables by pooling and "
            f"dtype, {looked_up}: it gives one table's results under another's name. List its configs in that order"
        )
