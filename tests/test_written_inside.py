"""Weights that the model's own forward writes while FSDP2 has gathered them last, as they do on copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dmp import DistributedModelParallel, ShardError, ShardingEnv, full_state_dict
from sharders import FSDPWrapper
from sharders.data_parallel import written_inside
from tests.ranks import mesh, run_ranks

WIDTH = 8
Write = Callable[[nn.Parameter, torch.Tensor], None]


def _in_place(p: nn.Parameter, other: torch.Tensor) -> None:
    p.mul_(0.5).add_(other, alpha=0.5)


def _through_data(p: nn.Parameter, other: torch.Tensor) -> None:
    p.data.mul_(0.5).add_(other.data, alpha=0.5)


def _assigned(p: nn.Parameter, other: torch.Tensor) -> None:
    p.data = p.data * 0.5 + other.data * 0.5


WAYS: dict[str, Write] = {"in place": _in_place, "through data": _through_data, "assigned": _assigned}


class Momentum(nn.Module):
    """A second encoder, which follows the first and is not trained, and a weight that is and is kept small."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH + 1) for _ in range(3))
        self.second.requires_grad_(False)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for p, other in zip(self.second.parameters(), self.first.parameters(), strict=True):
                self.write(p, other)
            self.write(self.last.weight, self.last.weight.clamp(-0.1, 0.1))
        return self.last(x) + self.first(x) * self.second(x)


