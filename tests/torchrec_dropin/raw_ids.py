"""Managed collision in one process and on a mesh: modules, batches of raw ids, and what is compared step by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dmp
from tests.equality import LR, env_of, layouts_for

POLICIES = ("LFU", "LRU", "DistanceLFU")
FEATURES = ("f", "g", "h")
_TABLES = (("t1", 23, 8, ("g",)), ("t2", 14, 16, ("h", "f")))


def make(
    kind: str = "ebc",
    policy: str = "DistanceLFU",
    interval: int = 2,
    optimizer: str | None = None,
    returns: bool = True,
    weighted: bool = False,
    rows: dict[str, int] | None = None,
    **policy_options: Any,
) -> nn.Module:
    """TorchRec's module: two tables, the second read by two features."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
    from torchrec.modules import mc_embedding_modules, mc_modules

    torch.manual_seed(0)
    tables_of = [(name, (rows or {}).get(name, num), dim, features) for name, num, dim, features in _TABLES]
    config: Any = EmbeddingConfig if kind == "ec" else EmbeddingBagConfig
    tables = [
        config(name=name, num_embeddings=num, embedding_dim=8 if kind == "ec" else dim, feature_names=list(features))
        for name, num, dim, features in tables_of
    ]
    inner: Any = EmbeddingCollection(tables=tables) if kind == "ec" else None
    inner = inner or EmbeddingBagCollection(tables=tables, is_weighted=weighted)
    if optimizer is not None:
        from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]

        given = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[optimizer]
        _apply_optimizer_in_backward(given, inner.parameters(), {"lr": LR})
    maps = {
        name: mc_modules.MCHManagedCollisionModule(
            zch_size=num,
            device=torch.device("cpu"),
            eviction_policy=getattr(mc_modules, f"{policy}_EvictionPolicy")(**policy_options),
            eviction_interval=interval,
            input_hash_size=1 << 40,
            input_hash_func=(lambda ids, size: (ids * 7919) % size) if name == "t1" else None,
        )
        for name, num, _, _ in tables_of
    }
    outer: Any = mc_embedding_modules
    outer = outer.ManagedCollisionEmbeddingCollection if kind == "ec" else outer.ManagedCollisionEmbeddingBagCollection
    module: nn.Module = outer(
        inner, mc_modules.ManagedCollisionCollection(maps, tables), return_remapped_features=returns
    )
    return module


def batch(step: int, rank: int, size: int = 5, weighted: bool = False, most: int = 4) -> Any:
    """Raw ids, a few of them often and others coming and going; keys in another order than the tables'."""
    from torchrec import KeyedJaggedTensor

    random = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, most, (len(FEATURES) * size,), generator=random)
    count = int(lengths.sum())
    often = torch.randint(0, 9, (count,), generator=random)
    passing = torch.randint(20 * step, 20 * step + 40, (count,), generator=random)
    is_often = torch.rand(count, generator=random) < 0.4
    ids = torch.where(is_often, often, passing) * ((1 << 33) + 1)
    weights = torch.rand(count, generator=random) if weighted else None
    return KeyedJaggedTensor(keys=list(FEATURES), values=ids, lengths=lengths, weights=weights)


def joined(batches: list[Any]) -> Any:
    """All ranks' batches as one."""
    from torchrec import KeyedJaggedTensor

    parts = [b.to_dict() for b in batches]
    values = torch.cat([part[key].values() for key in FEATURES for part in parts])
    lengths = torch.cat([part[key].lengths() for key in FEATURES for part in parts])
    weights = None
    if batches[0].weights_or_none() is not None:
        weights = torch.cat([part[key].weights() for key in FEATURES for part in parts])
    return KeyedJaggedTensor(keys=list(FEATURES), values=values, lengths=lengths, weights=weights)


