"""What tests of state share: a model of tables and dense layers, places to put it, jobs that save and load it there.

Terms. A place is a layout of the tables on a world; a kind is the optimizer in the tables' backward pass, "none" where
AdamW trains them with the rest; a run is what a job saw: the whole state at the save or load and after further steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import prod as prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dmp import (
    DistributedModelParallel,
    Layout,
    ShardingEnv,
    column_wise,
    data_parallel,
    grid,
    row_wise,
    table_row_wise,
    table_wise,
)
from dmp.checkpoint.api import load_checkpoint, save_checkpoint
from dmp.state.find_wrapped import env_of
from dmp.state.gather import full_state_dict
from dmp.state.optimizer_state import full_optimizer_state_dict
from dmp.wrap.values.whole import gather
from tests.ranks import mesh, run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's of its own TorchScript, FBGEMM's CPU build of what only GPUs have
    import torchrec.optim
    from torch.distributed.optim import _apply_optimizer_in_backward as in_backward  # type: ignore[attr-defined]

DIM, ROWS = 16, (10, 7, 5)  # ROWS[1] over 4 ranks: 2, 2, 2, 1
GLOBAL_BATCH = 8
TABLES = [f"ebc.embedding_bags.t{i}.weight" for i in range(len(ROWS))]
STEPS = 3  # before the save
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, 0.1),
    "adagrad": (torch.optim.Adagrad, 0.1),
    "rowwise_adagrad": (torchrec.optim.RowWiseAdagrad, 0.1),
    "adam": (torch.optim.Adam, 0.01),
}
PLANS: dict[str, Any] = {
    "table_wise": lambda n: [table_wise(i % n) for i in range(3)],
    "row_wise": lambda n: [row_wise()] * 3,
    "column_wise": lambda n: [column_wise(range(n))] * 3,
    "uneven": lambda n: [column_wise([0, n - 1, 0], widths=[4, 9, 3]), row_wise([n - 1, 0][:n]), table_wise(n - 1)],
    "mixed": lambda n: [row_wise(), data_parallel(), column_wise(range(n))],
    "grid": lambda n: [grid([[0, n - 1], [n // 2, 0]])] * 3,
    "data_parallel": lambda n: [data_parallel()] * 3,
    "table_row_wise": lambda n: [table_row_wise(1), table_row_wise(0), table_row_wise([0, 1])],
}
WORLDS: dict[str, tuple[tuple[int, ...], tuple[str, ...] | None]] = {
    "1": ((1,), None),
    "2": ((2,), None),
    "4": ((4,), None),
    "2x2": ((2, 2), ("replicate", "shard")),
    "hosts": ((2, 2), ("host", "local")),
}
State = tuple[dict[str, Any], dict[str, Any]]  # full_state_dict, full_optimizer_state_dict


class Place(NamedTuple):
    """A layout on a world."""

    layout: str
    world: str

    def __str__(self) -> str:
        return f"{self.layout}@{self.world}"

    @property
    def size(self) -> int:
        return prod(WORLDS[self.world][0])


class Run(NamedTuple):
    """Whole state at the save or load, and after further steps."""

    at: State
    later: State
    drawn: torch.Tensor
    """Random numbers right after the save or load."""
    blocks: dict[str, torch.Tensor]
    """Then too, of row-wise Adagrad: a table's sums, (rows, column blocks)."""


class Ranker(nn.Module):
    """Pooled tables into two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            torchrec.EmbeddingBagConfig(name=f"t{i}", embedding_dim=DIM, num_embeddings=n, feature_names=[f"f{i}"])
            for i, n in enumerate(ROWS)
        ]
        self.ebc = torchrec.EmbeddingBagCollection(tables=configs)
        self.over = nn.Linear(DIM * len(ROWS), 4)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 1)

    def forward(self, features: Any) -> torch.Tensor:
        scores: torch.Tensor = self.out(self.norm(self.over(self.ebc(features).values())).tanh())
        return scores


def make(kind: str = "adagrad", seed: int = 0) -> Ranker:
    """The plain model, with an optimizer in the tables' backward pass; "none": without."""
    torch.manual_seed(seed)
    module = Ranker()
    if kind != "none":
        optimizer, lr = OPTIMIZERS[kind]
        in_backward(optimizer, module.ebc.parameters(), {"lr": lr})
    return module


