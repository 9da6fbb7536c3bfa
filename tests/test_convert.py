"""Checkpoints out: to safetensors, from one kind to another, and how little of them is in memory meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

from dmp import (
    CheckpointError,
    ChunkedTensor,
    DistributedModelParallel,
    ShardingEnv,
    column_wise,
    export_safetensors,
    full_optimizer_state_dict,
    full_state_dict,
    load_checkpoint,
    row_wise,
    save_checkpoint,
    table_wise,
)
from dmp import __main__ as command_line
from dmp.checkpoint.convert import convert
from dmp.wrap.values.whole import gather
from tests import equality, formats_jobs, test_torchrec_opinion
from tests.bench.state_peak import peak_above
from tests.formats_jobs import LAYOUTS, ROOT, Model, assert_equal, once, save_hugging_face, sharded
from tests.ranks import mesh, run_ranks
from tests.test_torch_folders import read_whole, save_torchrec

pytestmark = formats_jobs.pytestmark


MB = 1 << 20


# ---- a model's weights ----


def export(path: str, layout: str, max_shard_bytes: int) -> Any:
    model = sharded(layout)
    export_safetensors(path, model, max_shard_bytes=max_shard_bytes)
    return full_state_dict(model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("max_shard_bytes", [10**6, 600])
@pytest.mark.sampled(2)
def test_export(layout: str, max_shard_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "out"
    expected = once(run_ranks(2, export, str(path), layout, max_shard_bytes)[0])
    files = sorted(file.name for file in path.iterdir())
    if max_shard_bytes == 600:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in expected.values())
        assert sorted({*index["weight_map"].values(), "model.safetensors.index.json"}) == files
        assert len(files) > 3
        held = {name: load_file(path / file)[name] for name, file in index["weight_map"].items()}
    else:
        assert files == ["model.safetensors"]
        held = load_file(path / "model.safetensors")
    assert_equal(held, expected)
    for error in run_ranks(2, export, str(path), layout, max_shard_bytes, expect=CheckpointError):
        assert "is there already" in str(error)


def test_gathering_leaves_values_where_they_are() -> None:
    """Meta stands for a device: what is there cannot come to the CPU."""
    model = nn.Linear(2, 1, device="meta")
    assert {value.device.type for value in full_state_dict(model, cpu=False).values()} == {"meta"}
    with pytest.raises(NotImplementedError, match="meta"):
        full_state_dict(model)


class Refuses:
    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        raise ValueError("no copies of this")


def gather_what_one_lacks(case: str) -> None:
    rank, replicated = dist.get_rank(), case == "a replica waits"
    env = ShardingEnv.from_mesh(mesh((2, 1), ("replicate", "shard")) if replicated else mesh((2,)))
    state: dict[str, Any] = {"note": Refuses() if rank == 0 and replicated else "text"}
    if case == "pieces":
        state["table"] = ChunkedTensor((4, 2), [torch.ones(2, 2)][rank:], [(0, 0)][rank:])
    gather(state, env, rank0_only=True)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("pieces", "the ranks' pieces of 'table' hold 4 of 8 elements"),
        ("a replica waits", "rank 0: ValueError: no copies of this"),
    ],
)
def test_gathering_fails_on_every_rank(case: str, message: str) -> None:
    for error in run_ranks(2, gather_what_one_lacks, case, expect=CheckpointError):
        assert message in str(error)


# ---- from one kind to another ----


def make_source(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.125)
    model(torch.arange(8).view(4, 2), torch.zeros(4, 1, dtype=torch.long)).sum().backward()
    optimizer.step()
    weights, state = full_state_dict(model), full_optimizer_state_dict(model, optimizer)
    if kind == "dmp":
        save_checkpoint(path, model, optimizer, {"step": 3})
    elif kind == "torch":
        torch.save({"model": weights, "optimizer": state, "extra": {"step": 3}}, path)
    elif kind == "safetensors":
        save_file(once(weights), path)
    elif kind == "hugging_face":
        save_hugging_face(path, once(weights), 2)
    else:
        dcp.save({"m": weights, "optim": {"state": state["state"]}}, checkpoint_id=path, no_dist=True)
    return weights, state


@pytest.mark.parametrize("kind", ["dmp", "torch", "safetensors", "hugging_face", "folder"])
@pytest.mark.parametrize("to", ["dmp", "torch", "safetensors"])
@pytest.mark.sampled(2)
def test_convert(kind: str, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / ("in.safetensors" if kind == "safetensors" else "in")
    weights, state = make_source(source, kind)
    assert command_line.main(["convert", str(source), str(tmp_path / "out"), "--to", to]) == 0
    assert "weights" in capsys.readouterr().out
    other = Model(1)
    has_state = not {"safetensors", "hugging_face"} & {kind, to}
    optimizer = torch.optim.Adagrad(other.parameters(), lr=1.0) if has_state else None
    extra = load_checkpoint(tmp_path / "out", other, optimizer)
    assert_equal(full_state_dict(other), weights)
    if has_state:
        loaded = full_optimizer_state_dict(other, optimizer)
        for name, values in state["state"].items():
            assert_equal(loaded["state"][name], values)
        assert loaded["param_groups"][0]["lr"] == (1.0 if kind == "folder" else 0.125)
        assert extra == (None if kind == "folder" else {"step": 3})
    assert {path.name for path in tmp_path.iterdir()} == {source.name, "out"}


@pytest.fixture(scope="module")
def torchrec_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torchrec") / "in"
    run_ranks(2, save_torchrec, str(path), "mixed", "rowwise_adagrad")
    return path


@pytest.mark.parametrize("to", ["dmp", "torch", "safetensors"])
def test_convert_torchrecs(to: str, torchrec_folder: Path, tmp_path: Path) -> None:
    """One table by columns, whose state is one value for each row and block, and one by rows."""
    saved = read_whole(str(torchrec_folder))
    assert command_line.main(["convert", str(torchrec_folder), str(tmp_path / "out"), "--to", to]) == 0
    model = test_torchrec_opinion.Model("cpu")
    equality.attach(model.ebc, "rowwise_adagrad")
    names = {table: f"ebc.embedding_bags.{table}.weight" for table in test_torchrec_opinion.ROWS}
    plan = {name: table_wise(0) for name in names.values()}
    wrapped = DistributedModelParallel(model, ShardingEnv.single(), plan=plan)
    load_checkpoint(tmp_path / "out", wrapped)
    weights = {key.removeprefix("model."): t for key, t in saved.items() if key.startswith("model.")}
    assert_equal(full_state_dict(wrapped), weights)
    state = full_optimizer_state_dict(wrapped)["state"]
    for table, name in names.items():
        value = saved[f"optim.state.{name}.{table}.momentum1"]
        if table == "t0":  # two column blocks of one width, one after another
            value = value.view(2, -1).double().mean(0).float()
        assert torch.equal(state[name]["sum"], torch.zeros_like(value) if to == "safetensors" else value)


def flip(file: Path) -> None:
    """One bit in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("kind", ["dmp", "torch", "folder"])
