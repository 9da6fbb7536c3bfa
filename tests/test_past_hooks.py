"""Blocks that are run past the hooks by which FSDP2 gathers their weights: right, or an error that says where."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from dmp import DistributedModelParallel, PlanError, ShardError, ShardingEnv
from sharders import FSDPWrapper, TensorParallelSharder, default_sharders
from tests.beside_plain import trains
from tests.ranks import mesh, run_ranks


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.layer.weight, self.layer.bias) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x).tanh()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(4), Mixer()

    def run(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mixer(self.norm(x))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


class Extending(Block):
    """Calls what it extends, in both ways."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + Block.forward(self, x)


class Direct(nn.Module):
    """Runs its blocks by their forward, as TorchRec's BERT4Rec does."""

    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind() for _ in range(2))
        self.rows = nn.Embedding(10, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.rows(ids)
        for layer in self.layers:
            x = layer.forward(x)
        return x


class InHelper(Direct):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return _run_all([layer.forward for layer in self.layers], self.rows(ids))


def _run_all(functions: Iterable[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    for function in functions:
        x = function(x)
    return x


class ByMethod(Direct):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return _run_all([layer.run for layer in self.layers], self.rows(ids))


class ByPart(Direct):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.rows(ids)
        for layer in self.layers:
            x = layer(x) + layer.norm(x)
        return x


class ByPartsMethod(Direct):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.rows(ids)
        for layer in self.layers:
            x = layer(layer.mixer.project(x))
        return x


class ByWeight(Direct):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.layers[0].mixer.scale  # type: ignore[union-attr]


class Reversing(Block):
    """Has its gradient by a pass of its own, as reversible layers do."""

    def backward_pass(self, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            self.run(x).backward(gradient)
        assert x.grad is not None
        return x.grad


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: nn.ModuleList) -> torch.Tensor:
        ctx.layers, ctx.inputs = layers, []
        for layer in layers:
            ctx.inputs.append(x)
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        for layer, x in zip(reversed(ctx.layers), reversed(ctx.inputs), strict=True):
            gradient = layer.backward_pass(x, gradient)
        return gradient, None


class Reversible(Direct):
    def __init__(self) -> None:
        super().__init__(Reversing)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Reversed.apply(self.rows(ids), self.layers)
        return out


RIGHT = (lambda: Direct(), lambda: Direct(Extending), lambda: InHelper())
SAID = {
    ByMethod: r"^run\(\) of 'layers.0' is run \(test_past_hooks.py:\d+\) while the weights of 'layers.0' are in pieces",
    ByPart: r"^'layers.0.norm' is run \(test_past_hooks.py:\d+\) while the weights of 'layers.0' are in pieces",
    ByPartsMethod: r"^project\(\) of 'layers.0.mixer' is run .* when 'layers.0' itself is called. Call that",
    ByWeight: r"computes with a piece of a weight .*\(test_past_hooks.py:\d+\).*\(layers.0, layers.1, ...\)",
}


def _trains(model: nn.Module, whole: nn.Module, env: ShardingEnv) -> None:
    trains(model, whole, env, lambda g: torch.randint(0, 10, (env.data_size, 3, 2), generator=g))


def _run_by_forward() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("shard",)))
    for make in RIGHT:
        for wrapper in (FSDPWrapper(), FSDPWrapper(reshard_after_forward=True, activation_checkpointing=True)):
            module = make()
            model = DistributedModelParallel(module, env, data_parallel_wrapper=wrapper)
            assert hasattr(type(module.layers[0]), "reshard"), "a unit of its own"
            _trains(model, make(), env)


def test_blocks_that_are_run_by_their_forward() -> None:
    """Their own hooks would gather them: they were run on pieces, or all weights were gathered at once."""
    run_ranks(2, _run_by_forward)


def _run_otherwise() -> None:
    env, ids = ShardingEnv.from_mesh(mesh((2,), ("shard",))), torch.arange(6).view(3, 2)
    for kind, message in SAID.items():
        model = DistributedModelParallel(kind(), env)
        with pytest.raises(ShardError, match=message):
            model(ids)
        at_once = DistributedModelParallel(kind(), env, data_parallel_wrapper=FSDPWrapper(units=[]))
        _trains(at_once, kind(), env)
    _trains(DistributedModelParallel(Reversible(), env), Reversible(), env)  # it ended in the backward pass


def test_blocks_that_are_run_otherwise() -> None:
    """torch calls a piece beside a batch a mixture of tensors; what the error advises is right."""
    run_ranks(2, _run_otherwise)


class Scored(Direct):
    """Rows are looked up by a method of the root, before its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 4, scale_grad_by_freq=True)  # no table to a sharder

    def items(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.rows(ids)
        return rows

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = ids
        for layer in self.layers:
            x = layer(x)
        return x


class ByItems(nn.Module):
    """A program's step of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.inner = model, [model.module if isinstance(model, DistributedModelParallel) else model]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(self.inner[0].items(ids))
        return out


def _method_of_the_root(is_told: bool) -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("shard",)))
    model = DistributedModelParallel(Scored(), env)
    if is_told:
        register_fsdp_forward_method(model.module, "items")
    batches = [torch.randint(0, 10, (2, 3, 2), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    whole = Scored()
    for xs in batches:
        ByItems(model)(xs[env.data_rank]).square().mean().backward()
        sum(ByItems(whole)(x).square().mean() / 2 for x in xs).backward()  # type: ignore[union-attr]
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(p.grad, DTensor) and q.grad is not None
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("is_told", [False, True])
def test_a_method_of_the_root_beside_its_forward(is_told: bool) -> None:
    """torch said "mixed torch.Tensor and DTensor"; what errors advise, to tell FSDP2 of it, is right too."""
    run_ranks(2, _method_of_the_root, is_told)


class Towers(nn.Module):
    """Encodes by methods that read its own weights, as CLIP's and vision transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.positions = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(3, 4))
        self.layers, self.projection = nn.ModuleList(Block() for _ in range(2)), nn.Parameter(torch.randn(4, 6))
        self.relation, self.gains = nn.Linear(4, 2), nn.ParameterList([torch.randn(4)])

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        x += self.positions[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return x[:, 0] @ self.projection

    @torch.no_grad()
    def encode_many(self, *xs: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.mean(1) @ self.projection for x in xs])

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.mean(1) @ self.relation.weight.T, x.mean(1) * self.gains[0]], 1)

    @torch.no_grad()
    def move(self, x: torch.Tensor) -> None:
        self.first.add_(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


def encodes(shape: tuple[int, ...], names: tuple[str, ...], resharded: bool | None) -> None:
    env, x = ShardingEnv.from_mesh(mesh(shape, names)), torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(0))
    wrapper = FSDPWrapper(reshard_after_forward=resharded)
    model, plain = DistributedModelParallel(Towers(), env, data_parallel_wrapper=wrapper), Towers()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(2):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(model.encode(x), plain.encode(x))
                torch.testing.assert_close(model.module.encode_many(x, x), plain.encode_many(x, x))
                torch.testing.assert_close(model.module.score(x), plain.score(x))  # of weights that parts hold
        with pytest.raises(ShardError, match=r"encode\(\) of 'FSDPTowers' reads a weight past .*torch.no_grad\(\)"):
            model.encode(x)
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(model.module.encode_many(x), plain.encode_many(x))
        with pytest.raises(RuntimeError, match=r"mixed torch.Tensor"):  # what writes finds the piece
            model.move(torch.ones(1, 1, 4))


@pytest.mark.parametrize("resharded", [None, False])
def test_a_method_that_reads_weights_of_its_own(resharded: bool | None) -> None:
    """torch said "mixed torch.Tensor and DTensor" of `model.encode_image(images)`."""
    run_ranks(2, encodes, (2,), ("shard",), resharded)


class Recurrent(nn.Module):
    """Whose first hidden states are made of a weight, for its dtype and device."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 4, batch_first=True)

    def start(self, num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = next(self.parameters())
        return weight.new_zeros(1, num_samples, 4), weight.new_full((1, num_samples, 4), 0.5)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        return self.cell(x, state)


def carries_its_state(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    plain, x = Recurrent(), torch.randn(2, 3, 4)
    model = DistributedModelParallel(copy.deepcopy(plain), env=ShardingEnv.from_mesh(mesh(shape, names)))
    state, expected = model.module.start(2), plain.start(2)  # type: ignore[operator]
    for _ in range(2):
        out, state = model(x, state)
        want, expected = plain(x, expected)
        torch.testing.assert_close((out, *state), (want, *expected))
        assert type(out) is torch.Tensor


@pytest.mark.parametrize(("shape", "names"), [((2,), ("shard",)), ((2, 2), ("shard", "tp"))], ids=str)
def test_a_state_made_of_a_weight(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """`next(model.parameters()).new_zeros(...)` is a DTensor where weights are split."""
    run_ranks(2 ** len(shape), carries_its_state, shape, names)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.norm = nn.Embedding(10, 4, scale_grad_by_freq=True), nn.LayerNorm(4)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor, fail: bool = False) -> torch.Tensor:
        x: torch.Tensor = self.rows(ids)
        if fail:
            raise KeyError("in the encoder")
        for layer in self.layers:
            x = layer(x)
        normed: torch.Tensor = self.norm(x)
        return normed


class Generating(nn.Module):
    """Encodes once, past its forward, and decodes by its forward, as a Hugging Face model's `generate`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = Encoder(), nn.Linear(4, 10)

    def forward(self, ids: torch.Tensor, encoded: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encoder(ids) if encoded is None else encoded)
        return logits

    @torch.no_grad()
    def generate(self, ids: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(ids)
        logits: torch.Tensor = self(ids, encoded=encoded) + self(encoded.argmax(-1))
        return logits


def _generates(shape: tuple[int, ...], names: tuple[str, ...], resharded: bool | None, by_layer: bool) -> None:
    env, ids = ShardingEnv.from_mesh(mesh(shape, names)), torch.arange(6).view(3, 2)
    wrapper = FSDPWrapper(reshard_after_forward=resharded)
    model, plain = DistributedModelParallel(Generating(), env, data_parallel_wrapper=wrapper), Generating()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    if by_layer:  # the first call of all
        with torch.no_grad():
            layer, x = "encoder.layers.1", torch.randn(3, 2, 4)
            torch.testing.assert_close(*(m.get_submodule(layer)(x) for m in (model.module, plain)))
    for _ in range(3):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(model.module.generate(ids), plain.generate(ids))
                torch.testing.assert_close(model.module.encoder(ids), plain.encoder(ids))
                with pytest.raises(KeyError, match="in the encoder"):
                    model.module.encoder(ids, fail=True)
                assert all(isinstance(p, DTensor) for p in model.parameters())
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            encoder = m.get_submodule("encoder")
            (m(ids).square().mean() + (encoder(ids) * encoder.norm(encoder(ids.flip(0)))).mean()).backward()
            with pytest.raises(KeyError, match="in the encoder"):
                encoder(ids, fail=True)
            encoder(ids).square().mean().backward()
            m(ids)  # leaves weights whole, which the optimizer makes old
            optimizer.step()
            optimizer.zero_grad()
    half = DistributedModelParallel(
        Generating(), env, data_parallel_wrapper=FSDPWrapper(mixed_precision=torch.bfloat16)
    )
    assert half.module.generate(ids).dtype == torch.bfloat16


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("resharded", [None, False, True])
@pytest.mark.sampled(4)
def test_generation_that_encodes_past_the_forward(resharded: bool | None, by_layer: bool) -> None:
    """It was refused, as a method that trains; and where a unit was called first, the model was no root any more."""
    run_ranks(2, _generates, (2,), ("shard",), resharded, by_layer)


def test_generation_beside_copies() -> None:
    run_ranks(4, _generates, (2, 2), ("replicate", "shard"), None, False)


class Multiplied(nn.Module):
    """A forward that multiplies by the head's weight itself, as fused losses do; nobody guesses what it takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(8, 8)
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.tokens(given["ids"]) @ self.head.weight.T


def _multiplies() -> None:
    env, given = ShardingEnv.from_mesh(mesh((2,), ("tp",))), {"ids": torch.arange(4)[None]}
    by_columns = TensorParallelSharder({"head": "colwise"})
    model = DistributedModelParallel(Multiplied(), env, sharders=[by_columns, *default_sharders()])
    words = r"a weight that is split over the tensor axis.* \(test_past_hooks.py:\d+\): .* as lm_head\(hidden\); or"
    with pytest.raises(ShardError, match=words):
        model(given)
    # What it advises: with an example the plan does not come to be.
    by_columns = TensorParallelSharder({"head": "colwise"}, example_inputs=(given,))
    with pytest.raises(PlanError, match="run split it raises"):
        DistributedModelParallel(Multiplied(), env, sharders=[by_columns, *default_sharders()])


def test_a_forward_that_reads_a_weight_which_a_tensor_axis_splits_is_told() -> None:
    """torch said "got mixed torch.Tensor and DTensor", of a class that the user has never met."""
    run_ranks(2, _multiplies)
