"""What `keyed_programs` are drawn from: TorchRec's collections, keyed batches, optimizers as its scripts have them.

Its batches come twice: with a batch size for each key, which the unsharded collections do not take, and repeated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.fuzz.outcome import Wrong

KEYS = ("a", "b", "c", "d", "s")
LR = 0.1
"""Of the tables' optimizer, before a schedule changes it."""
DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
DENSE: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-6),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4),
}


class Spec(NamedTuple):
    """A model.

    Args:
        features: of the tables of each collection.
        dtype: of the tables' weights.
    """

    seed: int
    features: dict[str, list[list[str]]]
    dtype: str

    @classmethod
    def drawn(cls, rng: random.Random) -> Spec:
        shared = [["a", "b"], ["c"], ["a", "d"]], [["a"], ["b"]], [["c", "a"], ["a", "b"], ["s"]]
        features = {
            "bags": rng.choice(shared),
            "weighted": rng.choice(([["a"], ["b"]], [["b", "a"]], [["d"], ["a", "d"]])),
            "words": rng.choice(([["a"], ["s"]], [["s", "a"]], [["s"], ["s", "b"]])),
        }
        return cls(rng.randrange(1000), features, rng.choice(("FP32", "FP32", "FP16", "BF16")))


@dataclass
class Batch:
    """Of one rank: `repeated` has one row for each sample, `by_key` those that differ, with inverse indices."""

    by_key: Any
    repeated: Any
    targets: torch.Tensor

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        return Batch(self.by_key.to(device), self.repeated.to(device), self.targets.to(device))


def drawn_batch(rows: dict[str, int], number: int, rank: int) -> Batch:
    """None to four samples; keys in another order in each batch, some without ids, of rank 0 never all."""
    from torchrec import KeyedJaggedTensor

    rng, of_all = random.Random(f"{number} {rank}"), random.Random(number)
    count = rng.choice((1, 2, 3, 4) if rank == 0 or of_all.random() < 0.5 else (0, 0, 1, 2, 4))
    keys = of_all.sample(KEYS, len(KEYS))
    ids, ids_by_key, sizes, inverse = list[list[int]](), list[list[int]](), list[list[int]](), list[list[int]]()
    for key in keys:
        longest, distinct = rng.choice((0, 1, 3, 3)), rng.choice((count, rng.randint(min(1, count), count)))
        own = [[rng.randrange(rows[key]) for _ in range(rng.randint(0, longest))] for _ in range(distinct)]
        to = [*range(distinct), *(rng.randrange(distinct) for _ in range(count - distinct))]  # each is some sample's
        rng.shuffle(to)
        ids, ids_by_key = ids + [own[i] for i in to], ids_by_key + own
        sizes.append([distinct])
        inverse.append(to)

    def keyed(of: list[list[int]], **more: Any) -> Any:
        values = torch.tensor([i for row in of for i in row], dtype=torch.int64)
        return KeyedJaggedTensor(
            keys, values, lengths=torch.tensor([len(row) for row in of], dtype=torch.int64), **more
        )

    named = keys, torch.tensor(inverse, dtype=torch.int64).view(len(keys), count)
    targets = torch.tensor([rng.random() for _ in range(count)])
    return Batch(keyed(ids_by_key, stride_per_key_per_rank=sizes, inverse_indices=named), keyed(ids), targets)


