"""`FSDPWrapper` beside the unsharded model on the global batch: meshes, policies, accumulation, what it ignores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dmp import ShardError, ShardingEnv, is_dtensor
from sharders.data_parallel.ddp import DDPWrapper
from sharders.data_parallel.fsdp import FSDPWrapper, data_mesh
from tests.ranks import mesh, run_ranks
from tests.transformers_zoo import GPT, Bert, Llama

VOCAB = 51
SAMPLES = 2
"""Of each data rank, every step."""

# CommDebugMode's hooks on modules whose inputs are ids.
full_backward_hook = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")

LLAMA_TP = {
    "layers.*.feed_forward.w1": ColwiseParallel,
    "layers.*.feed_forward.w2": RowwiseParallel,
    "layers.*.feed_forward.w3": ColwiseParallel,
}


def make(kind: str = "llama") -> nn.Module:
    """A small model; on 4 ranks nearly nothing of the plain ones divides evenly."""
    torch.manual_seed(0)
    if kind == "llama":
        return Llama(VOCAB, 24, hidden=40)
    if kind == "tied llama":
        return Llama(VOCAB, 24, hidden=40, tied=True)
    return GPT(VOCAB, 24, hidden=42) if kind == "gpt" else Bert(VOCAB, 24, hidden=42)


def env_of(shape: tuple[int, ...] | None, names: tuple[str, ...] = ()) -> ShardingEnv:
    return ShardingEnv.single() if shape is None else ShardingEnv.from_mesh(mesh(shape, names))


def ids_of(step: int, env: ShardingEnv, everyone: bool = False) -> torch.Tensor:
    """(B, T) ids of this data rank, or of all of them."""
    ids = torch.randint(0, VOCAB, (env.data_size, SAMPLES, 5), generator=torch.Generator().manual_seed(step))
    return ids.flatten(0, 1) if everyone else ids[env.data_rank]


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def same(model: nn.Module, plain: nn.Module, what: Callable[[nn.Parameter], Any] = lambda p: p) -> None:
    """Names, and values (or gradients) up to rounding."""
    ours, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    assert list(ours) == list(theirs)
    for name, p in theirs.items():
        one, other = what(ours[name]), what(p)
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(
                whole(one), other.detach(), atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def gradient(p: nn.Parameter) -> Any:
    return p.grad


def split_by_tensor(model: nn.Module, env: ShardingEnv) -> None:
    tensor = env.submesh("tensor")
    if tensor is not None:
        parallelize_module(model, tensor, {path: style() for path, style in LLAMA_TP.items()})


def train(model: nn.Module, batches: Callable[[int], torch.Tensor], steps: int = 3) -> torch.optim.Optimizer:
    # eps: the gradient of a key's bias is zero but for rounding, which a smaller one would make into a step
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batches(step)).backward()
        optimizer.step()
    return optimizer


def wrapped(
    env: ShardingEnv, kind: str = "llama", ignored: frozenset[str] = frozenset(), **options: Any
) -> tuple[nn.Module, nn.Module]:
    """What runs, and the module under its own names."""
    module = make(kind)
    split_by_tensor(module, env)
    return FSDPWrapper(**options).wrap(module, env, env.device, ignored), module


# ---- every mesh ----


def trains_as_plain(shape: tuple[int, ...] | None, names: tuple[str, ...], kind: str, options: dict[str, Any]) -> str:
    """Three steps, gradients of the first compared too; returns what ran."""
    env, plain = env_of(shape, names), make(kind)
    model, module = wrapped(env, kind, **options)
    for m, everyone in ((model, False), (plain, True)):
        loss_of(m, ids_of(9, env, everyone)).backward()
    same(module, plain, gradient)
    train(model, lambda step: ids_of(step, env))
    train(plain, lambda step: ids_of(step, env, everyone=True))
    same(module, plain)
    assert (model is module) or isinstance(model, DistributedDataParallel)
    assert list(module.state_dict()) == list(plain.state_dict())
    kinds = {type(module).__mro__[1].__name__} if any(map(is_dtensor, module.parameters())) else {type(model).__name__}
    return kinds.pop()


MESHES = {
    1: [
        (None, (), "Llama"),
        ((1,), ("dp",), "Llama"),
        ((1,), ("shard",), "FSDPModule"),
        ((1, 1), ("replicate", "shard"), "FSDPModule"),
    ],
    2: [
        ((2,), ("dp",), "AnyReachDDP"),
        ((2,), ("shard",), "FSDPModule"),
        ((1, 2), ("replicate", "shard"), "FSDPModule"),
        ((2, 1), ("replicate", "shard"), "FSDPModule"),
        ((1, 2), ("shard", "tp"), "FSDPModule"),
        ((2, 1), ("shard", "tp"), "FSDPModule"),
        ((1, 2), ("dp", "tp"), "Module"),
        ((2, 1), ("replicate", "tp"), "ReplicateModule"),
        ((2,), ("tp",), "Module"),
    ],
    4: [
        ((4,), ("shard",), "FSDPModule"),
        ((2, 2), ("replicate", "shard"), "FSDPModule"),
        ((2, 2), ("dp", "shard"), "FSDPModule"),
        ((2, 2), ("shard", "replicate"), "FSDPModule"),
        ((2, 2), ("shard", "fsdp"), "FSDPModule"),
        ((2, 1, 2), ("host", "replicate", "shard"), "FSDPModule"),
        ((2, 2), ("host", "local"), "AnyReachDDP"),
        ((2, 2), ("shard", "tp"), "FSDPModule"),
        ((2, 2), ("tp", "shard"), "FSDPModule"),
        ((2, 2), ("replicate", "tp"), "ReplicateModule"),
        ((2, 2), ("dp", "tp"), "ReplicateModule"),
        ((2, 1, 2), ("replicate", "shard", "tp"), "FSDPModule"),
        ((1, 2, 2), ("dp", "replicate", "tp"), "ReplicateModule"),
    ],
}


@pytest.mark.parametrize(
    ("shape", "names", "ran"),
    [m for meshes in MESHES.values() for m in meshes],
    ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else None,
)
@pytest.mark.sampled(16)
def test_every_mesh_trains_as_the_plain_model(shape: tuple[int, ...] | None, names: tuple[str, ...], ran: str) -> None:
    world = 1 if shape is None else torch.Size(shape).numel()
    done = run_ranks(world, trains_as_plain, shape, names, "llama", {})
    assert done == [ran] * world


@pytest.mark.parametrize("kind", ["tied llama", "gpt", "bert"])
@pytest.mark.parametrize("names", [("shard",), ("replicate", "shard")], ids="-".join)
@pytest.mark.sampled(10)
def test_tied_models(kind: str, names: tuple[str, ...]) -> None:
    run_ranks(2, trains_as_plain, (2,) if len(names) == 1 else (1, 2), names, kind, {})


# ---- what is gathered, and when ----


def collectives(shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[dict[str, int], dict[str, int]]:
    """Of a step of ours and of one by hand, by name."""
    env = env_of(shape, names)
    counts: list[dict[str, int]] = []
    ours = wrapped(env)[1]
    by_hand: nn.Module = make()
    for block in by_hand.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=env.mesh)
    fully_shard(by_hand, mesh=env.mesh)
    for model in (ours, by_hand):
        for _ in range(2):  # in which ranks agree on what follows what
            loss_of(model, ids_of(0, env)).backward()
        with CommDebugMode() as mode:
            loss_of(model, ids_of(0, env)).backward()
        counts.append({str(op): n for op, n in mode.get_comm_counts().items()})
    return counts[0], counts[1]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")  # the one by hand does
@full_backward_hook
@pytest.mark.parametrize(
    ("shape", "names"), [((2,), ("shard",)), ((2, 2), ("replicate", "shard"))], ids=["FSDP", "HSDP"]
)
def test_collectives_are_those_of_fully_shard_by_hand(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    for ours, by_hand in run_ranks(torch.Size(shape).numel(), collectives, shape, names):
        assert ours == by_hand
        # forward: two blocks and the root; backward: the last block is gathered still, or again
        assert sum(ours.values()) >= 3 + 3


def options_reach_torch(env_axes: tuple[str, ...]) -> None:
    env = env_of((2,), env_axes)
    gathers = {}
    for reshard in (True, False):
        module = wrapped(env, reshard_after_forward=reshard)[1]
        loss = loss_of(module, ids_of(0, env))
        with CommDebugMode() as mode:
            loss.backward()
        gathers[reshard] = sum(n for op, n in mode.get_comm_counts().items() if "_allgather_base" in str(op))
    assert gathers[False] == 0 < gathers[True]
    module = wrapped(env, units=["layers.0.*norm", "layers.1"])[1]
    assert {path for path, m in module.named_modules() if hasattr(m, "unshard")} == {
        "",
        "layers.0.attention_norm",
        "layers.0.ffn_norm",
        "layers.1",
    }
    with pytest.raises(ShardError, match=r"fits 'blocks\.\*'"):
        wrapped(env, units=["blocks.*"])


@full_backward_hook
def test_options_reach_torch() -> None:
    run_ranks(2, options_reach_torch, ("shard",))


def axes_of_the_mesh() -> None:
    """Copies outer, pieces inner, whatever the mesh's order; the tensor axis comes after."""
    env = env_of((2, 2), ("shard", "replicate"))
    assert data_mesh(env).mesh_dim_names == ("replicate", "shard")
    assert torch.equal(data_mesh(env).mesh, env.mesh.mesh.T)  # type: ignore[union-attr]
    assert data_mesh(env_of((2, 2), ("shard", "fsdp"))).shape == (4,)
    assert data_mesh(env_of((2, 1, 2), ("host", "replicate", "shard"))).shape == (2, 2)
    assert data_mesh(env_of((2, 1, 2), ("replicate", "shard", "tp"))).shape == (2, 1)
    env = env_of((2, 2), ("shard", "tp"))
    weight = wrapped(env)[1].layers[0].feed_forward.w2.weight  # type: ignore[index, union-attr]
    assert isinstance(weight, DTensor) and weight.device_mesh.mesh_dim_names == ("shard", "tp")
    assert weight.shape == (24, 40) and weight.to_local().shape == (12, 20)
    env = env_of((2, 2), ("replicate", "tp"))
    weight = wrapped(env)[1].layers[0].feed_forward.w1.weight  # type: ignore[index, union-attr]
    assert weight.placements[0] == Replicate() and weight.placements[1].is_shard(0)
    assert weight.shape == (40, 24) and weight.to_local().shape == (20, 24)


