"""Gradients of data-parallel tables by the rows that batches touch: the numbers of one process, and fewer bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import dmp
from dmp import data_parallel, rectangles, row_wise
from sharders.embedding.data_path import engine, pooled
from sharders.embedding.exchange.touched_rows import (
    BESIDE_BYTES,
    NOTHING,
    Touched,
    are_fewer,
    go_beside,
    touched_at_most,
)
from tests.equality import MESHES, OPTIMIZERS, attach, check_case, env_of, random_rectangles
from tests.ranks import run_ranks


@contextmanager
def _always() -> Iterator[None]:
    with mock.patch.object(engine, "are_fewer", return_value=True):
        yield


def _equals(mesh: str, kind: str) -> list[str]:
    env, failed = env_of(mesh), []
    plans = {
        "data_parallel": lambda i, s, e: data_parallel(),
        "mixed": lambda i, s, e: data_parallel() if i % 2 else rectangles(random_rectangles(s, e.table_size, 31 + i)),
    }
    with _always():
        for name, layouts in plans.items():
            for optimizer in OPTIMIZERS[: 2 if name == "mixed" else None]:
                for apart in (0, 1 << 40):
                    with mock.patch.object(pooled, "APART_BYTES", apart):
                        try:
                            check_case(kind, layouts, optimizer, env)
                        except AssertionError as error:
                            failed.append(f"{name} {optimizer} {apart}: {str(error)[:300]}")
    return failed


def _dense_sums(apart: int) -> list[torch.Tensor]:
    """Weights after some steps, where all of a table's gradient is summed."""
    torch.manual_seed(0)
    rows = (5, 900, 7, 300)
    configs = [
        EmbeddingBagConfig(num_embeddings=n, embedding_dim=8, name=f"t{i}", feature_names=[f"f{i}"])
        for i, n in enumerate(rows)
    ]
    module, env = EmbeddingBagCollection(configs), env_of("dp2")
    plan = {f"embedding_bags.t{i}.weight": data_parallel() if i % 2 == 0 else row_wise() for i in range(4)}
    attach(module, "rowwise_adagrad")
    with mock.patch.object(pooled, "APART_BYTES", apart):
        model = dmp.DistributedModelParallel(module, env, plan=plan)
        for step in range(3):
            ids = torch.arange(4 * 16 * 3) * (3 + step + env.rank) % 5
            batch = KeyedJaggedTensor([f"f{i}" for i in range(4)], ids, lengths=torch.full((64,), 3))
            model(batch).values().square().sum().backward()
    return [value.detach().clone() for value in dmp.to_unsharded(model).state_dict().values()]


def test_sums_of_their_own_are_the_same() -> None:
    """To the bit, whether they travel beside other gradients or not."""
    for beside, apart in zip(run_ranks(2, _dense_sums, 1 << 40), run_ranks(2, _dense_sums, 0), strict=True):
        assert len(beside) == 4 and all(map(torch.equal, beside, apart))


SLOW = [(mesh, kind) for mesh in ("dp4", "host2xlocal2", "replicate2xshard2") for kind in ("ebc", "ec_vbe")]
SLOW += [("shard2xtp2", "ebc"), ("single", "ebc"), ("dp2", "ebc_weighted_vbe"), ("dp2", "bag_mean"), ("dp2", "ec")]


