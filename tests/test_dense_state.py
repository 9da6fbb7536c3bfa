"""Checkpoints of transformers, and of tables with one, between meshes that split them: to the bit, and AdamW goes on.

The optimizer of a plain module is the pattern: its state's names and shapes are everyone's.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dmp import (
    CheckpointError,
    DistributedModelParallel,
    ShardingEnv,
    full_optimizer_state_dict,
    full_state_dict,
    load_checkpoint,
    save_checkpoint,
)
from tests.equality import attach
from tests.ranks import mesh as mesh_of
from tests.ranks import run_ranks
from tests.state_jobs import Found, Run, Saves, assert_none_wrong, assert_same, each, load_and_go_on, save_and_go_on
from tests.test_mixed import ITEMS, USERS, Recommender
from tests.test_mixed import T as HISTORY
from tests.transformers_zoo import Llama

# A Linear with a bias returns a view, and FSDP2 warns of writing into it in place, which nobody here does.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")

MORE, GLOBAL_BATCH, T, V = 3, 4, 8, 64
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "plain": ((1,), ("dp",)),  # the module itself, not wrapped
    "single": ((1,), ("dp",)),
    "dp2": ((2,), ("dp",)),
    "shard2": ((2,), ("shard",)),
    "tp2": ((2,), ("tp",)),
    "shard2xtp2": ((2, 2), ("shard", "tp")),
    "replicate2xshard2": ((2, 2), ("replicate", "shard")),
    "replicate2xtp2": ((2, 2), ("replicate", "tp")),
}
MODELS: dict[str, Any] = {"llama": Llama, "mixed": Recommender, "mixed_adagrad": Recommender}
SAMPLE = [
    # model, from, to
    ("llama", "plain", "shard2xtp2"),
    ("llama", "shard2xtp2", "replicate2xshard2"),
    ("llama", "replicate2xshard2", "tp2"),
    ("llama", "tp2", "shard2"),
    ("llama", "shard2", "dp2"),
    ("llama", "dp2", "replicate2xtp2"),
    ("llama", "replicate2xtp2", "single"),
    ("llama", "single", "plain"),
    ("llama", "shard2xtp2", "shard2xtp2"),
    ("mixed", "replicate2xtp2", "plain"),
    ("mixed", "shard2", "tp2"),
    ("mixed_adagrad", "shard2xtp2", "dp2"),
    ("mixed_adagrad", "tp2", "replicate2xshard2"),
]


def plain(model: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module: nn.Module = MODELS[model]()
    if model == "mixed_adagrad":
        attach(module.items, "adagrad")  # type: ignore[arg-type]
        attach(module.users, "adagrad")  # type: ignore[arg-type]
    return module


def build(model: str, mesh: str, seed: int = 0) -> nn.Module:
    if mesh == "plain":
        return plain(model, seed)
    return DistributedModelParallel(plain(model, seed), env_of(mesh))


def env_of(mesh: str) -> ShardingEnv:
    return ShardingEnv.single() if mesh == "single" else ShardingEnv.from_mesh(mesh_of(*MESHES[mesh]))


def adamw(model: nn.Module, lr: float = 3e-3, weight_decay: float = 0.1) -> torch.optim.Optimizer:
    """Over all that is not updated in the backward pass.

    In float32 a gradient that is nothing but rounding becomes a whole step of AdamW; a larger eps keeps it from that.
    """
    fused = model.fused_optimizer.fused if isinstance(model, DistributedModelParallel) else {}
    ours = [
        p for name, p in model.named_parameters() if name not in fused and not hasattr(p, "_in_backward_optimizers")
    ]
    return torch.optim.AdamW(ours, lr=lr, weight_decay=weight_decay, eps=1e-5)


def loss_of(model: nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
    """Of this data rank's part of the global batch; the parts are equal, so their mean is the global loss."""
    rng = torch.Generator().manual_seed(1000 + step)
    mine = slice(rank * GLOBAL_BATCH // size, (rank + 1) * GLOBAL_BATCH // size)
    inner = model.module if isinstance(model, DistributedModelParallel) else model
    if isinstance(inner, Llama):
        ids = torch.randint(0, V, (GLOBAL_BATCH, T + 1), generator=rng)[mine]
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    from torchrec import KeyedJaggedTensor

    lengths = torch.tensor([3, 0, HISTORY, 2])
    histories = torch.randint(0, ITEMS, (GLOBAL_BATCH, HISTORY), generator=rng)[mine]
    users = torch.randint(0, USERS, (GLOBAL_BATCH,), generator=rng)[mine]
    targets = torch.randint(0, ITEMS, (GLOBAL_BATCH,), generator=rng)[mine]
    ids = torch.cat([row[:n] for row, n in zip(histories, lengths[mine].tolist(), strict=True)])
    history = KeyedJaggedTensor(keys=["history"], values=ids, lengths=lengths[mine])
    user = KeyedJaggedTensor(keys=["user"], values=users, lengths=torch.ones_like(users))
    return F.cross_entropy(model(history, user), targets)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, env: ShardingEnv) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, env.data_rank, env.data_size).backward()
        optimizer.step()


