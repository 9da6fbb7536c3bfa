"""`FSDPWrapper` with parameters of all kinds: frozen, scalar, transposed, empty, of two dtypes, shared, others'."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from dmp import DistributedModelParallel, ShardError, full_state_dict
from sharders.data_parallel.fsdp import FSDPWrapper
from tests.ranks import mesh, run_ranks
from tests.test_fully_shard import env_of, ids_of, make, same, train, whole, wrapped


class Mixture(nn.Module):
    """Blocks with a frozen weight, a scalar, a transposed weight, a table that others own, an empty bias."""

    def __init__(self, table_rows: int = 7) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(table_rows, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_parameter("nothing", None)
        self.none = nn.LayerNorm(0)  # of a table's continuous columns, of which there are none
        self.register_buffer("shift", torch.tensor([0.1]))
        for block in self.layers:
            block[0].weight.requires_grad_(False)  # type: ignore[index]
        self.layers[0][0].requires_grad_(False)  # type: ignore[index]
        self.layers[2][2].weight = nn.Parameter(torch.randn(10, 6).T)  # type: ignore[index]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids % 7)
        for block in self.layers:
            x = block(x)
            x += 1  # on what is a view
        x = torch.cat([x, self.none(x[..., :0])], -1)
        return (x * self.scale + self.shift).log_softmax(-1)


def mixture_trains(shape: tuple[int, ...], names: tuple[str, ...], tensor: str, meta: bool) -> None:
    """Beside the plain one; the table is the rank's own and has another shape on every rank."""
    env = env_of(shape, names)
    values, plain = Mixture().state_dict(), Mixture()
    plain.table.requires_grad_(False)
    module = Mixture(7 + env.rank)
    module.load_state_dict({k: v for k, v in values.items() if k != "table.weight"}, strict=False)
    module.table.requires_grad_(False)
    module.table.weight.data[:7] = values["table.weight"]
    table, kept = module.table.weight, module.table.weight.detach().clone()
    if meta:
        for m in module.modules():
            for name, p in m.named_parameters(recurse=False):
                if p is not table:
                    setattr(m, name, nn.Parameter(p.to("meta"), requires_grad=p.requires_grad))
    if tensor:
        parallelize_module(module, env.submesh("tensor"), {tensor: RowwiseParallel(input_layouts=Replicate())})
    out = FSDPWrapper().wrap(module, env, env.device, frozenset({"table.weight"}))
    if meta:  # what the DMP does then
        for m in module.modules():
            for name, p in m.named_parameters(recurse=False):
                if p is not table:
                    setattr(m, name, nn.Parameter(torch.empty_like(p, device="cpu"), requires_grad=p.requires_grad))
        for name, p in module.named_parameters():
            if p is not table:
                fill(p, values[name])
    assert module.table.weight is table
    for model, everyone in ((out, False), (plain, True)):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            model(ids_of(step, env, everyone)).pow(2).mean().backward()
            optimizer.step()
    assert torch.equal(module.table.weight, kept)
    with torch.no_grad():
        assert not torch.equal(whole(module.scale), values["scale"])
        for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
            if p is not table:
                assert p.requires_grad == q.requires_grad, name
                torch.testing.assert_close(
                    whole(p), q.detach(), atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
                )


def fill(p: torch.Tensor, value: torch.Tensor) -> None:
    """Copy the rank's piece of `value`."""
    with torch.no_grad():
        if isinstance(p, DTensor):
            value = DTensor.from_local(value, p.device_mesh, [Replicate()] * p.device_mesh.ndim)
            value = value.redistribute(placements=p.placements)
        p.copy_(value)


IN_PLACE = (
    ((2,), ("shard",), ""),
    ((2, 2), ("replicate", "shard"), ""),
    ((2, 2), ("shard", "tp"), "layers.*.2"),
    ((2, 2), ("dp", "tp"), "layers.*.2"),
)


@pytest.mark.parametrize(
    ("shape", "names", "tensor", "meta"),
    [
        ((2,), ("dp",), "", False),  # DDP takes values alone: see shards_in_place
        *((*case, meta) for case in IN_PLACE for meta in (False, True)),
    ],
    ids=str,
)
@pytest.mark.sampled(6)
def test_parameters_of_all_kinds(shape: tuple[int, ...], names: tuple[str, ...], tensor: str, meta: bool) -> None:
    run_ranks(torch.Size(shape).numel(), mixture_trains, shape, names, tensor, meta)


