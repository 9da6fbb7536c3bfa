"""`DistributedModelParallel`: construction, names, values, ties and training, beside the unsharded model."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import dmp
from dmp import (
    DistributedModelParallel,
    PlanError,
    ShardError,
    ShardingEnv,
    ShardingPlan,
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from tests.equality import env_of
from tests.ranks import mesh, run_ranks
from tests.wrapped_net import LR, TABLES, Doubled, Net, batch, loss_of, mixed, plan_for, same_values, wrap

# ---- the constructor ----


def test_signature_is_frozen() -> None:
    parameters = inspect.signature(DistributedModelParallel).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "module": inspect.Parameter.empty,
        "env": None,
        "device": None,
        "plan": None,
        "sharders": None,
        "init_data_parallel": True,
        "init_parameters": True,
        "data_parallel_wrapper": None,
        "model_tracker_configs": None,
        "planner": None,
    }
    assert [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY] == ["planner"]
    load = inspect.signature(DistributedModelParallel.load_state_dict).parameters
    assert {n: p.default for n, p in load.items() if n not in ("self", "state_dict")} == {
        "prefix": "",
        "strict": True,
        "assign": False,
    }


class FixedPlanner:
    """Always the mixed plan."""

    def collective_plan(self, module: nn.Module, sharders: Any, env: ShardingEnv, pinned: Any = None) -> ShardingPlan:
        assert isinstance(sharders, list) and isinstance(env, ShardingEnv)
        return ShardingPlan(mixed())


def test_attributes_and_planner() -> None:
    module = Net()
    model = DistributedModelParallel(module, planner=FixedPlanner())
    assert model.module is module and model.plan == ShardingPlan(mixed()) and model.env == ShardingEnv.single()
    assert model.device == torch.device("cpu") and isinstance(model.fused_optimizer, torch.optim.Optimizer)
    with pytest.raises(PlanError, match="a plan or a planner, not both"):
        DistributedModelParallel(Net(), plan=mixed(), planner=FixedPlanner())


def test_defaults_plan_for_themselves() -> None:
    model = DistributedModelParallel(Net())
    assert set(model.plan) == set(TABLES)
    same_values(model, Net())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"module": 3}, ["torch.nn.Module", "int"]),
        ({"module": Net}, ["torch.nn.Module", "the class tests.wrapped_net.Net", "call it"]),
        ({"env": "cpu"}, ["ShardingEnv", "str"]),
        ({"plan": 3}, ["ShardingPlan", "int"]),
        ({"plan": {"users.weight": "row_wise"}}, ["'users.weight'", "'row_wise'"]),
        ({"sharders": [3]}, ["int", "module_type"]),
        ({"sharders": [FixedPlanner]}, ["class FixedPlanner", "call it"]),
    ],
)
def test_wrong_types(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises((ShardError, PlanError)) as error:
        DistributedModelParallel(**{"module": Net(), "plan": mixed(), **arguments})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_plan_that_does_not_fit_leaves_the_module_alone() -> None:
    module = Net()
    before = {name: (id(m), type(m)) for name, m in module.named_modules()}
    with pytest.raises(PlanError, match="'user'"):
        DistributedModelParallel(module, plan={**mixed(), "user": row_wise()})
    assert {name: (id(m), type(m)) for name, m in module.named_modules()} == before


# ---- names, values, ownership ----


def _names(at: str) -> None:
    env = env_of(at)
    plain = Net()
    for seed in (None, 1, 2):
        model = wrap(env, plan_for(env, seed))
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert [n for n, _ in model.named_buffers()] == [n for n, _ in plain.named_buffers()]
        assert list(model.state_dict()) == list(plain.state_dict())
        assert list(model.state_dict(prefix="x.")) == ["x." + n for n in plain.state_dict()]
        outer = nn.Sequential(model)  # and inside another module
        assert [n for n, _ in outer.named_parameters()] == ["0." + n for n, _ in plain.named_parameters()]
        assert list(outer.state_dict()) == ["0." + n for n in plain.state_dict()]
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        held = {n: p.numel() for n, p in model.named_parameters()}
        state = model.state_dict()
        for name in TABLES:
            chunks = state[name].chunks if hasattr(state[name], "chunks") else [state[name]]
            assert held[name] >= sum(c.numel() for c in chunks)  # chunks of several widths have zeros between them
            assert len(chunks) > 1 or held[name] == sum(c.numel() for c in chunks)
            assert state[name].shape == plain.state_dict()[name].shape
        same_values(model, plain)


@pytest.mark.parametrize(("world", "at"), [(2, "dp2"), (4, "replicate2xshard2")])
def test_names_never_change_and_values_are_kept(world: int, at: str) -> None:
    run_ranks(world, _names, at)


class Towers(nn.Module):
    """One table under three paths, two of them through one shared tower."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.left = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
        self.right, self.alone = self.left, self.left[0]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.left(ids) + self.right(ids + 1) + self.alone(ids)


