"""Tables on a mesh with a tensor axis: the same samples along it, sharded lookups, and results as if unsharded.

The whole matrix of layouts and optimizers on these meshes is in test_equality.py, marked slow; here is a sample of it.
"""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmp
from dmp import InputError, ShardingEnv, column_wise, data_parallel, row_wise, table_wise
from sharders import EmbeddingBagCollectionSharder
from sharders.embedding.exchange.replicas import Replicas
from tests.equality import (
    KINDS,
    LR,
    MESHES,
    OPTIMIZERS,
    attach,
    check_case,
    env_of,
    layouts_for,
    loss_of,
    make_batch,
    make_module,
    same_result,
)
from tests.ranks import mesh, run_ranks
from tests.test_collectives import counts

TENSOR_MESHES = [name for name, (shape, names) in MESHES.items() if "tp" in names and math.prod(shape) <= 4]


def _sample_of_cases(mesh_name: str) -> list[str]:
    """Three layouts for each kind of module, with optimizers in turn."""
    env = env_of(mesh_name)
    cases = layouts_for(env)
    others = [n for n in cases if n != "mixed"]
    failed = []
    for i, kind in enumerate(KINDS):
        turn = i + TENSOR_MESHES.index(mesh_name)
        for name, optimizer in (
            ("mixed", OPTIMIZERS[turn % len(OPTIMIZERS)]),
            (others[turn % len(others)], OPTIMIZERS[(turn + 2) % len(OPTIMIZERS)]),
            (others[(turn + 5) % len(others)], OPTIMIZERS[(turn + 4) % len(OPTIMIZERS)]),
        ):
            try:
                check_case(kind, cases[name], optimizer, env)
            except AssertionError as error:
                failed.append(f"{kind} {mesh_name} {name} {optimizer}: {str(error)[:400]}")
    return failed


@pytest.mark.parametrize("mesh_name", TENSOR_MESHES)
@pytest.mark.sampled(5)
def test_equals_unsharded(mesh_name: str) -> None:
    failed = run_ranks(math.prod(MESHES[mesh_name][0]), _sample_of_cases, mesh_name)
    assert not any(failed), "\n".join(sorted({line for of_rank in failed for line in of_rank}))


def _wrap(
    module: nn.Module, env: ShardingEnv, layout: str = "mixed", **options: object
) -> dmp.DistributedModelParallel:
    layouts = layouts_for(env)[layout]
    plan = {n: layouts(i, tuple(p.shape), env) for i, (n, p) in enumerate(module.named_parameters())}
    return dmp.DistributedModelParallel(module, env=env, plan=plan, **options)  # type: ignore[arg-type]


def _bits_equal(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, tensor.detach().contiguous(), group=group)
    return all(torch.equal(o, tensor) for o in others)


def _results_are_equal(kind: str) -> None:
    env = env_of("shard2xtp2")
    model = _wrap(make_module(kind), env)
    for step in range(3):
        out = model(*make_batch(kind, env.data_rank, step))
        tensors = (
            [out] if isinstance(out, torch.Tensor) else [*out.values()] if isinstance(out, dict) else [out.values()]
        )
        for t in tensors:
            assert _bits_equal(t if isinstance(t, torch.Tensor) else t.values(), env.group("tensor"))


@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_results_are_equal_to_the_bit_along_the_axis(kind: str) -> None:
    run_ranks(4, _results_are_equal, kind)


def _twice_frozen_and_in_double() -> None:
    """One module called twice in a step; then evaluation; float64 to 1e-12; the last table is frozen."""
    env = env_of("shard2xtp2")
    plain, module = (make_module("ebc").double() for _ in range(2))
    for m in (plain, module):
        [*m.parameters()][-1].requires_grad_(False)
    attach_to = [p for p in module.parameters() if p.requires_grad]
    model = _wrap(module, env)
    both = [[make_batch("ebc", r, step) for step in (0, 2)] for r in range(env.data_size)]
    losses = []
    for batches in both:
        results = [plain(*copy.deepcopy(b)).values().double() for b in batches if b[0].stride()]  # type: ignore[attr-defined]
        losses.append(sum((loss_of(v) for v in results), torch.zeros((), dtype=torch.float64)))
    (sum(losses) / len(both)).backward()  # type: ignore[union-attr]
    mine = [model(*b).values() for b in both[env.data_rank]]
    sum(loss_of(v) for v in mine).backward()  # type: ignore[union-attr]
    assert len(attach_to) == 4
    ordinary = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    ordinary.step()
    torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=LR).step()
    whole = dmp.full_state_dict(model)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(whole[name], p.detach(), atol=1e-6, rtol=1e-6)
    model.eval()
    batch = both[0][0]
    with torch.no_grad():
        out = model(*both[env.data_rank][0])
        assert not out.values().requires_grad
        if env.data_rank == 0:
            same_result(out, plain(*batch))


