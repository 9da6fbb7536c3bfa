"""The dense part of a step against what torch counts: flops, bytes of a real wrap to the byte, what is recomputed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dmp import (
    DistributedModelParallel,
    Layout,
    PlanError,
    ShardingEnv,
    dense_parameters,
    local_of,
    place_dense,
    replicate,
)
from planner import ShardingPlanner, Topology
from planner.costs.rings import Ring
from planner.dense.block import COMPUTE, DATA, TENSOR, DenseBlock
from planner.dense.decide import Dense, decide
from planner.dense.model import DenseModel
from sharders import default_sharders
from tests.ranks import mesh as mesh_of
from tests.ranks import run_ranks
from tests.test_transformers import MESHES, batch, loss_of, make
from tests.transformers_zoo import GPT, Bert, Llama

B, T, V = 4, 64, 256
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], int]] = {
    "llama": (lambda: Llama(V, 128, 4, 8, 4, 344), lambda: torch.zeros(B, T, dtype=torch.long), T),
    "gpt": (lambda: GPT(V, 128, 4, 8, 512, max_len=T), lambda: torch.zeros(B, T, dtype=torch.long), T),
    "bert": (lambda: Bert(V, 128, 4, 8, 512, max_len=T), lambda: torch.zeros(B, T, dtype=torch.long), T),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 8, 512, 0.0, batch_first=True), 3),
        lambda: torch.zeros(B, T, 128),
        T,
    ),
    "mlp": (lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), lambda: torch.zeros(B, 64), 1),
}
H100S = Topology(8e10, 2e12, 6e13, (5e10, 4.5e11), (2.5e-5, 1e-5), ranks_per_host=8, product_flops_16=4e14)


def decided(
    module: nn.Module,
    env: ShardingEnv,
    batch_size: float = 1,
    tokens: int | None = None,
    topology: Topology = H100S,
    chosen: dict[str, Layout] | None = None,
    dtype: torch.dtype | None = None,
) -> Dense:
    model = DenseModel.of(module, dense_parameters(module), tokens, dtype)
    return decide(model, place_dense(module, default_sharders(), env), chosen or {}, env, topology, batch_size)


def abstract(**sizes: int) -> ShardingEnv:
    return ShardingEnv.abstract(tuple(sizes.values()), tuple(sizes))


def block(dense: Dense, name: str) -> DenseBlock:
    return next(each for each in dense.blocks if each.name == name)


# ---- work ----


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_flops_and_activations_are_those_of_a_run(name: str, frozen: bool) -> None:
    """Where products' weights are frozen, as under adapters, their gradients are not computed."""
    make_module, make_batch, tokens = MODELS[name]
    module = make_module()
    lookups = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    for parameter in module.parameters():
        parameter.requires_grad_(not (frozen and parameter.dim() > 1 and id(parameter) not in lookups))
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with FlopCounterMode(display=False) as counted, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = module(make_batch())
        kept = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
        out.sum().backward()
    dense = decided(module, ShardingEnv.single(), B, tokens)
    flops = sum(each.flops for each in dense.blocks)
    blocks = sum(each.count for each in dense.blocks if each.name)
    unseen = 0 if name in ("bert", "mlp") else 3 * blocks * 4 * B * T * T * 128  # the CPU's fused attention
    first = {"mlp": 2 * B * 64 * 256, "encoder": 2 * B * T * 128 * 384}.get(name, 0)  # a batch needs no gradient
    assert flops - unseen - first == pytest.approx(counted.get_total_flops(), rel=0.001)
    most = {"encoder": 1.5, "mlp": 2.0}.get(name, 1.2)
    assert frozen or 0.8 < dense.training_bytes["activations"] / kept < most


def test_a_mixtures_experts_are_met_by_some_tokens() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"num_experts_per_tok": 2, "num_experts": 8}
            self.experts, self.over = nn.Parameter(torch.empty(8, 16, 16)), nn.Linear(16, 16, bias=False)

    dense = decided(Mixture(), ShardingEnv.single(), 1, 1)
    assert sum(each.flops for each in dense.blocks) == 6 * (2 * 16 * 16 + 16 * 16)


# ---- memory ----