class Model(nn.Module):
    """Pooled features, features weighted by a learnt gate of their ids, and jagged ones; gives (loss, scores)."""

    def __init__(self, spec: Spec, dtype: str = "FP32") -> None:
        from torchrec import (
            DataType,
            EmbeddingBagCollection,
            EmbeddingBagConfig,
            EmbeddingCollection,
            EmbeddingConfig,
            PoolingType,
        )

        super().__init__()
        torch.manual_seed(spec.seed)
        rng = random.Random(spec.seed)

        def tables(config: Any, of: str, **more: Any) -> list[Any]:
            pooling = {} if of == "words" else {"pooling": PoolingType.SUM}
            if of == "bags":
                pooling = {"pooling": rng.choice(list(PoolingType)[:2])}
            return [
                config(
                    name=f"{of}{i}",
                    num_embeddings=rng.choice((1, 2, 7, 23, 40)),
                    embedding_dim=8 if of == "words" else rng.choice((8, 12, 16)),
                    feature_names=names,
                    data_type=DataType[dtype],
                    **pooling,
                )
                for i, names in enumerate(spec.features[of])
            ]

        bags, weighted = (tables(EmbeddingBagConfig, of) for of in ("bags", "weighted"))
        words = tables(EmbeddingConfig, "words")
        self.bags = EmbeddingBagCollection(tables=bags)
        self.weighted = EmbeddingBagCollection(tables=weighted, is_weighted=True)
        self.words = EmbeddingCollection(tables=words)
        self.gate = nn.Parameter(0.5 + torch.rand(5))
        width = 8 + sum(c.embedding_dim * len(c.feature_names) for c in (*bags, *weighted))
        self.over, self.out = nn.Linear(width, 8), nn.Linear(8, 1)
        self.rows = {
            key: min([c.num_embeddings for c in (*bags, *weighted, *words) if key in c.feature_names], default=5)
            for key in KEYS
        }
        self.is_by_key = rng.random() < 0.5

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

        keyed, is_plain = batch.repeated, type(self.bags) is EmbeddingBagCollection
        if is_plain and not len(batch.targets):
            return 0.0 * self.gate.sum(), batch.targets
        source = batch.by_key if self.is_by_key and not is_plain else keyed
        pooled, weights = self.bags(source).values(), self.gate[source.values() % 5]
        sizes = {} if source is keyed else {"stride_per_key_per_rank": source.stride_per_key_per_rank()}
        inverse = source.inverse_indices_or_none()
        of_weighted = KeyedJaggedTensor(
            source.keys(), source.values(), weights, lengths=source.lengths(), inverse_indices=inverse, **sizes
        )
        jagged = torch.stack([jt.to_padded_dense(3) for jt in self.words(keyed).values()]).sum(0).mean(1)
        both = torch.cat([pooled, self.weighted(of_weighted).values(), jagged], 1)
        scores = self.out(torch.tanh(self.over(both))).squeeze(1)
        return (scores - batch.targets).square().sum() / 3, scores


class Optimizers:
    """Of one side, the wrapped model's or the plain one's, as a script of TorchRec's combines them.

    Args:
        fused: of the tables.
        dense: name -> parameter, of the rest.
        form: "combined", "warmup" of both or "alone": the dense one apart from the tables'.

    Attributes:
        all: what is stepped, saved and loaded.
    """

    def __init__(self, fused: Any, dense: dict[str, nn.Parameter], kind: str, form: str) -> None:
        from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
        from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

        self.fused, self.form, self.schedulers = fused, form, list[Any]()
        if form == "alone":
            self.all: Any = DENSE[kind](dense.values())
            return
        keyed = KeyedOptimizerWrapper(dense, DENSE[kind])
        if form == "warmup":
            stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=6, value=0.1)]
            fused, keyed = (WarmupOptimizer(of, stages, lr=LR) for of in (fused, keyed))
            self.fused = fused
        self.all = CombinedOptimizer([("fused", fused), ("dense", keyed)])
        self.all.save_param_groups(True)  # rates, which a script of TorchRec's has to ask for

    @property
    def each(self) -> list[Any]:
        return [self.all] if self.form != "alone" else [self.fused, self.all]

    def schedule(self, kind: str) -> None:
        made = torch.optim.lr_scheduler
        of = {
            "step": lambda o: made.StepLR(o, 2, gamma=0.5),
            "lambda": lambda o: made.LambdaLR(o, lambda n: 1 / (1 + n)),
        }
        for group in (group for o in self.each for group in o.param_groups):
            group.pop(
                "initial_lr", None
            )  # of a schedule before: torch's checkpoint has brought none where there was none
        self.schedulers = [of[kind](o) for o in self.each]

    def step(self) -> None:
        for of in (*self.each, *self.schedulers):
            of.step()

    def zero_grad(self) -> None:
        for of in self.each:
            of.zero_grad()

    @property
    def rate(self) -> float:
        """Of the tables."""
        rates = {float(group["lr"]) for group in self.fused.param_groups}
        if len(rates) > 1:
            raise Wrong(f"rates of the tables are {rates}")
        return rates.pop() if rates else LR