def test_called_twice_frozen_double_and_evaluation() -> None:
    run_ranks(4, _twice_frozen_and_in_double)


def _double_bag() -> None:
    """float64 tables, results and gradients: nothing on the way is float32."""
    env = env_of("tp2")
    torch.manual_seed(3)
    plain = nn.EmbeddingBag(23, 8, mode="mean", dtype=torch.float64)
    model = dmp.DistributedModelParallel(copy.deepcopy(plain), env=env, plan={"weight": column_wise([1, 0])})
    ids, offsets, _ = make_batch("bag_mean", 0, 3)
    expected, out = plain(ids, offsets), model(ids, offsets)
    torch.testing.assert_close(out, expected, atol=1e-14, rtol=1e-14)
    for one, result in ((plain, expected), (model, out)):
        (result * result).sum().backward()
        torch.optim.SGD(one.parameters(), lr=LR).step()
    torch.testing.assert_close(dmp.full_state_dict(model)["weight"], plain.weight.detach(), atol=1e-14, rtol=1e-14)


def test_double() -> None:
    run_ranks(2, _double_bag)


def _averaged(interval: int) -> None:
    """Each copy is a data rank here: it trains on its batch alone; every `interval` updates both are the mean."""
    env = env_of("replicate2xtp2")
    module = make_module("ebc")
    attach(module, "sgd")
    sharder = EmbeddingBagCollectionSharder(sync_interval=interval)
    model = _wrap(module, env, sharders=[sharder])
    plain = [make_module("ebc") for _ in range(env.data_size)]
    for step in range(2 * interval):
        for r, one in enumerate(plain):
            batch = make_batch("ebc", r, step)
            if batch[0].stride():  # type: ignore[attr-defined]
                loss_of(one(*batch)).backward()
            torch.optim.SGD(one.parameters(), lr=LR).step()
            one.zero_grad()
        if (step + 1) % interval == 0:
            with torch.no_grad():
                for together in zip(*(one.parameters() for one in plain), strict=True):
                    mean = torch.stack(list(together)).mean(0)
                    for p in together:
                        p.copy_(mean)
        loss_of(model(*make_batch("ebc", env.data_rank, step))).backward()
        expected = dict(plain[env.data_rank].named_parameters())
        for name, value in model.state_dict().items():
            chunks = zip(value.chunks, value.offsets, strict=True) if isinstance(value, dmp.ChunkedTensor) else []
            for chunk, at in chunks:
                part = expected[name].detach()[tuple(slice(o, o + n) for o, n in zip(at, chunk.shape, strict=True))]
                torch.testing.assert_close(chunk.detach(), part, atol=1e-5, rtol=1e-5)
            if not isinstance(value, dmp.ChunkedTensor):
                torch.testing.assert_close(value.detach(), expected[name].detach(), atol=1e-5, rtol=1e-5)


def test_replicas_averaged_every_interval() -> None:
    run_ranks(4, _averaged, 2)


def _mean_factor(mesh_name: str, interval: int) -> float:
    env = env_of(mesh_name)
    module = make_module("bag")
    attach(module, "sgd")
    from sharders import EmbeddingBagSharder

    model = _wrap(module, env, "row_wise", sharders=[EmbeddingBagSharder(sync_interval=interval)])
    replicas: Replicas = model.module._engine.path.replicas  # type: ignore[union-attr,assignment]
    return replicas.mean_factor


@pytest.mark.parametrize(
    ("mesh_name", "interval", "batches"),
    [("tp2", 1, 1), ("shard2xtp2", 1, 2), ("shard2xtp2", 5, 2), ("replicate2xtp2", 1, 2), ("replicate2xtp2", 5, 1)],
)
@pytest.mark.sampled(2)
def test_gradients_are_means_over_batches_not_ranks(mesh_name: str, interval: int, batches: int) -> None:
    world = math.prod(MESHES[mesh_name][0])
    assert set(run_ranks(world, _mean_factor, mesh_name, interval)) == {1 / batches}


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")  # the counter puts hooks on every module
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(("kind", "in_backward"), [("ebc", 1), ("ec", 1), ("embedding", 1), ("bag_mean", 1)])
@pytest.mark.sampled(2)
def test_collectives(kind: str, in_backward: int) -> None:
    for of_rank in run_ranks(2, _counts, "tp2", kind):
        assert of_rank == dict.fromkeys(of_rank, (3, in_backward))  # one more than on a shard axis, for the results


def _counts(mesh_name: str, kind: str) -> dict[str, tuple[int, int]]:
    env = env_of(mesh_name)
    result = {}
    for name in ("row_wise", "mixed", "column_wise"):
        module = make_module(kind)
        attach(module, "adagrad")
        both = [counts(_wrap(module, env, name), make_batch(kind, env.data_rank, 0))]
        result[name] = both[0]
    return result


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_an_axis_of_one_rank_costs_nothing() -> None:
    assert run_ranks(2, _counts_of_one) == run_ranks(2, _counts, "dp2", "ebc")


