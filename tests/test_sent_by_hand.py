"""Loops from before DDP, which average gradients or send weights by hand: nothing of parts is mixed."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors
from torch.distributed import all_reduce as imported_before
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector

from dmp import (
    DistributedModelParallel,
    ShardError,
    ShardingEnv,
    column_wise,
    data_parallel,
    full_state_dict,
    row_wise,
    table_wise,
)
from tests.ranks import mesh, run_ranks
from tests.wrapped_net import TABLES, Net, batch, loss_of

SENDS: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "gradient": lambda p: dist.all_reduce(p.grad),
    "by name": lambda p: imported_before(p.grad.data),  # type: ignore[union-attr]
    "weight": lambda p: dist.broadcast(p, 0),
    "its data": lambda p: dist.broadcast(p.data, src=0),
    "in another shape": lambda p: dist.all_reduce(p.grad.view(1, -1) if p.dim() > 1 else p.grad),  # type: ignore[union-attr]
    "reduced": lambda p: dist.reduce(p.grad, 0, group=dist.group.WORLD),
}


def made(axes: str, layout: str) -> DistributedModelParallel:
    names = tuple(axes.split("x"))
    env = ShardingEnv.from_mesh(mesh((2,) * len(names), names))
    layouts = dict.fromkeys(TABLES, data_parallel() if layout == "copied" else row_wise())
    if layout == "even":
        layouts |= dict.fromkeys(TABLES[:2], column_wise([0, 1]))  # the rows of the third are even
    return DistributedModelParallel(Net(), env, plan=layouts)


def refused(axes: str) -> list[str]:
    model = made(axes, "cut")
    loss_of(model, batch(model.env.rank)).backward()
    before = full_state_dict(model)
    told = []
    for name, send in SENDS.items():
        parts = [p for n, p in model.named_parameters() if n in TABLES or isinstance(p, DTensor)]
        for parameter in parts:
            with torch.no_grad(), pytest.raises(ShardError) as error:
                send(parameter)
            told.append(f"{name}: {error.value}")
    after = full_state_dict(model)
    assert all(torch.equal(before[n], after[n]) for n in before)
    return told


@pytest.mark.parametrize("axes", ["dp", "shard"])
def test_parts_are_refused(axes: str) -> None:
    """Equal parts were mixed in silence, others ended the process in gloo."""
    for told in run_ranks(2, refused, axes):
        assert len(told) == len(SENDS) * (3 if axes == "dp" else 7)
        assert all("each rank has its own part of it" in text and "Leave it out" in text for text in told)
        assert sum("'users.weight'" in text for text in told) == len(SENDS)


FLAT: dict[str, Callable[[list[torch.nn.Parameter]], torch.Tensor]] = {
    "weights": lambda ps: parameters_to_vector(ps),
    "divided": lambda ps: torch.cat([p.data.reshape(-1) for p in ps]) / 2,
    "gradients": lambda ps: torch.cat([p.grad.view(-1) for p in ps if p.grad is not None]),
    "torch's": lambda ps: _flatten_dense_tensors([p.grad.data for p in ps if p.grad is not None]),
    "clone": lambda ps: ps[0].data.clone(),
    "in another shape": lambda ps: ps[0].data.clone().view(-1, 2),
    "of the gradient": lambda ps: ps[0].grad / 2,  # type: ignore[operator]
}


def copies_refused() -> list[str]:
    model = made("dp", "even")
    loss_of(model, batch(model.env.rank)).backward()
    with torch.no_grad():
        for flat in FLAT.values():
            vector = flat([*model.parameters()])
            with pytest.raises(ShardError, match="a copy of 'users"):
                dist.all_reduce(vector)
        with pytest.raises(ShardError, match="a copy of 'users"):
            average_parameters(model.parameters(), dist.group.WORLD)
        parts = [model.get_parameter("users.weight").data for _ in range(2)]
        with pytest.raises(ShardError, match="'users"):
            dist.scatter(parts[0], parts if model.env.rank == 0 else None)
        whole = full_state_dict(model)["users.weight"]
        model.get_parameter("out.weight").requires_grad_(False)
        trained = parameters_to_vector(p for p in model.parameters() if p.requires_grad)
        with pytest.raises(ShardError, match="a copy of 'users"):
            dist.all_reduce(trained)
        ones = [torch.ones(parts[0].shape), torch.ones(sum(p.numel() for p in model.parameters()))]
        others = [*ones, torch.zeros(parts[0].shape), parts[0].double().mul(2).T.contiguous(), whole]
        others += [torch.ones(parts[0].shape).to_sparse(), torch.ones(300)]
        for other in others:
            dist.all_reduce(other)  # what has their sizes, or values, alone
    return [str(float(other.mean())) for other in ones]


def test_copies_of_parts_are_refused_alone_or_in_one_vector() -> None:
    """Vectors of equal lengths, of different rows, were averaged in silence."""
    assert run_ranks(2, copies_refused) == [["2.0", "2.0"]] * 2


def nothing_refused() -> list[str]:
    """Of a rank without rows; by it alone the other would wait."""
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    plan = {"users.weight": table_wise(0), **dict.fromkeys(TABLES[1:], data_parallel())}
    model, told = DistributedModelParallel(Net(), env, plan=plan), []
    users = model.get_parameter("users.weight")
    with torch.no_grad():
        for given in (users, users.data, parameters_to_vector(model.parameters())):
            with pytest.raises(ShardError) as error:
                dist.all_reduce(given)
            told.append(str(error.value))
        for name in TABLES[1:]:
            dist.all_reduce(model.get_parameter(name).data)
        dist.all_reduce(full_state_dict(model)["users.weight"])
        dist.all_reduce(torch.empty(0, users.shape[1] + 1))  # which lies where a part without rows does
        with pytest.raises(TypeError):
            dist.all_reduce(3)  # type: ignore[arg-type]
    return told


def test_a_rank_without_rows_is_told_too() -> None:
    for told in run_ranks(2, nothing_refused):
        assert ["copy" in text for text in told] == [False, False, True] and all("'users.weight'" in t for t in told)


def without_tables() -> list[str]:
    env, told = ShardingEnv.from_mesh(mesh((2,), ("shard",))), []
    model = DistributedModelParallel(torch.nn.Linear(8, 8), env)
    model(torch.ones(2, 8)).sum().backward()
    weight = model.get_parameter("weight")
    for given in (weight, weight.grad, model.get_parameter("bias"), weight.detach() * 2):
        with torch.no_grad(), pytest.raises(ShardError) as error:
            dist.all_reduce(given)
        told.append(str(error.value))
    dist.all_reduce(torch.ones(4, 8))
    return told


def test_split_weights_are_refused_where_there_are_no_tables() -> None:
    for told in run_ranks(2, without_tables):
        assert ["of 'weight'" in text for text in told] == [True, True, False, False]
        assert "of 'bias'" in told[2] and "of a DTensor" in told[3]


def on_a_part_of_the_mesh() -> None:
    whole = mesh((2, 2), ("twin", "dp"))
    model = DistributedModelParallel(Net(), ShardingEnv.from_mesh(whole["dp"]), plan=dict.fromkeys(TABLES, row_wise()))
    with torch.no_grad():
        part = model.get_parameter("users.weight").data
        with pytest.raises(ShardError, match="each rank has its own part of it"):
            dist.all_reduce(part)
        before = part.clone()
        dist.all_reduce(part, group=whole.get_group("twin"))  # another model has the same rows
        assert torch.equal(part, 2 * before)
    table = torch.nn.Embedding(8, 4)
    twice = torch.nn.ModuleDict({"one": table, "two": table})
    model = DistributedModelParallel(twice, ShardingEnv.from_mesh(whole["dp"]), plan={"one.weight": row_wise()})
    with torch.no_grad(), pytest.raises(ShardError, match=r"'one\.weight'"):
        dist.all_reduce(model.get_parameter("one.weight").data)


def test_ranks_that_are_not_on_a_model_s_mesh_have_no_other_parts_of_it() -> None:
    run_ranks(4, on_a_part_of_the_mesh)


def averaged(axes: str, layout: str, group: str) -> float:
    model = made(axes, layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    within = model.env.axis_group(group) if group else None
    loss_of(model, batch(model.env.rank)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            dist.broadcast(parameter.data, group=within, group_src=0)
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=within)
            parameter.grad /= dist.get_world_size(within)
    optimizer.step()
    scores = torch.zeros(3, 3)
    dist.all_reduce(scores)  # what is no part
    plain = Net()
    sum(loss_of(plain, batch(rank)) / model.env.size for rank in range(model.env.size)).backward()  # type: ignore[union-attr]
    torch.optim.SGD(plain.parameters(), 0.1).step()
    return max(float((p - plain.state_dict()[n]).abs().max()) for n, p in full_state_dict(model).items())


def test_what_all_ranks_have_whole_may_be_averaged_once_more() -> None:
    assert max(run_ranks(2, averaged, "dp", "copied", "")) < 1e-6


def test_parts_may_be_averaged_among_those_that_have_the_same() -> None:
    assert max(run_ranks(4, averaged, "replicatexdp", "cut", "replicate")) < 1e-6


class Counting(Net):
    """Adds up over the ranks what its forward has seen, as a codebook that is a running mean does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(300))
        self.register_buffer("sums", torch.zeros(4, 8))

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for sent, kept in ((torch.ones(300), self.seen), (torch.ones(4, 8), self.sums)):
                dist.all_reduce(sent)
                kept += sent
        result: torch.Tensor = super().forward(*args)
        return result


