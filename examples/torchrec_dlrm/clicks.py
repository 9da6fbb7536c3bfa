"""Batches of clicks: the binary Criteo files, through TorchRec's reader, or made-up clicks that can be learned."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, INT_FEATURE_COUNT, InMemoryBinaryCriteoIterDataPipe
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

_SPLITS = ("train", "val", "test")


def rows_of_tables(flags: argparse.Namespace) -> list[int]:
    """Rows of each of the 26 tables."""
    return flags.num_embeddings_per_feature or [flags.num_embeddings] * len(DEFAULT_CAT_NAMES)


def loader(flags: argparse.Namespace, split: str) -> Iterable[Batch]:
    """This rank's batches of one of `train`, `val` and `test`; each iteration starts over."""
    size = flags.batch_size if split == "train" else flags.test_batch_size or flags.batch_size
    limit = getattr(flags, f"limit_{split}_batches")
    if flags.in_memory_binary_criteo_path:
        return Limited(_criteo(flags, split, size), limit)
    return MadeUpClicks(flags, split, size, 10 if limit is None else limit)


class Limited(Iterable[Batch]):
    """The first batches of a loader."""

    def __init__(self, batches: Iterable[Batch], limit: int | None) -> None:
        self._batches, self._limit = batches, limit

    def __iter__(self) -> Iterator[Batch]:
        for index, batch in enumerate(self._batches):
            if index == self._limit:
                return
            yield batch


class MadeUpClicks(Iterable[Batch]):
    """Clicks that depend on hidden values of the ids and of the dense features. Ids are skewed: small ones are common.

    Args:
        split: others have other samples of the same hidden values.
        size: samples of a batch.
        count: batches.
    """

    def __init__(self, flags: argparse.Namespace, split: str, size: int, count: int) -> None:
        self._rows, self._per_bag = rows_of_tables(flags), flags.multi_hot_sizes or [1] * len(DEFAULT_CAT_NAMES)
        self._seed, self._split, self._size, self._count = flags.seed, _SPLITS.index(split), size, count
        hidden = torch.Generator().manual_seed(flags.seed)
        self._of_dense = torch.randn(INT_FEATURE_COUNT, generator=hidden) * 0.3
        self._of_ids = [torch.randn(min(rows, 1000), generator=hidden) for rows in self._rows]

    def __iter__(self) -> Iterator[Batch]:
        for index in range(self._count):
            of_batch = ((self._seed * 3 + self._split) * 100_003 + index) * dist.get_world_size() + dist.get_rank()
            yield self._batch(torch.Generator().manual_seed(of_batch))

    def _batch(self, random: torch.Generator) -> Batch:
        dense = torch.randn(self._size, INT_FEATURE_COUNT, generator=random)
        score = dense @ self._of_dense
        values, lengths = [], []
        for rows, per_bag, hidden in zip(self._rows, self._per_bag, self._of_ids, strict=True):
            ids = (torch.rand(self._size, per_bag, generator=random) ** 3 * rows).long()
            score += hidden[ids % len(hidden)].mean(1) * 0.5
            values.append(ids.flatten())
            lengths.append(torch.full((self._size,), per_bag))
        features = KeyedJaggedTensor(list(DEFAULT_CAT_NAMES), torch.cat(values), lengths=torch.cat(lengths))
        clicked = torch.rand(self._size, generator=random) < torch.sigmoid(score)
        return Batch(dense, features, clicked.long())


def _criteo(flags: argparse.Namespace, split: str, size: int) -> Iterable[Batch]:
    """All days but the last for training; the first half of the last for validation, the second for the test."""
    folder = flags.in_memory_binary_criteo_path
    names = sorted(os.listdir(folder), key=lambda name: int(name.split("_")[1]) if name.startswith("day_") else -1)
    kinds = [[os.path.join(folder, n) for n in names if n.endswith(f"_{k}.npy")] for k in ("dense", "sparse", "labels")]
    dense, sparse, labels = ([files[:-1], files[-1:]][split != "train"] for files in kinds)
    if not dense or len({len(files) for files in (dense, sparse, labels)}) != 1:
        raise SystemExit(f"{folder} needs day_<n>_dense.npy, _sparse.npy and _labels.npy of two days; it has {names}")
    return InMemoryBinaryCriteoIterDataPipe(
        split,
        dense,
        sparse,
        labels,
        batch_size=size,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        drop_last=split == "train",
        shuffle_batches=flags.shuffle_batches and split == "train",
        mmap_mode=flags.mmap_mode,
        hashes=rows_of_tables(flags),
    )
