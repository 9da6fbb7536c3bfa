"""Programs' hooks on what a tensor axis splits: they see what one process has, and what they change is changed so."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dmp import DistributedModelParallel, RanksError, ShardingEnv, full_state_dict, ranks
from sharders import TensorParallelSharder
from tests.ranks import mesh, run_ranks
from tests.test_values_of_heads import HEADS, WIDTH, Model


class Packed(nn.Module):
    """An attention with query, key and value in one."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.out = HEADS, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        heads = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(heads.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def made() -> Model:
    model = Model("plain").double()
    torch.manual_seed(1)
    model.blocks[1].attention = Packed().double()
    return model


def hook(model: Any, seen: list[torch.Tensor], *, later: bool) -> None:
    """On Linears that give parts and that take them, on an activation, on what is whole; before wrapping or after."""
    scale = torch.linspace(0.5, 1, 24, dtype=torch.float64)
    first, second = model.blocks

    def write(_: nn.Module, args: Any, out: torch.Tensor) -> None:
        out[..., 3] *= 0.5

    if not later:
        first.mlp[0].register_forward_hook(lambda _, args, out: out * scale)
        first.attention.out.register_forward_hook(lambda _, args, out: seen.extend((args[0], out)))
        return
    first.mlp[2].register_forward_pre_hook(lambda _, args: (args[0] * scale,))
    first.attention.q.register_forward_hook(lambda _, args, out: seen.extend((*args, out)))
    second.mlp[1].register_forward_hook(lambda _, args, out: seen.append(out))
    second.mlp[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]), prepend=True)
    second.attention.qkv.register_forward_hook(write)
    second.attention.qkv.register_forward_hook(lambda _, args, kwargs, out: seen.append(out), with_kwargs=True)
    second.mlp.register_forward_hook(lambda _, args, out: seen.append(out))


def trains_with_hooks(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    env, both = ShardingEnv.from_mesh(mesh(shape, names)), (made(), made())
    looks: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for module, seen in zip(both, looks, strict=True):
        hook(module, seen, later=False)
    models: list[nn.Module] = [DistributedModelParallel(both[0], env), both[1]]
    for module, seen in zip(both, looks, strict=True):
        hook(module, seen, later=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    x = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mine = x.chunk(env.data_size)[env.data_rank]
    for _ in range(3):
        for model, seen, optimizer, rows in zip(models, looks, optimizers, (mine, x), strict=True):
            seen.clear()
            loss = model(rows).square().mean() + sum(s.square().mean() for s in seen)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(looks[0]) == len(looks[1]) == 8
        for got, wanted in zip(*looks, strict=True):
            torch.testing.assert_close(got, wanted.chunk(env.data_size)[env.data_rank])
    values = full_state_dict(models[0])
    for name, value in both[1].state_dict().items():
        torch.testing.assert_close(values[name], value)
    again = copy.deepcopy(models[0])
    looks[0].clear()
    torch.testing.assert_close(again(mine), models[0](mine))
    assert len(looks[0]) == 16, "of the copy, and of the model"


@pytest.mark.parametrize(("shape", "names"), [((2,), ("tp",)), ((2, 2), ("shard", "tp"))])
def test_hooks_see_what_one_process_has(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """They had a rank's part: a mean of it trained each rank otherwise, in silence."""
    run_ranks(2 if len(shape) == 1 else 4, trains_with_hooks, shape, names)


def gradients_of_activations(model: Any, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Kept, as Grad-CAM does, and told to hooks on tensors, which double one."""
    kept: list[torch.Tensor] = []
    told: list[torch.Tensor | None] = [None]

    def keep(_: nn.Module, __: Any, out: torch.Tensor) -> None:
        out.retain_grad()
        kept.append(out)

    def tell(_: nn.Module, args: Any) -> None:
        args[0].register_hook(lambda grad: told.append(grad) or 2 * grad)

    first, second = getattr(model, "module", model).blocks
    first.mlp[0].register_forward_hook(keep)
    second.attention.qkv.register_forward_hook(keep)
    first.mlp[2].register_forward_pre_hook(tell)
    model(x).square().mean().backward()
    before = next(p for name, p in model.named_parameters() if name.endswith("blocks.0.mlp.0.bias")).grad
    whole = before.full_tensor() if isinstance(before, DTensor) else before
    return [*(out.grad for out in kept), *told[1:], whole]


def asks_for_gradients() -> None:
    model = DistributedModelParallel(made(), ShardingEnv.from_mesh(mesh((2,), ("tp",))))
    x = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours, theirs = gradients_of_activations(model, x), gradients_of_activations(made(), x)
    assert len(ours) == len(theirs) == 4
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted)


def test_gradients_of_what_hooks_are_shown_are_the_wholes() -> None:
    """They had none, and hooks on such tensors were never called, in silence."""
    run_ranks(2, asks_for_gradients)


class Hidden(Model):
    """Gives out its first block's output too, where it is asked."""

    gives = False

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.blocks[0](x, None)
        out = self.blocks[1](hidden, None)
        return {"out": out, "hidden": hidden} if self.gives else out


def chunks_are_told() -> list[list[str]]:
    env, told = ShardingEnv.from_mesh(mesh((2,), ("tp",))), []
    for kind in ("neither", "hooks", "output"):
        module = Hidden("plain").double()
        model = DistributedModelParallel(module, env, sharders=[TensorParallelSharder(sequence_parallel=True)])
        if kind == "hooks":
            module.blocks[0].mlp[0].register_forward_hook(lambda *_: None)  # which sees the whole
            module.blocks[0].mlp[2].register_forward_hook(lambda *_: None)
        module.gives = kind == "output"
        with mock.patch.object(ranks, "say_once") as said:
            for _ in range(2):
                model(torch.ones(1, 4, WIDTH, dtype=torch.float64))
        told.append([call.args[0] for call in said.call_args_list])
    return told


def test_chunks_of_the_sequence_are_told() -> None:
    """A mean of hidden states was another on each rank, without a word."""
    for nothing, hooks, output in run_ranks(2, chunks_are_told):
        assert not nothing and len(hooks) == len(output) == 1
        assert hooks[0].startswith("hooks on blocks.0.mlp.2 see a rank's chunk of the sequence along axis 'tp'")
        assert output[0].startswith("the model gives out hidden states (1, 2, 16), which are a rank's chunk")


def parts_ways() -> str:
    env = ShardingEnv.from_mesh(mesh((2,), ("tp",)))
    model = DistributedModelParallel(made(), env)
    linear: Any = model.module.blocks[0].attention
    (linear.k if env.rank else linear.q).register_forward_hook(lambda *_: None)
    with pytest.raises(RanksError) as told:
        model(torch.ones(1, 3, WIDTH, dtype=torch.float64))
    return str(told.value)


def test_hooks_of_one_rank_alone_are_told() -> None:
    for said in run_ranks(2, parts_ways):
        for rank, name in enumerate("qk"):
            assert f"rank {rank} is in the first forward with hooks on 'blocks.0.attention.{name}', which mesh" in said
        assert "so that each rank is to have them" in said
