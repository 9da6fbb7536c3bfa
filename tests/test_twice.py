"""Penalties on gradients: a backward pass through another, beside one process with the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dmp import DistributedModelParallel, Layout, ShardingEnv, colwise, data_parallel, full_state_dict, rowwise
from tests.ranks import mesh, run_ranks
from tests.test_tensor_parallel import batches, build, loss_of, split, whole


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first = nn.EmbeddingBag(16, 8, mode="sum"), nn.Linear(8, 8)
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.table(ids)
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.head(x) * self.scale
        return y


def penalized(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The loss, and its gradient by the input."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.rand(4, 8, generator=generator).requires_grad_()
    loss = model(x, torch.randint(0, 16, (4, 3), generator=generator)).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def trained(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """Three steps, the last of them with two forwards, and an ordinary one behind."""
    plan: dict[str, Layout] = {"table.weight": data_parallel()}
    for i in range(2 if "tp" in names else 0):
        up = f"layers.{i}.up"
        plan |= {f"{up}.weight": colwise(), f"{up}.bias": colwise(), f"layers.{i}.down.weight": rowwise()}
    model, plain = DistributedModelParallel(Net(), ShardingEnv.from_mesh(mesh(shape, names)), plan=plan), Net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, plain)]
    env = model.env
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for m, ranks in ((model, [env.data_rank]), (plain, range(env.data_size))):
            for rank in ranks:
                losses = (
                    [penalized(m, rank, step)] if step < 3 else [m(torch.ones(2, 8), torch.ones(2, 1).long()).sum()]
                )
                losses += [penalized(m, rank, 5)] if step == 2 else []
                (sum(losses) / len(ranks)).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
    after = full_state_dict(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(after[name], value, atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("axis", ["dp", "shard", "tp"])
def test_penalties_on_gradients(axis: str) -> None:
    """Of weights split over `tp` they were wrong in silence; over `shard` torch found a storage of size 0."""
    run_ranks(2, trained, (2,), (axis,))


@pytest.mark.slow
@pytest.mark.parametrize("names", [("replicate", "shard"), ("dp", "tp"), ("shard", "tp")])
@pytest.mark.filterwarnings("ignore:While redistributing")
def test_penalties_on_gradients_on_two_axes(names: tuple[str, ...]) -> None:
    run_ranks(4, trained, (2, 2), names)


def other_pass_on_one_rank() -> None:
    """After a penalty that no step followed."""
    model = DistributedModelParallel(Net(), ShardingEnv.from_mesh(mesh((2,), ("shard",))))
    penalized(model, model.env.data_rank, 0).backward()
    if model.env.rank:
        nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()
    model.zero_grad()
    penalized(model, model.env.data_rank, 1).backward()


def test_passes_of_other_models_gather_nothing() -> None:
    """Every pass in the process gathered the weights, also of a model that one rank still held, and ranks parted."""
    run_ranks(2, other_pass_on_one_rank)


def transformer(name: str, sequence_parallel: bool) -> None:
    """By the embedding's output, and by all weights."""
    model, plain = build(name), build(name)
    split(model, (2,), ("tp",), sequence_parallel=sequence_parallel)
    ids = batches(1)[0]

    def penalty(m: nn.Module) -> torch.Tensor:
        looked_up: list[torch.Tensor] = []
        embedding = next(each for each in m.modules() if isinstance(each, nn.Embedding))
        handle = embedding.register_forward_hook(lambda _, args, out: looked_up.append(out))
        loss = loss_of(m(ids), ids)
        handle.remove()
        asked: Sequence[torch.Tensor] = [looked_up[0], *m.parameters()]
        return sum(whole(g).square().sum() for g in torch.autograd.grad(loss, asked, create_graph=True)) + loss  # type: ignore[return-value]

    with sdpa_kernel(SDPBackend.MATH):  # the others are not differentiated twice
        for m in (model, plain):
            penalty(m).backward()  # type: ignore[no-untyped-call]
    for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(whole(p.grad), q.grad, atol=1e-8, rtol=1e-6, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("name", ["llama tied", "bert"])
@pytest.mark.sampled(4)
def test_penalties_of_transformers(name: str, sequence_parallel: bool) -> None:
    run_ranks(2, transformer, name, sequence_parallel)


def of_several() -> None:
    """Which lie elsewhere in the memory of each rank: a pass through another gathers the weights of all."""
    env, rank = ShardingEnv.from_mesh(mesh((2,), ("shard",))), torch.distributed.get_rank()
    beside, models, plain = [], [], []
    for i in range(6):
        beside.append([nn.Linear(1, 1) for _ in range(3 * rank)])
        torch.manual_seed(i)
        plain.append(nn.Linear(4 + 2 * i, 4))
        models.append(DistributedModelParallel(copy.deepcopy(plain[-1]), env))
    for each in (models, plain):
        inputs = [torch.ones(2, 4 + 2 * i, requires_grad=True) for i in range(len(each))]
        loss = sum((m(x).square().mean() for m, x in zip(each, inputs, strict=True)), torch.zeros(()))
        slopes = torch.autograd.grad(loss, inputs, create_graph=True)
        sum((slope.square().sum() for slope in slopes), loss).backward()
    for model, other in zip(models, plain, strict=True):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert p.grad is not None
            torch.testing.assert_close(whole(p.grad), q.grad)


def test_penalties_of_several_models() -> None:
    run_ranks(2, of_several)
