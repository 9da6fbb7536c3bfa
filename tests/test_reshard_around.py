"""What is around `model.reshard(plan)`: what it refuses, what goes on, what travels, and what refers to the tables."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmp
from dmp import (
    DistributedModelParallel,
    PlanError,
    RanksError,
    ShardError,
    ShardingEnv,
    column_wise,
    data_parallel,
    full_state_dict,
    load_checkpoint,
    replicate,
    row_wise,
    save_checkpoint,
    table_wise,
)
from planner import ShardingPlanner
from sharders import default_sharders
from tests.ranks import mesh, run_apart, run_ranks
from tests.state_jobs import TABLES, Ranker, assert_same, build, dense_optimizer, make, my_batch, train, whole

ROW_WISE = dict.fromkeys(TABLES, row_wise())
TABLE_WISE = {name: table_wise(i % 2) for i, name in enumerate(TABLES)}


def built(kind: str = "adagrad", layout: str = "row_wise") -> Any:
    return build(layout, kind, (2,), None)


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    return model(my_batch(step, model.env)).square().mean()


def state_of(model: Any) -> dict[str, Any]:
    """Everything of a model that a failed call must leave as it is."""
    return {
        "plan": model.plan,
        "parameters": {name: id(p) for name, p in model.named_parameters()},
        "values": {name: p.detach().clone() for name, p in model.named_parameters()},
        "groups": [id(group) for group in model.fused_optimizer.param_groups],
    }


def assert_unchanged(model: Any, before: dict[str, Any]) -> None:
    now = state_of(model)
    assert all(torch.equal(now["values"].pop(name), value) for name, value in before.pop("values").items())
    now.pop("values")
    assert now == before
    loss_of(model).backward()


# ---- in the workers ----


def as_unsharded(kind: str) -> None:
    """Four steps with a change of plan after two, and another after three."""
    plain, model = make(kind), built(kind)
    of_plain, optimizer = dense_optimizer(plain, kind), dense_optimizer(model, kind)
    train(model, optimizer, range(2), model.env)
    done = model.reshard({TABLES[0]: column_wise([1, 0]), TABLES[2]: data_parallel()}, optimizer)
    assert done.moved == (TABLES[0], TABLES[2]) and model.plan[TABLES[1]].layout == row_wise()
    train(model, optimizer, range(2, 3), model.env)
    model.reshard(TABLE_WISE, optimizer=[optimizer])
    train(model, optimizer, range(3, 4), model.env)
    train(plain, of_plain, range(4), ShardingEnv.single())
    assert_same(whole(model, optimizer), whole(plain, of_plain), exact=False)
    model.eval()
    plain.eval()
    with torch.no_grad():
        model.reshard(ROW_WISE, optimizer)
        half = slice(None, 4) if model.env.rank == 0 else slice(4, None)
        everything = plain(my_batch(9, ShardingEnv.single()))
        torch.testing.assert_close(model(my_batch(9, model.env)), everything[half], rtol=1e-4, atol=1e-5)


def counts_bytes() -> None:
    """Row-wise to table-wise: half of each table changes its rank, with its state."""
    model = built("adagrad")
    table = model.env.table_rank
    sent: list[int] = []
    original = dist.all_to_all_single

    def counting(out: Any, given: Any, *args: Any, **options: Any) -> Any:
        splits = args[1] if len(args) > 1 else None
        if given.dtype == torch.uint8:
            sent.append(sum(n for rank, n in enumerate(splits) if rank != table))
            assert given.numel() <= dmp.moving.mover.BUFFER_BYTES // 2
            assert splits[table] == 0, "what a rank keeps does not travel"
        return original(out, given, *args, **options)

    dist.all_to_all_single = counting
    try:
        done = model.reshard(TABLE_WISE)
    finally:
        dist.all_to_all_single = original
    # 10, 7 and 5 rows of 16 floats; blocks of 5, 4 and 3 rows on rank 0. Weights, and sums of the same size.
    of_rank = [4 * 16 * 4 * 2, (5 + 2) * 16 * 4 * 2]
    assert list(done.sent_bytes) == of_rank and of_rank[table] <= sum(sent) <= of_rank[table] + 16 * 8
    whole_bytes = (10 + 7 + 5) * 16 * 4 * 2 + 2 * 3 * 4  # and a step for each table, which each rank has
    assert sum(done.sent_bytes) + sum(done.kept_bytes) == whole_bytes
    again = model.reshard(TABLE_WISE)
    assert again.moved == () and not any(again.sent_bytes)


class Large(nn.Module):
    """A table of 100 MB, whose rows and columns travel in many pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(400_000, 64, mode="sum")


