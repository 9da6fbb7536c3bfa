"""Checkpoints and full state dicts: saved on one mesh and plan, loaded on others or in a plain module, same numbers."""

from __future__ import annotations

import copy
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dmp import (
    CheckpointError,
    DistributedModelParallel,
    DmpError,
    ShardingEnv,
    column_wise,
    data_parallel,
    grid,
    rectangles,
    row_wise,
    table_row_wise,
    table_wise,
)
from dmp.checkpoint import load_checkpoint, save_checkpoint
from dmp.gather import chunk_views, full_state_dict, sharded_parameters, to_unsharded
from dmp.optimizer_state import full_optimizer_state_dict
from dmp.verify import verify
from tests.equality import attach, env_of, loss_of, make_batch, make_module, random_rectangles
from tests.ranks import mesh, run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's of its own TorchScript, FBGEMM's CPU build of what only GPUs have
    import torchrec.optim
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

DIM, ROWS = 16, (10, 7, 5)  # ROWS[1] over 4 ranks: 2, 2, 2, 1
GLOBAL_BATCH = 8
TABLES = [f"ebc.embedding_bags.t{i}.weight" for i in range(len(ROWS))]


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
        return self.out(self.norm(self.over(self.ebc(features).values())).tanh())


def make(kind: str = "adagrad", seed: int = 0) -> nn.Module:
    """The plain model, with an optimizer in the tables' backward pass; "none": without."""
    torch.manual_seed(seed)
    module = Ranker()
    tables = list(module.ebc.parameters())
    if kind == "rowwise_adagrad":
        apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, tables, {"lr": 0.1})
    elif kind != "none":
        options = {
            "sgd": (torch.optim.SGD, 0.1),
            "adagrad": (torch.optim.Adagrad, 0.1),
            "adam": (torch.optim.Adam, 0.01),
        }
        optimizer, lr = options[kind]
        apply_optimizer_in_backward(optimizer, tables, {"lr": lr})
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