class TableAndTop(nn.Module):
    """What a table gives is float32 whatever the rest computes in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.top = nn.EmbeddingBag(9, 6), nn.Sequential(nn.Linear(8, 5), nn.LayerNorm(5), nn.Linear(5, 1))

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.table(ids), dense], 1))


def tables_keep_their_dtype() -> None:
    env, module = env_of((2,), ("shard",)), TableAndTop()
    FSDPWrapper(mixed_precision=torch.bfloat16).wrap(module, env, env.device, frozenset({"table.weight"}))
    seen = []
    module.table.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    out = module(torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 2))
    out.sum().backward()
    assert seen == [(torch.int64, torch.float32)] and out.dtype == torch.bfloat16
    gradient = module.table.weight.grad
    assert gradient is not None and gradient.dtype == torch.float32 and bool(gradient[1:5].abs().sum() > 0)


def test_tables_keep_their_dtype_under_mixed_precision() -> None:
    run_ranks(2, tables_keep_their_dtype)


class TwoDtypes(nn.Module):
    """Blocks in bfloat16 with norms in float32, as Hugging Face keeps some modules."""

    def __init__(self, apart: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), Half(6, apart)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = block(x)
        return x


class Half(nn.Module):
    def __init__(self, dim: int, apart: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim).bfloat16())
        self.more = nn.Parameter(torch.randn(dim, dim).bfloat16())
        self.bias = None if apart else nn.Parameter(torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.bfloat16() @ self.weight @ self.more).float()


def two_dtypes() -> None:
    env, module, plain = env_of((2,), ("shard",)), TwoDtypes(), TwoDtypes()
    FSDPWrapper().wrap(module, env, env.device, frozenset())
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    module(x).square().mean().backward()  # the same samples on both: no mean in another order
    plain(x).square().mean().backward()
    for (name, p), q in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        assert p.grad is not None and p.grad.dtype == q[1].dtype == p.dtype, name
        torch.testing.assert_close(whole(p.grad), q[1].grad, atol=1e-2, rtol=1e-2)
    with pytest.raises(
        ShardError, match=r"'layers.0.1.weight' is torch.bfloat16 beside .*torch.float32 in 'layers.0.1'"
    ):
        FSDPWrapper().wrap(TwoDtypes(apart=False), env, env.device, frozenset())


def test_two_dtypes_in_one_block() -> None:
    run_ranks(2, two_dtypes)


def shared_blocks() -> None:
    """One block called twice, and the wrapper's options copied with the model that holds them."""
    env = env_of((2,), ("shard",))
    plain, module = make(), make()
    for m in (plain, module):
        m.layers.append(m.layers[0])  # type: ignore[operator, index, union-attr]
    FSDPWrapper().wrap(module, env, env.device, frozenset())
    train(module, lambda step: ids_of(step, env))
    train(plain, lambda step: ids_of(step, env, everyone=True))
    same(module, plain)
    assert copy.deepcopy(FSDPWrapper(units=["layers.*"])).units == ("layers.*",)


def test_a_block_that_is_called_twice() -> None:
    run_ranks(2, shared_blocks)


def concatenated() -> None:
    """The one private call on meshes: what it gives is a mesh as any other."""
    both = DeviceMesh._concatenate([mesh((2, 2), ("a", "b"))["b"], mesh((2, 2), ("a", "b"))["a"]])
    assert both.mesh.tolist() == [[0, 2], [1, 3]]


def test_meshes_concatenate_in_any_order() -> None:
    run_ranks(4, concatenated)