def _shared() -> None:
    env = env_of("dp2")
    for name in ("left.0.weight", "alone.weight", "right.0.weight"):
        oracle, module = Towers(), Towers()
        model = DistributedModelParallel(module, env=env, plan={name: row_wise()})
        assert model.module.left is model.module.right and model.module.alone is model.module.left[0]
        assert list(model.plan) == ["left.0.weight"]
        assert list(model.state_dict()) == list(oracle.state_dict())
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in oracle.named_parameters()]
        optimizers = [torch.optim.SGD(m.parameters(), lr=LR) for m in (model, oracle)]
        for step in range(2):
            (model(batch(env.rank, step) % 8).pow(2).mean()).backward()
            (sum(oracle(batch(r, step) % 8).pow(2).mean() for r in range(2)) / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        same_values(model, oracle)


def test_a_shared_module_stays_one() -> None:
    run_ranks(2, _shared)


class Tied(nn.Module):
    """An embedding whose weight is the last layer's, and a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.table, self.head = nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Linear(4, 9)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids) + self.table(ids))


def _tied() -> None:
    env = env_of("dp2")
    oracle = Tied()
    model = DistributedModelParallel(Tied(), env=env, plan={"table.weight": column_wise([1], widths=[4])})
    optimizers = [torch.optim.SGD(m.parameters(), lr=LR) for m in (model, oracle)]
    for step in range(3):
        model(batch(env.rank, step) % 9).pow(2).mean().backward()
        (sum(oracle(batch(r, step) % 9).pow(2).mean() for r in range(2)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert model.module.head.weight is model.module.words.weight
    same_values(model, oracle)


def test_tied_weights_stay_tied_and_train() -> None:
    run_ranks(2, _tied)


class Named(nn.Embedding):
    """Without a forward of its own."""


def test_subclasses_are_found_unless_they_compute_otherwise() -> None:
    module = nn.Sequential(Named(6, 4), Doubled(6, 4))
    ids = torch.tensor([1, 5])
    expected = copy.deepcopy(module)[0](ids), copy.deepcopy(module)[1](ids)
    model = DistributedModelParallel(module, plan={"0.weight": row_wise()})
    assert type(model.module[0]) is not Named and type(model.module[1]) is Doubled
    assert torch.equal(model.module[0](ids), expected[0]) and torch.equal(model.module[1](ids), expected[1])
    with pytest.raises(PlanError, match=r"'1\.weight', which no sharder takes"):
        DistributedModelParallel(
            nn.Sequential(Named(6, 4), Doubled(6, 4)), plan={"0.weight": row_wise(), "1.weight": row_wise()}
        )


def test_the_root_itself_may_be_sharded() -> None:
    torch.manual_seed(0)
    model = DistributedModelParallel(nn.Embedding(6, 4), plan={"weight": row_wise()})
    torch.manual_seed(0)
    plain = nn.Embedding(6, 4)
    assert list(model.state_dict()) == ["weight"] and [n for n, _ in model.named_parameters()] == ["weight"]
    assert torch.equal(model(torch.tensor([5])), plain(torch.tensor([5])))
    model.load_state_dict(nn.Embedding(6, 4).state_dict())
    copy.deepcopy(model)(torch.tensor([5]))


def _few() -> None:
    env = env_of("dp2")
    dense = DistributedModelParallel(nn.Linear(3, 1), env=env, plan={})
    dense(torch.ones(2, 3)).sum().backward()
    empty = DistributedModelParallel(nn.ReLU(), env=env, plan={})
    assert torch.equal(empty(-torch.ones(2)), torch.zeros(2)) and list(empty.parameters()) == []
    tables = DistributedModelParallel(nn.Embedding(3, 4), env=env, plan={"weight": data_parallel()})
    tables(torch.tensor([1])).sum().backward()
    for model in (dense, empty, tables):
        model.load_state_dict(model.state_dict())
        copy.deepcopy(model)
        assert model.fused_optimizer.state_dict() == {"state": {}, "param_groups": []}


def test_no_tables_no_parameters_and_nothing_but_tables() -> None:
    run_ranks(2, _few)


def test_attributes_of_the_module_show_through() -> None:
    model = wrap()
    assert model.users is model.module.users and model.get_parameter("over.weight") is model.module.over.weight
    with pytest.raises(AttributeError, match="nobody"):
        _ = model.nobody


# ---- hooks and modes ----


def test_hooks_and_mode_are_carried_over() -> None:
    module = Net()
    seen: list[str] = []
    module.users.register_forward_pre_hook(lambda m, args: seen.append("before"))
    module.users.register_forward_hook(lambda m, args, kwargs, out: seen.append("after"), with_kwargs=True)
    module.users.register_forward_hook(lambda m, args, out: out * 0)
    module.users.register_full_backward_hook(lambda m, grad_in, grad_out: seen.append(f"backward {len(grad_out)}"))
    module.items.eval()
    model = DistributedModelParallel(module, plan=mixed())
    assert not model.module.items.training and model.module.users.training
    assert torch.count_nonzero(model.module.users(torch.tensor([[1]]))) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: the inputs of a table have no gradient
        loss_of(model, batch(0)).backward()
    assert seen[:2] == ["before", "after"] and seen[-1] == "backward 1"
    model.eval()
    assert not model.module.training and not model.module.users.training
    assert copy.deepcopy(model).training is False
    assert model.train().module.items.training


# ---- training ----


def _train(at: str, optimizer: str | None, seed: int | None) -> None:
    """Five steps on four-sample batches equal one process on the global batch."""
    env = env_of(at)
    oracle, model = Net(), wrap(env, plan_for(env, seed), optimizer)
    ours = torch.optim.AdamW([p for n, p in model.named_parameters() if optimizer is None or n not in TABLES], lr=0.01)
    theirs = torch.optim.AdamW(
        [p for n, p in oracle.named_parameters() if optimizer is None or n not in TABLES], lr=0.01
    )
    inside = torch.optim.Adagrad(
        [p for n, p in oracle.named_parameters() if optimizer and n in TABLES] or [nn.Parameter(torch.zeros(1))],
        lr=LR,
        eps=1e-10,
    )
    for step in range(5):
        mine = loss_of(model, batch(env.rank, step))
        whole = loss_of(oracle, torch.cat([batch(r, step) for r in range(env.size)]))
        mine.backward()
        whole.backward()
        for o in (ours, theirs, inside):
            o.step()
            o.zero_grad()
        if optimizer:
            assert all(p.grad is None for n, p in model.named_parameters() if n in TABLES)
            oracle.zero_grad()
    same_values(model, oracle)


@pytest.mark.parametrize(
    ("world", "at", "optimizer", "seed"),
    [
        (2, "dp2", None, None),
        (2, "dp2", "adagrad", None),
        (2, "dp2", None, 4),
        (4, "replicate2xshard2", "adagrad", 5),
        (4, "host2xlocal2", None, 6),
    ],
)
@pytest.mark.sampled(2)
def test_equals_one_process(world: int, at: str, optimizer: str | None, seed: int | None) -> None:
    run_ranks(world, _train, at, optimizer, seed)


def test_equals_one_process_in_one_process() -> None:
    _train("single", None, None)
    _train("single", "adagrad", 1)


def _ddp_leaves_tables_alone() -> None:
    env = env_of("dp2")
    model = wrap(
        env, {"users.weight": table_wise(1), "items.weight": row_wise(), "more.weight": column_wise([1, 0], [3, 1])}
    )
    ddp = model.running
    assert isinstance(ddp, nn.parallel.DistributedDataParallel)
    assert ddp.parameters_to_ignore == set(TABLES)
    for step in range(3):
        loss = loss_of(model, batch(env.rank, step))
        with CommDebugMode() as counter:
            loss.backward()
    reduced = sum(n for op, n in counter.get_comm_counts().items() if "allreduce" in str(op))
    assert reduced <= 1, counter.get_comm_counts()  # DDP's one bucket of dense gradients
    dense = [p.grad.clone() for n, p in model.named_parameters() if n not in TABLES]
    for grad in dense:
        mine = grad.clone()
        dist.broadcast(grad, 0)
        assert torch.equal(mine, grad)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:For backward hooks to be called")
def test_ddp_averages_dense_gradients_and_no_others() -> None:
    run_ranks(2, _ddp_leaves_tables_alone)


def _frozen() -> None:
    env = env_of("dp2")
    module = Net()
    module.users.weight.requires_grad_(False)
    model = DistributedModelParallel(module, env=env, plan={**mixed(), "items.weight": row_wise()})
    assert not model.get_parameter("users.weight").requires_grad
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    loss_of(model, batch(env.rank)).backward()
    optimizer.step()
    assert model.get_parameter("users.weight").grad is None
    chunk, at = (model.state_dict()["users.weight"].chunks[0], model.state_dict()["users.weight"].offsets[0])
    assert torch.equal(chunk, Net().users.weight[at[0] : at[0] + len(chunk)])
    assert not torch.equal(model.module.more.weight, Net().more.weight)


def test_frozen_tables_rest() -> None:
    run_ranks(2, _frozen)


# ---- the data-parallel part, later ----


class Lazy(nn.Module):
    """A dense layer that learns its shape from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.over = nn.Embedding(9, 4), nn.LazyLinear(2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.over(self.table(ids))


LAZY = "ignore:Lazy modules are a new feature"


def _lazy(on: str) -> None:
    env = ShardingEnv.from_mesh(mesh((2,), (on,)))
    model = DistributedModelParallel(Lazy(), env=env, plan={"table.weight": row_wise()}, init_data_parallel=False)
    torch.manual_seed(env.rank)
    with torch.no_grad():
        model(torch.tensor([1]))
    model.init_data_parallel()
    wrapped = model.running
    model.init_data_parallel()  # idempotent
    assert model.running is wrapped
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel) == (on == "dp")
    model(batch(env.data_rank) % 9).sum().backward()
    for p in (model.module.over.weight, model.module.over.weight.grad):
        mine = p.full_tensor() if on == "shard" else p.detach().clone()
        of_first = mine.clone()
        dist.broadcast(of_first, 0)
        assert torch.equal(mine, of_first)
    torch.manual_seed(0)
    assert torch.equal(dmp.full_state_dict(model)["over.weight"], nn.Linear(4, 2).weight)  # as rank 0 drew it


@pytest.mark.filterwarnings(LAZY)
def test_lazy_modules() -> None:
    run_ranks(2, _lazy, "dp")
    run_ranks(2, _lazy, "tp")
    run_ranks(2, _lazy, "shard")
    with pytest.raises(ShardError, match=r"'over\.weight'.*lazy.*init_data_parallel=False.*init_data_parallel\(\)"):
        DistributedModelParallel(Lazy(), plan={"table.weight": row_wise()})
