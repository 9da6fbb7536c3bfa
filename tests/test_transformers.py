"""Transformers on every mesh equal one process: 5 steps of AdamW on the global batch, losses, weights, optimizer state.

Shapes: B samples for each data rank, T positions, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv, clip_grad_norm_, full_optimizer_state_dict, full_state_dict
from sharders import FSDPWrapper, TensorParallelSharder
from tests.ranks import mesh as mesh_of
from tests.ranks import run_ranks
from tests.transformers_zoo import GPT, Bert, Llama

# A Linear with a bias returns a view, and FSDP2 warns of writing into it in place, which nobody here does.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")

B, T, V = 2, 8, 64
LR, STEPS, CLIP = 3e-3, 5, 0.05


class Mesh(NamedTuple):
    """Sizes and names of the axes."""

    shape: tuple[int, ...]
    names: tuple[str, ...]


MESHES = {
    "tp2": Mesh((2,), ("tp",)),
    "dp2": Mesh((2,), ("dp",)),
    "fsdp2": Mesh((2,), ("shard",)),
    "replicate2": Mesh((2,), ("replicate",)),
    "fsdp4": Mesh((4,), ("shard",)),
    "hsdp2x2": Mesh((2, 2), ("replicate", "shard")),
    "fsdp2xtp2": Mesh((2, 2), ("shard", "tp")),
    "dp2xtp2": Mesh((2, 2), ("dp", "tp")),
    "replicate2xtp2": Mesh((2, 2), ("replicate", "tp")),
    "dp2xfsdp2": Mesh((2, 2), ("dp", "shard")),
    "tp4": Mesh((4,), ("tp",)),
    "hsdp2x2xtp2": Mesh((2, 2, 2), ("replicate", "shard", "tp")),
    "hsdp2x4": Mesh((2, 4), ("replicate", "shard")),
    "fsdp4xtp2": Mesh((4, 2), ("shard", "tp")),
    "fsdp2xtp4": Mesh((2, 4), ("shard", "tp")),
}
MODELS = {
    "llama": lambda: Llama(kv_heads=4),
    "llama_gqa": lambda: Llama(),
    "llama_tied": lambda: Llama(tied=True, kv_heads=4),
    "gpt": lambda: GPT(),
    "gpt_untied": lambda: GPT(tied=False),
    "bert": lambda: Bert(),
}
MODES: dict[str, dict[str, bool]] = {
    "plain": {},
    "sp": {"sequence_parallel": True},
    "loss": {"loss_parallel": True},
    "sp_loss": {"sequence_parallel": True, "loss_parallel": True},
}


def make(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def batch(data_rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1000 * step + data_rank)
    ids = torch.randint(0, V, (B, T + 1), generator=rng)
    return ids[:, :-1], ids[:, 1:]


def loss_of(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parallel_loss(mode: str) -> Any:
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel() if MODES[mode].get("loss_parallel") else nullcontext()


class End(NamedTuple):
    """Where the unsharded model ends: weights, and optimizer state by parameter."""

    values: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]


class Run(NamedTuple):
    """Five steps of the unsharded model: losses by step, part and data rank, norms by step."""

    losses: list[list[list[torch.Tensor]]]
    norms: list[torch.Tensor]
    end: End


def end_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> End:
    return End(model.state_dict(), {name: optimizer.state[parameter] for name, parameter in model.named_parameters()})


def adamw(model: nn.Module, name: str, dtype: torch.dtype) -> torch.optim.AdamW:
    # In float32 a gradient that is nothing but rounding (as of the bias of attention's keys) becomes a whole step of
    # AdamW; a larger eps keeps it from that. The runs in float64 need none.
    eps = (1e-5 if name.startswith("llama") else 1e-4) if dtype == torch.float32 else 1e-8
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=eps)


@functools.cache
def one_process(name: str, ranks: int, accumulate: int, clip: bool, dtype: torch.dtype) -> Run:
    model = make(name).to(dtype)
    optimizer = adamw(model, name, dtype)
    all_losses: list[list[list[torch.Tensor]]] = []
    norms: list[torch.Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        all_losses.append([])
        for part in range(accumulate):
            losses = [loss_of(model, *batch(r, step * accumulate + part)) for r in range(ranks)]
            (sum(losses) / len(losses) / accumulate).backward()  # type: ignore[union-attr]
            all_losses[-1].append([loss.detach() for loss in losses])
        if clip:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
    return Run(all_losses, norms, end_of(model, optimizer))


def five_steps(
    mesh: str,
    name: str,
    mode: str,
    options: dict[str, Any],
    accumulate: int = 1,
    clip: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    env = ShardingEnv.from_mesh(mesh_of(*MESHES[mesh]))
    expected = one_process(name, env.data_size, accumulate, clip, dtype)
    model = DistributedModelParallel(
        make(name, seed=env.rank).to(dtype),  # rank 0's values win
        env,
        sharders=[TensorParallelSharder(**MODES[mode])] if mode != "plain" else None,
        data_parallel_wrapper=FSDPWrapper(**options) if options else None,
    )
    assert [n for n, _ in model.named_parameters()] == list(expected.end.state)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    optimizer = adamw(model, name, dtype)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(accumulate):
            with parallel_loss(mode):
                loss = loss_of(model, *batch(env.data_rank, step * accumulate + part))
                (loss / accumulate).backward()
            got = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
            want = expected.losses[step][part][env.data_rank]
            torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
        if clip:
            norm = clip_grad_norm_(model, CLIP)
            torch.testing.assert_close(norm, expected.norms[step], atol=tolerance, rtol=tolerance)
        optimizer.step()
    compare(model, optimizer, expected.end, tolerance)


def trained_like(
    oracle: nn.Module, model: nn.Module, env: ShardingEnv, optimizers: Sequence[torch.optim.Optimizer], steps: int
) -> None:
    """Some steps of both, the oracle's on all batches; then they are the same.

    Args:
        optimizers: the oracle's, then the model's.
    """
    for step in range(steps):
        batches = [batch(r, step) for r in range(env.data_size)]
        loss = sum(loss_of(oracle, *b) for b in batches) / env.data_size
        for one, total in zip(optimizers, (loss, loss_of(model, *batches[env.data_rank])), strict=True):
            one.zero_grad()
            total.backward()  # type: ignore[union-attr]
            one.step()
    compare(model, optimizers[1], end_of(oracle, optimizers[0]))


def compare(model: nn.Module, optimizer: torch.optim.Optimizer, expected: End, tolerance: float = 1e-5) -> None:
    values = full_state_dict(model)
    assert list(values) == list(expected.values)
    for key, value in expected.values.items():
        torch.testing.assert_close(values[key], value, atol=tolerance, rtol=tolerance, msg=f"{key} differs")
    state = full_optimizer_state_dict(model, optimizer)["state"]
    for key, wanted in expected.state.items():
        for what, want in wanted.items():
            torch.testing.assert_close(
                state[key][what], want, atol=tolerance, rtol=10 * tolerance, msg=f"{key}: {what} differs"
            )


def quick_on_two(mesh: str, *more: str) -> Any:
    """A case that is slow on more than two ranks: what they add, `test_equals_one_process` sees."""
    return pytest.param(mesh, *more, marks=[pytest.mark.slow] * (math.prod(MESHES[mesh].shape) > 2))


def _cases() -> list[Any]:
    """Every model and mode on one mesh of each kind; elsewhere two models, plain and with everything."""
    found = []
    for mesh, (shape, names) in MESHES.items():
        tensor = shape[names.index("tp")] if "tp" in names else 1
        in_full = mesh in ("tp2", "fsdp2xtp2", "fsdp2", "hsdp2x2") or math.prod(shape) > 4
        models = ["llama" if tensor > 2 else "llama_gqa", "gpt"] + ["llama_tied", "bert"] * in_full
        models += ["gpt_untied"] if mesh == "fsdp2xtp2" else []
        modes = list(MODES) if in_full else ["plain", "sp_loss"]
        for name in models:  # grouped-query attention where its 2 KV heads divide
            for mode in modes if tensor > 1 else ["plain"]:
                is_more = (
                    mesh == "fsdp2xtp2" and name in ("llama_tied", "bert", "gpt_untied") and mode in ("sp", "loss")
                )
                marks = [pytest.mark.slow] if math.prod(shape) > 4 or is_more else []
                found.append(pytest.param(mesh, name, mode, marks=marks, id=f"{mesh}-{name}-{mode}"))
    return found


@pytest.mark.parametrize(("mesh", "name", "mode"), _cases())
@pytest.mark.sampled(80)
def test_equals_one_process(mesh: str, name: str, mode: str) -> None:
    run_ranks(math.prod(MESHES[mesh].shape), five_steps, mesh, name, mode, {})


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("fsdp2xtp2", {"activation_checkpointing": True}),
        ("hsdp2x2", {"activation_checkpointing": True, "reshard_after_forward": False}),
        ("tp2", {"activation_checkpointing": True, "sequence_parallel": True}),
        ("fsdp2xtp2", {"activation_checkpointing": True, "sequence_parallel": True}),
        ("fsdp2", {"reshard_after_forward": False}),
        ("fsdp2", {"offload": True}),
    ],
)
@pytest.mark.sampled(4)
def test_options_do_not_change_numbers(mesh: str, options: dict[str, Any]) -> None:
    options = dict(options)
    mode = "sp" if options.pop("sequence_parallel", False) else "plain"
    run_ranks(math.prod(MESHES[mesh].shape), five_steps, mesh, "llama_gqa", mode, options)


@pytest.mark.parametrize(
    "mesh", [quick_on_two(m) for m in ("tp2", "dp2", "fsdp2", "fsdp2xtp2", "hsdp2x2", "replicate2xtp2")]
)
@pytest.mark.sampled(3)
def test_accumulated_and_clipped(mesh: str) -> None:
    run_ranks(math.prod(MESHES[mesh].shape), five_steps, mesh, "gpt", "plain", {}, accumulate=2, clip=True)


@pytest.mark.parametrize(
    ("mesh", "name"),
    [quick_on_two("tp2", "llama_gqa"), quick_on_two("fsdp2xtp2", "bert"), quick_on_two("replicate2xtp2", "llama_tied")],
)
def test_equals_one_process_in_double_precision(mesh: str, name: str) -> None:
    mode = "sp" if "tp" in mesh else "plain"
    run_ranks(math.prod(MESHES[mesh].shape), five_steps, mesh, name, mode, {}, dtype=torch.float64)