def bounded_memory() -> None:
    """Beside the old shards a rank needs its new ones and a buffer."""
    env = ShardingEnv.from_mesh(mesh((2,)))
    model = DistributedModelParallel(Large(), env, plan={"table.weight": row_wise()})
    before = {name: value.clone() for name, value in full_state_dict(model).items()}
    live: dict[int, int] = {}
    largest = 0

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and type(out) is torch.Tensor and out.device.type == "cpu":
                storage = out.untyped_storage()
                live[storage.data_ptr()] = storage.nbytes()
                largest = max(largest, storage.nbytes() if out.dtype == torch.uint8 else 0)
            return out

    with Counting():
        done = model.reshard({"table.weight": column_wise([1, 0])})
    half = 400_000 * 32 * 4
    own = model.module.table.weight.untyped_storage().data_ptr()
    made = [n for at, n in live.items() if n > 1 << 20]
    assert live[own] == half and largest <= 8 << 20
    assert sum(n for n in made if n != half) <= 16 << 20
    assert done.sent_bytes == (half // 2, half // 2)
    assert torch.equal(full_state_dict(model)["table.weight"], before["table.weight"])


def refuses() -> None:
    """Each bad call is an error that names what and where, on all ranks, and changes nothing."""
    model = built()
    rank, before = model.env.rank, state_of(model)
    cases: list[tuple[Any, str]] = [
        ({"ebc.embedding_bags.t9.weight": row_wise()}, "t9.*does not have; did you mean"),
        ({TABLES[0]: table_wise(7)}, "rank 7"),
        ({TABLES[0]: replicate()}, "a dense weight.*save_checkpoint"),
        ({"over.weight": row_wise()}, "over.weight.*layouts of tables alone"),
        ({TABLES[0]: table_wise(rank)}, "ranks disagree on plan"),
        ({TABLES[0]: table_wise(rank + 1)}, "rank 1: .*rank 2"),
        ([TABLES[0]], "expected a ShardingPlan or a dict"),
    ]
    for plan, said in cases:
        with pytest.raises(PlanError, match=f"(?s){said}"):
            model.reshard(plan)
    with pytest.raises(ShardError, match=r"expected an optimizer over .*torch\.nn\.modules\.linear\.Linear"):
        model.reshard(TABLE_WISE, model.module.out)
    if rank:
        model.module.ebc.resharded = lambda plan: torch.empty(1 << 60)
    with pytest.raises(PlanError, match=r"model\.reshard: rank 1: RuntimeError: .*memory"):
        model.reshard(TABLE_WISE)
    vars(model.module.ebc).pop("resharded", None)
    with pytest.raises(PlanError, match="ranks disagree on optimizers"):
        model.reshard(TABLE_WISE, dense_optimizer(model, "none") if rank else None)
    assert_unchanged(model, before)


def refuses_what_is_under_way() -> None:
    """A begun call, a forward without its backward, a call from inside the forward or the backward."""
    model = built()
    call = model.module.ebc.begin(my_batch(0, model.env))
    loss = loss_of(model)
    model.reshard(TABLE_WISE)
    with pytest.raises(ShardError, match=r"began before it was .*resharded; begin the batch again"):
        model.module.ebc.finish(call)
    with pytest.raises(ShardError, match="gradients of a forward from before model"):
        loss.backward()  # which leaves torch's DDP in the middle of it
    model = built()
    inside = model.module.over.register_forward_hook(lambda *_: model.reshard(ROW_WISE) and None)
    with pytest.raises(ShardError, match="inside the model's forward"):
        loss_of(model)
    inside.remove()
    loss = loss_of(model)
    loss.register_hook(lambda grad: model.reshard(ROW_WISE) and None)
    with pytest.raises(ShardError, match="inside the model's backward"):
        loss.backward()


def optimizers_follow() -> None:
    """One that is left out refuses to step where it has state; one without any follows; gradients move along."""
    model = built("none")
    left_out, fresh = dense_optimizer(model, "none"), torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, left_out, range(1), model.env)
    loss_of(model, 1).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if "ebc" not in name}
    twin = copy.deepcopy(model)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.grad = mine.grad.clone()
    old = dict(model.named_parameters())
    model.reshard(TABLE_WISE)
    with pytest.raises(ShardError, match=r"AdamW was made before model.reshard\(plan\).*t0.*Pass it there"):
        left_out.step()
    assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters() if name in grads)
    assert all((p is old[name]) == (name not in TABLES) for name, p in model.named_parameters())
    fresh.step()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    mine, other = full_state_dict(model), full_state_dict(twin)
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def users_things_stay() -> None:
    """Modules, hooks, modes, schedulers, copies, frozen tables; what a user has put on a parameter."""
    model = built("sgd")
    ebc, weight = model.module.ebc, model.module.ebc.embedding_bags["t0"].weight
    holder, seen = model.module.ebc.embedding_bags["t0"], []
    ebc.register_forward_hook(lambda *_: seen.append(1))
    weight.note = "mine"
    scheduler = torch.optim.lr_scheduler.ExponentialLR(model.fused_optimizer, 0.5)
    model.reshard({TABLES[0]: data_parallel(), TABLES[1]: table_wise(1)})
    assert model.module.ebc is ebc and ebc.embedding_bags["t0"] is holder
    assert holder.weight is not weight and holder.weight.note == "mine" and holder.weight.shape == (10, 16)
    assert weight.isnan().all(), "who holds the old one reads no number of before"
    model.fused_optimizer.step()
    scheduler.step()
    before, twin = full_state_dict(model), copy.deepcopy(model)
    loss_of(model).backward()
    assert seen == [1]
    rates = [group["lr"] for group in model.fused_optimizer.param_groups]
    assert rates == [0.05], "one optimizer, one group, whatever the layouts"
    plain = make("sgd")
    plain.load_state_dict(before)
    for p in plain.ebc.parameters():
        p._in_backward_optimizers[0].param_groups[0]["lr"] = 0.05  # type: ignore[attr-defined]
    plain(my_batch(0, ShardingEnv.single())).square().mean().backward()
    after = full_state_dict(model)
    for name in TABLES:
        torch.testing.assert_close(after[name], plain.state_dict()[name])
    loss_of(twin).backward()
    assert all(torch.equal(value, after[name]) for name, value in full_state_dict(twin).items())


