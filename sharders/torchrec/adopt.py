"""`adopt`: a list of sharders with TorchRec's in it as one of ours alone.

One of theirs is told by its module type. What it says of optimizers (`fused_params`), wire formats
(`qcomm_codecs_registry`), sharding types and compute kernels becomes options of ours; a subclass with a `shard` of its
own, and one for modules that ours has no sharder for, is run as it is, by `TorchRecSharder`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dmp import is_torchrecs
from sharders.embedding.collections import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from sharders.embedding.fused_collections import FusedEmbeddingBagCollectionSharder, FusedEmbeddingCollectionSharder
from sharders.embedding.lookup.given_optimizers import spec_of_fused_params
from sharders.embedding.plain import EmbeddingBagSharder
from sharders.managed_collision.sharder import (
    ManagedCollisionEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingCollectionSharder,
)
from sharders.torchrec.sharder import TorchRecSharder
from sharders.torchrec.wire_formats import codecs_of

_MANAGED = "torchrec.modules.mc_embedding_modules.ManagedCollision"
_OURS: dict[str, type[Any]] = {
    "torchrec.modules.embedding_modules.EmbeddingBagCollection": EmbeddingBagCollectionSharder,
    "torchrec.modules.embedding_modules.EmbeddingCollection": EmbeddingCollectionSharder,
    "torchrec.modules.fused_embedding_modules.FusedEmbeddingBagCollection": FusedEmbeddingBagCollectionSharder,
    "torchrec.modules.fused_embedding_modules.FusedEmbeddingCollection": FusedEmbeddingCollectionSharder,
    "torch.nn.modules.sparse.EmbeddingBag": EmbeddingBagSharder,
    f"{_MANAGED}EmbeddingBagCollection": ManagedCollisionEmbeddingBagCollectionSharder,
    f"{_MANAGED}EmbeddingCollection": ManagedCollisionEmbeddingCollectionSharder,
}
"""Module type -> our sharder of it, a class."""


def adopt(sharders: Iterable[Any]) -> list[Any]:
    """The same sharders in their order, each of TorchRec's as one of ours.

    Those of quantized modules, which are for inference and match nothing that is trained, are left out. That of
    feature-processed collections stands for that of the collection inside, which is what has tables.

    Raises:
        ShardError: an optimizer or a wire format that ours does not have, by name.
    """
    adopted, inner = [], []
    for sharder in sharders:
        if not is_torchrecs(sharder, "ModuleSharder"):
            adopted.append(sharder)
        elif is_torchrecs(sharder, "FeatureProcessedEmbeddingBagCollectionSharder") and _runs_torchrecs_own(sharder):
            inner.append(_adopted(sharder._ebc_sharder))
        elif not sharder.module_type.__module__.startswith("torchrec.quant."):
            adopted.append(_adopted(sharder))
    return [*inner, *adopted]  # the last for a module type wins


def _adopted(theirs: Any) -> Any:
    kind = theirs.module_type
    ours = _OURS.get(f"{kind.__module__}.{kind.__qualname__}")
    if ours is None or not _runs_torchrecs_own(theirs):
        return TorchRecSharder(theirs)
    who = type(theirs).__name__
    return ours(
        optimizer=spec_of_fused_params(theirs.fused_params or {}, f"{who}: fused_params"),
        codecs=codecs_of(getattr(theirs, "_e_sharder", theirs).qcomm_codecs_registry, who),
    )


def _runs_torchrecs_own(theirs: Any) -> bool:
    """Whether its `shard` is TorchRec's, whatever else a subclass has overridden."""
    owner = next(kind for kind in type(theirs).__mro__ if "shard" in vars(kind))
    return owner.__module__.startswith("torchrec.distributed.")
