"""The wire formats that a TorchRec sharder's `qcomm_codecs_registry` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dmp import ShardError, is_torchrecs, type_name
from sharders.embedding.exchange.codec import Cast, Codec, Codecs

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Operations that TorchRec sends results of tables by; ours has one path for all layouts.
_OPERATIONS = ("POOLED_EMBEDDINGS_ALL_TO_ALL", "POOLED_EMBEDDINGS_REDUCE_SCATTER", "SEQUENCE_EMBEDDINGS_ALL_TO_ALL")


def codecs_of(registry: Mapping[str, Any] | None, who: str) -> Codecs:
    """How results and gradients travel.

    Args:
        registry: name of an operation -> codecs of TorchRec's.
        who: the sharder's class, for messages.

    Raises:
        ShardError: a format that ours does not have, or one for some operations only.
    """
    found = {name: _both(codecs, who) for name, codecs in (registry or {}).items() if name in _OPERATIONS}
    if len(set(found.values())) > 1:
        raise ShardError(
            f"{who}: qcomm_codecs_registry has one format for some operations and another for others ({found}); here "
            "all tables of a module travel together: give all operations one format"
        )
    return next(iter(found.values()), Codecs())


def _both(codecs: Any, who: str) -> Codecs:
    ways = ("forward", "backward")
    return Codecs(*(_codec(getattr(codecs, way), f"{who}: qcomm_codecs_registry, {way}") for way in ways))


def _codec(theirs: Any, where: str) -> Codec | None:
    if theirs is None or is_torchrecs(theirs, "NoOpQuantizedCommCodec"):
        return None
    name = str(getattr(getattr(theirs, "_comm_precision", None), "value", type_name(theirs)))
    if name == "fp32":
        return None
    if name not in _DTYPES:
        raise ShardError(f"{where}: the format {name!r} is not known here; known are fp32, {', '.join(_DTYPES)}")
    return Cast(_DTYPES[name], getattr(theirs, "_loss_scale", None) or 1.0)
