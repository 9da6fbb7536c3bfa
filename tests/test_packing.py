"""Ids packed for all ranks by one compiled call: what goes to each rank, word by word."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from unittest import mock

import pytest
import torch

from sharders.embedding.batches.batch import Batch
from sharders.embedding.ids import packing
from sharders.embedding.ids.packing import Packable, Packing
from sharders.embedding.lookup import numba_functions


def _expected(batch: Batch, slots: Sequence[Packable], bits: torch.Tensor | None) -> list[torch.Tensor]:
    """Lengths, ids and weights of one rank."""
    lengths, ids, weights = [], [], []
    for _, key, low, high in slots:
        of_key = slice(batch.starts[key], batch.starts[key + 1])
        values, bag = batch.values[of_key].long(), torch.arange(batch.batch_size).repeat_interleave(batch.lengths[key])
        stays = torch.ones_like(values, dtype=torch.bool) if high < 0 else (values >= low) & (values < high)
        lengths.append(torch.bincount(bag[stays], minlength=batch.batch_size))
        ids.append(values[stays] - max(low, 0))
        weights.append((bits if bits is not None else values[:0])[of_key if bits is not None else slice(0)])
        weights[-1] = weights[-1][stays] if bits is not None else weights[-1]
    return [torch.cat(of).int() for of in (lengths, ids, weights)]


@pytest.mark.parametrize("at_once", [True, False])
def test_each_rank_gets_its_lengths_ids_and_weights(at_once: bool) -> None:
    """`at_once`: as this CPU does it; else one by one."""
    pytest.importorskip("numba")
    from sharders.embedding.lookup import numba_pack

    entry_of = packing.entry_of
    if not at_once:
        with mock.patch.object(numba_pack, "has", return_value=False):
            one_by_one = numba_functions._loaded(numba_functions._made("pack_ids", None))
        entry_of = {"pack_ids": one_by_one}.__getitem__
    for seed in range(40):
        draw, generator = Random(seed), torch.Generator().manual_seed(seed)
        random = partial(torch.randint, generator=generator)
        samples, ranks, longest = draw.choice([1, 15, 16, 17, 40]), draw.choice([2, 3]), draw.choice([1, 1, 5, 33])
        rows = [draw.choice([1, 3, 40, 2**31 - 1]) for _ in range(3)]
        lengths = torch.ones(3, samples, dtype=torch.int64) if longest == 1 else random(0, longest + 1, (3, samples))
        counts = tuple(lengths.sum(1).tolist())
        ids = torch.cat([random(0, num, (count,)) for num, count in zip(rows, counts, strict=True)])
        ids, bits = ids.to(draw.choice([torch.int32, torch.int64])), random(0, 99, ids.shape, dtype=torch.int32)
        batch = Batch(ids, lengths, (0, 1, 2), counts=counts)
        cuts = [[min(-(-num // ranks) * r, num) for r in range(ranks + 1)] for num in rows]
        of_ranks = [
            [Packable(f, f, *((0, -1) if f == 1 else (cuts[f][r], cuts[f][r + 1]))) for f in range(3)]
            for r in range(ranks)
        ]
        head, tail, weights = draw.choice([0, 26]), draw.choice([0, 2]), draw.choice([None, bits])
        packs = Packing(of_ranks, head, tail)
        room = packs.room(counts, samples, weights is not None)
        memory = torch.full((room + 32,), -7, dtype=torch.int32)
        with mock.patch.object(packing, "entry_of", entry_of):
            packed = packs(batch, weights, True, memory[:room])
        assert (memory[room:] == -7).all(), "written beyond its room"
        for slots, end, words, of_lengths, bags in zip(
            of_ranks, packed.ends, packed.words, packed.lengths, packed.bags, strict=True
        ):
            expected = _expected(batch, slots, weights)
            assert torch.equal(memory[end - words : end - tail], torch.cat(expected)), seed
            assert torch.equal(of_lengths.reshape(-1), expected[0])
            assert bags == [int((of > 0).sum()) * (s.high >= 0) for of, s in zip(of_lengths, slots, strict=True)]


@pytest.mark.parametrize("told", [{"NUMBA_CPU_NAME": "generic"}, {"NUMBA_ENABLE_AVX": "0"}])
@pytest.mark.sampled(2)
def test_what_the_user_says_of_the_cpu_is_heeded(told: dict[str, str], tmp_path: Path) -> None:
    """Where this CPU has AVX-512, LLVM ended the process: "Do not know how to split the result of this operator!"."""
    pytest.importorskip("numba")
    code = "from tests import test_packing as t; t.test_each_rank_gets_its_lengths_ids_and_weights(True)"
    environment = {**os.environ, **told, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, cwd=Path(__file__).parents[1])
