"""On an accelerator: tables, blocks, checkpoints and the pipeline, against the plain module in the CPU's memory.

One rank for each device that there is, two at most, with the backend that torch has for them, and nothing for the CPU
beside it: as `init_process_group("nccl")` gives it. Nothing but torch and pytest is needed: such machines often have no
TorchRec.
"""

from __future__ import annotations

import copy
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dmp
from dmp import DistributedModelParallel, Layout, ShardingEnv, column_wise, data_parallel, row_wise, table_wise
from sharders import EmbeddingBagSharder, EmbeddingSharder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's of its own TorchScript
    from torch.distributed.optim import _apply_optimizer_in_backward

pytestmark = pytest.mark.gpu

BATCH, STEPS, LR = 12, 3, 0.1
KINDS = {None: torch.optim.Adam, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
"""Of tables; the first after the backward pass, the others in it."""
NEAR = {torch.float64: 1e-9, torch.float32: 1e-4}
LAYOUTS: dict[str, Callable[[int], Layout]] = {
    "table_wise": table_wise,
    "row_wise": lambda _: row_wise(),
    "column_wise": lambda last: column_wise(ranks=[0, last]),
    "data_parallel": lambda _: data_parallel(),
}


def on_devices(job: Callable[..., None], *args: Any, folder: Path) -> None:
    """Run `job(env, *args)` on each device; what a rank raised is raised here."""
    size = min(2, torch.accelerator.device_count())
    faults = torch.multiprocessing.get_context("spawn").SimpleQueue()
    given = str(folder / "store"), size, job, args, faults
    torch.multiprocessing.start_processes(_run, given, nprocs=size, start_method="spawn")
    found = [faults.get() for _ in range(size)]
    if any(found):
        pytest.fail("\n".join(filter(None, found)), pytrace=False)


def _run(rank: int, store: str, size: int, job: Callable[..., None], args: tuple[Any, ...], faults: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    fault = ""
    try:
        torch.accelerator.set_device_index(rank)
        kind = device().type
        backend = dist.get_default_backend_for_device(kind)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
        job(ShardingEnv.from_mesh(init_device_mesh(kind, (size,), mesh_dim_names=("dp",))), *args)
    except BaseException:
        fault = f"rank {rank}:\n{traceback.format_exc()}"
    faults.put(fault)
    sys.stdout.flush()
    with suppress(Exception):
        dist.destroy_process_group()


def device() -> torch.device:
    """Of this process."""
    found = torch.accelerator.current_accelerator(check_available=True)
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())


class Net(nn.Module):
    """Pooled tables and rows of another, under a small tower."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(40, 8, mode="sum", include_last_offset=True)
        self.items = nn.EmbeddingBag(23, 8, mode="mean", include_last_offset=True)
        self.words = nn.Embedding(31, 8)
        self.over = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: torch.Tensor, bounds: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        found = [self.users(ids, bounds), self.items(ids % 23, bounds), self.words(words).sum(1)]
        out: torch.Tensor = self.over(torch.cat(found, 1))
        return out


TABLES = ("users.weight", "items.weight", "words.weight")


def net(dtype: torch.dtype) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rank's share of a step's samples, on the CPU; the first bag of each is empty."""
    with torch.device("cpu"):
        return _batch(torch.Generator().manual_seed(100 * step + rank), BATCH // size)


def _batch(generator: torch.Generator, samples: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lengths = torch.randint(1, 5, (samples,), generator=generator)
    lengths[0] = 0
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, 40, (int(bounds[-1]),), generator=generator)
    return ids, bounds, torch.randint(0, 31, (samples, 2), generator=generator)


def plain_run(dtype: torch.dtype, optimizer: str | None, size: int) -> tuple[list[torch.Tensor], Net]:
    """Losses and the module after `STEPS` steps on all ranks' samples, in one process on the CPU."""
    module = net(dtype)
    tables = [p for name, p in module.named_parameters() if name in TABLES]
    of_tables = KINDS[optimizer](tables, lr=LR)
    others = torch.optim.Adam(module.over.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        loss = sum(module(*batch(step, r, size)).square().mean() for r in range(size)) / size
        module.zero_grad()
        loss.backward()
        of_tables.step()
        others.step()
        losses.append(loss.detach())
    return losses, module


def trained(
    env: ShardingEnv, dtype: torch.dtype, optimizer: str | None, layout: str, kernel: str | None
) -> DistributedModelParallel:
    """Compared with the plain run, losses and weights."""
    size = env.size
    module = net(dtype).to(env.device)
    if optimizer:
        given = [module.get_parameter(name) for name in TABLES]
        _apply_optimizer_in_backward(KINDS[optimizer], given, {"lr": LR})
    plan = {name: LAYOUTS[layout](size - 1) for name in TABLES}
    sharders = [EmbeddingBagSharder(kernel=kernel), EmbeddingSharder(kernel=kernel), *dmp.default_sharders()]
    model = DistributedModelParallel(module, env, plan=plan, sharders=sharders)
    own = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=LR)
    losses, plain = plain_run(dtype, optimizer, size)
    for step in range(STEPS):
        out = model(*(t.to(env.device) for t in batch(step, env.rank, size)))
        assert out.device == env.device
        loss = out.square().mean()
        own.zero_grad()
        loss.backward()
        own.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close((mean / size).cpu(), losses[step], atol=NEAR[dtype], rtol=NEAR[dtype])
    same(dmp.full_state_dict(model), plain, NEAR[dtype])
    return model


def same(state: dict[str, Any], plain: nn.Module, near: float) -> None:
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(
            state[name].cpu(), value.cpu(), atol=near, rtol=near, msg=lambda m, n=name: f"{n}: {m}"
        )


def tables(env: ShardingEnv, dtype: torch.dtype, layout: str, kernel: str | None) -> None:
    for optimizer in (None, "sgd", "adagrad"):
        trained(env, dtype, optimizer, layout, kernel)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("kernel", [None, "triton"])
def test_tables(layout: str, dtype: torch.dtype, kernel: str | None, tmp_path: Path) -> None:
    if kernel == "triton" and torch.accelerator.current_accelerator() != torch.device("cuda"):
        pytest.skip("it is for GPUs")
    on_devices(tables, dtype, layout, kernel, folder=tmp_path)


class Block(nn.Module):
    """A transformer's: attention by heads, then two Linears, each added to what came."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, y.shape[-1] // self.heads)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(found.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def transformer() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(50, 32), Block(), Block(), nn.Linear(32, 50)).double()


def blocks(env: ShardingEnv, axis: str, folder: str) -> None:
    """On one axis as on the CPU; clipped, saved, read by a model on the CPU, and given back plain."""
    mesh = init_device_mesh(env.device_type, (env.size,), mesh_dim_names=(axis,))
    plain = transformer()
    model = DistributedModelParallel(copy.deepcopy(plain).to(env.device), ShardingEnv.from_mesh(mesh))
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=LR, eps=1e-4) for m in (model, plain))
    ids = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(1))
    for _ in range(STEPS):
        for module, optimizer, here in ((model, ours, ids.to(env.device)), (plain, theirs, ids)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(here).flatten(0, 1), here.flatten()).backward()
        norm, expected = dmp.clip_grad_norm_(model, 0.5), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert float(norm) == pytest.approx(float(expected), abs=1e-9)
        ours.step()
        theirs.step()
    same(dmp.full_state_dict(model), plain, 1e-9)
    dmp.save_checkpoint(folder, model, ours, {"step": STEPS})
    drawn = torch.rand(3, device=env.device)
    again = DistributedModelParallel(transformer().to(env.device), ShardingEnv.from_mesh(mesh))
    read = torch.optim.AdamW(again.parameters(), lr=LR, eps=1e-4)
    assert dmp.load_checkpoint(folder, again, read)["step"] == STEPS
    assert torch.equal(torch.rand(3, device=env.device), drawn), "the device's generator goes on as it did"
    same(dmp.full_state_dict(again), plain, 1e-9)
    alone = DistributedModelParallel(transformer(), ShardingEnv.single("cpu"))
    dmp.load_checkpoint(folder, alone)
    same(dmp.full_state_dict(alone), plain, 1e-9)
    same(dmp.to_unsharded(model).state_dict(), plain, 1e-9)


@pytest.mark.parametrize("axis", ["dp", "shard", "tp"])
def test_blocks(axis: str, tmp_path: Path) -> None:
    if axis == "shard" and torch.__version__ < (2, 13):
        pytest.skip("full sharding is refused with an earlier torch")
    on_devices(blocks, axis, str(tmp_path / "saved"), folder=tmp_path)


class WithLoss(nn.Module):
    """As pipelines take a model: a batch in, the loss and what was predicted out."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.net(*given)
        return out.square().mean(), out


def pipeline(env: ShardingEnv) -> None:
    """Batches from the CPU's memory, copied while the step before runs, give what the plain loop does."""
    plan = {f"net.{name}": row_wise() for name in TABLES}
    found = []
    for pipes in (False, True):
        model = DistributedModelParallel(WithLoss(net(torch.float64)).to(env.device), env, plan=plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        batches = iter([batch(step, env.rank, env.size) for step in range(6)])
        if pipes:
            train = dmp.TrainPipeline(model, optimizer, env.device)
            outs = [train.progress(batches) for _ in range(6)]
        else:
            outs = []
            for each in batches:
                optimizer.zero_grad()
                loss, out = model(tuple(t.to(env.device) for t in each))
                loss.backward()
                optimizer.step()
                outs.append(out)
        found.append([out.detach().cpu() for out in outs])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_pipeline(tmp_path: Path) -> None:
    on_devices(pipeline, folder=tmp_path)


def default_device_and_plan(env: ShardingEnv) -> None:
    """A program's default device, the planner's own plan, autocast and a scaler."""
    torch.set_default_device(env.device)
    try:
        model = DistributedModelParallel(net(torch.float32).to(env.device), env)
        optimizer = torch.optim.Adam(model.parameters(), lr=LR)
        scaler = dmp.GradScaler(model)
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast(env.device_type, torch.bfloat16):
                loss = model(*(t.to(env.device) for t in batch(0, env.rank, env.size))).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0], losses
    finally:
        torch.set_default_device(None)


def test_default_device_and_plan(tmp_path: Path) -> None:
    on_devices(default_device_and_plan, folder=tmp_path)