def nothing_is_left() -> None:
    """Old tables go, although somebody holds their parameters; begun calls and gradients with them."""
    model = built("none")
    stores = [weakref.ref(model.module.ebc._engine.store)]
    held = [*model.module.ebc.parameters()]
    loss_of(model).backward()
    for plan in (TABLE_WISE, ROW_WISE, TABLE_WISE):
        model.reshard(plan)
        stores.append(weakref.ref(model.module.ebc._engine.store))
    gc.collect()
    assert [store() is not None for store in stores] == [False, False, False, True]
    assert all(p.grad is None and p.untyped_storage().nbytes() <= 4 for p in held)


def half_precision() -> None:
    """Tables that were cast after wrapping, and a frozen one."""
    module = make("none")
    module.ebc.embedding_bags["t1"].weight.requires_grad_(False)
    model = DistributedModelParallel(module, ShardingEnv.from_mesh(mesh((2,))), plan=ROW_WISE)
    model.module.ebc.to(torch.bfloat16)
    before = full_state_dict(model)
    model.reshard({TABLES[0]: table_wise(1), TABLES[1]: column_wise([0, 1]), TABLES[2]: column_wise([1, 1])})
    after = full_state_dict(model)
    assert after[TABLES[0]].dtype == torch.bfloat16 and all(torch.equal(after[n], before[n]) for n in before)
    assert [p.requires_grad for p in model.module.ebc.parameters()] == [True, False, True]
    loss_of(model).backward()