def trains_after_inference_mode(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    env, plain = env_of(shape, names), make("llama")
    model, module = wrapped(env)
    for step in range(2):
        with torch.inference_mode():
            got, expected = model(ids_of(9, env)), plain(ids_of(9, env))
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        train(model, lambda _, step=step: ids_of(step, env), steps=1)  # type: ignore[misc]
        train(plain, lambda _, step=step: ids_of(step, env, everyone=True), steps=1)  # type: ignore[misc]
        same(module, plain)


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((2,), ("shard",)),
        pytest.param((2, 2), ("replicate", "tp"), marks=pytest.mark.slow),
        pytest.param((2, 2), ("replicate", "shard"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_evaluation_in_inference_mode_comes_first(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """As trainers do it: what is gathered then is written again in training."""
    run_ranks(torch.Size(shape).numel(), trains_after_inference_mode, shape, names)


def given_data() -> None:
    env = env_of((2,), ("shard",))
    model = DistributedModelParallel(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), env)
    with torch.device("meta"):
        later = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    for fresh in (copy.deepcopy(model), DistributedModelParallel(later, env)):  # values came after it was split
        data = fresh.get_parameter("0.weight")
        data.data = data.data * 2
        with pytest.raises(ShardError, match="changes nothing"):
            fresh(torch.ones(3, 4))
    weight, x = model.module.get_parameter("0.weight"), torch.ones(3, 4)
    kept = full_state_dict(model)
    for look in (lambda: model(x), model.state_dict):
        weight.data = weight.data * 2
        with pytest.raises(ShardError, match=r"p\.data = \.\.\. of '0\.weight', a DTensor .* changes nothing"):
            look()
    model(x).sum().backward()
    torch.testing.assert_close(full_state_dict(model), kept)
    weight = next(p for name, p in model.named_parameters() if name == "0.weight")
    weight.data.copy_(weight.data * 2)
    torch.testing.assert_close(full_state_dict(model)["0.weight"], 2 * kept["0.weight"])
    model(x)
    model.to(torch.device("cpu")).zero_grad()
    model(x).sum().backward()


def test_data_put_in_the_place_of_a_split_weight_is_told() -> None:
    """Torch makes nothing of it, in silence: weights averaged over steps, put in place so to be tried, were not."""
    run_ranks(2, given_data)


T = TypeVar("T")


class Base(ABC, nn.Module):
    @abstractmethod
    def forward(self, ids: torch.Tensor) -> torch.Tensor: ...


class Body(Generic[T], nn.Sequential):
    """A unit, whose first base is another than the root's."""


class Policy(Base):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(Body[int](nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(ids % 6, 6).to(self.head.weight.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).log_softmax(-1)


def other_bases_train(names: tuple[str, ...], mixed: bool) -> None:
    env = env_of((2,), names)
    wrapper = FSDPWrapper(mixed_precision=torch.float32) if mixed else FSDPWrapper()
    model, plain = DistributedModelParallel(Policy(), env, data_parallel_wrapper=wrapper), Policy()
    assert isinstance(model.module, Policy) and all(isinstance(m, Body) for m in model.module.layers)
    ids = torch.arange(12).view(4, 3)
    for each, mine in ((model, ids[2 * env.rank : 2 * env.rank + 2]), (plain, ids)):
        optimizer = torch.optim.Adam(each.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (each(mine)[..., 0].mean() + each(mine)[..., 3].square().mean()).backward()
            optimizer.step()
    torch.testing.assert_close(full_state_dict(model), plain.state_dict())
    assert type(copy.deepcopy(model).module.head) is type(model.module.head)


@pytest.mark.parametrize(("names", "mixed"), [(("shard",), False), (("dp",), True)])
def test_classes_that_do_not_begin_with_torchs(names: tuple[str, ...], mixed: bool) -> None:
    """Python would not change a module of such a class to the one that torch makes."""
    run_ranks(2, other_bases_train, names, mixed)


def frozen_for_a_forward() -> None:
    """As a discriminator is for its generator's step; the model is whole from a forward to its backward pass."""
    env = env_of((2,), ("shard",))
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()]
    made.append(copy.deepcopy(made[0]))
    models = [DistributedModelParallel(made[0], env), made[1]]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for step in range(4):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for model, plain, optimizer in zip(models, made, optimizers, strict=True):
            rows = x.chunk(2)[env.rank] if model is models[0] else x
            part = plain[2 * (step % 2)]
            part.requires_grad_(False)
            loss = model(rows).square().mean()
            part.requires_grad_(True)
            loss.backward()
            assert all(p.grad is None for p in part.parameters()), "frozen in the forward"
            assert all(p.requires_grad for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    for name, value in full_state_dict(models[0]).items():
        torch.testing.assert_close(value, made[1].state_dict()[name])


def test_what_is_thawed_before_the_backward_pass_trains_again() -> None:
    """It rested from then on, in silence."""
    run_ranks(2, frozen_for_a_forward)


def hooked_after_a_forward() -> None:
    env, x = env_of((2,), ("shard",)), torch.arange(16.0).view(4, 4)
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))]
    made.append(copy.deepcopy(made[0]))
    models = [DistributedModelParallel(made[0], env), made[1]]
    for model, rows in zip(models, (x.chunk(2)[env.rank], x), strict=True):
        loss = model(rows).square().mean()
        for p in model.parameters():
            p.register_hook(lambda gradient: gradient * 0.5)
        loss.backward()
    for p, plain in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert isinstance(p.grad, DTensor)
        torch.testing.assert_close(p.grad.full_tensor(), plain.grad)


def test_a_hook_on_a_gradient_that_is_put_on_after_the_forward() -> None:
    """It was not run in that pass, in silence."""
    run_ranks(2, hooked_after_a_forward)