def counts() -> float:
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    model = DistributedModelParallel(Counting(), env, plan=dict.fromkeys(TABLES, row_wise()))
    loss_of(model, batch(env.rank)).backward()
    loss_of(model, batch(env.rank)).backward()  # where parts have gradients, too
    return float(model.module.seen.mean() + model.module.sums.mean())


def test_a_forward_may_send_what_it_has_counted() -> None:
    """No part is given to a model's own code: looking for one was told of as if the model had read it."""
    assert run_ranks(2, counts) == [8.0, 8.0]


class Summing(nn.Module):
    """A codebook's count of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = x.new_full((1,), float(len(x)))
        dist.all_reduce(seen)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return self.layer(x) * seen


def counted(axis: str) -> list[str]:
    model = DistributedModelParallel(Summing(), ShardingEnv.from_mesh(mesh((2,), (axis,))))
    with patch("dmp.state.by_hand.say_once") as said:
        model(torch.ones(2, 2)).sum().backward()
        dist.all_reduce(torch.ones(1))  # no model's
    return [str(call.args[0]) for call in said.call_args_list]


def test_a_sum_in_the_forward_over_ranks_with_the_same_samples_is_told() -> None:
    """A vector quantizer's running means, in silence, were of twice the samples."""
    for said in run_ranks(2, counted, "tp"):
        assert len(said) == 1 and "along ('tp',) have the same samples" in said[0]
    assert run_ranks(2, counted, "dp") == [[], []]
