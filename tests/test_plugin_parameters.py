"""A plugin's parameters: what it does not name is data-parallel; what is on meta is filled whatever its form."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dmp import (
    ChunkedTensor,
    DistributedModelParallel,
    ParameterInfo,
    PlanError,
    ShardError,
    ShardingEnv,
    data_parallel,
    row_wise,
)
from examples.custom_sharder import Experts, ExpertsSharder, ShardedExperts
from sharders.testing import SharderCheckError, check_sharder
from tests.ranks import mesh, run_ranks


class Biased(Experts):
    """Experts with a bias for all and a count; the sharder below names neither."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.bias = nn.Parameter(torch.empty(sizes[2]))
        self.register_buffer("scale", torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "bias"):
            nn.init.uniform_(self.bias)
            nn.init.constant_(self.scale, 0.5)

    def forward(self, tokens: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(tokens, expert) + self.bias


class ShardedBiased(ShardedExperts):
    def __init__(self, original: Any, *args: Any) -> None:
        super().__init__(original, *args)
        device = args[-1]
        for name in ("bias", "scale"):
            value = getattr(original, name).detach()
            value = torch.empty_like(value, device=device) if value.is_meta else value.to(device, copy=True)
            if name == "bias":
                self.bias = nn.Parameter(value)
            else:
                self.register_buffer(name, value)

    def forward(self, tokens: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(tokens, expert) + self.bias

    def unsharded(self) -> nn.Module:
        with torch.device("meta"):
            return Biased(*self._shape).to(self.weight.dtype)


class BiasedSharder(ExpertsSharder):
    module_type = Biased
    made: Any = ShardedBiased

    def shard(self, module: Any, plan: Any, env: ShardingEnv, device: Any) -> nn.Module:
        shards = plan["weight"].layout.shards(module.weight.shape, env)
        return self.made(module, shards, env, device)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.before = nn.Linear(4, 4)
        self.experts = Biased(6, 4, 3)

    def forward(self, tokens: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts(torch.tanh(self.before(tokens)), expert)
        return out


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 4, generator=rng), torch.randint(0, 6, (5,), generator=rng)


def alone() -> nn.Module:
    torch.manual_seed(5)
    return Biased(6, 4, 3)


def check(axes: tuple[str, ...], sharder: Any, make: Any = Model) -> None:
    check_sharder(sharder(), make, batch, ShardingEnv.from_mesh(mesh((2,) * len(axes), axes)))


@pytest.mark.parametrize("axis", ["dp", "shard"])
@pytest.mark.sampled(2)
def test_what_a_sharder_does_not_name_is_averaged(axis: str) -> None:
    run_ranks(2, check, (axis,), BiasedSharder, timeout=200)


def test_what_a_sharder_does_not_name_in_the_model_itself_is_averaged() -> None:
    run_ranks(2, check, ("dp",), BiasedSharder, alone, timeout=200)


@pytest.mark.slow
def test_what_a_sharder_does_not_name_is_averaged_over_copies_too() -> None:
    run_ranks(4, check, ("replicate", "shard"), BiasedSharder, timeout=200)


class LeavesOnMeta(BiasedSharder):
    class made(ShardedBiased):
        def __init__(self, original: Any, *args: Any) -> None:
            super().__init__(original, *args)
            if original.bias.is_meta:
                self.bias = nn.Parameter(original.bias.detach())


class Cuts(BiasedSharder):
    class made(ShardedBiased):
        def __init__(self, original: Any, *args: Any) -> None:
            super().__init__(original, *args)
            self.bias = nn.Parameter(self.bias.detach()[:1].clone())


@pytest.mark.parametrize(
    ("sharder", "name", "text"),
    [
        (LeavesOnMeta, "meta_init", r"LeavesOnMeta\.shard left 'experts\.bias' on meta"),
        (Cuts, "values", r"made 'experts\.bias' of shape \(1,\) for one of \(3,\); expected it whole"),
    ],
)
def test_the_battery_says_what_is_owed(sharder: Any, name: str, text: str) -> None:
    for error in run_ranks(2, check, ("dp",), sharder, expect=SharderCheckError, timeout=200):
        assert error.check == name
        assert __import__("re").search(text, str(error)), error


class Whole:
    """Runs a Linear as it is: its state is whole, or, cut, a DTensor."""

    module_type = nn.Linear

    def parameters(self, module: nn.Linear) -> dict[str, ParameterInfo]:
        return {"weight": ParameterInfo(tuple(module.weight.shape), module.weight.dtype, "linear")}

    def layouts(self, info: ParameterInfo, env: ShardingEnv) -> list[Any]:
        return [data_parallel(), row_wise()]

    def shard(self, module: nn.Linear, plan: Any, env: ShardingEnv, device: torch.device) -> nn.Module:
        made = copy.deepcopy(module).to_empty(device=device)
        if plan["weight"].layout.name == "row_wise":
            from torch.distributed.tensor import Shard, distribute_tensor

            assert env.mesh is not None
            made.weight = nn.Parameter(distribute_tensor(made.weight.detach(), env.mesh, [Shard(0)]))
        return made


def filled(layout: Any, device: str) -> dict[str, torch.Tensor]:
    with torch.device(device):
        module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    torch.manual_seed(3)
    model = DistributedModelParallel(module, env, plan={f"{i}.weight": layout for i in range(2)}, sharders=[Whole()])
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.state_dict().items()}
    return {n: p.detach().clone() for n, p in whole.items()}


def test_from_meta_whatever_the_form() -> None:
    torch.manual_seed(3)
    wanted = DistributedModelParallel(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).to("meta"), ShardingEnv.single())
    for layout in (data_parallel(), row_wise()):
        for got in run_ranks(2, filled, layout, "meta"):
            for name, value in wanted.state_dict().items():
                assert torch.equal(got[name], value), (layout, name)


