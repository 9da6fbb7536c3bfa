"""Of unpooled lookups each row that a batch names travels once: the same numbers as without, and fewer bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn

import dmp
from dmp import ShardError, row_wise, table_wise
from sharders import EmbeddingCollectionSharder, EmbeddingSharder
from sharders.embedding.lookup import distinct, numba_kernel
from sharders.embedding.results import row_places
from tests.equality import MESHES, attach, env_of, run_matrix, run_random
from tests.ranks import run_ranks

SLOW_MESHES = ("dp2", "dp4", "host2xlocal2", "replicate2xshard2", "tp2xdp2")
needs_numba = pytest.mark.skipif(bool(numba_kernel.problem()), reason="ids are brought down by what numba compiles")


@contextmanager
def _always(apart: bool = False) -> Iterator[None]:
    """Small batches too, and every segment whose ids come again; `apart`: gradients are not put together."""
    elements = 0 if apart else row_places.READ_APART
    few = mock.patch.multiple(distinct, FEWEST_IDS=0, FEW_IDS=1)
    with few, mock.patch.object(row_places, "READ_APART", elements):
        yield


@needs_numba
@pytest.mark.parametrize("seed", range(12))
def test_rows_and_the_ids_that_they_stand_for(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 600, (4,), generator=draw).tolist()
    rows = [2, 90, 5000, 10**7]
    values = torch.cat([torch.randint(0, r, (n,), generator=draw) for r, n in zip(rows, counts, strict=True)])
    places = torch.randperm(len(values), generator=draw).to(torch.int32)
    values = values.to((torch.int32, torch.int64)[seed % 2])
    with _always():
        found = distinct.distinct_rows(values, counts, [2, 90, 0, 10**7], places)  # the third is left alone
    assert found is not None and found.values.dtype == values.dtype
    assert found.counts[2] == counts[2] and found.counts[0] <= 2 and sum(found.counts) == len(found.values)
    at = places.argsort()[found.places.long()]
    assert values[at].equal(found.values.repeat_interleave(found.times))
    segments = torch.arange(4).repeat_interleave(torch.tensor(counts))
    assert segments[at].equal(
        torch.arange(4).repeat_interleave(torch.tensor(found.counts)).repeat_interleave(found.times)
    )
    to = torch.full((len(values),), -1, dtype=torch.int32)
    of_ids = found.places.data_ptr(), found.times.data_ptr()
    distinct.spread([distinct.Numbered(3, len(found.times), *of_ids, 0)], to)
    assert to[found.places.long()].equal(torch.arange(3, 3 + len(found.times)).repeat_interleave(found.times).int())


def test_ids_that_hardly_come_again_stay_as_they_are() -> None:
    assert distinct.distinct_rows(torch.randperm(5000), [5000], [10**6]) is None
    assert distinct.distinct_rows(torch.zeros(40, dtype=torch.int64), [40], [10]) is None  # too few to save anything


def _matrix(mesh: str, kind: str, every: int) -> list[str]:
    with _always(apart=kind == "ec"):
        return run_matrix(mesh, kind, every)


def _random(mesh: str, kind: str, seeds: range) -> list[str]:
    with _always(apart=kind == "ec"):
        return run_random(mesh, kind, seeds)


@needs_numba
@pytest.mark.parametrize("kind", ["ec", "embedding"])
@pytest.mark.parametrize(
    ("mesh", "every"),
    [
        ("dp2", 9),
        *(
            pytest.param(m, 3, marks=pytest.mark.slow)
            for m in ("dp2", "dp4", "host2xlocal2", "replicate2xshard2", "tp2xdp2")
        ),
    ],
)
def test_equals_unsharded(mesh: str, kind: str, every: int) -> None:
    failed = run_ranks(math.prod(MESHES[mesh][0]), _matrix, mesh, kind, every, timeout=300)
    assert not any(failed), "\n".join(sorted({line for of_rank in failed for line in of_rank}))


@needs_numba
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ec", "embedding"])
@pytest.mark.parametrize("mesh", ["dp2", "dp4"])
def test_random_rectangles(mesh: str, kind: str) -> None:
    failed = run_ranks(math.prod(MESHES[mesh][0]), _random, mesh, kind, range(30), timeout=300)
    assert not any(failed), "\n".join(sorted({line for of_rank in failed for line in of_rank}))


def _popular(layout: str, kernel: str | None, wire: torch.dtype | None) -> tuple[list[torch.Tensor], int]:
    """Results and weights after some steps of an embedding whose ids come again; bytes that the last of them sent."""
    env, module = env_of("dp2"), nn.Embedding(5000, 8)
    with torch.no_grad():
        module.weight.copy_(torch.randn(5000, 8, generator=torch.Generator().manual_seed(1)))
    attach(module, "rowwise_adagrad")
    plan = {"weight": row_wise() if layout == "row_wise" else table_wise(0)}
    model = dmp.DistributedModelParallel(
        module, env=env, plan=plan, sharders=[EmbeddingSharder(kernel=kernel, wire=wire), EmbeddingCollectionSharder()]
    )
    found = []
    for step in range(3):
        draw = torch.Generator().manual_seed(10 * step + env.rank)
        ids = torch.randint(0, 5000, (4096,), generator=draw)
        ids = torch.where(torch.rand(4096, generator=draw) < 0.9, ids % 40, ids)
        out = model(ids)
        found.append(out.detach().clone())
        (out * torch.randn(4096, 8, generator=draw)).sum().backward()
    sent = sum(phase.sent_bytes for phase in dmp.step_phases(model).values())
    return [*found, dmp.full_state_dict(model)["weight"]], sent


@needs_numba
@pytest.mark.parametrize("layout", ["table_wise", "row_wise"])
@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=str)
@pytest.mark.sampled(4)
def test_fewer_bytes_and_the_same_bits_again(layout: str, wire: torch.dtype | None) -> None:
    plain, joined, again = (run_ranks(2, _popular, layout, kernel, wire) for kernel in ("torch", None, None))
    for (expected, all_bytes), (shown, some), (second, _) in zip(plain, joined, again, strict=True):
        assert some < 0.4 * all_bytes
        assert all(a.equal(b) for a, b in zip(shown, second, strict=True))
        close = {"rtol": 0.05, "atol": 0.05} if wire else {"rtol": 1e-5, "atol": 1e-5}
        assert all(torch.allclose(a, b, **close) for a, b in zip(expected, shown, strict=True))


def _taken(layout: str, ids: torch.Tensor) -> int:
    """How often torch's operators take the gradients of some rows, in a step of an embedding."""
    env, module = env_of("dp2"), nn.Embedding(5000, 8)
    attach(module, "sgd")
    plan = {"weight": row_wise() if layout == "row_wise" else table_wise(0)}
    model = dmp.DistributedModelParallel(module, env=env, plan=plan)
    with mock.patch.object(row_places.RowPlaces, "take", autospec=True, side_effect=row_places.RowPlaces.take) as take:
        model(ids).square().sum().backward()
    return take.call_count


