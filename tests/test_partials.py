"""Bags whose rows lie on several ranks: sums in any order of segments, and what travels of them."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchrec

import dmp
from sharders.channel import Purpose
from sharders.embedding.data_path import way
from sharders.embedding.lookup import numba_kernel
from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.embedding.lookup.reads import Segmented
from tests.equality import attach, env_of
from tests.oracle import LR
from tests.ranks import run_ranks
from tests.test_channel import Counting, sharder
from tests.test_kernels import KERNELS, LAYOUTS, SPECS, Oracle, assert_close, make


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.kind)
@pytest.mark.parametrize("layout", ["one_width", "shared", "mixed"])
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
@pytest.mark.sampled(4)
def test_bags_of_segments(kernel: str, dtype: torch.dtype, layout: str, spec: OptimizerSpec, weighted: bool) -> None:
    bank, lookup = make(LAYOUTS[layout], dtype, spec, kernel)
    oracle = Oracle(bank, lookup.ranges)
    g = torch.Generator().manual_seed(0)
    bank.step()
    for width in bank.regions:
        slots = [i for i, s in enumerate(lookup.ranges) if s.chunk.width == width and s.rows]
        lengths = [torch.randint(1, 4, (num,), generator=g) for num in (3, 0, 5) for _ in slots]
        segments = [(i, int(n.sum())) for i, n in zip([*slots, *reversed(slots), *slots], lengths, strict=True)]
        parts = [torch.randint(0, lookup.ranges[i].rows, (n,), generator=g) for i, n in segments]
        weights = torch.rand(sum(map(len, parts)), generator=g).to(dtype).requires_grad_()
        of_parts = weights.split([len(part) for part in parts])
        expected = torch.cat([
            torch.segment_reduce(
                F.embedding(ids + (of := lookup.ranges[i]).first_row, oracle.parameters[of.chunk], sparse=oracle.sparse)
                * (w.unsqueeze(1) if weighted else 1),
                "sum",
                lengths=n,
                unsafe=True,
            )
            for (i, _), ids, n, w in zip(segments, parts, lengths, of_parts, strict=True)
        ])  # fmt: skip
        ids, bags = torch.cat(parts).int(), F.pad(torch.cat(lengths).cumsum(0), (1, 0)).int()
        given = Segmented(ids, segments, bags, weights.detach() if weighted else None)
        found = lookup.rows(given)
        assert_close(found, expected.detach())
        grad = torch.randn(found.shape, dtype=dtype, generator=g)
        torch.autograd.backward(expected, grad)
        flat = lookup.gradient_rows(grad, given)
        for chunk, parameter in oracle.parameters.items():
            if chunk.width == width and parameter.grad is not None:
                of_chunk = flat[chunk.element_offset :][: chunk.rows * chunk.width].view(chunk.rows, chunk.width)
                assert_close(of_chunk, parameter.grad.to_dense())
        if weighted:
            assert weights.grad is not None
            assert_close(lookup.gradient_row_weights(grad, given), weights.grad)
        lookup.update_rows(grad, given)
    oracle.step()
    oracle.check(bank)


def _bytes_of_a_step(layouts: dict[str, str], bags: list[int]) -> tuple[list[int], int, int]:
    """What a step sends: of results, of gradients; elements of all results; bags of this rank with ids in a block."""
    env = env_of("dp2" if dist.get_world_size() == 2 else "dp4")
    rows, dim = 64, 16
    module = torchrec.EmbeddingBagCollection(
        tables=[torchrec.EmbeddingBagConfig(rows, dim, f"t{i}", feature_names=[f"f{i}"]) for i in range(len(bags))]
    )
    attach(module, "sgd")
    plan = {f"embedding_bags.{t}.weight": getattr(dmp, layout)() for t, layout in layouts.items()}
    sent: list[int] = []

    def transport(group: dist.ProcessGroup | None, purpose: Purpose) -> Counting:
        channel = Counting(group)
        channel.sent = [] if purpose == "headers" else sent
        return channel

    model = dmp.DistributedModelParallel(module, env=env, plan=plan, sharders=[sharder("ebc", transport=transport)])
    generator = torch.Generator().manual_seed(env.rank)
    samples = 40
    lengths = torch.cat([torch.full((samples,), n) for n in bags])
    ids = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
    keys = [f"f{i}" for i in range(len(bags))]
    result = model(torchrec.KeyedJaggedTensor(keys, ids, lengths=lengths)).values()
    result.sum().backward()
    block_of = ids.view(-1) * env.size // rows
    bag_of = torch.arange(lengths.numel()).repeat_interleave(lengths)
    pairs = {(int(b), int(r)) for b, r in zip(bag_of, block_of, strict=True)}
    others = sum(r != env.rank for _, r in pairs)
    return sent[-2:], result.numel() * 4, others * dim * 4


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_id_sends_its_row_alone(ranks: int) -> None:
    """Where every rank's partial sums would be as many bytes as all results, from each."""
    found = run_ranks(ranks, _bytes_of_a_step, {"t0": "row_wise", "t1": "row_wise"}, [1, 1])
    for (_, gradients), results, of_others in found:
        assert gradients == of_others < results  # to the others, single rows' gradients
    total = sum(sent[0] for sent, _, _ in found)
    assert total == sum(of_others for _, _, of_others in found)
    assert total < found[0][1] * ranks  # not ranks - 1 times the results of each


