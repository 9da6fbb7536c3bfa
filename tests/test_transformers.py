"""Transformers on every mesh equal one process: 5 steps of AdamW on the global batch, losses, weights, optimizer state.

Shapes: B samples for each data rank, T positions, V vocabulary.
"""

from __future__ import annotations

import math
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
LR, STEPS = 3e-3, 5


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
    oracle = make(name).to(dtype)
    model = DistributedModelParallel(
        make(name, seed=env.rank).to(dtype),  # rank 0's values win
        env,
        sharders=[TensorParallelSharder(**MODES[mode])] if mode != "plain" else None,
        data_parallel_wrapper=FSDPWrapper(**options) if options else None,
    )
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in oracle.named_parameters()]
    # In float32 a gradient that is nothing but rounding (as of the bias of attention's keys) becomes a whole step of
    # AdamW; a larger eps keeps it from that. The runs in float64 need none.
    eps = (1e-5 if name.startswith("llama") else 1e-4) if dtype == torch.float32 else 1e-8
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    plain, mine = (torch.optim.AdamW(m.parameters(), lr=LR, eps=eps) for m in (oracle, model))
    for step in range(STEPS):
        plain.zero_grad()
        mine.zero_grad()
        for part in range(accumulate):
            batches = [batch(r, step * accumulate + part) for r in range(env.data_size)]
            losses = [loss_of(oracle, *b) for b in batches]
            (sum(losses) / len(losses) / accumulate).backward()  # type: ignore[union-attr]
            with parallel_loss(mode):
                loss = loss_of(model, *batches[env.data_rank])
                (loss / accumulate).backward()
            got = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
            torch.testing.assert_close(got, losses[env.data_rank], atol=tolerance, rtol=tolerance)
        if clip:
            want = nn.utils.clip_grad_norm_(oracle.parameters(), 0.05)
            torch.testing.assert_close(clip_grad_norm_(model, 0.05), want, atol=tolerance, rtol=tolerance)
        plain.step()
        mine.step()
    compare(model, oracle, mine, plain, tolerance)


def compare(
    model: nn.Module,
    oracle: nn.Module,
    mine: torch.optim.Optimizer,
    plain: torch.optim.Optimizer,
    tolerance: float = 1e-5,
) -> None:
    values = full_state_dict(model)
    assert list(values) == list(oracle.state_dict())
    for key, value in oracle.state_dict().items():
        torch.testing.assert_close(values[key], value, atol=tolerance, rtol=tolerance, msg=f"{key} differs")
    state = full_optimizer_state_dict(model, mine)["state"]
    for key, parameter in oracle.named_parameters():
        for what, want in plain.state[parameter].items():
            torch.testing.assert_close(
                state[key][what], want, atol=tolerance, rtol=10 * tolerance, msg=f"{key}: {what} differs"
            )


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
                marks = [pytest.mark.slow] if math.prod(shape) > 4 else []
                found.append(pytest.param(mesh, name, mode, marks=marks, id=f"{mesh}-{name}-{mode}"))
    return found


@pytest.mark.parametrize(("mesh", "name", "mode"), _cases())
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
def test_options_do_not_change_numbers(mesh: str, options: dict[str, Any]) -> None:
    options = dict(options)
    mode = "sp" if options.pop("sequence_parallel", False) else "plain"
    run_ranks(math.prod(MESHES[mesh].shape), five_steps, mesh, "llama_gqa", mode, options)


@pytest.mark.parametrize("mesh", ["tp2", "dp2", "fsdp2", "fsdp2xtp2", "hsdp2x2", "replicate2xtp2"])
def test_accumulated_and_clipped(mesh: str) -> None:
    run_ranks(math.prod(MESHES[mesh].shape), five_steps, mesh, "gpt", "plain", {}, accumulate=2, clip=True)


@pytest.mark.parametrize(
    ("mesh", "name"), [("tp2", "llama_gqa"), ("fsdp2xtp2", "bert"), ("replicate2xtp2", "llama_tied")]
)
def test_equals_one_process_in_double_precision(mesh: str, name: str) -> None:
    mode = "sp" if "tp" in mesh else "plain"
    run_ranks(math.prod(MESHES[mesh].shape), five_steps, mesh, name, mode, {}, dtype=torch.float64)