def save(path: str, model: str, mesh: str) -> Run:
    made = build(model, mesh)
    return save_and_go_on(path, made, adamw(made), train, MORE)


def load(path: str, model: str, mesh: str) -> Run:
    made = build(model, mesh, seed=1)
    return load_and_go_on(path, made, adamw(made, lr=1.0, weight_decay=0.0), train, MORE)


def check_load(loaded: Run, saved: Run, model: str, exact: bool) -> None:
    assert_same(loaded.at, saved.at)
    assert_same(loaded.later, saved.later, exact, tolerance=(1e-5, 1e-5))
    weights, optimizer = loaded.at
    own = plain(model)
    assert weights.keys() == own.state_dict().keys()
    for name, parameter in own.named_parameters():
        shapes = {key: torch.as_tensor(value).shape for key, value in optimizer["state"][name].items()}
        assert shapes.pop("step") == ()
        names = {"sum"} if hasattr(parameter, "_in_backward_optimizers") else {"exp_avg", "exp_avg_sq"}
        assert shapes == dict.fromkeys(names, parameter.shape), name


def load_all(sources: dict[str, str], model: str, mesh: str) -> Found:
    return each(
        sources,
        lambda source, path: load(path, model, mesh),
        lambda loaded, saved, source: check_load(loaded, saved, model, exact=source == mesh),
        lambda source: MESHES[source] == MESHES[mesh],
    )


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(tmp_path_factory.mktemp("saved"))


