"""Options of the data-parallel wrappers beside habits of training, through `DistributedModelParallel`: the numbers of
the unsharded module on the global batch, or an error in words on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from dmp import DistributedModelParallel, ShardError, ShardingEnv, clip_grad_norm_, full_state_dict
from sharders import DDPWrapper, FSDPWrapper
from tests.ranks import mesh, run_ranks

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "dp": ((2,), ("dp",)),
    "shard": ((2,), ("shard",)),
    "hsdp": ((2, 2), ("replicate", "shard")),
    "shard_tp": ((2, 2), ("shard", "tp")),
    "dp_tp": ((2, 2), ("dp", "tp")),
}
WIDTH = 8


class Block(nn.Module):
    """Attention with one head to a rank, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.norm = 2, nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, 4)).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(F.gelu(self.up(x)))
        return out


class Stack(nn.Module):
    """Blocks, one of which is run twice, under a first weight that is tied to the last; one that some ranks leave out,
    one that nobody runs, and one without dimensions."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.at_times, self.never, self.gain = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2), nn.Parameter(torch.ones(()))
        self.reentrant = reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        if ids[0, 0] % 2:
            x = self.at_times(x)
        out: torch.Tensor = self.head(x * self.gain)
        return out


class Side:
    """A model and the samples of the ranks that it stands for: the wrapped one's own, or the plain one's all."""

    def __init__(self, model: nn.Module, ranks: Sequence[int]) -> None:
        self.model, self.ranks, self.step = model, ranks, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(self, micro: int = 0) -> torch.Tensor:
        """The mean over the ranks; their samples differ at each step, and in each part of one."""
        return torch.stack([self._of_rank(rank, micro) for rank in self.ranks]).mean()

    def _of_rank(self, rank: int, micro: int) -> torch.Tensor:
        seed = 100 * self.step + 10 * micro + rank
        ids = torch.randint(0, 12, (3, 4), generator=torch.Generator().manual_seed(seed))
        loss: torch.Tensor = self.model(ids).double().tanh().square().mean()
        return loss

    def gathering(self) -> Any:
        """Of gradients alone, without an average, where this is the wrapped one."""
        return self.model.no_sync() if isinstance(self.model, DistributedModelParallel) else nullcontext()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1


def _plain(side: Side) -> None:
    side.loss().backward()


def _accumulated(side: Side) -> None:
    with side.gathering():
        side.loss().backward()
    side.loss(1).backward()


def _added(side: Side) -> None:
    side.loss().backward()
    side.loss(1).backward()


def _in_another_order(side: Side) -> None:
    losses = [side.loss(), side.loss(1)]
    for loss in losses:
        loss.backward()


def _again(side: Side) -> None:
    loss = side.loss()
    loss.backward(retain_graph=True)
    (loss / 2).backward()


def _clipped(side: Side) -> None:
    side.loss().backward()
    if isinstance(side.model, DistributedModelParallel):
        clip_grad_norm_(side.model, 0.1)
    else:
        nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)


def _kept(side: Side) -> None:
    side.optimizer.zero_grad(set_to_none=False)
    side.loss().backward()


def _evaluated(side: Side) -> None:
    side.loss().backward()
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            side.loss(2)


def _copied(side: Side) -> None:
    side.model = copy.deepcopy(side.model)
    side.optimizer = torch.optim.SGD(side.model.parameters(), lr=0.05, momentum=0.9)
    side.loss().backward()


def _loaded(side: Side) -> None:
    saved, of_optimizer = copy.deepcopy(side.model.state_dict()), copy.deepcopy(side.optimizer.state_dict())
    side.loss().backward()
    side.optimizer.step()
    side.optimizer.zero_grad()
    side.model.load_state_dict(saved)
    side.optimizer.load_state_dict(of_optimizer)
    side.loss(1).backward()


def _frozen(side: Side) -> None:
    weight = side.model.at_times.weight  # the wrapper answers for its module
    weight.requires_grad_(not weight.requires_grad)
    side.loss().backward()


Habit = Callable[[Side], None]
HABITS: tuple[Habit, ...] = (
    *(_accumulated, _added, _in_another_order, _again, _clipped, _kept, _evaluated, _copied, _loaded, _frozen, _frozen),
)
DDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
}
FSDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "freed": {"reshard_after_forward": True},
    "kept": {"reshard_after_forward": False},
    "offloaded": {"offload": True},
    "at once": {"units": []},
    "checkpointed": {"activation_checkpointing": True},
    "narrow": {"mixed_precision": torch.float32},
    "narrow, kept": {"mixed_precision": torch.float32, "reshard_after_forward": False},
    "narrow, freed, checkpointed": {
        "mixed_precision": torch.float32,
        "reshard_after_forward": True,
        "activation_checkpointing": True,
    },
    "a policy, offloaded": {
        "mixed_precision": MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.float64),
        "offload": True,
    },
    "narrow, averaged wide": {
        "mixed_precision": MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    },
}


def trains(
    on: str, kind: str, options: dict[str, Any], habits: Sequence[Habit] = HABITS, reentrant: bool | None = None
) -> None:
    """A step by each habit, one after another: values, gradients and momentum are the plain model's."""
    env = ShardingEnv.from_mesh(mesh(*MESHES[on]))
    tolerance = 1e-3 if "mixed_precision" in options else 1e-9
    wrapper = {"ddp": DDPWrapper, "fsdp": FSDPWrapper}[kind](**options)
    model = DistributedModelParallel(Stack(reentrant).double(), env, data_parallel_wrapper=wrapper)
    sides = Side(model, [env.data_rank]), Side(Stack().double(), range(env.data_size))
    for step, habit in enumerate(habits):
        for side in sides:
            habit(side)
        grads = [{n: _whole(p.grad) for n, p in side.model.named_parameters()} for side in sides]
        _same(grads, f"step {step}, {habit.__name__}, gradient of", tolerance)
        for side in sides:
            side.update()
    _same([full_state_dict(sides[0].model), sides[1].model.state_dict()], "value of", tolerance)