def _real(mesh: str, name: str) -> None:
    env = ShardingEnv.from_mesh(mesh_of(*MESHES[mesh]))
    module = make(name)
    report = ShardingPlanner(batch_size=2).plan(module, default_sharders(), env).report
    tables = {p.name for p in report.parameters}
    model = DistributedModelParallel(module, env)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of(model, *batch(env.data_rank, 0)).backward()
    optimizer.step()
    dense = {n: p for n, p in model.named_parameters() if n not in tables}

    def size(tensors: Any) -> int:
        return sum(local_of(t).numel() * t.element_size() for t in tensors)

    state = [t for p in dense.values() for key, t in optimizer.state[p].items() if key != "step"]
    found = {"weights": size(dense.values()), "gradients": size(p.grad for p in dense.values())}
    found["optimizer state"] = size(state)
    assert {part: report.dense_bytes[part] for part in found} == found, (env.rank, found)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        *(("fsdp2", "llama"), ("dp2", "bert"), ("tp2", "llama_gqa")),
        pytest.param("fsdp2xtp2", "gpt", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(3)
def test_what_stays_on_a_rank_is_what_a_real_wrap_holds(mesh: str, name: str) -> None:
    run_ranks(math.prod(MESHES[mesh].shape), _real, mesh, name)


def test_units_are_gathered_and_copies_have_buckets() -> None:
    with torch.device("meta"):
        llama = Llama(V, 128, 4, 8, 8, 344)
    numel = sum(p.numel() for p in llama.layers[0].parameters())
    split = decided(llama, abstract(shard=8), 1, T).training_bytes["gathered weights and buckets"]
    root = sum(p.numel() for n, p in llama.named_parameters() if not n.startswith("layers."))
    assert split == 4 * (3 * numel + 2 * root)
    whole = decided(llama, abstract(dp=8), 1, T).training_bytes
    assert whole["gathered weights and buckets"] == whole["gradients"] == 4 * sum(p.numel() for p in llama.parameters())
    frozen = llama.requires_grad_(False)
    assert decided(frozen, abstract(shard=8), 1, T).training_bytes["optimizer state"] == 0


def test_recomputed_blocks_are_seen_and_cost_a_forward() -> None:
    from torch.distributed._composable.checkpoint_activation import checkpoint
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    env, plain = ShardingEnv.single(), Llama(V, 128, 4, 8, 4, 344)
    as_it_is = block(decided(plain, env, B, T), "layers.*")
    composed, wrapped, flagged = (Llama(V, 128, 4, 8, 4, 344) for _ in range(3))
    for i in range(4):
        checkpoint(composed.layers[i])
        wrapped.layers[i] = checkpoint_wrapper(wrapped.layers[i])
        flagged.layers[i].gradient_checkpointing = True  # as Hugging Face's
    for module in (composed, wrapped, flagged):
        again = block(decided(module, env, B, T), "layers.*")
        assert again.flops == pytest.approx(as_it_is.flops * 4 / 3)
        assert again.training_bytes["activations"] == as_it_is.recomputed_bytes
        assert as_it_is.recomputed_bytes < 0.5 * as_it_is.training_bytes["activations"]


def test_what_comes_and_goes_is_taken_from_the_reserve_first() -> None:
    module = nn.Sequential(nn.Linear(256, 256, bias=False))
    stays = 4 * 4 * 256 * 256
    env = ShardingEnv.single()
    roomy = Topology(100 * stays, 1e12, 1e13, 1e10, 1e-5)
    assert decided(module, env, 1, 1, roomy).taken_bytes == stays
    many = decided(module, env, 30_000, 1, roomy)  # of 15 %, two thirds
    assert many.taken_bytes == stays + many.training_bytes["activations"] - stays * 10


def test_activations_that_do_not_fit_are_a_note_and_weights_an_error() -> None:
    with torch.device("meta"):
        llama = Llama(V, 128, 4, 8, 4, 344)
    stays = 4 * 4 * sum(p.numel() for p in llama.parameters())
    small = Topology(1.5 * stays, 1e12, 1e13, 1e10, 1e-5)
    dense = decided(llama, ShardingEnv.single(), 4, T, small)
    assert any("activation_checkpointing=True" in note and "on which the plan counts" in note for note in dense.notes)
    none = decided(llama, ShardingEnv.single(), 512, T, small)
    assert any("counts none of them" in note for note in none.notes) and none.taken_bytes == stays
    tiny = Topology(0.5 * stays, 1e12, 1e13, 1e10, 1e-5)
    with pytest.raises(PlanError, match=r"layers\.\*(.|\n)*'dp' called 'shard'") as caught:
        decided(llama, abstract(dp=8), 1, T, tiny)
    certain = stays * 5 // 4  # and DDP's buckets
    assert caught.value.bytes_short == math.ceil(certain - 0.95 * 0.5 * stays)
    with pytest.raises(PlanError, match="4 times the ranks on 'shard', 16"):
        decided(llama, abstract(shard=4), 1, T, replace(tiny, memory_bytes=0.3 * stays))
    with pytest.raises(PlanError, match=r"memory_bytes of (\d+)") as named:
        decided(llama, ShardingEnv.single(), 1, T, tiny)
    memory = float(str(named.value).partition("memory_bytes of ")[2].split()[0])
    decided(llama, ShardingEnv.single(), 1, T, Topology(memory + 1, 1e12, 1e13, 1e10, 1e-5))


# ---- collectives ----


def test_a_group_with_many_ranks_on_a_host_goes_through_all_their_cards() -> None:
    across = Ring.along(("shard",), abstract(shard=8, tp=8), H100S)
    assert across.seconds_per_byte == pytest.approx(7 / 8 / 5e10)
    whole = Ring.along(("shard",), abstract(shard=64), H100S)
    assert whole.seconds_per_byte == pytest.approx(7 / 8 / (8 * 5e10))
    inside = Ring.along(("tp",), abstract(shard=8, tp=8), H100S)
    assert inside.seconds_per_byte == pytest.approx(7 / 8 / 4.5e11) and inside.latency == pytest.approx(3e-5)
    assert Ring.along((), abstract(shard=8), H100S) == Ring(1, 0.0, 0.0)


def test_a_block_waits_for_its_tensor_collectives_and_hides_the_others() -> None:
    with torch.device("meta"):
        llama = Llama(32768, 4096, 4, 32, 8, 14336)
    env = abstract(shard=8, tp=8)
    dense = decided(llama, env, 8, 2048, dtype=torch.bfloat16)
    layers = block(dense, "layers.*")
    ring = Ring.along(("tp",), env, H100S)
    hidden_state = 8 * 2048 * 4096 * 2
    assert layers.seconds[TENSOR] == pytest.approx(4 * 4 * ring.all_reduce(hidden_state))
    assert layers.hidden_seconds > 0 and layers.seconds[DATA] < layers.hidden_seconds
    split = decided(llama, abstract(shard=64), 1, 2048, dtype=torch.bfloat16)
    assert block(split, "layers.*").seconds[TENSOR] == 0
    assert split.seconds[COMPUTE] == pytest.approx(dense.seconds[COMPUTE], rel=0.05)  # the same samples in all
    few = decided(llama, abstract(shard=64), 1, 16, dtype=torch.bfloat16)  # too little to compute to hide anything
    assert block(few, "layers.*").seconds[DATA] > 0.8 * block(few, "layers.*").hidden_seconds


def test_copies_reduce_once_and_shards_gather_twice() -> None:
    module = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    size = 4 * 4 * 2048 * 2048
    for env in (abstract(dp=8), abstract(shard=8)):
        dense = decided(module, env, 1, 1)
        both = sum(each.hidden_seconds + each.seconds[DATA] for each in dense.blocks)
        ring = Ring.along(env.names, env, H100S)
        times = 4 if env.fully_sharded_axes else 3  # units, buckets
        gathers = 3 * ring.gather(size, times) if env.fully_sharded_axes else ring.all_reduce(size, times)
        assert both == pytest.approx(gathers)
    kept = decided(module, abstract(shard=8), 1, 1, chosen={f"{i}.weight": replicate() for i in range(4)})
    assert kept.training_bytes["weights"] == size


# ---- samples ----


def test_the_report_says_what_has_no_shape() -> None:
    """It read "step 0 ms" of a model that was all lazy."""
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(4))
    report = ShardingPlanner().plan(lazy, default_sharders(), abstract(shard=2)).report
    assert "0.weight, 0.bias, 1.weight and 1 more: of lazy modules" in report.notes[0]
    assert "without a shape" in str(report)


def test_the_report_says_how_long_a_sample_is() -> None:
    with torch.device("meta"):
        llama = Llama()
    env = abstract(shard=2)
    guessed = ShardingPlanner().plan(llama, default_sharders(), env).report
    assert any("512 tokens" in note and "guess" in note for note in guessed.notes)
    said = ShardingPlanner(sequence_length=64).plan(llama, default_sharders(), env).report
    assert any("64 tokens" in note and "as given" in note for note in said.notes)
    llama.config = {"max_position_embeddings": 8192}
    known = ShardingPlanner().plan(llama, default_sharders(), env).report
    assert any("config.max_position_embeddings = 8192" in note for note in known.notes)
    assert said.step_seconds == pytest.approx(sum(said.phase_seconds) + sum(said.dense_seconds.values()))
    with pytest.raises(ValueError, match="sequence_length"):
        ShardingPlanner(sequence_length=0)
    with pytest.raises(ValueError, match="compute_dtype"):
        ShardingPlanner(compute_dtype="bf16")  # type: ignore[arg-type]