def test_axes_of_the_mesh() -> None:
    run_ranks(4, axes_of_the_mesh)


def says_what_it_will_do() -> None:
    single, dp, shard, tp = (ShardingEnv.single(), *(env_of((2,), (name,)) for name in ("dp", "shard", "tp")))
    wrapper = FSDPWrapper()
    assert [wrapper.shards_in_place(e, False) for e in (single, dp, shard, tp)] == [False, False, True, False]
    assert wrapper.shards_in_place(dp, True) and wrapper.shards_in_place(tp, True)
    assert FSDPWrapper(offload=True).shards_in_place(dp, False)
    nothing = nn.Sequential(nn.ReLU())
    assert wrapper.wrap(nothing, shard, shard.device, frozenset()) is nothing
    module = make()
    everything = frozenset(name for name, _ in module.named_parameters())
    assert wrapper.wrap(module, shard, shard.device, everything) is module
    assert not any(map(is_dtensor, module.parameters())) and type(module) is Llama
    for env in (single, tp):
        with pytest.raises(ShardError, match=r"mixed_precision of FSDPWrapper needs a mesh with a data axis.*autocast"):
            FSDPWrapper(mixed_precision=torch.bfloat16).wrap(make(), env, env.device, frozenset())
    with pytest.MonkeyPatch.context() as older:  # as FSDP2 is in torch 2.12
        older.delattr("torch.distributed.fsdp.FSDPModule.set_reduce_scatter_unused_params")
        wrapper.check(make(), dp, {}, frozenset())
        with pytest.raises(ShardError, match=r"fully sharded with torch .* expected torch 2.13 or later"):
            wrapper.check(make(), shard, {}, frozenset())


