"""Checkpoints and full state dicts: saved on one mesh and plan, loaded on others or in a plain module, same numbers."""

from __future__ import annotations

import copy
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dmp import CheckpointError, DistributedModelParallel, DmpError, ShardingEnv, rectangles
from dmp.checkpoint.api import load_checkpoint, save_checkpoint
from dmp.chunked import chunk_views
from dmp.state.gather import full_state_dict
from dmp.state.local_chunks import sharded_parameters
from dmp.state.optimizer_state import full_optimizer_state_dict
from dmp.state.unsharded import to_unsharded
from dmp.state.verify import verify
from tests.equality import attach, env_of, loss_of, make_batch, make_module, random_rectangles
from tests.ranks import mesh, run_ranks
from tests.state_jobs import (
    DIM,
    OPTIMIZERS,
    ROWS,
    TABLES,
    WORLDS,
    Place,
    Ranker,
    assert_same,
    batch,
    build,
    dense_optimizer,
    load_into,
    load_into_plain,
    make,
    my_batch,
    prod,
    save_from,
    save_from_plain,
    train,
    whole,
)
from tests.state_jobs import (
    GLOBAL_BATCH as GLOBAL_BATCH,
)
from tests.test_state_matrix import check_load

PLAIN = Place("table_wise", "1")  # what a plain module is like


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*((kind, "row_wise") for kind in (*OPTIMIZERS, "none")), ("rowwise_adagrad", "column_wise")],
)
@pytest.mark.sampled(10)
def test_load_into_a_plain_module(kind: str, layout: str, tmp_path: Path) -> None:
    path = str(tmp_path / "step3")
    saved = run_ranks(2, save_from, path, layout, kind, (2,))[0]
    check_load(load_into_plain(path, kind), saved, Place(layout, "2"), PLAIN, 2)


@pytest.mark.parametrize("kind", ["adagrad", "rowwise_adagrad", "none"])
@pytest.mark.sampled(3)
def test_plain_save_loads_on_a_mesh(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "step3")
    saved = save_from_plain(path, kind)
    for loaded in run_ranks(2, load_into, path, "mixed", kind, (2,)):
        check_load(loaded, saved, PLAIN, Place("mixed", "2"), 2)


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
@pytest.mark.sampled(3)
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
@pytest.mark.sampled(3)
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
    assert {"dmp.json", "plan.json", "objects.pt", ".metadata", "tensors.json", "checksums.json"} < names
    assert json.loads((path / "dmp.json").read_text())["version"] == 3
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
    with torch.device("meta"):  # a default device, as a program sets for all that it makes
        assert load_checkpoint(path, other, restored)["step"] == 2
    assert_same(whole(other, restored), whole(model, optimizer))


def test_in_the_background_and_again(tmp_path: Path) -> None:
    run_ranks(2, save_twice, str(tmp_path / "saved"))
    assert os.listdir(tmp_path) == ["saved"]


def truncate(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])


def newer(path: Path) -> None:
    about = json.loads((path / "dmp.json").read_text())
    (path / "dmp.json").write_text(json.dumps({**about, "version": 99}))


def evil(path: Path) -> None:
    """One who means harm writes the checksums too, and the version before tensors.json was read."""
    about = json.loads((path / "dmp.json").read_text())
    written = {".metadata": b"cos\nsystem\n(S'true'\ntR.", "dmp.json": json.dumps({**about, "version": 2}).encode()}
    checksums = json.loads((path / "checksums.json").read_text())
    for name, data in written.items():
        (path / name).write_bytes(data)
        checksums[name] = zlib.crc32(data)
    (path / "checksums.json").write_text(json.dumps(checksums))


SPOILERS: dict[str, tuple[Any, str]] = {
    "truncated": (truncate, "cut short"),
    "no data file": (lambda path: next(path.glob("*.distcp")).unlink(), "is missing"),
    "half saved": (lambda path: (path / ".metadata").unlink(), "cut short"),
    "newer": (newer, "version 99"),
    "bad metadata": (lambda path: (path / ".metadata").write_bytes(b"junk"), "metadata"),
    "bad objects": (lambda path: (path / "objects.pt").write_bytes(b"junk"), "objects.pt"),
    "evil metadata": (evil, "os.system"),
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


def saves_parts(path: str) -> list[str]:
    """What a save says of averages of weights, and of an optimizer's state, in `extra`; of what is whole it says
    nothing."""
    model = build("mixed", "none", (2,), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    said = []
    for extra in ({"ema": averages}, {"of": {f"module.{n}": v for n, v in averages.items()}}, [optimizer.state_dict()]):
        with pytest.raises(CheckpointError) as error:
            save_checkpoint(path, model, extra=extra)
        said.append(str(error.value))
    save_checkpoint(path, model, extra={"ema": full_state_dict(model)})
    return said


def test_a_rank_s_part_in_extra_is_refused(tmp_path: Path) -> None:
    """Of averages rank 0's rows were saved, in silence; over an optimizer's state the ranks parted."""
    for said in run_ranks(2, saves_parts, str(tmp_path / "saved")):
        for text, where in zip(said, ("extra['ema']['", "extra['of']['module.", "extra[0]['state']["), strict=True):
            assert f"{where}" in text and "is rank 0's part" in text, text


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


def test_state_of_another_optimizer_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in torch it loads; nothing told that moments were of no use."""
    module, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "saved", module, optimizer)
    load_checkpoint(tmp_path / "saved", other, torch.optim.AdamW(other.parameters()))
    assert "the saved optimizer" not in caplog.text
    load_checkpoint(tmp_path / "saved", other, torch.optim.SGD(other.parameters()))
    assert "has amsgrad, betas, decoupled_weight_decay, eps, which SGD has not" in caplog.text