def an_optimizer_of_what_is_here() -> None:
    """One made of what is not empty on this rank would not train what comes to it: told before anything moves."""
    model = built("none", layout="table_wise")
    optimizer = torch.optim.Adagrad([p for p in model.parameters() if p.numel()])
    loss_of(model).backward()
    optimizer.step()
    with pytest.raises(PlanError, match=r"Adagrad of this rank lacks 'ebc.*, which that of another rank has"):
        model.reshard(ROW_WISE, optimizer)
    loss_of(model).backward()


def an_optimizer_of_what_is_here_left_out() -> None:
    """The same where it was not passed, and has not stepped; one of all parameters trains what comes to its rank."""
    model = built("none", layout="table_wise")
    optimizer = torch.optim.Adagrad([p for p in model.parameters() if p.numel()])
    with pytest.raises(PlanError, match=r"no optimizer of this rank has 'ebc.*, which one of another rank has"):
        model.reshard(ROW_WISE)
    del optimizer
    optimizer = torch.optim.Adagrad(model.parameters())
    model.reshard(ROW_WISE)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if name in TABLES}
    loss_of(model).backward()
    optimizer.step()
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in TABLES)


def planned(folder: str) -> None:
    """A planner's plan for the plain model; checkpoints before and after fit both."""
    model = built()
    save_checkpoint(f"{folder}/before", model)
    kept = full_state_dict(model)
    plan = ShardingPlanner().collective_plan(make(), default_sharders(), model.env)
    assert model.reshard(plan).plan == plan == model.plan
    model.reshard(dict.fromkeys(TABLES, table_wise(0)))  # rank 1 has nothing
    save_checkpoint(f"{folder}/after", model)
    loss_of(model).backward()
    other = built(layout="column_wise")
    for each, path in ((model, "before"), (other, "after")):
        load_checkpoint(f"{folder}/{path}", each)
        assert all(torch.equal(value, kept[name]) for name, value in full_state_dict(each).items())


def one_does_not_call() -> str:
    model = built()
    began = time.monotonic()
    try:
        if dist.get_rank():
            model.reshard(TABLE_WISE)
        else:
            loss_of(model)
    except RanksError as error:
        assert time.monotonic() - began < 20
        return str(error)
    return "nothing"


# ---- in the parent ----


@pytest.mark.parametrize("kind", ["adagrad", "none"])
def test_equals_the_unsharded(kind: str) -> None:
    run_ranks(2, as_unsharded, kind)


JOBS = [counts_bytes, refuses, refuses_what_is_under_way, optimizers_follow, users_things_stay, half_precision]
JOBS += [an_optimizer_of_what_is_here, an_optimizer_of_what_is_here_left_out]


@pytest.mark.parametrize("job", [*JOBS, nothing_is_left], ids=lambda job: job.__name__)
def test_two_ranks(job: Any) -> None:
    run_ranks(2, job)


def test_planned_and_saved(tmp_path: Path) -> None:
    run_ranks(2, planned, str(tmp_path))


@pytest.mark.slow
def test_memory_is_bounded() -> None:
    run_ranks(2, bounded_memory)


@pytest.mark.slow
def test_a_rank_that_does_something_else_is_told() -> None:
    for said in run_apart(2, one_does_not_call):
        assert "model.reshard" in said and "the forward of 'ebc'" in said, said


def test_alone() -> None:
    module = Ranker()
    model = DistributedModelParallel(module, plan=dict.fromkeys(TABLES, table_wise(0)))
    before = full_state_dict(model)
    done = model.reshard({TABLES[0]: column_wise([0, 0]), TABLES[1]: data_parallel()})
    assert done.sent_bytes == (0,) and done.kept_bytes == (sum(4 * 16 * n for n in (10, 7, 5)),)
    assert all(torch.equal(value, before[name]) for name, value in full_state_dict(model).items())