@pytest.mark.parametrize(
    ("mesh", "kind"), [("dp2", "ebc_weighted"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_equals_unsharded(mesh: str, kind: str) -> None:
    failed = run_ranks(math.prod(MESHES[mesh][0]), _equals, mesh, kind, timeout=300)
    assert not any(failed), "\n".join(sorted({line for of_rank in failed for line in of_rank}))


def _of_a_step(rows: int, ids: int) -> tuple[int, torch.Tensor]:
    """Bytes of the gradients of one step, and weights after three."""
    env, module = env_of("dp2"), nn.EmbeddingBag(rows, 8, mode="sum")
    with torch.no_grad():
        module.weight.copy_(torch.randn(rows, 8, generator=torch.Generator().manual_seed(1)))
    attach(module, "adagrad")
    model = dmp.DistributedModelParallel(module, env=env, plan={"weight": data_parallel()})
    for step in range(3):
        draw = torch.Generator().manual_seed(10 * step + env.rank)
        model(torch.randint(0, rows, (ids, 1), generator=draw)).square().sum().backward()
    return dmp.step_phases(model)["grad a2a"].sent_bytes, dmp.full_state_dict(model)["weight"]


def test_bytes_follow_the_ids_of_large_tables_and_the_rows_of_small_ones() -> None:
    large, again = run_ranks(2, _of_a_step, 4000, 64), run_ranks(2, _of_a_step, 4000, 64)
    assert all(sent <= 64 * (8 * 4 + 8) + 64 for sent, _ in large)
    assert large[0][1].equal(large[1][1])  # the same to the bit on all ranks
    assert all(a[1].equal(b[1]) for a, b in zip(large, again, strict=True))
    assert all(sent <= 40 * (8 * 4 + 8) + 64 for sent, _ in run_ranks(2, _of_a_step, 40, 64))


def _beside_rows() -> tuple[float, ...]:
    """One rank without samples, another without ids in the table."""
    env = env_of("dp2")
    tables = nn.ModuleList([nn.EmbeddingBag(500, 4, mode="sum"), nn.EmbeddingBag(9, 4, mode="sum")])
    for table in tables:
        attach(table, "sgd")
    model = dmp.DistributedModelParallel(tables, env=env, plan={"0.weight": data_parallel(), "1.weight": row_wise()})
    before = dmp.full_state_dict(model)["0.weight"].clone()
    ids = torch.full((0 if env.rank else 3, 1), 7)
    model.module[0](ids).sum().backward()
    return tuple((before - dmp.full_state_dict(model)["0.weight"]).sum(1)[[6, 7]].tolist())


def test_a_rank_without_ids() -> None:
    first, second = run_ranks(2, _beside_rows)
    assert first == second and first[0] == 0 and first[1] > 0


@pytest.mark.parametrize(
    ("ranks", "rows", "alone"), [(2, 90, 1), (2, 95, 0), (4, 40, 1), (4, 50, 0), (8, 20, 1), (8, 25, 0)]
)
def test_an_all_reduce_sends_no_more_for_more_ranks(ranks: int, rows: int, alone: bool) -> None:
    """Beside other gradients rows travel however many they are."""
    table = SimpleNamespace(rows=100, dim=8, trains=True)
    placement: Any = SimpleNamespace(trains_local=True, tables=[table], is_local=[True])
    touched = [Touched(rows, rows * 8)] * ranks
    assert are_fewer(placement, touched, True, 4)
    assert are_fewer(placement, touched, False, 4) == alone


def test_large_tables_are_compared_with_an_all_reduce() -> None:
    """On one axis too: only what does not go beside other gradients is summed there."""
    table = SimpleNamespace(rows=1 << 20, dim=15, trains=True)
    placement: Any = SimpleNamespace(trains_local=True, tables=[table], is_local=[True])
    assert are_fewer(placement, [Touched(1 << 18, 15 << 18)] * 4, True, 4)
    assert not are_fewer(placement, [Touched(1 << 19, 15 << 19)] * 4, True, 4)


def test_tables_that_are_whole_here_and_trained_count_alone() -> None:
    tables = [SimpleNamespace(rows=100, dim=8, trains=trains) for trains in (True, False, True)]
    features = [SimpleNamespace(table=i, index=i) for i in range(3)]
    here: Any = SimpleNamespace(trains_local=True, tables=tables, is_local=[True, True, False], features=features)
    few, many = (SimpleNamespace(counts=counts, key_of=[0, 1, 2]) for counts in ([30, 40, 50], [300] * 3))
    assert touched_at_most(here, few) == Touched(30, 240) and touched_at_most(here, many) == Touched(100, 800)  # type: ignore[arg-type]
    assert are_fewer(here, [Touched(90, 720)] * 2, False, 4) and not are_fewer(here, [Touched(91, 728)] * 2, False, 4)
    here.trains_local = False
    assert touched_at_most(here, few) == NOTHING and not are_fewer(here, [NOTHING] * 2, True, 4)  # type: ignore[arg-type]


def test_what_goes_beside_other_gradients_is_counted_over_all_ranks() -> None:
    assert go_beside(BESIDE_BYTES, True) and not go_beside(BESIDE_BYTES + 1, True) and not go_beside(1, False)
    table = SimpleNamespace(rows=1 << 20, dim=7, trains=True)  # with their numbers half of that, on one rank
    placement: Any = SimpleNamespace(trains_local=True, tables=[table], is_local=[True])
    half = Touched(1 << 19, 7 << 19)
    assert are_fewer(placement, [half] * 2, True, 4) and not are_fewer(placement, [half] * 4, True, 4)


def _clamped() -> torch.Tensor:
    """What a row has lost to 16 bags on two ranks, each of which wants 3 / 2 of it."""
    config = EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="t", feature_names=["f"])
    env, module = env_of("dp2"), EmbeddingBagCollection([config])
    attach(module, "sgd")
    model = dmp.DistributedModelParallel(module, env=env, plan={"embedding_bags.t.weight": data_parallel()})
    group = model.fused_optimizer.param_groups[0]
    group |= {"gradient_clipping": True, "max_gradient": 1.0}
    before = dmp.full_state_dict(model)["embedding_bags.t.weight"].clone()
    ids = KeyedJaggedTensor(["f"], torch.zeros(8, dtype=torch.int64), lengths=torch.ones(8, dtype=torch.int64))
    (3 * model(ids).values()).sum().backward()
    return (before - dmp.full_state_dict(model)["embedding_bags.t.weight"])[0] / group["lr"]


def test_gradients_of_copied_tables_are_clamped_before_they_are_summed() -> None:
    for change in run_ranks(2, _clamped):
        assert torch.allclose(change, torch.full((4,), 16.0))
