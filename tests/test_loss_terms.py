"""Terms of the loss over tables' own values: gradients are those of one process, or an error says why not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import get_total_norm

from dmp import (
    DistributedModelParallel,
    RanksError,
    ShardError,
    ShardingEnv,
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from dmp.chunked import as_chunks, chunk_views
from dmp.ranks import say_once
from dmp.state.local_chunks import sharded_parameters
from dmp.wrap.values.whole import gather
from tests.ranks import mesh, run_apart, run_ranks
from tests.test_asked import Said
from tests.wrapped_net import Net, batch, loss_of

Term = Callable[[nn.Module], torch.Tensor]


class Cubed(torch.autograd.Function):
    """A user's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 3 * ctx.saved_tensors[0] ** 2


def every(of: Callable[[torch.Tensor], torch.Tensor]) -> Term:
    return lambda m: 0.1 * sum((of(p) for p in m.parameters()), torch.zeros(()))


def users(of: Callable[[torch.Tensor], torch.Tensor]) -> Term:
    return lambda m: of(m.get_parameter("users.weight")) * 0.1


RIGHT: dict[str, Term] = {
    "squares": every(lambda p: p.square().sum()),
    "absolute": every(lambda p: p.abs().sum() / 2),
    "elastic": every(lambda p: (p.abs() + 0.5 * p**2).sum(dtype=torch.float64).float()),
    "huber": every(lambda p: F.huber_loss(p, torch.zeros_like(p), reduction="sum")),
    "decayed": lambda m: torch.stack([p.pow(2).sum() for p in m.parameters()]).mean() * 0.1,
    "all in one": lambda m: nn.utils.parameters_to_vector(m.parameters()).square().sum(),
    "own": users(lambda p: Cubed.apply(p).sum()),
    "lists": lambda m: torch.stack([t.sum() for t in torch._foreach_abs(list(m.parameters()))]).sum(),
    "sums of rows": users(lambda p: 3 * p.square().sum(1).sum()),
}
OF_ROWS: dict[str, Term] = {
    "norms of rows": users(lambda p: p.norm(dim=1).sum()),
    "rows of length 1": users(lambda p: (1 - F.normalize(p, dim=-1)).square().sum()),
}
WRONG: dict[str, Term] = {
    "norm": users(torch.norm),
    "linalg": users(torch.linalg.vector_norm),
    "mean": users(torch.mean),
    "mean squares": users(lambda p: p.square().mean()),
    "deviation": users(torch.std),
    "maximum": users(lambda p: F.pad(p, (0, 0, 0, 1)).max()),
    "root": users(lambda p: p.square().sum().sqrt()),
    "of lists": lambda m: torch.stack(torch._foreach_norm(list(m.parameters()))).sum(),
    "a row": users(lambda p: p[:1].sum()),
    "product": lambda m: m.get_parameter("users.weight").sum() * m.get_parameter("out.bias").sum(),
    "centre": lambda m: (m.get_parameter("users.weight") - m.get_parameter("out.bias")).square().sum(),
    "pairs": users(lambda p: (p.unsqueeze(0) - p.unsqueeze(1)).square().sum()),
    "beside a batch": users(lambda p: (torch.ones(3, 1, 1) * p).sum()),
    "means of rows": users(lambda p: p.square().sum(1).mean()),
}
BESIDE: dict[str, Term] = {
    "moved": lambda m: (m.get_parameter("users.weight") + m.get_parameter("out.bias")).sum(),
    "moved mean": lambda m: (m.get_parameter("out.bias") - m.get_parameter("users.weight")).mean(),
    "joined": lambda m: torch.cat([m.get_parameter(n).flatten() for n in ("users.weight", "out.weight")]).mean(),
}
"""A dense weight beside each row of a table."""
PLANS = {"rows": row_wise(), "columns": column_wise([0, 1]), "whole": table_wise(1), "copies": data_parallel()}


