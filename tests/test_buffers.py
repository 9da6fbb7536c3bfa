"""Buffers of replicated models are rank 0's in every forward, as under DDP; sent where a rank has written some."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dmp import DistributedModelParallel, ShardingEnv, full_state_dict, load_checkpoint, save_checkpoint
from tests.ranks import mesh, run_ranks


class Net(nn.Module):
    """A mask and a filter that nobody writes, statistics that every step writes, a number that some ranks write."""

    def __init__(self, with_norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.over = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if with_norm else nn.Identity()
        self.register_buffer("mask", torch.tensor([float("nan"), 1.0, 2.0, 3.0]))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("filter", torch.tensor([1.0 + 2.0j, 3.0]).conj())  # bits of which torch gives no view
        self.register_buffer("none", torch.empty(0, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, scale = self.get_buffer("mask"), self.get_buffer("scale")
        out: torch.Tensor = self.norm(self.over(x)) * torch.nan_to_num(mask) * scale
        return out


def _train(model: nn.Module, module: Net) -> list[dict[str, Any]]:
    """Buffers after every forward."""
    rank, seen = dist.get_rank(), []
    for step in range(6):
        if step == 2 and rank == 1:
            module.get_buffer("scale").data.fill_(9.0)  # counts no version
        if step == 3 and rank == 0:
            module.get_buffer("scale").fill_(2.0)
        if step == 4:
            module.scale = torch.tensor(3.0 + rank)
        model.train(step != 5)
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(3, 4, generator=generator)).sum().backward()
        seen.append({name: b.clone() for name, b in module.named_buffers()})
    return seen


def _as_under_ddp(with_norm: bool) -> list[int]:
    """Steps at which buffers have travelled."""
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    expected = _train(DistributedDataParallel(module := Net(with_norm)), module)
    travelled: list[int] = []
    original = DistributedDataParallel._distributed_broadcast_coalesced
    model = DistributedModelParallel(Net(with_norm), env)
    calls = 0

    def counted(*args: Any) -> None:
        travelled.append(calls)
        original(*args)

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    model.module.register_forward_hook(count)
    with mock.patch.object(DistributedDataParallel, "_distributed_broadcast_coalesced", counted):
        got = _train(model, model.module)  # type: ignore[arg-type]
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0, equal_nan=True)
    return travelled


def _of_a_dim_of_one(name: str) -> None:
    """The only buffer has a dim of size 1, whose stride may be anything; by itself DDP takes it for overlapping."""
    module = nn.Linear(4, 4)
    module.register_buffer("positions", torch.full((1, 6, 4), float(dist.get_rank())).transpose(0, 1))
    model = DistributedModelParallel(module, ShardingEnv.from_mesh(mesh((2,), (name,))))
    for step in range(3):
        model.module.get_buffer("positions").add_(dist.get_rank() * step)
        model(torch.ones(2, 4)).sum().backward()
        assert not model.module.get_buffer("positions").any()


def test_a_buffer_of_a_dim_of_one() -> None:
    run_ranks(2, _of_a_dim_of_one, "dp")


def test_unwritten_buffers_do_not_travel() -> None:
    assert run_ranks(2, _as_under_ddp, False) == [[0, 2, 3, 4]] * 2


def test_written_buffers_travel() -> None:
    assert run_ranks(2, _as_under_ddp, True) == [[0, 1, 2, 3, 4, 5]] * 2


def _saved(axis: str, path: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A buffer as it is on this rank, as it is whole there, and as it comes back."""
    env, name = ShardingEnv.from_mesh(mesh((2,), (axis,))), "norm.running_mean"
    model = DistributedModelParallel(Net(True), env)
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(env.rank))).sum().backward()
    own = model.get_buffer(name).clone()
    save_checkpoint(path, model)
    whole = full_state_dict(model)[name]
    load_checkpoint(path, model)
    return own, whole, model.get_buffer(name).clone()


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_a_checkpoint_has_the_first_ranks(axis: str, tmp_path: Path) -> None:
    found = run_ranks(2, _saved, axis, tmp_path / "saved")
    assert not torch.equal(found[0][0], found[1][0])
    for own, whole, loaded in found:
        assert torch.equal(whole, own)
        assert torch.equal(loaded, found[0][0])