def results(out: Any, size: int, rank: int) -> list[torch.Tensor]:
    """Of one rank's samples in a result for several ranks' batches: values by key, then remapped ids by key."""
    found, remapped = out
    own = slice(size * rank, size * (rank + 1))
    if not isinstance(found, dict):
        tensors = [found.values()[own]]
    else:
        tensors = [row for name in sorted(found) for row in found[name].to_dense()[own]]
    if remapped is not None:
        assert remapped.keys() == ["g", "h", "f"]
        tensors += [ids for key in remapped.keys() for ids in remapped[key].to_dense()[own]]  # noqa: SIM118 of a KJT
    return tensors


def loss_of(out: Any, samples: int) -> torch.Tensor:
    """A mean over samples."""
    found = out[0]
    values = [found.values()] if not isinstance(found, dict) else [found[name].values() for name in sorted(found)]
    return sum((v.square() * torch.linspace(0.1, 0.5, v.shape[1])).sum() for v in values) / samples  # type: ignore[return-value]


class Pair:
    """One process with all ranks' batches, and the mesh, side by side.

    Args:
        model: wrapped already; made by default.
        plain: the unsharded module; made by default.
        options: of `make`.
    """

    def __init__(self, at: str, layout: str, plain: Any = None, model: Any = None, **options: Any) -> None:
        self.env, self.options = env_of(at), options
        self.plain = make(**options) if plain is None else plain
        self.model = model or dmp.DistributedModelParallel(make(**options), env=self.env, plan=self.plan(layout))
        assert {*self.model.state_dict()} == {*self.plain.state_dict()}
        assert {n for n, _ in self.model.named_parameters()} == {n for n, _ in self.plain.named_parameters()}
        self.ordinary = None
        if options.get("optimizer") is None:
            self.ordinary = [torch.optim.SGD(m.parameters(), lr=LR) for m in (self.plain, self.model)]

    def plan(self, layout: str) -> dict[str, Any]:
        """The tables' layouts."""
        layouts = layouts_for(self.env)[layout]
        shapes = enumerate((n, tuple(p.shape)) for n, p in self.plain.named_parameters())
        return {n: layouts(i, shape, self.env) for i, (n, shape) in shapes}  # type: ignore[arg-type]

    def step(self, step: int, size: int = 5, trains: bool = True) -> None:
        """One batch through both; results, and what was learned, are the same."""
        num, rank = self.env.data_size, self.env.place_of(self.env.rank, "replicate", "shard")
        batches = [batch(step, r, size, self.options.get("weighted", False)) for r in range(num)]
        for m in (self.plain, self.model):
            m.train(trains)
        expected, got = self.plain(joined(batches)), self.model(batches[rank])
        for ours, theirs in zip(results(got, size, 0), results(expected, size, rank), strict=True):
            torch.testing.assert_close(ours, theirs, msg=lambda m: f"step {step}: {m}")
        if trains:
            loss_of(expected, size * num).backward()
            loss_of(got, size).backward()
            for each in self.ordinary or ():
                each.step()
                each.zero_grad()
            self.compare(step)

    def compare(self, step: int) -> None:
        """All weights, and of the maps every number."""
        whole = dmp.full_state_dict(self.model)
        for name, value in self.plain.state_dict().items():
            torch.testing.assert_close(whole[name], value, msg=lambda m, n=name: f"{n} after step {step}: {m}")  # type: ignore[misc]

    def filled(self) -> list[int]:
        """How many ids each map has."""
        empty = torch.iinfo(torch.int64).max
        return [int((b != empty).sum()) for n, b in self.plain.named_buffers() if n.endswith("sorted_raw_ids")]


def check(
    at: str, layout: str, steps: int = 7, modes: str = "", sizes: tuple[int, ...] = (5,), **options: Any
) -> list[int]:
    """Train both for some steps; returns how many ids each map has at the end.

    Args:
        modes: of each step: `t` trains (also where nothing is said), `e` evaluates.
        sizes: samples of each step, over and over.
    """
    pair = Pair(at, layout, **options)
    for step in range(steps):
        pair.step(step, sizes[step % len(sizes)], modes[step : step + 1] != "e")
    return pair.filled()
