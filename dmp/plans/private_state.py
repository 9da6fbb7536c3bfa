"""Modules that learn from the ids that pass through them, each rank from its own: what one knows the others do not.

A map from raw ids to rows is the usual one: the same raw id is then one row on this rank and another on the next, and
all of them train a row that stands for different things. Torch and TorchRec's unsharded modules say nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from dmp.env import ShardingEnv
from dmp.errors import ShardError

_ID_MAP = "keeps a map from raw ids to rows that grows with the ids it sees"
_POOL = "keeps values that a call writes and another reads"
_PRUNING = "counts the ids it sees and prunes rows by that"
_OWN_UPDATE = "updates its tables inside its own backward, from this rank's gradient alone"

PRIVATE_STATE = {
    "torchrec.modules.mc_embedding_modules.BaseManagedCollisionEmbeddingCollection": _ID_MAP,
    "torchrec.modules.mc_modules.ManagedCollisionCollection": _ID_MAP,
    "torchrec.modules.mc_modules.ManagedCollisionModule": _ID_MAP,
    "torchrec.modules.itep_embedding_modules.ITEPEmbeddingBagCollection": _PRUNING,
    "torchrec.modules.itep_embedding_modules.ITEPEmbeddingCollection": _PRUNING,
    "torchrec.modules.itep_modules.GenericITEPModule": _PRUNING,
    "torchrec.modules.object_pool.ObjectPool": _POOL,
    "torchrec.modules.object_pool_lookups.KeyedJaggedTensorPoolLookup": _POOL,
    "torchrec.modules.object_pool_lookups.TensorPoolLookup": _POOL,
    "torchrec.modules.fused_embedding_modules.FusedEmbeddingBagCollection": _OWN_UPDATE,
    "torchrec.modules.fused_embedding_modules.FusedEmbeddingCollection": _OWN_UPDATE,
}
"""Full name of a class, subclasses meant too -> what of its own each rank would have."""


def refuse_private_state(module: nn.Module, env: ShardingEnv, handled: Iterable[nn.Module]) -> None:
    """Raise `ShardError` for the outermost such module where several ranks have batches of their own; and for one that
    writes to its weights in its forward.

    Args:
        handled: modules that a sharder replaces: what is in them is that sharder's.
    """
    if env.data_size == 1:
        return
    known = {id(m) for site in handled for m in site.modules()}
    for path, each in module.named_modules():
        if id(each) in known:
            continue
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None:
            raise ShardError(
                f"{type(each).__name__} at {path!r} has max_norm={each.max_norm}: its forward rescales the rows of its "
                f"ids in place, and each of the {env.data_size} data ranks has ids of its own, so that their copies "
                "would part. Scale what is looked up, or the rows after each step (torch.renorm); one data rank runs "
                "it as it is"
            )
        names = [f"{c.__module__}.{c.__qualname__}" for c in type(each).__mro__]
        what = next((PRIVATE_STATE[name] for name in names if name in PRIVATE_STATE), None)
        if what is not None:
            raise ShardError(
                f"{type(each).__name__} at {path!r} {what}, and each of the {env.data_size} data "
                "ranks has ids of its own: the ranks' results would part. Take the plain embedding collection "
                "and map ids to rows before the model (a hash, or a dictionary made once), or pass a sharder that "
                f"takes {type(each).__name__}; one data rank runs it as it is"
            )
