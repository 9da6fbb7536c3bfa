"""A table's weight that the model's own code reads past its forward, without gradients or by `.data`: this rank's part,
never taken for the whole."""

from __future__ import annotations

import copy
import dis
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dmp import (
    DistributedModelParallel,
    Layout,
    ShardError,
    ShardingEnv,
    column_wise,
    data_parallel,
    full_state_dict,
    row_wise,
    table_wise,
)
from sharders.embedding.weights import asked_of
from tests.ranks import mesh, run_ranks


class Near(nn.Module):
    def forward(self, x: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return -torch.cdist(x, items)


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20, 8), nn.Embedding(12, 8)
        self.near_all = Near()

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (self.users(users) * self.items(items)).sum(1)

    def score(self, users: torch.Tensor, how: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
        return how(self.users(users), self.items.weight)

    def keep_small(self) -> None:
        self.items.weight.data.clamp_(-0.5, 0.5)
        self.users.weight.copy_(F.normalize(self.users.weight, dim=1))

    def turned(self, how: Callable[[torch.Tensor], Any]) -> Any:
        return how(self.items.weight.transpose(0, 1))

    def scores_of_all(self, x: torch.Tensor) -> torch.Tensor:
        items = self.items.weight
        return torch.matmul(x, items.transpose(0, 1))

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.items.weight)

    def near(self, x: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(1) - self.items.weight.unsqueeze(0)).norm(dim=-1)

    def embedded(self, items: torch.Tensor) -> torch.Tensor:
        return F.embedding(items, weight=self.items.weight)

    def looked_up_as_plain(self, items: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = nn.Embedding.from_pretrained(self.items.weight)(items)
        return out

    def of_length_1(self, x: torch.Tensor) -> torch.Tensor:
        items = self.items.weight
        return torch.einsum("bd,nd->bn", x, F.normalize(items, dim=-1))

    def of_all_twice(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.cat([self.items.weight, self.items.weight]).permute(1, 0)

    def by_element(self, x: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(1) * self.items.weight).sum(-1)

    def by_module(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.near_all(x, self.items.weight)
        return out

    def of_copy(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (-self.items.weight.clone().double().float()).T

    def of_fixed(self, x: torch.Tensor) -> torch.Tensor:
        user = self.users(x[0, :1].long())[0]
        return (user * self.items.weight.detach()).sum(1)

    def best(self, x: torch.Tensor) -> torch.Tensor:
        return (self.items.weight * x[0]).sum(1).topk(2).indices

    def as_numbers(self, x: torch.Tensor) -> Any:
        return self.items.weight.detach().cpu().numpy()

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(self.items.weight)

    def sizes(self) -> list[int]:
        items = self.items.weight
        number = torch.arange(items.size(0)).numel(), items.numel()
        return [*number, *self.items.weight.shape, len(self.items.weight), self.users.weight.shape[0]]

    def centred(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.items.weight.mean(0)

    def penalty(self) -> torch.Tensor:
        items = self.items.weight
        number = items.norm(dim=1).sum() + items.unsqueeze(0).pow(2).sum()
        assert type(number) is torch.Tensor
        return number

    def own_step(self) -> None:
        with torch.no_grad():
            self.items.weight -= 0.1 * self.items.weight.grad
            self.items.weight *= 0.9

    def trained(self) -> torch.Tensor:
        items = self.items.weight
        items.norm(dim=1).sum().backward()
        assert items.grad is not None
        return items.grad

    def rows_of(self, items: torch.Tensor) -> torch.Tensor:
        return self.items.weight[items % 6]

    def without_last(self, end: int) -> torch.Tensor:
        items = self.items.weight
        return items[: self.items.num_embeddings - end]

    def change(self, how: Callable[[torch.Tensor], Any]) -> None:
        self.items.weight.data = how(self.items.weight.data)

    def project(self) -> None:
        self.items.weight.data -= self.users.weight.data[:] * self.items.weight.detach().sum(1, keepdim=True)

    def all_items(self) -> torch.Tensor:
        assert self.items.weight.requires_grad and self.items.weight.device.type == "cpu"
        out: torch.Tensor = self.items(torch.arange(12))
        return out


HOW: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a product": lambda x, w: x @ w.t(),
    "linear": lambda x, w: F.linear(x, w),
    "of normalized rows": lambda x, w: torch.matmul(x, F.normalize(w, dim=-1).T),
    "another product": lambda x, w: torch.einsum("bd,nd->bn", x, w),
    "a row": lambda x, w: w[3],
    "rows": lambda x, w: F.embedding(torch.tensor([1, 2]), w),
    "a norm": lambda x, w: w.norm(),
    "a mean of rows": lambda x, w: w.mean(0),
    "a mean": lambda x, w: w.square().mean(),
}


def zeroed(w: torch.Tensor) -> torch.Tensor:
    w[0] = 0
    return w


BETWEEN_STEPS: dict[str, tuple[Callable[[torch.Tensor], Any], bool | None]] = {
    "a row": (zeroed, None),
    "a row in place": (lambda w: w[0].fill_(0), None),
    "centred": (lambda w: w - w.mean(0), None),
    "of length 1": (lambda w: w / w.norm(), None),
    "by their spread": (lambda w: w / w.std(0), None),
    "sorted": (lambda w: w.sort(0).values, None),
    "of spread 1": (lambda w: w / w.std(1, keepdim=True), False),
    "without the largest": (lambda w: w - w.topk(1, 1).values, False),
    "columns of length 1": (lambda w: F.normalize(w, dim=0), None),
    "rows of length 1": (lambda w: F.normalize(w, p=2, dim=1), False),
    "rows by hand": (lambda w: w.div_(w.norm(dim=1, keepdim=True)), False),
    "short rows": (lambda w: w.renorm_(2, 0, 1.0), False),
    "small": (lambda w: w.clamp_(-0.5, 0.5), True),
    "large": (lambda w: w.masked_fill_(w.abs() < 0.1, 0.0), True),
}
"""With whether it is right on columns too; None: on neither."""


def wrapped(layout: Layout, users: Layout | None = None, rows: int = 20) -> tuple[DistributedModelParallel, Scorer]:
    """And the plain one."""
    plain = Scorer()
    if rows != 20:
        plain.users = nn.Embedding(rows, 8)
    plan = {"users.weight": users or row_wise(), "items.weight": layout}
    return DistributedModelParallel(copy.deepcopy(plain), ShardingEnv.from_mesh(mesh((2,), ("dp",))), plan=plan), plain


def reads(layout: Layout, how: str) -> None:
    model, _ = wrapped(layout)
    with torch.no_grad():
        model.module.score(torch.tensor([0, 1, 2]), HOW[how])  # type: ignore[operator]


def changes(layout: Layout, is_by_rows: bool) -> None:
    """With gradients on, as between two steps."""
    for name, (how, is_right_on_columns) in BETWEEN_STEPS.items():
        torch.manual_seed(0)
        model, plain = wrapped(layout)
        if is_right_on_columns or (is_right_on_columns is False and is_by_rows):
            model.change(how), plain.change(how)
            torch.testing.assert_close(full_state_dict(model)["items.weight"], plain.items.weight.data, msg=name)
        else:
            with pytest.raises(ShardError, match=r"reads table 'items.weight'.*this rank's part"):
                model.change(how)


def scores(layout: Layout) -> None:
    """Of a loss in a method of the model's own, which its forward does not come to."""
    model, plain = wrapped(layout)
    for each in (model, plain):
        each.score(torch.tensor([0]), lambda x, w: w.square().sum()).backward()
        each.turned(lambda w: w.square().sum()).backward()
    with pytest.raises(ShardError, match=r"reads table 'items.weight'"):
        model.turned(lambda w: torch.ones(1, 8) @ w)
    for rows in (lambda: model.rows_of(torch.arange(3)), lambda: model.without_last(1)):
        with pytest.raises(ShardError, match=r"reads table 'items.weight' \(__getitem__\)"):
            rows()
    model.scores_of_all(torch.ones(1, 8))


def is_refused_where_taken(layout: Layout) -> None:
    model, plain = wrapped(layout)
    x = torch.ones(2, 8)
    takes: Sequence[tuple[Callable[..., torch.Tensor], torch.Tensor, str]] = (
        (model.linear, x, "linear"),
        (model.near, x, "sub"),
        (model.embedded, torch.tensor([1]), "embedding"),
        (model.looked_up_as_plain, torch.tensor([1]), "embedding"),
        (lambda ids: nn.Embedding.forward(model.module.items, ids), torch.tensor([1]), "embedding"),  # type: ignore[arg-type,union-attr]
        (model.of_length_1, x, "einsum"),
        (model.of_all_twice, x, "matmul"),
        (model.centred, x, "mean|sub"),
        (model.by_element, x, "mul"),
        (model.by_module, x, "cdist"),
        (model.of_copy, x, "matmul"),
        (model.as_numbers, x, "numpy"),
        *([(model.best, x, "topk"), (model.spread, x, "linalg_svdvals")] if layout == row_wise() else ()),
    )
    rank = torch.distributed.get_rank()
    for take, given, what in takes:
        if what == "numpy" and rank == 1 and layout != row_wise():
            assert take(given).shape == (12, 8)  # without gradients the rank that has the whole may go on alone
            continue
        with pytest.raises(ShardError, match=rf"reads table 'items.weight' \({what}\)"):
            take(given)
    if layout == row_wise():
        with pytest.raises(ShardError, match=r"\(mul\)"):
            model.of_fixed(x)
    for each in (model, plain):
        each.penalty().backward()
        each.own_step()
    torch.testing.assert_close(full_state_dict(model)["items.weight"], plain.items.weight.data)
    assert model.sizes() == plain.sizes()
    with torch.no_grad():
        assert model.sizes() == plain.sizes()
    wanted = plain.trained()
    parts = wanted.tensor_split(2) if layout == row_wise() else (wanted[:0], wanted)
    torch.testing.assert_close(model.trained(), parts[rank])


def changes_by_another(users: Layout, items: Layout) -> None:
    torch.manual_seed(0)
    model, plain = wrapped(items, users, rows=12)
    model.project(), plain.project()
    torch.testing.assert_close(full_state_dict(model)["items.weight"], plain.items.weight.data)


@pytest.mark.parametrize("layout", [row_wise(), column_wise([0, 1])], ids=["rows", "columns"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.sampled(2)
def test_is_not_taken_for_the_whole(layout: Layout, how: str) -> None:
    for error in run_ranks(2, reads, layout, how, expect=ShardError):
        assert "reads table 'items.weight'" in str(error) and "past the model's forward" in str(error)


@pytest.mark.parametrize("layout", [row_wise(), column_wise([0, 1])], ids=["rows", "columns"])
def test_is_changed_between_steps_as_the_whole_or_not_at_all(layout: Layout) -> None:
    """Rows of half their columns each got length 1, and row 0 of each part was zeroed, in silence."""
    run_ranks(2, changes, layout, layout == row_wise())


@pytest.mark.parametrize("layout", [row_wise(), column_wise([0, 1])], ids=["rows", "columns"])
def test_scores_of_a_loss_in_a_method_are_refused(layout: Layout) -> None:
    """A part of the rows gave as many scores, and the target was out of bounds."""
    for error in run_ranks(2, scores, layout, expect=ShardError):
        assert "scores_of_all" in str(error) and "reads table 'items.weight' (matmul)" in str(error)


@pytest.mark.parametrize("layout", [row_wise(), table_wise(1)], ids=["rows", "whole"])
def test_with_gradients_is_refused_where_it_is_taken(layout: Layout) -> None:
    """The loss was a number of this rank's rows, and only its backward pass was refused; so it is on all ranks where
    one of them has the whole, which waited for the others."""
    run_ranks(2, is_refused_where_taken, layout)


def takes_the_whole(layout: Layout) -> None:
    torch.manual_seed(0)
    plain, x = Scorer(), torch.ones(2, 8)
    model = DistributedModelParallel(copy.deepcopy(plain), plan={"users.weight": layout, "items.weight": layout})
    for each in (model, plain):
        each.linear(x).sum().backward()
        assert each.near(x).shape == (2, 12)
    torch.testing.assert_close(model.module.items.weight.grad, plain.items.weight.grad)  # type: ignore[union-attr]


def test_what_every_rank_has_whole_is_taken() -> None:
    run_ranks(1, takes_the_whole, row_wise())
    run_ranks(2, takes_the_whole, data_parallel())


def test_is_changed_by_another_that_is_cut_alike() -> None:
    run_ranks(2, changes_by_another, row_wise(), row_wise())
    for users, items in ((row_wise([1, 0]), row_wise()), (table_wise(0), table_wise(1))):
        for error in run_ranks(2, changes_by_another, users, items, expect=ShardError):
            assert "reads table" in str(error)


def does_what_is_right() -> None:
    torch.manual_seed(0)
    plain = Scorer()
    torch.manual_seed(0)
    model = DistributedModelParallel(Scorer(), plan={"users.weight": row_wise(), "items.weight": row_wise()})
    with torch.no_grad():
        for each in (model.module, plain):
            each.keep_small()  # type: ignore[operator]
        torch.testing.assert_close(model.module.all_items(), plain.all_items())  # type: ignore[operator]
        ids = torch.arange(12)
        torch.testing.assert_close(model(ids, ids), plain(ids, ids))
        part = model.module.items.weight  # who is not the model reads its part
        assert type(part) is nn.Parameter and part.norm().isfinite()


def test_elements_and_rows_are_right() -> None:
    run_ranks(2, does_what_is_right)


IS_OLD = sys.version_info < (3, 11)


class Local(nn.Module):
    """Takes its weights by a local name, the first of two: one instruction loads both since Python 3.13."""

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.words.weight
        return F.linear(weight, x)  # type: ignore[arg-type]

    def beside(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.words.weight
        return torch.cat([weight, x])  # type: ignore[list-item]

    def times(self, x: torch.Tensor) -> torch.Tensor:
        x, weight = x + 1, self.words.weight
        return weight @ x  # type: ignore[operator]


def test_the_first_of_two_local_names() -> None:
    for method, taken_by in ((Local.scores, "linear"), (Local.beside, "cat"), (Local.times, "@")):
        asked = asked_of._asked_after(method.__code__)
        (read,) = (s for s in dis.get_instructions(method) if s.argval == "weight" and s.opname == "LOAD_ATTR")
        # Python 3.10 turns two values over on the stack, which is not followed.
        assert asked[read.offset] == (asked_of.UNKNOWN if IS_OLD and method is Local.times else taken_by,), method