def with_term(names: tuple[str, ...], plan: str, term: Term) -> dict[str, torch.Tensor]:
    """Gradients of two passes, each with the term."""
    env = ShardingEnv.from_mesh(mesh((2,) * len(names), names))
    plans = {"users.weight": PLANS[plan], "items.weight": row_wise(), "more.weight": table_wise(0)}
    model = DistributedModelParallel(Net(), env, plan=plans)
    for step in range(2):
        (loss_of(model, batch(env.data_rank, step)) + term(model)).backward()
    grads = {name: as_chunks(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    for name, (parameter, chunked) in sharded_parameters(model).items():
        grads[name] = chunk_views(parameter.grad, parameter, chunked)  # type: ignore[arg-type]
    return gather(grads, env)


def without_ranks(data_size: int, term: Term) -> dict[str, torch.Tensor]:
    module = Net()
    for step in range(2):
        for rank in range(data_size):
            ((loss_of(module, batch(rank, step)) + term(module)) / data_size).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def differences(names: tuple[str, ...], plan: str, terms: list[str]) -> list[str]:
    said, found = Said(), []
    say_once.cache_clear()
    logging.getLogger("dmp").addHandler(said)
    try:
        for name in terms:
            term = {**RIGHT, **OF_ROWS, **WRONG}[name]
            got, wanted = with_term(names, plan, term), without_ranks(2, term)
            found += [f"{name}: {of}" for of, grad in wanted.items() if not torch.allclose(got[of], grad, atol=1e-6)]
    finally:
        logging.getLogger("dmp").removeHandler(said)
    of_numbers = [text for text in said.texts if "its number on each rank" in text]
    assert bool(of_numbers) == (plan != "copies" or "squares" in terms) and len(of_numbers) <= 3
    assert ("own" not in terms or plan == "copies") == ("Cubed" not in " ".join(said.texts))
    return found


def errors(names: tuple[str, ...], plan: str, terms: list[str]) -> list[str]:
    texts = []
    for name in terms:
        with pytest.raises(ShardError) as error:
            with_term(names, plan, {**OF_ROWS, **WRONG, **BESIDE}[name])
        texts.append(str(error.value))
    return texts


@pytest.mark.parametrize("plan", [*PLANS])
@pytest.mark.sampled(2)
def test_terms_whose_parts_add_up(plan: str) -> None:
    terms = [*RIGHT, *OF_ROWS] if plan != "columns" else [*RIGHT]
    assert run_ranks(2, differences, ("dp",), plan, terms) == [[], []]


def test_terms_that_need_the_whole_are_right_where_one_rank_has_it_or_all() -> None:
    terms = ["norm", "mean squares", "deviation", "maximum", "root", "a row"]
    assert run_ranks(2, differences, ("dp",), "copies", terms) == [[], []]
    assert run_ranks(2, differences, ("dp",), "whole", ["norm", "root", "a row"]) == [[], []]


def test_terms_that_need_the_whole_are_refused_on_a_part() -> None:
    """Each rank trained its part by the part's norm, or mean, in silence."""
    for texts in run_ranks(2, errors, ("dp",), "rows", [*WRONG]):
        assert all("table 'users.weight' itself" in text or "table 'items" in text for text in texts), texts
        assert "by linalgvectornorm: each rank has a part" in texts[0]
    for texts in run_ranks(2, errors, ("dp",), "columns", [*OF_ROWS, "means of rows"]):
        assert len(texts) == 3


def test_what_is_trained_beside_rows_of_a_table_that_one_rank_has_is_refused() -> None:
    """The rank with the rows gave a dense weight its gradient, the other none, and half of it was trained."""
    for texts in run_ranks(2, errors, ("dp",), "whole", [*BESIDE]):
        assert [text[text.index("by ") :].partition(":")[0] for text in texts] == ["by add", "by sub", "by mean"]


@pytest.mark.slow
def test_terms_on_two_axes() -> None:
    for names in (("replicate", "shard"), ("shard", "tp")):
        for texts in run_ranks(4, errors, names, "rows", ["norm", "mean"]):
            assert len(texts) == 2


def scores(module: nn.Module, data_rank: int) -> torch.Tensor:
    """All users', of a batch: another on each rank."""
    weight = module.get_parameter("users.weight")
    return F.cross_entropy(torch.full((1, weight.shape[1]), data_rank + 1.0) @ weight.T, torch.tensor([data_rank]))


def of_own_batches(names: tuple[str, ...], scores_of: str) -> list[str]:
    env = ShardingEnv.from_mesh(mesh((2,) * len(names), names))
    plan = {"users.weight": data_parallel(), "items.weight": row_wise(), "more.weight": table_wise(0)}
    model, module = DistributedModelParallel(Net(), env, plan=plan), Net()
    for step in range(2):
        loss = loss_of(model, batch(env.data_rank, step)) if scores_of == "beside" else 0
        (loss + scores(model.module, env.data_rank)).backward()
        for rank in range(env.data_size):
            loss = loss_of(module, batch(rank, step)) if scores_of == "beside" else 0
            ((loss + scores(module, rank)) / env.data_size).backward()
    got, wanted = model.get_parameter("users.weight").grad, module.get_parameter("users.weight").grad
    return [] if torch.allclose(got, wanted, atol=1e-6) else [f"{(got - wanted).abs().max()}"]  # type: ignore[operator, arg-type]


@pytest.mark.parametrize("scores_of", ["beside", "alone"])
def test_what_a_loss_reads_of_a_copied_table_is_averaged_over_the_ranks(scores_of: str) -> None:
    """Each rank trained its copy by the scores of its own batch, and the copies parted in silence."""
    assert run_ranks(2, of_own_batches, ("dp",), scores_of) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("names", [("replicate", "shard"), ("shard", "tp")])
def test_so_it_is_on_two_axes(names: tuple[str, ...]) -> None:
    assert run_ranks(4, of_own_batches, names, "beside") == [[]] * 4


Scaled = Callable[[torch.Tensor, float], torch.Tensor]
BY_RANK: dict[str, Scaled] = {
    "norm": lambda p, c: c * p.norm(),
    "root": lambda p, c: c * (p.square().sum().sqrt() + 1).log(),
    "squares": lambda p, c: p.square().sum() * c,
    "rows": lambda p, c: (p.norm(dim=1).sum() + p.abs().sum() / 2) / c,
}


def scaled(names: tuple[str, ...], plan: str, terms: list[str], at: str = "users.weight") -> list[str]:
    """Terms that are multiplied by a number of the rank's batch: those whose gradient is not that of one process."""
    env, found = ShardingEnv.from_mesh(mesh((2,) * len(names), names)), []
    plans = {"users.weight": PLANS[plan], "items.weight": row_wise(), "more.weight": table_wise(0)}
    for name in terms:
        model, module = DistributedModelParallel(Net(), env, plan=plans), Net()
        for step in range(2):
            term = BY_RANK[name](model.get_parameter(at), 1.0 + env.data_rank)
            (loss_of(model, batch(env.data_rank, step)) + term).backward()
            for rank in range(env.data_size):
                term = BY_RANK[name](module.get_parameter(at), 1.0 + rank)
                ((loss_of(module, batch(rank, step)) + term) / env.data_size).backward()
        parameter, chunked = sharded_parameters(model)[at]
        got = gather({at: chunk_views(parameter.grad, parameter, chunked)}, env)[at]  # type: ignore[arg-type]
        if not torch.allclose(got, module.get_parameter(at).grad, atol=1e-5):  # type: ignore[arg-type]
            found.append(name)
    return found


@pytest.mark.parametrize(("plan", "terms"), [("whole", ["norm", "root", "squares"]), ("rows", ["squares", "rows"])])
def test_a_term_is_scaled_by_the_mean_over_the_ranks(plan: str, terms: list[str]) -> None:
    """The number of the rank that has the table, or the row, counted alone."""
    assert run_ranks(2, scaled, ("dp",), plan, terms) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("names", [("replicate", "shard"), ("shard", "tp")])
def test_so_it_is_of_parts_on_two_axes(names: tuple[str, ...]) -> None:
    assert run_ranks(4, scaled, names, "rows", ["squares", "rows"]) == [[]] * 4


def scaled_below(of: str) -> str:
    plan = {"users.weight": row_wise(), "items.weight": row_wise(), "more.weight": table_wise(0)}
    model = DistributedModelParallel(Net(), plan=plan)
    weight, c = model.get_parameter("users.weight"), torch.tensor(1.0 + model.env.rank)
    scale = c if of == "all" else c.expand(8)
    with pytest.raises(ShardError) as error:
        (loss_of(model, batch(model.env.rank)) + (scale * weight).square().sum()).backward()
    return str(error.value)


@pytest.mark.parametrize("of", ["all", "columns"])
def test_values_that_each_rank_scales_by_another_number_are_refused(of: str) -> None:
    for text in run_ranks(2, scaled_below, of):
        assert "by another number on each rank" in text and "c * p.square().sum()" in text


def penalised_on_one_rank() -> str:
    plan = {"users.weight": table_wise(1), "items.weight": row_wise(), "more.weight": table_wise(0)}
    model = DistributedModelParallel(Net(), plan=plan)
    try:
        for step in range(2):
            loss = loss_of(model, batch(model.env.rank, step))
            (loss + model.get_parameter("users.weight").norm() if model.env.rank else loss).backward()
    except RanksError as error:
        return str(error)
    return ""


def test_a_term_on_one_rank_alone_is_an_error_on_all() -> None:
    for text in run_apart(2, penalised_on_one_rank):
        assert "what the loss reads of users.weight" in text


def read_on_one_rank() -> str:
    plan = {"users.weight": data_parallel(), "items.weight": row_wise(), "more.weight": table_wise(0)}
    model = DistributedModelParallel(Net(), plan=plan)
    try:
        for step in range(2):
            loss = loss_of(model, batch(model.env.rank, step))
            (loss + scores(model.module, 0) if model.env.rank else loss).backward()
    except RanksError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_copied_table_that_one_rank_reads_is_an_error_on_all() -> None:
    for text in run_apart(2, read_on_one_rank):
        assert "what the loss reads of users.weight" in text


def scores_by_a_part() -> str:
    plan = {"users.weight": table_wise(0), "items.weight": row_wise(), "more.weight": table_wise(0)}
    model = DistributedModelParallel(Net(), plan=plan)
    loss = (torch.ones(1, 8) @ model.get_parameter("users.weight").T).square().sum()
    loss = loss + loss_of(model, batch(model.env.rank))
    with pytest.raises(ShardError) as error:
        loss.backward()
    return str(error.value)


def test_scores_of_a_batch_by_a_table_that_one_rank_has_are_refused() -> None:
    for text in run_ranks(2, scores_by_a_part):
        assert "table 'users.weight' itself, by mm" in text and "data_parallel() in the plan" in text


def norms_of_all() -> list[float]:
    plan = {"users.weight": column_wise([0, 1]), "items.weight": table_wise(0), "more.weight": row_wise()}
    model = DistributedModelParallel(Net(), plan=plan)
    return [float(get_total_norm(model.parameters(), p)) for p in (2.0, float("inf"))]


def test_torchs_norm_of_all_weights_is_the_whole_models() -> None:
    wanted = [float(get_total_norm(Net().parameters(), p)) for p in (2.0, float("inf"))]
    for found in run_ranks(2, norms_of_all):
        assert found == pytest.approx(wanted)