def test_says_what_it_will_do() -> None:
    run_ranks(2, says_what_it_will_do)


def ddp_refuses_dtensors() -> None:
    env = env_of((2, 2), ("dp", "tp"))
    module = make()
    split_by_tensor(module, env)
    with pytest.raises(ShardError, match=r"takes no DTensors, and 'layers.0.feed_forward.w1.weight' is one.*'tp'"):
        DDPWrapper().wrap(module, env, env.device, frozenset())


def test_ddp_refuses_dtensors() -> None:
    run_ranks(4, ddp_refuses_dtensors)


# ---- accumulation, checkpointing, scaling ----


def accumulates(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    env, plain = env_of(shape, names), make()
    module = wrapped(env)[1]
    for step in range(3):
        module.set_requires_gradient_sync(step == 2)  # type: ignore[operator]
        with CommDebugMode() as mode:
            (loss_of(module, ids_of(step, env)) / 3).backward()
        reductions = sum(n for op, n in mode.get_comm_counts().items() if "reduce" in str(op))
        assert bool(reductions) == (step == 2)
        (loss_of(plain, ids_of(step, env, everyone=True)) / 3).backward()
    same(module, plain, gradient)


@pytest.mark.parametrize(
    ("shape", "names"),
    [((2,), ("shard",)), ((2, 1), ("shard", "replicate")), ((2, 1), ("replicate", "tp"))],
    ids=["FSDP", "HSDP", "replicate"],
)
@full_backward_hook
@pytest.mark.sampled(2)
def test_gradients_accumulate_without_reduction(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    run_ranks(2, accumulates, shape, names)


def recomputes(shape: tuple[int, ...] | None, names: tuple[str, ...], which: Any) -> list[int]:
    env, plain, calls = env_of(shape, names), make(), [0, 0]
    model, module = wrapped(env, activation_checkpointing=which)
    for i, block in enumerate(module.layers):  # type: ignore[arg-type, union-attr]

        def count(*_: Any, i: int = i) -> None:
            calls[i] += 1

        block.feed_forward.register_forward_pre_hook(count)
    train(model, lambda step: ids_of(step, env))
    train(plain, lambda step: ids_of(step, env, everyone=True))
    same(module, plain)
    return calls


def last_block(path: str, module: nn.Module) -> bool:
    return path == "layers.1"


@pytest.mark.parametrize(
    ("shape", "names"),
    [(None, ()), ((2,), ("dp",)), ((2,), ("shard",)), ((2, 2), ("shard", "tp")), ((2, 2), ("replicate", "tp"))],
    ids=str,
)
@pytest.mark.sampled(5)
def test_checkpointed_blocks_are_recomputed(shape: tuple[int, ...] | None, names: tuple[str, ...]) -> None:
    world = 1 if shape is None else torch.Size(shape).numel()
    assert run_ranks(world, recomputes, shape, names, True) == [[6, 6]] * world
    assert run_ranks(world, recomputes, shape, names, last_block) == [[3, 6]] * world


def skips_together(shape: tuple[int, ...], names: tuple[str, ...], kind: type[GradScaler]) -> tuple[bool, bool, float]:
    """Whether weights changed in a good step, and in one with an infinity in the last piece alone; the scale then."""
    env = env_of(shape, names)
    model, module = wrapped(env)
    optimizer, scaler = torch.optim.AdamW(module.parameters()), kind("cpu", init_scale=4.0)
    changed = []
    for bad in (False, True):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, ids_of(0, env))).backward()
        before = [local_of(p).clone() for p in module.parameters()]
        local = module.layers[1].feed_forward.w1.weight.grad.to_local()  # type: ignore[index, union-attr]
        if bad and env.coordinate[-1] == env.shape[-1] - 1:
            local.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        after = [local_of(p) for p in module.parameters()]
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    return changed[0], changed[1], scaler.get_scale()


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("shard",), GradScaler),
        (("replicate", "shard"), GradScaler),
        # GradScaler asks the ranks of the first gradient's mesh alone, which here lacks the tensor axis.
        (("shard", "tp"), ShardedGradScaler),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor with numel=1:UserWarning")  # torch's own scale