def test_long_bags_send_their_sums() -> None:
    both = {"t0": "row_wise", "t1": "row_wise"}
    for (_, gradients), results, of_others in run_ranks(2, _bytes_of_a_step, both, [1, 2]):
        assert gradients == of_others < results
    for (_, gradients), results, of_others in run_ranks(2, _bytes_of_a_step, both, [12, 12]):
        assert of_others <= gradients == results  # of all bags, one block's sums


@pytest.mark.parametrize("longest", [1, 2])
def test_means(longest: int) -> None:
    """Of bags of at most one id they are their rows, which nothing divides; an empty bag is 0. Sums lie between."""
    config, mean = torchrec.EmbeddingBagConfig, torchrec.PoolingType.MEAN
    tables = [config(9, 4, f"t{i}", feature_names=[f"f{i}"], pooling=mean) for i in (0, 2, 3)]
    module = torchrec.EmbeddingBagCollection(tables=[tables[0], config(9, 4, "t1", feature_names=["f1"]), *tables[1:]])
    plain = copy.deepcopy(module)
    model = dmp.DistributedModelParallel(module, plan={n: dmp.row_wise() for n, _ in module.named_parameters()})
    lengths = torch.tensor([1, 0, longest, 1] * 4)
    ids = torch.randint(9, (int(lengths.sum()),), generator=torch.Generator().manual_seed(0))
    batch = torchrec.KeyedJaggedTensor([f"f{i}" for i in range(4)], ids, lengths=lengths)
    found, expected = model(batch).values(), plain(batch).values()
    assert_close(found, expected)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    kept = grad.clone()
    found.backward(grad)
    expected.backward(grad)
    assert torch.equal(grad, kept)
    for parameter, like in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None and like.grad is not None
        assert_close(parameter.grad, like.grad)


def _of_mixed_tables(most_ids: int, reads: list[bool]) -> None:
    """Tables of several widths as partials and whole, trained beside the plain module on the batch of all ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    dims, rows = (16, 40, 64, 16, 40, 64), 30
    configs = [
        torchrec.EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=d, feature_names=[f"f{i}"])
        for i, d in enumerate(dims)
    ]
    torch.manual_seed(0)
    plain = torchrec.EmbeddingBagCollection(configs)
    module = copy.deepcopy(plain)
    attach(module, "sgd")
    tables = [dmp.table_wise(i % world) for i in (1, 3, 2)]
    layouts = [dmp.row_wise(), tables[0], dmp.column_wise([0, world - 1]), tables[1], dmp.row_wise(), tables[2]]
    plan = {f"embedding_bags.t{i}.weight": layout for i, layout in enumerate(layouts)}
    model = dmp.DistributedModelParallel(module, plan=plan)
    was, seen = way.Way._reads_given, []

    def noted(*given: Any) -> bool:
        seen.append(was(*given))
        return seen[-1]

    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    with mock.patch.object(way.Way, "_reads_given", noted):
        for step in range(3):
            g = torch.Generator().manual_seed(step)
            batches = []
            for _ in range(world):
                lengths = torch.randint(0, most_ids + 1, (len(dims) * 24,), generator=g)
                ids = torch.randint(0, rows, (int(lengths.sum()),), generator=g)
                batches.append(torchrec.KeyedJaggedTensor([f"f{i}" for i in range(len(dims))], ids, lengths=lengths))
            scale = torch.randn(24, sum(dims), generator=g)
            (model(batches[rank]).values() * scale).sum().backward()
            optimizer.zero_grad()
            (sum((plain(batch).values() * scale).sum() for batch in batches) / world).backward()
            optimizer.step()
    assert seen == reads * 3
    for name, value in dmp.full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name])


@pytest.mark.skipif(bool(numba_kernel.problem()), reason="read there by what numba compiles")
@pytest.mark.parametrize(("most_ids", "reads"), [(1, True), (40, False)])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_own_gradients_are_read_where_they_were_left_beside_partials(ranks: int, most_ids: int, reads: bool) -> None:
    """Where bags are short; those of partials are packed all the same."""
    run_ranks(ranks, _of_mixed_tables, most_ids, [reads])


def _without_rows_of_its_own() -> None:
    """Ranks that look up whole bags for others beside tables of so few rows that they have none of them."""
    rank = dist.get_rank()
    configs = [
        torchrec.EmbeddingBagConfig(name=f"t{i}", num_embeddings=n, embedding_dim=8, feature_names=[f"f{i}"])
        for i, n in enumerate((2, 9))
    ]
    torch.manual_seed(0)
    plain = torchrec.EmbeddingBagCollection(configs)
    plan = {"embedding_bags.t0.weight": dmp.row_wise(), "embedding_bags.t1.weight": dmp.column_wise([2, 3])}
    model = dmp.DistributedModelParallel(copy.deepcopy(plain), plan=plan)
    lengths = torch.tensor([2, 0, 1, 3, 1, 2])
    ids = torch.tensor([0, 1, 1, 0, 0, 1, 8, 3, 5]) % (2 if rank == 3 else 9)
    ids[:6] %= 2
    batch = torchrec.KeyedJaggedTensor(["f0", "f1"], ids, lengths=lengths)
    torch.testing.assert_close(model(batch).values(), plain(batch).values())


def test_ranks_without_rows_of_what_travels_as_partials() -> None:
    """They ended in "zip() argument 2 is shorter", and the others in a parting."""
    run_ranks(4, _without_rows_of_its_own)