def check(saves: Saves, model: str, sources: list[str], target: str) -> None:
    paths = {s: saves.path(f"{model}-{s}", math.prod(MESHES[s][0]), save, model, s) for s in sources}
    shape, names = MESHES[target]
    results = run_ranks(math.prod(shape), load_all, paths, model, target, timeout=300.0)
    env = ShardingEnv.abstract(shape, names, "cpu")
    ranks = range(env.size)
    data_ranks = [r // env.tensor_size for r in ranks]  # the tensor axis is the inner one
    assert_none_wrong(f"{model} into {target}", results, data_ranks)


@pytest.mark.parametrize(("model", "source", "target"), SAMPLE)
@pytest.mark.sampled(32)
def test_save_here_load_there(model: str, source: str, target: str, saves: Saves) -> None:
    check(saves, model, [source], target)


@pytest.mark.slow
@pytest.mark.parametrize("target", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_every_mesh_loads_every_other(model: str, target: str, saves: Saves) -> None:
    check(saves, model, list(MESHES), target)


def from_one_process(model: str, mesh: str) -> None:
    """By torch's own dictionaries, whole tensors all."""
    module, alone = plain(model), ShardingEnv.single()
    its_own = adamw(module)
    train(module, its_own, range(2), alone)
    made = build(model, mesh, seed=1)
    optimizer = adamw(made, lr=1.0)
    made.load_state_dict(module.state_dict())
    optimizer.load_state_dict(copy.deepcopy(its_own.state_dict()))  # torch keeps the tensors that it is given
    train(module, its_own, range(2, 4), alone)
    train(made, optimizer, range(2, 4), env_of(mesh))
    for name, value in full_state_dict(made).items():
        torch.testing.assert_close(value, module.state_dict()[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("model", "mesh"), [("llama", "shard2"), ("mixed", "tp2")])
def test_an_optimizers_state_of_one_process_is_cut(model: str, mesh: str) -> None:
    """That of split weights was kept whole, and the next step failed in torch's words."""
    run_ranks(2, from_one_process, model, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "mixed"])
def test_so_it_is_on_two_axes(model: str) -> None:
    run_ranks(4, from_one_process, model, "shard2xtp2")


class Scores(nn.Module):
    """A table, and a weight that is split."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.words(ids))
        return out


def takes_a_plain_models(axes: tuple[str, ...]) -> None:
    model = DistributedModelParallel(Scores(), ShardingEnv.from_mesh(mesh_of((2,), axes)))
    ids = torch.tensor([[1, 2]])
    for seed, taking in enumerate((model, copy.deepcopy(model), model)):
        torch.manual_seed(seed)
        plain = Scores()
        taking.module.load_state_dict(plain.state_dict(), assign=seed == 2)  # type: ignore[union-attr]
        for name, value in full_state_dict(taking).items():
            assert torch.equal(value, plain.state_dict()[name])
        with torch.no_grad():
            torch.testing.assert_close(taking(ids), plain(ids))
        taking(ids).sum().backward()
    with pytest.raises(RuntimeError, match=r"size mismatch for out.weight"):
        model.module.load_state_dict({**plain.state_dict(), "out.weight": torch.ones(3, 4)})  # type: ignore[union-attr]


@pytest.mark.parametrize("axes", [("shard",), ("dp",)])
def test_the_module_itself_takes_a_plain_models(axes: tuple[str, ...]) -> None:
    """It ended in DTensor's words where weights are split."""
    run_ranks(2, takes_a_plain_models, axes)


def reads_what_one_wrote(folder: str) -> None:
    model = DistributedModelParallel(Scores(), ShardingEnv.from_mesh(mesh_of((2,), ("shard",))))
    before, rank = full_state_dict(model), model.env.rank
    torch.save(model.state_dict(), f"{folder}/rank {rank}")
    torch.distributed.barrier()
    theirs, own = (torch.load(f"{folder}/{name}", weights_only=False) for name in ("rank 0", f"rank {rank}"))
    with pytest.raises(CheckpointError, match=r"is another rank's part: torch.save on one rank writes"):
        model.load_state_dict(theirs)
    if rank:
        with pytest.raises(CheckpointError, match=r"out.weight is another rank's part"):
            model.module.load_state_dict(theirs)
    model.load_state_dict(own)
    model.module.load_state_dict(own)
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, before[name])


def test_a_file_that_one_rank_wrote_is_no_other_ranks(tmp_path: Path) -> None:
    """Others took its parts for their own, in silence."""
    run_ranks(2, reads_what_one_wrote, str(tmp_path))


def test_state_by_row_keeps_its_shape(tmp_path: Path) -> None:
    """Adafactor's means over rows are (rows, 1): as (rows,) the first step after a load could not use them."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = DistributedModelParallel(nn.Linear(6, 4), ShardingEnv.single())
        return model, torch.optim.Adafactor(model.parameters(), 0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.arange(12.0).view(2, 6)).square().sum().backward()
        optimizer.step()

    model, optimizer = made()
    step(model, optimizer)
    save_checkpoint(tmp_path / "saved", model, optimizer)
    again, other = made()
    load_checkpoint(tmp_path / "saved", again, other)
    step(model, optimizer)
    step(again, other)
    assert torch.equal(again.module.weight, model.module.weight)  # type: ignore[arg-type, union-attr]
    state = full_optimizer_state_dict(model, optimizer)["state"]["weight"]
    assert state["row_var"].shape == (4, 1) and state["col_var"].shape == (1, 6)


class Optional(nn.Module):
    """As memories, extra keys and prompts are where none are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.top = nn.Parameter(torch.zeros(0, 4)), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.extra, x]))


def empty_goes_on(folder: str) -> None:
    """The file has its count of steps alone, and AdamW's next step ended in a KeyError."""
    runs = []
    for mesh in ("dp2", "shard2"):
        torch.manual_seed(len(runs))
        model = DistributedModelParallel(Optional(), env_of(mesh))
        runs.append((model, adamw(model)))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(*runs[0])
    save_checkpoint(folder, *runs[0])
    load_checkpoint(folder, *runs[1])
    for run in runs:
        step(*run)
    torch.testing.assert_close(*(full_state_dict(model) for model, _ in runs))


def test_a_parameter_of_no_elements_goes_on(tmp_path: Path) -> None:
    run_ranks(2, empty_goes_on, str(tmp_path / "c"))


def state_of_empty(folder: str) -> None:
    """TorchRec's `WarmupOptimizer` keeps how far it is in a parameter's state that has no elements."""
    runs = []
    for mesh in ("dp2", "shard2"):
        model = DistributedModelParallel(Optional(), env_of(mesh))
        runs.append((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    (saved, of_saved), (loaded, of_loaded) = runs
    of_saved.state[saved.module.extra]["warmup"] = torch.tensor([7.0, 0.25])  # type: ignore[index, union-attr]
    save_checkpoint(folder, saved, of_saved)
    load_checkpoint(folder, loaded, of_loaded)
    found = of_loaded.state[loaded.module.extra]["warmup"]  # type: ignore[index, union-attr]
    assert found.tolist() == [7.0, 0.25]


def test_state_of_a_parameter_of_no_elements_is_loaded(tmp_path: Path) -> None:
    run_ranks(2, state_of_empty, str(tmp_path / "c"))
