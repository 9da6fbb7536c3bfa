"""Sharders: how each kind of module runs on a mesh.

Rooms: `embedding` (tables), `shared_memory` (exchanges inside a host), `managed_collision` (raw ids mapped to their
rows), `torchrec` (TorchRec's sharders, taken in), `tensor_axis`, `tensor_parallel`, `data_parallel`, `testing`. Single
files:

- `channel`: exchange of buffers between the ranks of one group
- `before_steps`: a look at gradients before an optimizer's step, or where its closure has made them
- `quiet`: silence while code of others is run for a look at it
- `unheard`: classes made of a module's own, of which that class does not hear
"""

from __future__ import annotations

from dmp import default_sharders
from sharders.data_parallel.ddp import DDPWrapper
from sharders.data_parallel.fsdp import FSDPWrapper
from sharders.embedding.collections import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from sharders.embedding.fused_collections import FusedEmbeddingBagCollectionSharder, FusedEmbeddingCollectionSharder
from sharders.embedding.plain import EmbeddingBagSharder, EmbeddingSharder
from sharders.managed_collision.sharder import (
    ManagedCollisionEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingCollectionSharder,
)
from sharders.tensor_axis.batch_layout import gather_batch, slice_batch
from sharders.tensor_axis.jagged import Jagged, dense_to_jagged, jagged_to_dense
from sharders.tensor_parallel.sharder import TensorParallelSharder
from sharders.torchrec.sharder import TorchRecSharder

__all__ = [
    "DDPWrapper",
    "EmbeddingBagCollectionSharder",
    "EmbeddingBagSharder",
    "EmbeddingCollectionSharder",
    "EmbeddingSharder",
    "FSDPWrapper",
    "FusedEmbeddingBagCollectionSharder",
    "FusedEmbeddingCollectionSharder",
    "Jagged",
    "ManagedCollisionEmbeddingBagCollectionSharder",
    "ManagedCollisionEmbeddingCollectionSharder",
    "TensorParallelSharder",
    "TorchRecSharder",
    "default_sharders",
    "dense_to_jagged",
    "gather_batch",
    "jagged_to_dense",
    "slice_batch",
]