def _whole(gradient: Any) -> torch.Tensor | None:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def _same(pair: Sequence[dict[str, torch.Tensor | None]], what: str, tolerance: float) -> None:
    for name, wanted in pair[1].items():
        got = pair[0][name]
        assert (got is None) == (wanted is None), f"{what} {name}: {got} beside {wanted}"
        if got is not None and wanted is not None:
            furthest, largest = (got - wanted).abs().max().item(), wanted.abs().max().item()
            assert furthest <= tolerance * max(largest, 1e-2), f"{what} {name}: {furthest} off {largest}"


CASES = [
    *(("dp", "ddp", options) for options in DDP),
    *(("shard", "fsdp", options) for options in FSDP),
    *(("dp", "fsdp", options) for options in ("plain", "narrow", "offloaded", "checkpointed")),
    *((on, "fsdp", options) for on in ("hsdp", "shard_tp", "dp_tp") for options in FSDP),
]


def world_of(on: str) -> int:
    return prod(MESHES[on][0])


@pytest.mark.parametrize(
    ("on", "kind", "options"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (world_of(case[0]) > 2)) for case in CASES],
)
@pytest.mark.sampled(20)
def test_options_beside_habits(on: str, kind: str, options: str) -> None:
    run_ranks(world_of(on), trains, on, kind, (DDP if kind == "ddp" else FSDP)[options])


WERE_WRONG: list[tuple[str, str, str, tuple[Habit, ...]]] = [
    ("dp", "ddp", "unused", (_in_another_order, _again, _plain)),  # torch averages no second backward pass
    ("dp", "fsdp", "checkpointed", (_again, _frozen, _copied)),  # blocks are wrapped again
    ("shard", "fsdp", "checkpointed", (_again, _again)),  # and computed again for each of two passes
    ("shard", "fsdp", "kept", (_evaluated, _copied, _plain)),  # what is gathered is older than the chunks
    ("shard", "fsdp", "narrow, averaged wide", (_accumulated, _accumulated, _plain)),  # in one part of two reached
    ("shard_tp", "fsdp", "narrow", (_plain, _plain)),  # what is gathered over one axis is split over the other
]


@pytest.mark.parametrize(("on", "kind", "options", "habits"), WERE_WRONG)
@pytest.mark.sampled(4)
def test_pairs_that_were_wrong(on: str, kind: str, options: str, habits: Sequence[Habit]) -> None:
    run_ranks(world_of(on), trains, on, kind, (DDP if kind == "ddp" else FSDP)[options], habits)