@needs_numba
@pytest.mark.parametrize("layout", ["table_wise", "row_wise"])
@pytest.mark.parametrize("come_again", [True, False])
def test_gradients_of_rows_are_summed_by_compiled_code(layout: str, come_again: bool) -> None:
    ids = torch.arange(4096) % 40 if come_again else torch.arange(4096)
    assert run_ranks(2, _taken, layout, ids) == [0, 0]


def _clipped(when: str) -> str | torch.Tensor:
    env, module = env_of("dp2"), nn.Embedding(10, 4)
    attach(module, "sgd")
    model = dmp.DistributedModelParallel(module, env=env, plan={"weight": table_wise(0)})
    group = model.fused_optimizer.param_groups[0]
    before = dmp.full_state_dict(model)["weight"].clone()
    with _always():
        if when == "before":
            group |= {"gradient_clipping": True, "max_gradient": 1.0}
        out = model(torch.zeros(8, dtype=torch.int64))
        if when == "between":
            group |= {"gradient_clipping": True, "max_gradient": 1.0}
            with pytest.raises(ShardError) as error:
                (3 * out).sum().backward()
            return str(error.value)
        (3 * out).sum().backward()
    return (before - dmp.full_state_dict(model)["weight"])[0] / group["lr"]


@needs_numba
def test_clamped_gradients_are_not_summed_before() -> None:
    for change in run_ranks(2, _clipped, "before"):
        assert torch.allclose(change, torch.full((4,), 16.0))  # each of 16 ids' 3 / 2 as 1
    assert all("set it before the forward" in text for text in run_ranks(2, _clipped, "between"))
