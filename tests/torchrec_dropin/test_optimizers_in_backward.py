"""In-backward optimizers as TorchRec's users ask for them, in whole models on ranks: clipping, options, state."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmp
from dmp import DistributedModelParallel, ShardingEnv, column_wise, data_parallel, row_wise, table_wise
from tests.equality import LR, attach, env_of, layouts_for, make_batch, make_module
from tests.ranks import run_ranks
from tests.results import is_empty, loss_of
from tests.row_oracles import CASES, Case

BOUND = 0.02


def fused(kind: str, plan: Any, env: ShardingEnv, **params: Any) -> DistributedModelParallel:
    """A module of `tests.equality` with the `fused_params` of TorchRec's sharder."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    sharders = [EmbeddingBagCollectionSharder(params), EmbeddingCollectionSharder(params)]
    return DistributedModelParallel(make_module(kind), env, plan=plan, sharders=sharders)


def clamped_oracle(kind: str, ranks: int, steps: int) -> tuple[dict[str, torch.Tensor], bool]:
    """Weights after SGD on the whole batch with every element of the results' gradients clamped; whether any was."""
    module, was_clamped = make_module(kind), False

    def clamp(grad: torch.Tensor) -> torch.Tensor:
        nonlocal was_clamped
        was_clamped |= bool((grad.abs() > BOUND).any())
        return grad.clamp(-BOUND, BOUND)

    for step in range(steps):
        for rank in range(ranks):
            batch = make_batch(kind, rank, step)
            if is_empty(batch):
                continue
            out = module(*batch)
            values = [out.values()] if kind.startswith("ebc") else [each.values() for each in out.values()]
            for value in values:
                if value.requires_grad:
                    value.register_hook(clamp)
            (loss_of(out) / ranks).backward()
        for p in module.parameters():
            if p.grad is not None:
                p.data -= LR * p.grad
                p.grad = None
    return {name: p.detach() for name, p in module.named_parameters()}, was_clamped


def clipped(kind: str, layouts: Iterable[str]) -> None:
    env = env_of("dp2")
    expected, was_clamped = clamped_oracle(kind, env.size, 2)
    assert was_clamped
    for name in layouts:
        plan = {
            n: layouts_for(env)[name](i, tuple(p.shape), env)
            for i, (n, p) in enumerate(make_module(kind).named_parameters())
        }
        params = {"learning_rate": LR, "gradient_clipping": True, "max_gradient": BOUND}
        model = fused(kind, plan, env, **params)
        for step in range(2):
            loss_of(model(*make_batch(kind, env.rank, step))).backward()
        for key, value in dmp.full_state_dict(model).items():
            torch.testing.assert_close(value, expected[key], msg=lambda m, key=key, name=name: f"{name} {key}: {m}")


@pytest.mark.parametrize("kind", ["ebc", "ebc_weighted", "ec"])
def test_gradients_of_results_are_clamped_whatever_the_plan(kind: str) -> None:
    """Sums, means (before they are divided), weighted bags and rows; data-parallel tables too."""
    run_ranks(2, clipped, kind, ["row_wise", "mixed", "data_parallel"])


def stepped(
    module: nn.Module, case: Case, options: dict[str, Any], state: dict[Any, Any], step: int, ranks: int
) -> None:
    """One step of the unsharded module on the whole batch, row by row."""
    for rank in range(ranks):
        batch = make_batch("ebc", rank, step)
        if not is_empty(batch):
            (loss_of(module(*batch)) / ranks).backward()
    with torch.no_grad():
        for name, p in module.named_parameters():
            assert p.grad is not None
            for row in p.grad.any(1).nonzero().view(-1).tolist():
                case.step(p[row], p.grad[row], state.setdefault((name, row), {}), options, step + 1)
            p.grad = None