def batch(step: int, rank: int = 0, size: int = 1) -> Any:
    """This rank's part of the step's batch, which looks up every row (in-backward Adam leaves others alone)."""
    generator = torch.Generator().manual_seed(step)
    ids = [torch.randperm(GLOBAL_BATCH * 4, generator=generator).view(GLOBAL_BATCH, 4) % n for n in ROWS]
    mine = slice(rank * GLOBAL_BATCH // size, (rank + 1) * GLOBAL_BATCH // size)
    values = torch.cat([i[mine].reshape(-1) for i in ids])
    lengths = torch.full((len(ROWS) * (GLOBAL_BATCH // size),), 4)
    return torchrec.KeyedJaggedTensor(keys=[f"f{i}" for i in range(len(ROWS))], values=values, lengths=lengths)


def my_batch(step: int, env: ShardingEnv) -> Any:
    """This rank's part; every axis of the meshes here has different samples."""
    return batch(step, env.rank, env.size)


def dense_optimizer(model: nn.Module, kind: str, lr: float = 0.01) -> torch.optim.Optimizer:
    """AdamW over what is not updated in the backward pass; over everything where nothing is."""
    names = dict(model.named_parameters())
    ours = [p for name, p in names.items() if kind == "none" or name not in TABLES]
    return torch.optim.AdamW(ours, lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, env: ShardingEnv) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(my_batch(step, env)).square().mean().backward()
        optimizer.step()


def table_plan(layout: str, env: ShardingEnv) -> dict[str, Layout]:
    """The entries of a layout in `PLANS`."""
    return dict(zip(TABLES, PLANS[layout](env.table_size), strict=True))


def build(layout: str, kind: str, shape: tuple[int, ...], names: tuple[str, ...] | None, seed: int = 0) -> Any:
    env = ShardingEnv.from_mesh(mesh(shape, names))
    return DistributedModelParallel(make(kind, seed), env, plan=table_plan(layout, env))


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return full_state_dict(model), full_optimizer_state_dict(model, optimizer)


def save_from(
    path: str, layout: str, kind: str, shape: tuple[int, ...], names: tuple[str, ...] | None = None, more: int = 2
) -> Run:
    """Train, change the learning rates, save, train `more` steps."""
    model = build(layout, kind, shape, names)
    return save_and_go_on(path, model, dense_optimizer(model, kind), train, more)


def save_from_plain(path: str, kind: str, more: int = 2) -> Run:
    module = make(kind)
    return save_and_go_on(path, module, dense_optimizer(module, kind), train, more)


def load_into(
    path: str,
    layout: str,
    kind: str,
    shape: tuple[int, ...],
    names: tuple[str, ...] | None = None,
    more: int = 2,
    before: int = 0,
) -> Run:
    """Load into a model of other values, learning rates and random state, then train `more` steps.

    Args:
        before: steps before the load. DistributedDataParallel changes the order in which it sums ranks after its first
            backward: on more than two, a model that has not trained goes on with other last bits.
    """
    model = build(layout, kind, shape, names, seed=1)
    optimizer = dense_optimizer(model, kind, lr=1.0)
    train(model, optimizer, range(before), model.env)
    return load_and_go_on(path, model, optimizer, train, more)


def load_into_plain(path: str, kind: str, more: int = 2) -> Run:
    module = make(kind, seed=1)
    return load_and_go_on(path, module, dense_optimizer(module, kind, lr=1.0), train, more)


Train = Callable[[nn.Module, torch.optim.Optimizer, range, ShardingEnv], None]


def save_and_go_on(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, more: int) -> Run:
    env = env_of(model)
    train(model, optimizer, range(STEPS), env)
    for group in _tables_groups(model):
        group["lr"] *= 0.5
    optimizer.param_groups[0]["lr"] *= 0.25
    torch.manual_seed(100 + env.data_rank)
    torch.rand(5)
    save_checkpoint(path, model, optimizer, {"step": STEPS, "seen": torch.arange(STEPS)})
    return _go_on(model, optimizer, train, range(STEPS, STEPS + more))


def load_and_go_on(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, more: int) -> Run:
    extra = load_checkpoint(path, model, optimizer)
    assert extra["step"] == STEPS and torch.equal(extra["seen"], torch.arange(STEPS))
    return _go_on(model, optimizer, train, range(extra["step"], extra["step"] + more))


def _go_on(model: nn.Module, optimizer: torch.optim.Optimizer, train: Train, steps: range) -> Run:
    drawn = torch.rand(3)
    at = whole(model, optimizer)
    blocks = _block_sums(model, at[0])
    train(model, optimizer, steps, env_of(model))
    return Run(at, whole(model, optimizer), drawn, blocks)


def _tables_groups(model: nn.Module) -> list[dict[str, Any]]:
    if isinstance(model, DistributedModelParallel):
        return model.fused_optimizer.param_groups
    inner = [o for p in model.parameters() for o in getattr(p, "_in_backward_optimizers", ())]
    return [group for optimizer in inner for group in optimizer.param_groups]


def _block_sums(model: nn.Module, weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    if isinstance(model, DistributedModelParallel):
        state = model.fused_optimizer.state_dict()["state"]
    else:
        state = full_optimizer_state_dict(model)["state"]
    sums = {name: own["sum"] for name, own in state.items() if "sum" in own and own["sum"].shape != weights[name].shape}
    whole_sums = gather(sums, env_of(model)) if sums else {}
    return {name: value.view(len(value), -1) for name, value in whole_sums.items()}


# ---- comparisons ----

_HOW_IT_RUNS = {"params", "foreach", "fused", "capturable", "differentiable"}


def flat(state: Any) -> dict[str, torch.Tensor]:
    weights, optimizer = state
    tensors = dict(weights)
    for name, values in optimizer["state"].items():
        tensors.update({f"{name}/{key}": torch.as_tensor(value) for key, value in values.items()})
    return tensors


def options(state: State) -> dict[str, dict[str, Any]]:
    """Parameter name -> learning rate, betas, weight decay, ..."""
    groups = state[1]["param_groups"]
    return {n: {k: v for k, v in g.items() if k not in _HOW_IT_RUNS} for g in groups for n in g["params"]}


def assert_same(got: Any, expected: Any, exact: bool = True, tolerance: tuple[float, float] = (1e-4, 1e-5)) -> None:
    """Names, shapes and values, to the bit or within (relative, absolute) `tolerance`, and options to the bit."""
    a, b = flat(got), flat(expected)
    rtol, atol = (0.0, 0.0) if exact else tolerance
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=atol, msg=f"{name}: {{}}".format)
    assert options(got).keys() == options(expected).keys()
    for name, mine in options(got).items():
        theirs = options(expected)[name]  # a table's group in a plain module has options that kernels do not know
        assert "lr" in mine.keys() & theirs.keys()
        assert {k: mine[k] for k in theirs if k in mine} == {k: theirs[k] for k in mine if k in theirs}, name


# ---- many loads in one call ----


def state_file(path: str) -> Path:
    """Rank 0's run of a save, with what every rank drew."""
    return Path(f"{path}.runs.pt")


Found = tuple[dict[Any, str], dict[Any, torch.Tensor]]


def each(
    sources: dict[Any, str],
    load: Callable[[Any, str], Run],
    check: Callable[[Run, Run, Any], None],
    same_mesh: Callable[[Any], bool],
) -> Found:
    """Load and check every source.

    Returns:
        source -> what is wrong; source -> what was drawn, for sources of another mesh.
    """
    wrong: dict[Any, str] = {}
    drawn: dict[Any, torch.Tensor] = {}
    for source, path in sources.items():
        saved = Run(*torch.load(state_file(path), weights_only=True))
        try:
            loaded = load(source, path)
            check(loaded, saved, source)
            if same_mesh(source):
                assert torch.equal(loaded.drawn, saved.drawn[dist.get_rank()]), "random state"
            else:
                drawn[source] = loaded.drawn
        except (AssertionError, RuntimeError) as error:
            wrong[source] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return wrong, drawn


# ---- the parent's side ----


class Saves:
    """Checkpoints in a folder, each made when first asked for, with the run that saved it beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str, size: int, job: Callable[..., Run], *args: Any) -> str:
        """Path of the checkpoint that `job(path, *args)` saves on `size` ranks."""
        path = str(self.folder / name)
        if not state_file(path).exists():
            runs = run_ranks(size, job, path, *args)
            for run in runs[1:]:
                assert_same(run.at, runs[0].at)
                assert_same(run.later, runs[0].later)
            drawn = torch.stack([run.drawn for run in runs])
            torch.save(tuple(runs[0]._replace(drawn=drawn)), state_file(path))
        return path


def assert_none_wrong(what: str, results: list[Found], data_ranks: list[int]) -> None:
    """No source is wrong on any rank, and random state of other meshes is derived for each data rank."""
    wrong = [f"from {at} on rank {r}: {text}" for r, (found, _) in enumerate(results) for at, text in found.items()]
    assert not wrong, "\n".join([f"{what}: {len(wrong)} wrong", *wrong[:20]])
    # Every source's rank 0 had the same random state, so that what another mesh derives of it is the same too.
    derived: dict[int, set[tuple[float, ...]]] = {}
    for rank, (_, drawn) in zip(data_ranks, results, strict=True):
        derived.setdefault(rank, set()).update(tuple(numbers.tolist()) for numbers in drawn.values())
    if any(drawn for _, drawn in results):
        assert {len(numbers) for numbers in derived.values()} == {1}
        assert len(set.union(*derived.values())) == len(derived)