def _counts_of_one() -> dict[str, tuple[int, int]]:
    env = ShardingEnv.from_mesh(mesh((2, 1), ("dp", "tp")))
    result = {}
    for name in ("row_wise", "mixed", "column_wise"):
        module = make_module("ebc")
        attach(module, "adagrad")
        result[name] = counts(_wrap(module, env, name), make_batch("ebc", env.rank, 0))
    return result


def _mismatched(kind: str, change: str) -> list[str]:
    """Calls that each end in the same error on every rank, then a good one."""
    env = env_of("shard2xtp2")
    model = _wrap(make_module(kind), env, "row_wise")
    tp = env.coordinate[1]
    if change == "sampler over all ranks":
        batch = make_batch(kind, env.rank, 2)
    else:  # only the last data rank's group differs, in one id or in the order
        ids = torch.tensor([4, 2, 9, 0])
        if env.coordinate == (1, 1):
            ids = torch.tensor([4, 2, 9, 1] if change == "one id" else [2, 4, 9, 0])
        offsets = torch.tensor([0, 1, 3] if (change == "offsets" and tp) else [0, 2, 3])
        batch = (ids,) if kind == "embedding" else (ids, offsets)
    with pytest.raises(InputError) as error:
        model(*batch)
    good = model(*make_batch(kind, env.data_rank, 0))
    same_result(good, make_module(kind)(*make_batch(kind, env.data_rank, 0)))
    return [str(error.value)]


@pytest.mark.parametrize(
    ("kind", "change", "ranks"),
    [
        ("embedding", "sampler over all ranks", "0 and 1"),
        ("embedding", "one id", "2 and 3"),
        ("bag_mean", "order", "2 and 3"),
        ("bag_mean", "offsets", "0 and 1"),
    ],
)
@pytest.mark.sampled(2)
def test_different_batches_along_the_axis(kind: str, change: str, ranks: str) -> None:
    (text,) = {line for of_rank in run_ranks(4, _mismatched, kind, change) for line in of_rank}
    assert f"ranks {ranks} call" in text
    assert "'tp'" in text and "data rank" in text and "env.data_size" in text and "gather_batch" in text


def _bad_id() -> str:
    env = env_of("shard2xtp2")
    model = _wrap(make_module("embedding"), env, "row_wise")
    ids = torch.tensor([1, 2, 99 if env.data_rank == 1 else 3])
    with pytest.raises(InputError, match="has id 99") as error:
        model(ids)
    return str(error.value)


def test_a_bad_id_is_raised_on_all_ranks() -> None:
    assert len(set(run_ranks(4, _bad_id))) == 1


def _learned_weights() -> None:
    """Weights that come out of a layer: the whole batch's gradient reaches it, on every rank the same."""
    env = env_of("tp2")
    plain = make_module("bag_weighted")
    layouts = {"weight": row_wise()}
    ids, offsets = torch.tensor([1, 22, 5, 5, 0, 7, 7]), torch.tensor([0, 0, 6])
    for layout in (layouts, {"weight": table_wise(1)}, {"weight": data_parallel()}):
        model = dmp.DistributedModelParallel(copy.deepcopy(plain), env=env, plan=layout)
        theirs, mine = (torch.linspace(0.1, 2, 7, requires_grad=True) for _ in range(2))
        loss_of(plain(ids, offsets, theirs)).backward()
        loss_of(model(ids, offsets, mine)).backward()
        assert theirs.grad is not None and mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-5)
        assert _bits_equal(mine.grad, env.group("tensor"))


def test_gradient_of_weights() -> None:
    run_ranks(2, _learned_weights)


def _in_place(mesh_name: str) -> None:
    env = env_of(mesh_name)
    layouts = (row_wise(), table_wise(0), column_wise([0, env.table_size - 1]), data_parallel())
    for kind, layout, size in itertools.product(("bag", "embedding"), layouts, (3, 4)):
        plain, module = make_module(kind), make_module(kind)
        model = dmp.DistributedModelParallel(module, env=env, plan={"weight": layout})
        batch = (torch.arange(2 * size), torch.arange(0, 2 * size + 1, 2))[: 2 if kind == "bag" else 1]
        results = [torch.relu_(m(*batch)) for m in (model, plain)]
        torch.testing.assert_close(*results)
        for out in results:
            (out * out).sum().backward()
        optimizers = [torch.optim.SGD(m.parameters(), lr=LR) for m in (model, plain)]
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(dmp.full_state_dict(model)["weight"], plain.weight.detach())


@pytest.mark.parametrize("mesh_name", ["dp1", "dp2", "tp2"])
@pytest.mark.sampled(2)
def test_results_may_be_changed_in_place(mesh_name: str) -> None:
    run_ranks(math.prod(MESHES[mesh_name][0]), _in_place, mesh_name)