def test_an_infinity_on_one_rank_skips_the_step_on_all(names: tuple[str, ...], kind: type[GradScaler]) -> None:
    shape = (2,) * len(names)
    world = torch.Size(shape).numel()
    assert run_ranks(world, skips_together, shape, names, kind) == [(True, False, 2.0)] * world


# ---- policies ----


def close_in_half_precision(shape: tuple[int, ...], names: tuple[str, ...], policy: Any) -> None:
    env, plain, seen = env_of(shape, names), make(), []
    model, module = wrapped(env, mixed_precision=policy)
    assert model is module
    module.layers[0].feed_forward.w1.register_forward_hook(lambda _, args, out: seen.append(out.dtype))  # type: ignore
    train(module, lambda step: ids_of(step, env))
    train(plain, lambda step: ids_of(step, env, everyone=True))
    assert seen == [torch.bfloat16] * 3
    distances = []
    for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert p.dtype == torch.float32, name
        distances.append((whole(p) - q.detach()).abs().mean())
    assert 0 < torch.stack(distances).max() < 0.01  # three AdamW steps of 0.01 each, of which most agree in sign


@pytest.mark.parametrize(
    "policy",
    [torch.bfloat16, MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)],
    ids=["dtype", "policy"],
)
@pytest.mark.parametrize("names", [("shard",), ("dp",)], ids="-".join)
@pytest.mark.sampled(2)
def test_mixed_precision(names: tuple[str, ...], policy: Any) -> None:
    run_ranks(2, close_in_half_precision, (2,), names, policy)


@pytest.mark.parametrize("names", [("shard",), ("dp",)], ids="-".join)
@pytest.mark.parametrize("offload", [True, CPUOffloadPolicy(pin_memory=False)], ids=["True", "policy"])
@pytest.mark.sampled(4)
def test_offload(names: tuple[str, ...], offload: Any) -> None:
    ran = run_ranks(2, trains_as_plain, (2,), names, "llama", {"offload": offload})
    assert ran == ["FSDPModule" if names == ("shard",) else "ReplicateModule"] * 2
