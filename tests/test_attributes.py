"""A weight read as an attribute is the parameter itself, on every mesh; a model's own code reads plain tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dmp import DistributedModelParallel, ShardError, ShardingEnv, full_state_dict, row_wise, table_wise, to_unsharded
from sharders import TensorParallelSharder
from tests.equality import env_of, make_batch, make_module
from tests.ranks import mesh, run_ranks
from tests.transformers_zoo import GPT, LlamaBlock, rotary

LR = 0.05
MESHES = {
    2: [((2,), ("dp",)), ((2,), ("shard",)), ((2,), ("tp",)), ((1, 2), ("dp", "tp")), ((2, 1), ("shard", "tp"))],
    4: [((2, 2), ("dp", "tp")), ((2, 2), ("shard", "tp")), ((2, 2), ("replicate", "shard"))],
}


class Figured(nn.Embedding):
    """Its users read a figure on it."""

    def __init__(self) -> None:
        super().__init__(20, 4)
        self.scale = 3.0


class Figures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = Figured()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.emb(ids) * self.emb.scale


def reads_a_users_own() -> None:
    plain, ids = Figures(), torch.arange(20)
    model = DistributedModelParallel(copy.deepcopy(plain), plan={"emb.weight": row_wise()})
    for each in (model, copy.deepcopy(model), to_unsharded(model)):
        torch.testing.assert_close(each(ids), plain(ids))
    model.module.emb.scale = 2.0
    model.reshard({"emb.weight": table_wise(1)})
    for each in (model, to_unsharded(model)):
        torch.testing.assert_close(each(ids), plain(ids) * 2 / 3)


def test_what_a_user_put_on_a_table_is_there() -> None:
    run_ranks(2, reads_a_users_own)


class Keeps(nn.Module):
    """A distribution of the last batch, for a term of the loss, states by name that begin as numbers, and one in a
    buffer, with its graph, as spiking neurons have it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.out = nn.Linear(4, 4), nn.Linear(4, 2)
        self.states: dict[str, Any] = {"v": 0.0}
        self.register_buffer("potential", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.latent = torch.distributions.Normal(self.mean(x), 1.0)
        self.states["v"] = self.latent.mean.detach()
        self.potential = self.latent.mean.sum(0)
        return self.out(self.latent.mean)


def copies_of_kept(axis: str) -> None:
    """Ended in torch's error of deepcopy, or of a tensor's truth."""
    model = DistributedModelParallel(Keeps(), ShardingEnv.from_mesh(mesh((2,), (axis,))))
    x = torch.randn(3, 4)
    for _ in range(2):
        (model(x).square().mean() + model.module.latent.mean.mean()).backward()
        plain = to_unsharded(model)
        assert torch.equal(plain.states["v"], model.module.states["v"])
        torch.testing.assert_close(plain(x), model(x))


@pytest.mark.parametrize("axis", ["dp", "shard"])
def test_a_copy_is_made_beside_results_within_objects(axis: str) -> None:
    run_ranks(2, copies_of_kept, axis)


class Reader(nn.Module):
    """Weights of its own and of others, read in every way: in its forward, in a method, in what is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(65, 32)  # 65: left whole, so that it may be read as the head
        self.pos = nn.Parameter(torch.randn(8, 32))
        self.layers = nn.ModuleList(LlamaBlock(32, 4, 4, 64) for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.gain = nn.Parameter(torch.ones(32))
        self.temperature = nn.Parameter(torch.zeros(()))

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids) + self.pos[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, rotary(ids.shape[1], 8, ids.device))
        x = checkpoint(lambda x: x * self.gain, x, use_reentrant=False)
        return F.layer_norm(x, (32,), self.norm.weight, self.norm.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.encode(ids), self.emb.weight) * self.temperature.exp()

    def freeze(self) -> None:
        self.norm.weight.requires_grad = False


def make() -> Reader:
    torch.manual_seed(0)
    return Reader().double()


def others(module: nn.Module, model: DistributedModelParallel) -> list[str]:
    """Parameters that an attribute, read first, is not."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    paths = [name.rpartition(".") for name in names]
    read = {name: getattr(module.get_submodule(path), last) for name, (path, _, last) in zip(names, paths, strict=True)}
    held = dict(model.named_parameters(remove_duplicate=False))
    return [name for name in names if read[name] is not held[name]]


def batches(env: ShardingEnv, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All ids (4, 8), and this rank's part."""
    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(step))
    return ids, ids.chunk(env.data_size)[env.data_rank]


def loss_of(module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(module(ids).flatten(0, 1), ids.flatten())


def attributes_are_parameters(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    env = ShardingEnv.from_mesh(mesh(shape, names))
    for module in (make(), GPT().double())[names == ("dp",) :]:
        model = DistributedModelParallel(module, env=env)
        assert not others(module, model)
        with torch.no_grad():
            model(batches(env, 0)[1])
        assert not others(module, model)
        loss_of(model, batches(env, 0)[1]).backward()
        assert not others(module, model)
        twin = model.copy()
        assert not others(twin.module, twin)
        twin.eval()(batches(env, 0)[1])
        twin = copy.deepcopy(model)
        assert not others(twin.module, twin)
    model.to(torch.float64)
    assert not others(module, model)


def chosen_by_attribute(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """An optimizer of some weights, others frozen, all named by attributes."""
    env, plain, module = ShardingEnv.from_mesh(mesh(shape, names)), make(), make()
    model = DistributedModelParallel(module, env=env)
    for each in (plain, module):
        each.freeze()
        each.norm.bias.requires_grad = False
    optimizers = [torch.optim.AdamW([m.pos, m.gain, m.emb.weight, m.temperature], lr=LR) for m in (module, plain)]
    for step in range(3):
        ids, mine = batches(env, step)
        losses = loss_of(model, mine), loss_of(plain, ids)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not others(module, model)
    state = full_state_dict(model)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(state[name], p.detach(), atol=1e-9, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_attribute_is_the_parameter(world: int) -> None:
    for shape, names in MESHES[world]:
        run_ranks(world, attributes_are_parameters, shape, names)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_weights_are_chosen_by_attribute(world: int) -> None:
    for shape, names in MESHES[world][1:]:
        run_ranks(world, chosen_by_attribute, shape, names)


def methods_beside_forward() -> None:
    """Of the model, and of a class that has been split before under another name."""
    env, plain, module = ShardingEnv.from_mesh(mesh((2,), ("tp",))), make(), make()
    DistributedModelParallel(module, env=env)
    ids = batches(env, 0)[0]
    with torch.no_grad():
        for each in (module.encode, module.forward):
            torch.testing.assert_close(each(ids), getattr(plain, each.__name__)(ids))  # type: ignore[operator]
    out = module.norm(torch.ones(3, 32, dtype=torch.float64))
    assert type(out) is torch.Tensor and isinstance(module.norm.weight, DTensor)
    assert type(module).__name__ == "Reader" and isinstance(module, Reader)
    module.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(ValueError, match="stop"):  # after which nothing is left behind
        module(ids)
    assert isinstance(module.norm.weight, DTensor)


def stop(*_: Any) -> None:
    raise ValueError("stop")


def test_methods_beside_forward() -> None:
    run_ranks(2, methods_beside_forward)


class Scaled(nn.Module):
    """Reads attributes of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.shift: torch.Tensor
        self.register_buffer("shift", torch.zeros(1))
        self.times, self._power = 1.0, 1.0

    @property
    def power(self) -> float:
        return self._power

    @power.setter
    def power(self, value: float) -> None:
        self._power = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x**self._power * self.gain * self.times + self.shift


def test_what_is_set_on_the_wrapper_is_set_on_the_module() -> None:
    """Else what is read there would not be what the forward reads."""
    model, x = DistributedModelParallel(Scaled()), torch.full((2,), 3.0)
    model.times, model.power = 2.0, 2.0
    assert model(x).tolist() == [18.0] * 2
    model.gain, model.shift = nn.Parameter(torch.full((1,), 10.0)), torch.ones(1)
    assert model(x).tolist() == [181.0] * 2 and [p.item() for p in model.parameters()] == [10.0]
    model.note = "mine"  # the module has no such name
    assert not hasattr(model.module, "note") and model.note == "mine"
    model.eval()
    assert not model.module.training
    with pytest.raises(TypeError, match=r"cannot assign .* as parameter 'gain'"):
        torch.func.functional_call(model, {"gain": torch.zeros(1)}, (x,))
    assert model(x).tolist() == [181.0] * 2


class Grown(nn.Module):
    """Multiplied by what is added after wrapping."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x) * getattr(self, "gain", 1.0) + getattr(self, "shift", 0.0)
        return self.head(x) if hasattr(self, "head") else x


def added() -> None:
    env = env_of("dp2")
    model, x = DistributedModelParallel(Grown(), env), torch.full((1, 2), 1.0 + env.rank)
    model(x).sum().backward()
    torch.manual_seed(env.rank)
    model.gain = nn.Parameter(torch.rand(1))
    model.register_parameter("shift", nn.Parameter(torch.rand(1)))
    model.register_buffer("count", torch.ones(1))
    model.head = nn.Linear(1, 1)
    names = ["layer.weight", "layer.bias", "head.weight", "head.bias"]
    assert [name for name, _ in model.named_parameters()] == ["gain", "shift", *names]
    assert set(model.state_dict()) == {"gain", "shift", "count", *names}
    model.zero_grad()
    model(x).sum().backward()
    for name, p in model.named_parameters():
        for value in (p.detach(), p.grad):
            others = [torch.empty_like(p) for _ in range(env.size)]
            dist.all_gather(others, value)
            assert torch.equal(*others), name


def test_what_is_added_to_the_wrapper_is_trained_and_saved() -> None:
    """It was kept where nobody looked for it, and what was added to the module each rank trained by itself."""
    run_ranks(2, added)


def another_module() -> None:
    env = env_of("dp2")
    model, x = DistributedModelParallel(Grown(), env), torch.full((1, 2), 1.0 + env.rank)
    model(x).sum().backward()
    model.layer = nn.Linear(2, 1)
    model(x).sum().backward()
    assert model.layer.weight.grad.tolist() == [[1.5, 1.5]]


def test_a_module_in_the_place_of_another_is_averaged() -> None:
    """Each rank trained its own: the watch looked at the one that was gone."""
    run_ranks(2, another_module)


def _add(module: nn.Module, what: str) -> None:
    if what == "parameter":
        module.gain = nn.Parameter(torch.ones(1))
    elif what == "module":
        module.head = nn.Linear(1, 1)
    elif what == "another module":
        module.layer = nn.Linear(2, 1)
    elif what == "another parameter":
        module.layer.weight = nn.Parameter(torch.ones(1, 2))  # type: ignore[union-attr]
    elif what == "nothing in its place":
        module.layer.bias = None  # type: ignore[union-attr]


REFUSED = {
    "parameter": r"'gain' was added after wrapping.*nobody would average its gradients",
    "module": r"'head.weight' was added after wrapping",
    "another module": r"'layer.weight' was added after wrapping",
    "another parameter": r"'layer.weight' was replaced after wrapping.*FSDP2 would put back",
    "nothing in its place": r"'layer.bias' was replaced after wrapping",
}


def added_to_what_is_split() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("shard",)))
    for ran_before in (False, True):
        for what, message in REFUSED.items():
            model, x = DistributedModelParallel(Grown(), env), torch.ones(1, 2)
            if ran_before:
                model(x).sum().backward()
            _add(model, what)
            for _ in range(2):
                with pytest.raises(ShardError, match=message):
                    model(x)
        frozen = DistributedModelParallel(Grown(), env)
        frozen.gain = nn.Parameter(torch.ones(1), requires_grad=False)
        frozen(x)
        frozen.gain.requires_grad_(True)
        with pytest.raises(ShardError, match=REFUSED["parameter"]):
            frozen(x)


def test_what_is_added_to_weights_that_are_split_is_refused() -> None:
    """Each rank trained its own, or FSDP2 put back what it had, without a word."""
    run_ranks(2, added_to_what_is_split)


class Pair(Grown):
    """What is added is between two layers that are split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(2, 4), nn.LayerNorm(2)
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.layer(self.first(x) * getattr(self, "gain", 1.0)))
        return out


def added_between_split_layers() -> None:
    env, x = ShardingEnv.from_mesh(mesh((2,), ("tp",))), torch.ones(1, 2)
    for what, change in {
        "'gain' was added": lambda m: setattr(m, "gain", nn.Parameter(torch.ones(1))),
        "'norm.weight' was replaced": lambda m: setattr(m.norm, "weight", nn.Parameter(torch.ones(2))),
        "'layer.bias' was replaced": lambda m: setattr(m.layer, "bias", nn.Parameter(torch.ones(2))),
    }.items():
        model = DistributedModelParallel(
            Pair(), env, sharders=[TensorParallelSharder({"first": "colwise", "layer": "rowwise"})]
        )
        model(x).sum().backward()
        change(model.module)
        with pytest.raises(ShardError, match=rf"^{what} after wrapping"):
            model(x)


def test_what_is_added_between_split_layers_is_refused() -> None:
    """Each rank of a tensor axis trained it by its part of the gradient, or from values of its own, without a word."""
    run_ranks(2, added_between_split_layers)


def tables(mesh_name: str) -> None:
    env = env_of(mesh_name)
    for kind in ("ebc", "ec", "bag"):
        module = nn.Sequential(make_module(kind))
        model = DistributedModelParallel(module, env=env)
        assert not others(module, model)
        if kind != "bag":
            (attribute,) = [n for n, _ in model.module[0].named_children()]  # type: ignore[index]
            for table, held in getattr(model.module[0], attribute).items():  # type: ignore[index]
                assert held.weight is dict(model.named_parameters())[f"0.{attribute}.{table}.weight"]
        model.module[0](*make_batch(kind, env.data_rank, 0))  # type: ignore[index, operator]
        twin = model.copy()
        assert not others(twin.module, twin)
        model.to(torch.float64)
        assert not others(module, model)


@pytest.mark.parametrize("mesh_name", ["dp2", "tp2", "replicate2"])
@pytest.mark.sampled(4)
def test_tables(mesh_name: str) -> None:
    run_ranks(2, tables, mesh_name)


class TrainsItself(Figures):
    """A method of a name that torch's modules have too."""

    def compile(self, optimizer: str, metrics: tuple[str, ...] = ()) -> None:  # type: ignore[override]
        self.made = optimizer, metrics


def test_a_models_own_compile_is_called() -> None:
    model = DistributedModelParallel(TrainsItself(), ShardingEnv.single())
    model.compile("adagrad", metrics=("auc",))
    assert model.module.made == ("adagrad", ("auc",))
    plain = DistributedModelParallel(Figures(), ShardingEnv.single())
    plain.compile(backend="eager")
    assert plain._compiled_call_impl is not None