def writes_last(way: str, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    env = ShardingEnv.from_mesh(mesh(shape, names))
    torch.manual_seed(0)
    whole = Momentum(WAYS[way]).double()
    model = DistributedModelParallel(copy.deepcopy(whole), env)
    both = [(m, torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)) for m in (model, whole)]
    for step in range(4):
        batch = torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for (m, optimizer), x in zip(both, (batch[env.data_rank], batch.flatten(0, 1)), strict=True):
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    values = full_state_dict(model)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(values[name], value, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("shape", "names"), [((2,), ("shard",)), ((2, 2), ("shard", "tp"))], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(4)
def test_writes_last(way: str, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    run_ranks(2 * len(shape), writes_last, way, shape, names)


def in_parts(way: str) -> None:
    """A unit that stays in two parts after its forward, four ranks, and evaluations in between."""
    env = ShardingEnv.from_mesh(mesh((4,), ("shard",)))
    torch.manual_seed(0)
    whole = nn.Sequential(Momentum(WAYS[way]), nn.Linear(WIDTH + 1, 2)).double()
    wrapper = FSDPWrapper(units=Momentum, reshard_after_forward=2)
    model = DistributedModelParallel(copy.deepcopy(whole), env, data_parallel_wrapper=wrapper)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    for _ in range(3):
        for m in (model, whole):
            m(x).square().mean().backward()
            with torch.no_grad():
                m(x)
                for p in m.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=0.1)
            m.zero_grad()
    values = full_state_dict(model)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(values[name], value, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(2)
def test_writes_last_where_a_unit_stays_in_parts(way: str) -> None:
    """An evaluation ended in torch's error of sizes at the next step, with nothing written too."""
    run_ranks(4, in_parts, way)


class Codebook(nn.Module):
    """Whose entries the forward replaces by means of what is next to them, as a VQ-VAE's do that many have copied."""

    def __init__(self, rows: int = 5) -> None:
        super().__init__()
        self.encode, self.entries = nn.Linear(WIDTH, WIDTH), nn.Embedding(5, WIDTH)
        self.means = nn.Parameter(torch.randn(5, WIDTH))
        self.rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encode(x)
        nearest = nn.functional.one_hot(torch.cdist(z, self.entries.weight).argmin(1), 5).to(z)
        read = nearest @ self.entries.weight
        self.means = nn.Parameter(self.means * 0.9 + nearest.T @ z)
        self.entries.weight = nn.Parameter(self.means[: self.rows] / 2)
        return z + (read - z).detach() + (z - read.detach()).square().mean()


def replaced_lasts(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    env = ShardingEnv.from_mesh(mesh(shape, names))
    torch.manual_seed(0)
    whole = Codebook().double()
    model = DistributedModelParallel(copy.deepcopy(whole), env)
    both = [(m, torch.optim.Adam(m.parameters(), lr=0.1)) for m in (model, whole)]
    for step in range(3):
        x = torch.randn(6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for m, optimizer in both:
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    values = full_state_dict(model)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(values[name], value, msg=lambda text, name=name: f"{name}: {text}")
    model.module.rows = 4  # type: ignore[assignment]
    with pytest.raises(ShardError, match=r"'entries.weight'.* another parameter in its place.*\(4, 8\).*\(5, 8\)"):
        model(x).square().mean().backward()


@pytest.mark.parametrize(("shape", "names"), [((2,), ("shard",)), ((2, 2), ("shard", "tp"))], ids=str)
def test_a_parameter_put_in_its_place_lasts(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """What FSDP2 had gathered took its place again, in silence."""
    run_ranks(2 * len(shape), replaced_lasts, shape, names)


class OfBatches(nn.Module):
    """Writes what the rank's own batch gives."""

    def __init__(self, averages: bool) -> None:
        super().__init__()
        self.mean, self.top = nn.Parameter(torch.zeros(WIDTH), requires_grad=False), nn.Linear(WIDTH, 1)
        self.averages = averages

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean = x.mean(0)
            if self.averages:
                dist.all_reduce(mean)
            self.mean.lerp_(mean, 0.5)
        return self.top(x - self.mean)


def others_are_told(is_trained: bool) -> None:
    """Of what is trained too, whose chunks are other ones before it is gathered again."""
    env = ShardingEnv.from_mesh(mesh((2,), ("shard",)))
    for averages in (True, False):
        model = DistributedModelParallel(OfBatches(averages).requires_grad_(is_trained), env)
        model.module.top.requires_grad_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with nullcontext() if averages else pytest.raises(ShardError, match=r"'mean' was .* other ranks.*all_reduce"):
            for _ in range(2):
                model(torch.full((3, WIDTH), float(env.rank))).sum().backward()
                optimizer.step()


@pytest.mark.parametrize("is_trained", [False, True])
def test_other_values_on_other_ranks_are_told(is_trained: bool) -> None:
    run_ranks(2, others_are_told, is_trained)


def late_is_told() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("shard",)))
    writes: list[Write] = [lambda p, other: None]
    model = DistributedModelParallel(Momentum(lambda p, other: writes[0](p, other)), env)
    with mock.patch.object(written_inside, "_FIRST", 2), mock.patch.object(written_inside, "_LATER", 4):
        x = torch.ones(3, WIDTH)
        for _ in range(3):
            model(x).sum().backward()
        writes[0] = _through_data
        with pytest.raises(ShardError, match=r"was written through p\.data .* and not the first 2"):
            model(x).sum().backward()


def test_values_are_compared_now_and_then() -> None:
    run_ranks(2, late_is_told)


def casts_are_refused() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("shard",)))
    wrapper = FSDPWrapper(mixed_precision=torch.bfloat16)
    model = DistributedModelParallel(Momentum(_in_place), env, data_parallel_wrapper=wrapper)
    with pytest.raises(ShardError, match=r"written by the model while it was gathered, in torch\.bfloat16.*float32"):
        model(torch.ones(3, WIDTH)).sum().backward()


def test_what_was_gathered_in_fewer_bits_is_refused() -> None:
    run_ranks(2, casts_are_refused)


def between_passes() -> None:
    """The root stays gathered until its backward pass: so does what the model's attributes give."""
    env = ShardingEnv.from_mesh(mesh((2,), ("shard",)))
    model = DistributedModelParallel(nn.Sequential(nn.Linear(2, 3)), env)
    loss = model(torch.ones(1, 2)).sum()
    with torch.no_grad():
        model.module[0].weight.fill_(2.0)  # type: ignore[index]
    loss.backward()
    assert all((p.full_tensor() == 2.0).all() for p in model.parameters() if p.dim() == 2)  # type: ignore[operator]


def test_what_is_written_between_the_passes_lasts() -> None:
    run_ranks(2, between_passes)
