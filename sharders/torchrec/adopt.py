"""`adopt`: a list of sharders with TorchRec's in it as one of ours alone.

One of theirs is told by its module type. What it says of optimizers (`fused_params`), wire formats
(`qcomm_codecs_registry`) becomes options of ours; where a subclass has `sharding_types` of its own, the planner is
offered only those. A subclass with a `shard` of its own, and one for modules that ours has no sharder for, is run as it
is, by `TorchRecSharder`. Compute kernels are a plan's to say.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dmp import Layout, ParameterInfo, ShardingEnv, is_torchrecs, sharding_types
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

_AROUND = ("FeatureProcessedEmbeddingBagCollectionSharder", "EmbeddingTowerSharder", "EmbeddingTowerCollectionSharder")
"""Their sharders of modules with collections inside."""

_log = logging.getLogger("dmp")


def adopt(sharders: Iterable[Any]) -> list[Any]:
    """The same sharders in their order, each of TorchRec's as one of ours.

    Those of quantized modules, which are for inference and match nothing that is trained, are left out. Those of
    modules around collections (feature-processed ones, towers) stand for those of the collections inside, which is
    where tables are: what is around them are ordinary modules.

    Raises:
        ShardError: an optimizer or a wire format that ours does not have, by name.
    """
    adopted: list[Any] = []
    inner: list[Any] = []
    for sharder in sharders:
        if not is_torchrecs(sharder, "ModuleSharder"):
            adopted.append(sharder)
        elif is_torchrecs(sharder, *_AROUND) and _runs_torchrecs_own(sharder):
            inner += _of_inner(sharder)
        elif not sharder.module_type.__module__.startswith("torchrec.quant."):
            adopted.append(_adopted(sharder))
    _say_what_is_overruled(inner, adopted)
    return [*inner, *adopted]  # the last for a module type wins


def _of_inner(theirs: Any) -> list[Any]:
    """Of the collections that its modules are around."""
    if hasattr(theirs, "_ebc_sharder"):
        return [_adopted(theirs._ebc_sharder)]
    return [_made(kind, theirs) for kind in (EmbeddingBagCollectionSharder, EmbeddingCollectionSharder)]


def _say_what_is_overruled(inner: list[Any], adopted: list[Any]) -> None:
    """Tables of one kind of collection have one sharder here, whatever is around them."""
    for ours in inner:
        other = next((o for o in reversed(adopted) if type(o) is type(ours)), ours)
        if ours.optimizer not in (None, other.optimizer):
            _log.warning(
                "tables inside of feature processors and towers are updated as those of other collections, by %s, and "
                "not by the %s of their own sharder's fused_params; apply_optimizer_in_backward says it table by table",
                other.optimizer,
                ours.optimizer,
            )


def _adopted(theirs: Any) -> Any:
    kind = theirs.module_type
    ours = _OURS.get(f"{kind.__module__}.{kind.__qualname__}")
    if ours is None or not _runs_torchrecs_own(theirs):
        return TorchRecSharder(theirs)
    return _made(ours, theirs)


def _made(ours: type[Any], theirs: Any) -> Any:
    """One of ours with the options of one of theirs."""
    who = type(theirs).__name__
    made = ours(
        optimizer=spec_of_fused_params(theirs.fused_params or {}, f"{who}: fused_params"),
        codecs=codecs_of(getattr(theirs, "_e_sharder", theirs).qcomm_codecs_registry, who),
    )
    if not _is_torchrecs_own(theirs, "sharding_types"):
        made.layouts = _Offered(made.layouts, theirs)
    return made


@dataclass(frozen=True)
class _Offered:
    """In place of a sharder's `layouts`: those that the sharding types of one of theirs allow.

    Args:
        layouts: of ours.
        theirs: with a `sharding_types` of its user's own.
    """

    layouts: Callable[[ParameterInfo, ShardingEnv], Iterable[Layout]]
    theirs: Any

    def __call__(self, info: ParameterInfo, env: ShardingEnv) -> list[Layout]:
        """All of ours, with a warning, where none is of those types; one process has all of each table anyhow."""
        offered = [*self.layouts(info, env)]
        if env.table_size == 1:
            return offered
        types = self.theirs.sharding_types(env.device_type)
        inner = env.table_size // env.table_shape[0] if len(env.table_shape) > 1 else env.table_size
        allowed = [layout for layout in offered if {*types} & {*sharding_types(layout, info.shape, env, inner)}]
        if not allowed:
            _log.warning(
                "%s.sharding_types allows %s, none of which cuts a table of %s on %s; the planner is offered %s",
                *(type(self.theirs).__name__, types, tuple(info.shape), env, ", ".join(map(str, offered))),
            )
        return allowed or offered


def _runs_torchrecs_own(theirs: Any) -> bool:
    """Whether its `shard` is TorchRec's, whatever else a subclass has overridden."""
    return _is_torchrecs_own(theirs, "shard")


def _is_torchrecs_own(theirs: Any, method: str) -> bool:
    owner = next(kind for kind in type(theirs).__mro__ if method in vars(kind)).__module__
    return owner.startswith("torchrec.distributed.") and ".test_utils." not in owner
