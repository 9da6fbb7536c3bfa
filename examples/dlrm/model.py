"""The DLRM of this example: TorchRec's own model class over 26 embedding tables, built the same for the same seed.

The wrapper needs nothing of it: any module that holds an `EmbeddingBagCollection` is trained in the same way.
Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
arXiv:1906.00091.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from criteo import FEATURES, NUM_DENSE
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

_MAX_MATERIAL_BYTES = 1 << 30  # larger tables start on the meta device, and come to life shard by shard


def make_dlrm(rows: Sequence[int], dim: int, seed: int, *, meta: bool | None = None) -> DLRM:
    """Builds the model on the CPU; tables of more than 1 GiB in all on the meta device (`meta` decides otherwise).

    Args:
        rows: rows of each of the 26 tables.
        dim: embedding dimension, the same for all.
        seed: of the initial weights.
    """
    meta = sum(rows) * dim * 4 > _MAX_MATERIAL_BYTES if meta is None else meta
    torch.manual_seed(seed)
    tables = [
        EmbeddingBagConfig(name=f"t_{feature}", num_embeddings=n, embedding_dim=dim, feature_names=[feature])
        for feature, n in zip(FEATURES, rows, strict=True)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta" if meta else "cpu"))
    return DLRM(
        collection,
        dense_in_features=NUM_DENSE,
        dense_arch_layer_sizes=[4 * dim, dim],
        over_arch_layer_sizes=[64, 32, 1],
    )


def split_parameters(model: torch.nn.Module) -> tuple[dict[str, torch.nn.Parameter], dict[str, torch.nn.Parameter]]:
    """(tables, dense parameters), each by fully-qualified name."""
    tables = {name: p for name, p in model.named_parameters() if ".embedding_bags." in name}
    dense = {name: p for name, p in model.named_parameters() if name not in tables}
    return tables, dense