@pytest.mark.parametrize("to", ["dmp", "torch", "safetensors"])
def test_damage_is_not_converted(kind: str, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"weight": torch.randn(64, 64)}
    if kind == "dmp":
        save_checkpoint(tmp_path / "in", nn.Linear(64, 64, bias=False))
    elif kind == "torch":
        torch.save(values, tmp_path / "in")
    else:
        dcp.save(values, checkpoint_id=tmp_path / "in", no_dist=True)
    largest = max((tmp_path / "in").glob("*.distcp"), key=lambda file: file.stat().st_size, default=tmp_path / "in")
    flip(largest)
    assert command_line.main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", to]) == 1
    said = capsys.readouterr().err
    assert "is damaged" in said and "weight'" in said
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"net.weight": torch.ones(2), "net.shift": torch.zeros(1)}, tmp_path / "in.pt")

    source, target = str(tmp_path / "in.pt"), str(tmp_path / "out")
    command = [sys.executable, "-W", "error", "-m", "dmp", "convert", source, target, "--to", "safetensors"]
    command += ["--rename", "net.shift=bias", "--rename", "net="]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert_equal(load_file(tmp_path / "out" / "model.safetensors"), {"weight": torch.ones(2), "bias": torch.zeros(1)})
    for arguments, message in {
        (source, target, "--to", "safetensors"): "is there already",
        (source, target): "is there already",
        (str(tmp_path / "none"), target): "there is nothing at",
    }.items():
        assert command_line.main(["convert", *arguments]) == 1
        assert message in capsys.readouterr().err
    assert command_line.main(["convert", source, target, "--rename", "a"]) == 2
    assert "takes OLD=NEW" in capsys.readouterr().err


# ---- how much is held ----


def test_convert_holds_pieces(tmp_path: Path) -> None:
    """Each way out; what is mapped, the system can take back: it is not counted."""
    for rows in (1, 1 << 17):  # the first loads what is loaded at first use
        tensors = {"wide": torch.randn(rows, 64), "long": torch.randn(rows * 64)}  # 32 MB each
        paths = [tmp_path / f"{rows}{name}" for name in (".safetensors", "b", "c", "d")]
        save_file(tensors, paths[0])
        for source, target, kind in zip(paths, paths[1:], ("dmp", "torch", "safetensors"), strict=False):
            _, peak = peak_above(lambda: convert(source, target, kind))  # noqa: B023
            assert rows == 1 or peak < 30 * MB, (kind, peak)
        assert_equal(load_file(paths[3] / "model.safetensors"), tensors)


def gather_large(path: str) -> list[int]:
    """On each rank the peak of each way to gather 64 MB, above what the rank held before."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"rows": nn.EmbeddingBag(1 << 17, 64, mode="sum"), "columns": nn.EmbeddingBag(1 << 17, 64)})
    plan = {"rows.weight": row_wise(), "columns.weight": column_wise([0, 1])}
    model = DistributedModelParallel(module, ShardingEnv.from_mesh(mesh((2,))), plan=plan)
    whole, at_both = peak_above(lambda: full_state_dict(model))
    received, at_first = peak_above(lambda: full_state_dict(model, rank0_only=True))
    if dist.get_rank() == 0:
        assert_equal(received, whole)
    _, exported = peak_above(lambda: export_safetensors(path, model))
    return [at_both, at_first, exported]


def test_gathering_holds_the_result_and_pieces(tmp_path: Path) -> None:
    peaks = run_ranks(2, gather_large, str(tmp_path / "out"))
    result = 64 * MB
    for rank, (at_both, at_first, exported) in enumerate(peaks):
        assert result < at_both < result + 16 * MB
        assert result * (rank == 0) <= at_first < result * (rank == 0) + 16 * MB
        assert exported < 24 * MB