PLANS: dict[str, Any] = {
    "table_wise": lambda n: [table_wise(i % n) for i in range(3)],
    "row_wise": lambda n: [row_wise()] * 3,
    "column_wise": lambda n: [column_wise(range(n))] * 3,
    "uneven": lambda n: [column_wise([0, n - 1, 0], widths=[4, 9, 3]), row_wise([n - 1, 0]), table_wise(n - 1)],
    "mixed": lambda n: [row_wise(), data_parallel(), column_wise(range(n))],
    "grid": lambda n: [grid([[0, n - 1], [n // 2, 0]])] * 3,
    "data_parallel": lambda n: [data_parallel()] * 3,
    "table_row_wise": lambda n: [table_row_wise(1), table_row_wise(0), table_row_wise([0, 1])],
}


def build(layout: str, kind: str, shape: tuple[int, ...], names: tuple[str, ...] | None, seed: int = 0) -> Any:
    env = ShardingEnv.from_mesh(mesh(shape, names))
    plan = dict(zip(TABLES, PLANS[layout](env.table_size), strict=True))
    return DistributedModelParallel(make(kind, seed), env, plan=plan)


def save_from(
    path: str, layout: str, kind: str, shape: tuple[int, ...], names: tuple[str, ...] | None = None, more: int = 2
) -> tuple[Any, ...]:
    """Train 3 steps, save, train `more`; rank 0's whole state at the save and at the end."""
    model = build(layout, kind, shape, names)
    optimizer = dense_optimizer(model, kind)
    train(model, optimizer, range(3), model.env)
    for group in model.fused_optimizer.param_groups:
        group["lr"] *= 0.5
    optimizer.param_groups[0]["lr"] *= 0.25
    save_checkpoint(path, model, optimizer, {"step": 3, "seen": torch.arange(3)})
    at_save = whole(model, optimizer)
    train(model, optimizer, range(3, 3 + more), model.env)
    return at_save, whole(model, optimizer)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    return full_state_dict(model), full_optimizer_state_dict(model, optimizer)


def load_into(
    path: str, layout: str, kind: str, shape: tuple[int, ...], names: tuple[str, ...] | None = None, more: int = 2
) -> tuple[Any, ...]:
    """Load into a model of other values, then train `more` steps; whole state after each."""
    model = build(layout, kind, shape, names, seed=1)
    optimizer = dense_optimizer(model, kind, lr=1.0)
    extra = load_checkpoint(path, model, optimizer)
    assert extra["step"] == 3 and torch.equal(extra["seen"], torch.arange(3))
    at_load = whole(model, optimizer)
    train(model, optimizer, range(3, 3 + more), model.env)
    return at_load, whole(model, optimizer)


def load_plain(path: str, kind: str, more: int = 2) -> tuple[Any, ...]:
    module = make(kind, seed=1)
    optimizer = dense_optimizer(module, kind, lr=1.0)
    assert load_checkpoint(path, module, optimizer)["step"] == 3
    at_load = whole(module, optimizer)
    train(module, optimizer, range(3, 3 + more), ShardingEnv.single())
    return at_load, whole(module, optimizer)


def flat(state: Any) -> dict[str, torch.Tensor]:
    weights, optimizer = state
    tensors = dict(weights)
    for name, values in optimizer["state"].items():
        tensors.update({f"{name}/{key}": torch.as_tensor(value) for key, value in values.items()})
    return tensors


def assert_same(got: Any, expected: Any, exact: bool = True, apart_from: str = "\0") -> None:
    a, b = flat(got), flat(expected)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].shape == b[name].shape, name
        if exact and not name.endswith(apart_from):
            assert torch.equal(a[name], b[name]), name
        else:
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    lrs = [{n: g["lr"] for g in s[1]["param_groups"] for n in g["params"]} for s in (got, expected)]
    assert lrs[0] == lrs[1]


WORLDS: dict[str, tuple[tuple[int, ...], tuple[str, ...] | None]] = {
    "1": ((1,), None),
    "2": ((2,), None),
    "4": ((4,), None),
    "2x2": ((2, 2), ("replicate", "shard")),
    "hosts": ((2, 2), ("host", "local")),
}
CASES = [
    # kind, from, to
    ("adagrad", ("table_wise", "2"), ("row_wise", "4")),
    ("adagrad", ("mixed", "4"), ("uneven", "2")),
    ("rowwise_adagrad", ("row_wise", "2"), ("table_wise", "4")),
    ("adam", ("column_wise", "4"), ("mixed", "2")),
    ("adam", ("data_parallel", "2"), ("table_row_wise", "hosts")),
    ("sgd", ("grid", "2x2"), ("column_wise", "2")),
    ("none", ("uneven", "2"), ("mixed", "4")),
    ("none", ("table_wise", "2x2"), ("grid", "4")),
]


@pytest.mark.parametrize(("kind", "source", "target"), CASES, ids=lambda c: c if isinstance(c, str) else "@".join(c))
def test_save_here_load_there(kind: str, source: tuple[str, str], target: tuple[str, str], tmp_path: Path) -> None:
    path = str(tmp_path / "step3")
    shape, names = WORLDS[source[1]]
    saved = run_ranks(prod(shape), save_from, path, source[0], kind, shape, names)
    for other in saved[1:]:
        assert_same(other[0], saved[0][0])
    shape, names = WORLDS[target[1]]
    loaded = run_ranks(prod(shape), load_into, path, target[0], kind, shape, names)
    at_save, later = saved[0]
    for at_load, after in loaded:
        assert_same(at_load, at_save)
        assert_same(after, later, exact=False)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam", "none"])
def test_load_into_a_plain_module(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "step3")
    at_save, later = run_ranks(2, save_from, path, "row_wise", kind, (2,))[0]
    at_load, after = load_plain(path, kind)
    assert_same(at_load, at_save)
    assert_same(after, later, exact=False)


@pytest.mark.parametrize("kind", ["adagrad", "rowwise_adagrad", "none"])
def test_plain_save_loads_on_a_mesh(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "step3")
    module = make(kind)
    optimizer = dense_optimizer(module, kind)
    train(module, optimizer, range(3), ShardingEnv.single())
    save_checkpoint(path, module, optimizer, {"step": 3, "seen": torch.arange(3)})
    at_save = whole(module, optimizer)
    train(module, optimizer, range(3, 5), ShardingEnv.single())
    for at_load, after in run_ranks(
        2, load_into, path, "mixed" if kind != "rowwise_adagrad" else "row_wise", kind, (2,)
    ):
        assert_same(at_load, at_save)
        assert_same(after, whole(module, optimizer), exact=False)


@pytest.mark.parametrize(
    ("source", "target"), [("column_wise", "column_wise"), ("column_wise", "uneven"), ("row_wise", "column_wise")]
)
def test_rowwise_state_of_column_blocks(source: str, target: str, tmp_path: Path) -> None:
    path = str(tmp_path / "step3")
    at_save, _ = run_ranks(2, save_from, path, source, "rowwise_adagrad", (2,))[0]
    at_load, _ = run_ranks(2, load_into, path, target, "rowwise_adagrad", (2,))[0]
    assert_same(at_load, at_save, exact=source == target, apart_from="/sum")
    assert at_load[1]["state"][TABLES[0]]["sum"].shape == (ROWS[0],)
    at_load, _ = load_plain(path, "rowwise_adagrad")
    assert_same(at_load, at_save)


def column_blocks_to_the_bit(path: str) -> None:
    model = build("column_wise", "rowwise_adagrad", (2,), None)
    train(model, dense_optimizer(model, "rowwise_adagrad"), range(2), model.env)
    save_checkpoint(path, model)
    other = build("column_wise", "rowwise_adagrad", (2,), None, seed=1)
    load_checkpoint(path, other)
    for name, values in model.fused_optimizer.state_dict()["state"].items():
        got = other.fused_optimizer.state_dict()["state"][name]["sum"]
        assert values["sum"].size() == (values["sum"].size()[0], 2)
        assert all(torch.equal(a, b) for a, b in zip(got.chunks, values["sum"].chunks, strict=True))


def test_column_blocks_come_back_to_the_bit(tmp_path: Path) -> None:
    run_ranks(2, column_blocks_to_the_bit, str(tmp_path / "saved"))


def irregular_cuts(path: str, seed: int) -> tuple[dict[str, Any], bool]:
    """Rectangles whose columns do not line up, some wider than a block: saved, loaded and trained on to the bit."""
    env = env_of("dp4")

    def wrapped(shift: float) -> DistributedModelParallel:
        module = make_module("ebc")
        attach(module, "rowwise_adagrad")
        with torch.no_grad():
            for p in module.parameters():
                p += shift
        shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
        plan = {n: rectangles(random_rectangles(s, 4, seed + i)) for i, (n, s) in enumerate(shapes.items())}
        return DistributedModelParallel(module, env=env, plan=plan)

    model, other = wrapped(0.0), wrapped(1.0)
    for step in range(2):
        loss_of(model(*make_batch("ebc", env.rank, step))).backward()
    save_checkpoint(path, model)
    load_checkpoint(path, other)
    for m in (model, other):
        loss_of(m(*make_batch("ebc", env.rank, 2))).backward()
    same = all(
        torch.equal(a, b)
        for x, y in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
        for a, b in zip(x.chunks, y.chunks, strict=True)
    )
    return full_optimizer_state_dict(model)["state"], same


@pytest.mark.parametrize("seed", [1, 20, 300])
def test_irregular_column_cuts_come_back_to_the_bit(seed: int, tmp_path: Path) -> None:
    for state, same in run_ranks(4, irregular_cuts, str(tmp_path / "saved"), seed):
        assert same
        assert state["embedding_bags.t2.weight"]["sum"].shape == (29,)


def unshard(layout: str, shape: tuple[int, ...], names: tuple[str, ...] | None) -> bool:
    model = build(layout, "adagrad", shape, names)
    plain = to_unsharded(model)
    assert type(plain) is Ranker and not plain.out.weight.is_meta
    values = full_state_dict(model)
    assert all(torch.equal(v, values[k]) for k, v in plain.state_dict().items())
    features = my_batch(0, model.env)
    torch.testing.assert_close(plain(features), model(features))
    received = full_state_dict(model, rank0_only=True)
    assert received.keys() == (values.keys() if dist.get_rank() == 0 else set())
    return all(torch.equal(v, values[k]) for k, v in received.items())


@pytest.mark.parametrize(("layout", "world"), [("mixed", "2"), ("uneven", "4"), ("row_wise", "2x2")])
def test_unsharded_and_rank0_only(layout: str, world: str) -> None:
    shape, names = WORLDS[world]
    assert all(run_ranks(prod(shape), unshard, layout, shape, names))


def check_verify(kind: str, spoil: bool) -> str:
    model = build("mixed", kind, (2,), None)
    before = whole(model, dense_optimizer(model, kind))
    if spoil:
        model.ebc.register_forward_hook(
            lambda _, __, out: type(out)(out.keys(), out.length_per_key(), out.values() * 1.01)
        )
    report = verify(model, make("none", seed=3), batch(0, model.env.rank, 2))
    assert_same(whole(model, dense_optimizer(model, kind)), before)
    assert len(report.gradients) + len(report.not_compared) == len(list(model.parameters()))
    return str(report)


@pytest.mark.parametrize("kind", ["none", "adagrad"])
def test_verify(kind: str) -> None:
    assert "gradient of out.weight" in run_ranks(2, check_verify, kind, False)[0]


def test_verify_names_what_differs() -> None:
    errors = run_ranks(2, check_verify, "none", True, expect=DmpError)
    assert str(errors[0]) == str(errors[1])
    assert "output differs by" in str(errors[0]) and "gradient of" in str(errors[0])


def dense_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3), nn.Tanh())


def dense_steps(module: nn.Module, count: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(count):
        optimizer.zero_grad()
        module(torch.linspace(-1, 1, 30).view(5, 6)).square().sum().backward()
        optimizer.step()
    return optimizer


def save_dtensors(path: str) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    both = mesh((2, 2), ("dp_shard", "tp"))
    module = dense_module()
    parallelize_module(module, both["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(module, mesh=both["dp_shard"])
    optimizer = dense_steps(module)
    save_checkpoint(path, module, optimizer)
    return whole(module, optimizer)


def load_dtensors(path: str) -> Any:
    from torch.distributed.fsdp import fully_shard

    module = dense_module()
    fully_shard(module, mesh=mesh((3,), ("fsdp",)))  # 10 rows over 3 ranks: 4, 4, 2
    optimizer = dense_steps(module, 0)
    load_checkpoint(path, module, optimizer)
    return whole(module, optimizer)


def test_dtensors(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    plain = dense_module()
    expected = whole(plain, dense_steps(plain))
    saved = run_ranks(4, save_dtensors, path)
    for state in saved:
        assert_same(state, expected, exact=False)
        assert_same(state, saved[0])
    other = dense_module()
    optimizer = dense_steps(other, 0)
    load_checkpoint(path, other, optimizer)
    assert_same(whole(other, optimizer), saved[0])
    for state in run_ranks(3, load_dtensors, path):
        assert_same(state, saved[0])


# ---- files ----


def save_plain(path: Path, kind: str = "adagrad") -> tuple[nn.Module, torch.optim.Optimizer]:
    module = make(kind)
    optimizer = dense_optimizer(module, kind)
    train(module, optimizer, range(3), ShardingEnv.single())
    save_checkpoint(path, module, optimizer, {"step": 3, "seen": torch.arange(3)})
    return module, optimizer


def test_on_disk(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    path = tmp_path / "saved"
    module, _ = save_plain(path)
    names = {p.name for p in path.iterdir()}
    assert {"dmp.json", "plan.json", "objects.pt", ".metadata"} < names
    assert json.loads((path / "dmp.json").read_text())["version"] == 1
    assert os.listdir(tmp_path) == ["saved"]
    dcp_to_torch_save(path, tmp_path / "all.pt")
    stored = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(stored["model.out.weight"], module.out.weight)
    assert stored[f"optimizer.state.{TABLES[0]}.sum"].shape == (ROWS[0], DIM)


def load_file(path: str) -> None:
    model = build("mixed", "adagrad", (2,), None, seed=1)
    optimizer = dense_optimizer(model, "adagrad", lr=1.0)
    saved = torch.load(path, weights_only=True)
    assert load_checkpoint(path, model, optimizer) == saved.get("extra")
    assert_same(whole(model, optimizer), (saved["model"], saved["optimizer"]))


def test_torch_save_files(tmp_path: Path) -> None:
    module, optimizer = save_plain(tmp_path / "saved")
    state = {"model": full_state_dict(module), "optimizer": full_optimizer_state_dict(module, optimizer), "extra": 7}
    torch.save(state, tmp_path / "full.pt")
    run_ranks(2, load_file, str(tmp_path / "full.pt"))
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    other = make("adagrad", seed=1)
    assert load_checkpoint(tmp_path / "weights.pt", other) is None
    assert torch.equal(other.out.weight, module.out.weight)


def save_twice(path: str) -> None:
    model = build("mixed", "adagrad", (2,), None)
    optimizer = dense_optimizer(model, "adagrad")
    pending = save_checkpoint(path, model, optimizer, {"step": 0}, asynchronous=True)
    expected = whole(model, optimizer)
    train(model, optimizer, range(2), model.env)
    assert pending is not None
    pending.wait()
    assert pending.done()
    other = build("row_wise", "adagrad", (2,), None, seed=1)
    restored = dense_optimizer(other, "adagrad")
    assert load_checkpoint(path, other, restored)["step"] == 0
    assert_same(whole(other, restored), expected)
    save_checkpoint(path, model, optimizer, {"step": 2})
    assert load_checkpoint(path, other, restored)["step"] == 2
    assert_same(whole(other, restored), whole(model, optimizer))


def test_in_the_background_and_again(tmp_path: Path) -> None:
    run_ranks(2, save_twice, str(tmp_path / "saved"))
    assert os.listdir(tmp_path) == ["saved"]


def random_state(path: str, save: bool, shape: tuple[int, ...]) -> torch.Tensor:
    model = build("row_wise", "sgd", shape, None)
    torch.manual_seed(100 + dist.get_rank())
    torch.rand(5)
    if save:
        save_checkpoint(path, model)
    else:
        torch.manual_seed(0)
        load_checkpoint(path, model)
    return torch.rand(3)


def test_random_state(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    drawn = run_ranks(2, random_state, path, True, (2,))
    assert all(torch.equal(a, b) for a, b in zip(run_ranks(2, random_state, path, False, (2,)), drawn, strict=True))
    other = run_ranks(4, random_state, path, False, (4,))
    again = run_ranks(4, random_state, path, False, (4,))
    assert len({tuple(x.tolist()) for x in other}) == 4
    assert all(torch.equal(a, b) for a, b in zip(other, again, strict=True))


def truncate(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])


def newer(path: Path) -> None:
    about = json.loads((path / "dmp.json").read_text())
    (path / "dmp.json").write_text(json.dumps({**about, "version": 99}))


SPOILERS: dict[str, tuple[Any, str]] = {
    "truncated": (truncate, "cut short"),
    "no data file": (lambda path: next(path.glob("*.distcp")).unlink(), "is missing"),
    "half saved": (lambda path: (path / ".metadata").unlink(), "cut short"),
    "newer": (newer, "version 99"),
    "bad metadata": (lambda path: (path / ".metadata").write_bytes(b"junk"), "metadata"),
    "bad objects": (lambda path: (path / "objects.pt").write_bytes(b"junk"), "objects.pt"),
    "evil metadata": (lambda path: (path / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR."), "os.system"),
    "gone": (shutil.rmtree, "nothing at"),
    "left half saved": (lambda path: path.rename(path.with_name(".saved.saving")), "a save that was cut short"),
    "foreign": (lambda path: (path / "dmp.json").unlink(), "no dmp.json"),
}


@pytest.mark.parametrize("how", SPOILERS)
def test_damage_is_named_and_changes_nothing(how: str, tmp_path: Path) -> None:
    spoil, message = SPOILERS[how]
    save_plain(tmp_path / "saved")
    spoil(tmp_path / "saved")
    module = make("adagrad", seed=1)
    optimizer = dense_optimizer(module, "adagrad")
    before = copy.deepcopy(whole(module, optimizer))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "saved", module, optimizer)
    assert_same(whole(module, optimizer), before)


def misfit(path: str, change: str) -> None:
    model = build("mixed", "adam" if change == "optimizer" else "adagrad", (2,), None, seed=1)
    if change == "shape":
        model.module.out = nn.Linear(5, 1)
    elif change == "dtype":
        model.module.out.double()
    elif change == "name":
        model.module.more = nn.Linear(1, 1)
    optimizer = dense_optimizer(model, "adagrad")
    before = copy.deepcopy(whole(model, optimizer))
    try:
        load_checkpoint(path, model, optimizer)
    finally:
        assert_same(whole(model, optimizer), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("shape", "'out.weight' has shape (1, 4), expected (1, 5)"),
        ("dtype", "'out.weight' has dtype torch.float32, expected torch.float64"),
        ("name", "missing key 'more.weight'"),
        ("optimizer", f"optimizer state 'exp_avg' of {TABLES[0]!r} is missing"),
    ],
)
def test_misfits_are_named_on_every_rank(change: str, message: str, tmp_path: Path) -> None:
    save_plain(tmp_path / "saved")
    errors = run_ranks(2, misfit, str(tmp_path / "saved"), change, expect=CheckpointError)
    assert all(message in str(error) for error in errors)


def save_badly(path: str) -> None:
    model = build("mixed", "adagrad", (2,), None)
    save_checkpoint(path, model, extra=object() if dist.get_rank() == 0 else None)


def test_a_failed_save_leaves_the_old_one(tmp_path: Path) -> None:
    module, _ = save_plain(tmp_path / "saved")
    errors = run_ranks(2, save_badly, str(tmp_path / "saved"), expect=CheckpointError)
    assert all("extra holds something that cannot be read back safely" in str(e) for e in errors)
    other = make("adagrad", seed=1)
    load_checkpoint(tmp_path / "saved", other)
    assert torch.equal(other.out.weight, module.out.weight)


def test_a_save_killed_between_its_two_renames_is_found(tmp_path: Path) -> None:
    module, _ = save_plain(tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / ".saved.replaced")
    other = make("adagrad", seed=1)
    load_checkpoint(tmp_path / "saved", other)
    assert torch.equal(other.out.weight, module.out.weight)


def test_weights_alone(tmp_path: Path) -> None:
    module = make("none")
    save_checkpoint(tmp_path / "saved", module)
    other = make("adagrad", seed=1)
    load_checkpoint(tmp_path / "saved", other)
    assert torch.equal(other.out.weight, module.out.weight)
    with pytest.raises(CheckpointError, match="no optimizer state"):
        load_checkpoint(tmp_path / "saved", other, dense_optimizer(other, "adagrad"))


def test_foreign_parameter() -> None:
    with pytest.raises(CheckpointError, match="not the model's"):
        full_optimizer_state_dict(nn.Linear(2, 1), torch.optim.SGD(nn.Linear(2, 1).parameters()))


def cut_gradients() -> None:
    model = build("uneven", "none", (2,), None)
    for name, (parameter, chunked) in sharded_parameters(model).items():
        cut = chunk_views(parameter.detach(), parameter, chunked)
        assert cut.offsets == chunked.offsets, name
        for a, b in zip(cut.chunks, chunked.chunks, strict=True):
            assert a.data_ptr() == b.data_ptr() and a.shape == b.shape


def test_chunk_views_follow_the_parameter() -> None:
    run_ranks(2, cut_gradients)


def prod(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count