def test_a_block_run_twice_in_reentrant_checkpoints() -> None:
    """Each has a backward pass of its own, and torch averaged the first alone."""
    run_ranks(2, trains, "shard", "fsdp", {}, (_plain, _accumulated, _plain), True)


def static(habit: Habit) -> None:
    env = ShardingEnv.from_mesh(mesh(*MESHES["dp"]))
    model = DistributedModelParallel(
        nn.Sequential(nn.Embedding(12, 2), nn.Linear(2, 2)), env, data_parallel_wrapper=DDPWrapper(static_graph=True)
    )
    side = Side(model, [env.data_rank])
    for each in (habit,) if habit is _accumulated else (_added, _accumulated, _evaluated, habit):
        each(side)
        side.update()


@pytest.mark.parametrize("habit", [_accumulated, _again, _in_another_order])
def test_a_static_graph_has_one_backward_pass_for_each_forward(habit: Habit) -> None:
    """Others were averaged by nobody, in silence, or ended in an assertion of torch's."""
    for error in run_ranks(2, static, habit, expect=ShardError):
        assert str(error).startswith("static_graph ") and "leave static_graph out" in str(error)


class Chosen(nn.ModuleDict):
    """Runs one of its modules."""

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        out: torch.Tensor = self[name](x)
        return out


def hooked(axis: str) -> list[int]:
    """How often a hook on each of two weights runs, of which each is reached in one pass of two; a third in none."""
    env = ShardingEnv.from_mesh(mesh(*MESHES[axis]))
    module = Chosen({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    model, ran = DistributedModelParallel(module, env), dict.fromkeys("abc", 0)

    def hook(p: torch.Tensor) -> None:
        assert p.grad is not None
        ran[next(name for name in "abc" if module[name].weight is p)] += 1

    handles = [module[name].weight.register_post_accumulate_grad_hook(hook) for name in "abc"]
    for name in "ab":
        x = torch.ones(1, 2, requires_grad=True)
        out = model(x, name)
        torch.autograd.grad(out.sum(), x, retain_graph=True)
        out.sum().backward()
    for handle in handles:  # torch keeps a model alive that its own hook knows
        handle.remove()
    return [*ran.values()]


def test_hooks_on_accumulated_gradients_run_where_something_came() -> None:
    """torch ran those of all chunks, with no gradient or at one of before, and in passes for other gradients too."""
    assert run_ranks(2, hooked, "shard") == [[1, 1, 0]] * 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DDPWrapper(bucket_cap=1), "got ['bucket_cap'], expected some of ['"),
        (lambda: DDPWrapper(process_group=None), "got ['process_group']"),
        (
            lambda: FSDPWrapper(mixed_precision="bf16"),
            "or a MixedPrecisionPolicy; got 'bf16'",
        ),
        (lambda: FSDPWrapper(mixed_precision=torch.int32), "mixed_precision of FSDPWrapper is a floating-point"),
        (lambda: FSDPWrapper(offload=None), "offload of FSDPWrapper is a bool or an OffloadPolicy; got None"),
        (lambda: FSDPWrapper(activation_checkpointing="all"), "a choice (path, module) -> bool; got 'all'"),
        (lambda: FSDPWrapper(compile="aot_eager"), "a dict of options of torch.compile; got 'aot_eager'"),
        (lambda: FSDPWrapper(reshard_after_forward="no"), "reshard_after_forward of FSDPWrapper is None, a bool or"),
    ],
)
def test_options_that_cannot_be_are_told_where_they_are_given(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ShardError) as error:
        make()
    assert words in str(error.value)


def test_weights_are_kept_in_as_many_parts_as_ranks_allow() -> None:
    """Before anything is changed."""
    env = ShardingEnv.abstract((4,), ("shard",), "cpu")
    for parts in (0, 3, 8):
        with pytest.raises(ShardError, match=f"reshard_after_forward={parts} of FSDPWrapper: .* divisor of the 4"):
            FSDPWrapper(reshard_after_forward=parts).check(nn.Linear(2, 2), env, {}, frozenset())
