"""Modules that TorchRec's sharders take, batches for them, and a sharder in TorchRec's form as a user writes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROWS = {"a": 13, "b": 13, "c": 9, "d": 50}


def collection(
    features: Sequence[str] = ("a", "b", "c", "d"),
    *,
    is_weighted: bool = False,
    pooled: bool = True,
    mean: bool = False,
) -> Any:
    """An `EmbeddingBagCollection`, or an `EmbeddingCollection`, of the tables that read these features."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType

    kind: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
    tables = [
        kind(name=name, num_embeddings=ROWS[names[0]], embedding_dim=8, feature_names=names)
        for name, names in (("t0", ["a", "b"]), ("t1", ["c"]), ("t2", ["d"]))
        if names[0] in features
    ]
    if mean:
        tables[1].pooling = PoolingType.MEAN
    if not pooled:
        return EmbeddingCollection(tables=tables)
    return EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)


class Rest(nn.Module):
    """Anything behind a tower's tables."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3)

    def forward(self, embeddings: Any) -> torch.Tensor:
        return torch.tanh(self.linear(embeddings.values()))


class Codebook(nn.Module):
    """Rows by ids (n,)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(10, 4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]


def make_module(kind: str) -> nn.Module:
    """Of a kind, seeded."""
    from torchrec.modules import embedding_tower, feature_processor_, fp_embedding_modules

    torch.manual_seed(3)
    if kind in ("fp", "fp_collection"):
        lengths = dict.fromkeys(ROWS, 4)
        if kind == "fp":
            processors: Any = {n: feature_processor_.PositionWeightedModule(max_feature_length=4) for n in ROWS}
        else:
            processors = feature_processor_.PositionWeightedModuleCollection(max_feature_lengths=lengths)
        module: nn.Module = fp_embedding_modules.FeatureProcessedEmbeddingBagCollection(
            collection(is_weighted=True), processors
        )
    elif kind == "towers":
        first, second = (collection(names) for names in (["a", "b", "c"], ["d"]))
        towers = [embedding_tower.EmbeddingTower(first, Rest(24)), embedding_tower.EmbeddingTower(second, Rest(8))]
        module = embedding_tower.EmbeddingTowerCollection(towers)
    elif kind == "codebook":
        module = Codebook()
    else:
        module = collection(pooled=kind != "ec", mean=kind == "ebc_mean")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return module


def make_batch(kind: str, rank: int, step: int) -> tuple[Any, ...]:
    """Arguments of one rank's forward: equal sizes, keys in another order at each step."""
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(100 * rank + step)
    if kind == "codebook":
        return (torch.randint(0, 10, (5,), generator=generator),)
    keys = [*ROWS][step % 4 :] + [*ROWS][: step % 4]
    lengths = torch.randint(0, 4, (4, 3), generator=generator)
    values = [
        torch.randint(0, ROWS[k], (int(n.sum()),), generator=generator) for k, n in zip(keys, lengths, strict=True)
    ]
    return (KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=lengths.view(-1)),)


def their_sharder(kind: str, **options: Any) -> Any:
    """TorchRec's for a kind of module, with these options; a user's own for `codebook`."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder

    made: dict[str, Any] = {
        "ec": EmbeddingCollectionSharder,
        "towers": EmbeddingTowerCollectionSharder,
        "fp": FeatureProcessedEmbeddingBagCollectionSharder,
        "fp_collection": FeatureProcessedEmbeddingBagCollectionSharder,
        "codebook": codebook_sharder,
    }
    return made.get(kind, EmbeddingBagCollectionSharder)(**options)


class _Sum(torch.autograd.Function):
    """The sum over the ranks, and of their gradients the mean."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        dist.all_reduce(total := x.clone(), group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        dist.all_reduce(total := grad.clone(), group=ctx.group)
        return total / dist.get_world_size(ctx.group), None


class ShardedCodebook(nn.Module):
    """Rows cut into blocks: every rank looks all ids up in its own."""

    def __init__(self, module: Codebook, spec: Any, env: Any) -> None:
        super().__init__()
        self.env = env
        mine = spec.shards[env.rank]
        self.first, self.rows = mine.shard_offsets[0], mine.shard_sizes[0]
        self.weight = nn.Parameter(module.weight[self.first : self.first + self.rows].detach().clone())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        all_ids = [torch.empty_like(ids) for _ in range(self.env.world_size)]
        dist.all_gather(all_ids, ids, group=self.env.process_group)
        at = torch.cat(all_ids) - self.first
        inside = (at >= 0) & (at < self.rows)
        rows = torch.where(inside.unsqueeze(1), self.weight[at.clamp(0, self.rows - 1)], 0.0)
        return _Sum.apply(rows, self.env.process_group).split(len(ids))[self.env.rank]  # type: ignore[no-any-return]


def codebook_sharder() -> Any:
    """A user's own sharder, in TorchRec's form."""
    from torchrec.distributed.types import ModuleSharder

    class CodebookSharder(ModuleSharder):  # type: ignore[type-arg]
        @property
        def module_type(self) -> type[Codebook]:
            return Codebook

        def sharding_types(self, compute_device_type: str) -> list[str]:
            return ["row_wise"]

        def shard(self, module: Any, params: Any, env: Any, device: Any = None, module_fqn: Any = None) -> Any:  # type: ignore[override]
            return ShardedCodebook(module, params["weight"].sharding_spec, env)

    return CodebookSharder()