class ShiftedChunks(ShardedBiased):
    """Its second rank says that it has what the first one has; its third row has no owner."""

    def chunked_state(self) -> Any:
        (whole,) = super().chunked_state().values()
        return {"weight": ChunkedTensor(whole.size(), whole.chunks, [(0, 0, 0)], whole.dtype)}


class FewerChunks(ShardedBiased):
    def chunked_state(self) -> Any:
        (whole,) = super().chunked_state().values()
        return {"weight": ChunkedTensor(whole.size(), [whole.chunks[0][:2]], whole.offsets, whole.dtype)}


class NoChunks(ShardedBiased):
    def chunked_state(self) -> Any:
        return {"weight": ChunkedTensor(self._shape, [], [], self.weight.dtype)}


def wrapped_elsewhere(made: Any, on_meta: bool) -> None:
    sharder = BiasedSharder()
    sharder.made = made
    module = Model().to("meta") if on_meta else Model()
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    DistributedModelParallel(module, env, plan={"experts.weight": row_wise()}, sharders=[sharder])


@pytest.mark.parametrize(
    ("made", "gives"),
    [
        (ShiftedChunks, "(3, 4, 3) at offset (0, 0, 0)"),
        (FewerChunks, "(2, 4, 3) at offset (3, 0, 0)"),
        (NoChunks, "nothing"),
    ],
)
def test_chunks_that_overlap_or_leave_holes_are_named_on_every_rank(made: Any, gives: str) -> None:
    """They passed: who gathered or saved them heard of it, hours later."""
    for on_meta in (False, True):
        for error in run_ranks(2, wrapped_elsewhere, made, on_meta, expect=(ShardError, PlanError)):
            assert "chunked_state() of what BiasedSharder.shard made of Biased at 'experts' gives" in str(error)
            assert (
                f"gives 'experts.weight' on rank 1 as {gives}; its plan, row_wise(), says (3, 4, 3) at offset "
                "(3, 0, 0) of (6, 4, 3)"
            ) in str(error)


def wrapped_by(member: str, gives: Any, ranks: tuple[int, ...], is_planned: bool) -> None:
    """A sharder of which a member gives something else than it must, on some ranks."""
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    sharder, module, plain = BiasedSharder(), Model(), Model()
    if env.rank in ranks:
        if member == "chunked_state":
            sharder.made = type("Made", (ShardedBiased,), {member: lambda self: gives})
        else:
            setattr(sharder, member, lambda *args: args[0] if gives == "the module" else gives)
    try:
        DistributedModelParallel(
            module, env, plan={"experts.weight": row_wise()} if is_planned else None, sharders=[sharder]
        )
    finally:
        assert type(module.experts) is Biased
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@pytest.mark.parametrize(
    ("member", "gives", "text"),
    [
        ("shard", None, "BiasedSharder.shard gave None for Biased at 'experts'; expected a module"),
        (
            "shard",
            "the module",
            "BiasedSharder.shard gave Biased at 'experts' back as it was; expected a module in its",
        ),
        ("parameters", None, "BiasedSharder.parameters gave None for Biased at 'experts'; expected a dict"),
        ("parameters", {"weight": (6, 4, 3)}, "gave {'weight': (6, 4, 3)} for Biased at 'experts'; expected a dict"),
        ("layouts", None, "BiasedSharder.layouts gave None for a parameter of shape (6, 4, 3); expected layouts"),
        ("layouts", ["row_wise"], "BiasedSharder.layouts gave ['row_wise'] for a parameter of shape (6, 4, 3)"),
        ("chunked_state", None, "BiasedSharder.shard made of Biased at 'experts' gives None; expected a dict"),
    ],
)
@pytest.mark.sampled(6)
def test_what_a_wrong_sharder_gives_is_named_on_every_rank(
    member: str, gives: Any, text: str, ranks: tuple[int, ...]
) -> None:
    for is_planned in (False, True):
        for error in run_ranks(2, wrapped_by, member, gives, ranks, is_planned, expect=(ShardError, PlanError)):
            assert text in str(error), error
