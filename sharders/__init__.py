"""Sharders: how each kind of module runs on a mesh."""

from __future__ import annotations

from dmp import ModuleSharder
from sharders.collections import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from sharders.data_parallel import DDPWrapper
from sharders.plain import EmbeddingBagSharder, EmbeddingSharder

__all__ = [
    "DDPWrapper",
    "EmbeddingBagCollectionSharder",
    "EmbeddingBagSharder",
    "EmbeddingCollectionSharder",
    "EmbeddingSharder",
    "default_sharders",
]


def default_sharders() -> list[ModuleSharder]:
    """The built-in sharders; TorchRec's modules are among them where TorchRec is installed."""
    from importlib.util import find_spec

    plain: list[ModuleSharder] = [EmbeddingBagSharder(), EmbeddingSharder()]
    torchrec: list[ModuleSharder] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    return [*torchrec, *plain] if find_spec("torchrec") else plain