def live(name: str, changes: list[dict[str, Any]]) -> None:
    case, env = CASES[name], env_of("dp2")
    module, oracle = make_module("ebc"), make_module("ebc")
    case.attach(list(module.parameters()))
    model = DistributedModelParallel(module, env, plan={n: row_wise() for n, _ in module.named_parameters()})
    options, state = dict(case.options), {}
    for step, change in enumerate(changes):
        for group in model.fused_optimizer.param_groups:
            group.update(change)
        options.update(change)
        options.update({k: {"none": 0, "l2": 1, "decouple": 2}.get(v, v) for k, v in options.items()})
        loss_of(model(*make_batch("ebc", env.rank, step))).backward()
        stepped(oracle, case, options, state, step, env.size)
        whole = dmp.full_state_dict(model)
        for key, p in oracle.named_parameters():
            torch.testing.assert_close(whole[key], p.detach(), msg=lambda m, key=key, step=step: f"{step} {key}: {m}")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "rowwise_l2",
            [{"weight_decay": 0.0}, {"weight_decay": 0.3}, {"weight_decay_mode": 2}, {"max_norm": 0.5}],
        ),
        ("lars_decay", [{}, {"weight_decay": 0.0, "momentum": 0.2}, {"eta": 0.1}]),
        ("lamb", [{"weight_decay": 0.3}, {"weight_decay": 0.0}]),
    ],
)
def test_options_take_effect_at_the_next_backward(name: str, changes: list[dict[str, Any]]) -> None:
    run_ranks(2, live, name, changes)


PLANS: dict[str, list[Any]] = {
    "whole_rows": [row_wise(), data_parallel(), table_wise(1), row_wise([1, 0]), table_wise(0)],
    "other": [table_wise(1), row_wise(), row_wise([1, 0]), data_parallel(), table_wise(1)],
    "columns": [column_wise([0, 1]), table_wise(0), column_wise([1, 0]), column_wise([0, 1]), table_wise(1)],
}


def planned(name: str, layouts: str, seed: int = 7) -> DistributedModelParallel:
    module = make_module("ebc", seed)
    CASES[name].attach(list(module.parameters()))
    plan = dict(zip(dict(module.named_parameters()), PLANS[layouts], strict=True))
    return DistributedModelParallel(module, env_of("dp2"), plan=plan)


def train(model: DistributedModelParallel, steps: range) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    for step in steps:
        loss_of(model(*make_batch("ebc", model.env.rank, step))).backward()
    return dmp.full_state_dict(model), dmp.full_optimizer_state_dict(model)["state"]


def saved_and_loaded(path: str, name: str) -> None:
    model = planned(name, "whole_rows")
    before = train(model, range(2))
    dmp.save_checkpoint(path, model)
    twin = copy.deepcopy(model)
    after = train(model, range(2, 4))
    assert not any(torch.equal(v, after[0][k]) for k, v in dmp.full_state_dict(twin).items() if v.numel() > 4)
    torch.testing.assert_close(train(twin, range(2, 4)), after, rtol=0, atol=0)
    for layouts in ("other", "columns"):
        loaded = planned(name, layouts, seed=1)
        train(loaded, range(1))
        dmp.load_checkpoint(path, loaded)
        torch.testing.assert_close(train(loaded, range(0)), before, rtol=1e-6, atol=0)
        later = train(loaded, range(2, 4))
        if layouts == "other":
            torch.testing.assert_close(later, after, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["rowwise_l2", "adam_decay", "partial_adam_decay", "lamb", "partial_lamb", "lars_decay"]
)
@pytest.mark.sampled(6)
def test_state_goes_into_other_plans_and_copies(name: str, tmp_path: Path) -> None:
    run_ranks(2, saved_and_loaded, str(tmp_path / "saved"), name)


def averaged() -> None:
    from sharders import EmbeddingBagCollectionSharder

    env, module = env_of("replicate2"), make_module("ebc")
    CASES["lamb_decay"].attach(list(module.parameters()))
    plan = {n: table_wise(0) for n, _ in module.named_parameters()}
    model = DistributedModelParallel(module, env, plan=plan, sharders=[EmbeddingBagCollectionSharder(sync_interval=2)])
    for step in range(2):
        loss_of(model(*make_batch("ebc", env.rank, step))).backward()
    for name, states in model.fused_optimizer.state_dict()["state"].items():
        for tensor in (model.state_dict()[name], *states.values()):
            dist.all_reduce(total := tensor.clone())
            torch.testing.assert_close(total, 2 * tensor)


def test_replicas_that_are_averaged() -> None:
    run_ranks(2, averaged)


def test_options_of_a_sharder_reach_tables_with_an_optimizer_of_their_own() -> None:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    module, sharder = (
        make_module("ebc"),
        EmbeddingBagCollectionSharder({"gradient_clipping": True, "learning_rate": 9.0}),
    )
    attach(module, "adagrad")
    (group,) = DistributedModelParallel(module, ShardingEnv.single(), sharders=[sharder]).fused_optimizer.param_groups
    assert (group["gradient_clipping"], group["lr"], group["eps"]) == (True, LR, 1e-10)
