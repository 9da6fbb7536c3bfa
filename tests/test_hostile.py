"""Sources made to do harm: nothing of them runs, nothing outside is read, and a model is as it was."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dmp import CheckpointError, full_state_dict, keep_last, latest, load_checkpoint
from dmp.__main__ import main
from dmp.checkpoint.sources.dcp_metadata import read_metadata
from tests import spoiled
from tests.gadgets import GADGETS, PLANTERS, Call, Name, State, targets_of_planters, whole

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind."""
    return {kind: spoiled.make(kind, tmp_path_factory.mktemp("good")) for kind in spoiled.KINDS}


@pytest.fixture(scope="module")
def net() -> tuple[spoiled.Net, torch.optim.Optimizer]:
    made = spoiled.Net(1)
    return made, spoiled.trained(made, 0.5)


def state_of(net: tuple[spoiled.Net, torch.optim.Optimizer]) -> Any:
    return copy.deepcopy((net[0].state_dict(), net[1].state_dict(), torch.get_rng_state()))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(torch.equal(a, b)) if isinstance(a, torch.Tensor) else bool(a == b)


def in_metadata(path: Path, data: bytes) -> None:
    (path / ".metadata").write_bytes(data)
    spoiled.approve(path)


def in_objects(path: Path, data: bytes) -> None:
    spoiled.replace_in_zip(path / "objects.pt", "data.pkl", data)
    spoiled.approve(path)


def in_a_piece(path: Path, data: bytes) -> None:
    """A whole file of pieces is one archive, whose tensor is described so."""
    for file in path.glob("*.distcp"):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", data)
            archive.writestr("archive/data/0", bytes(1 << 14))


def in_a_file(path: Path, data: bytes) -> None:
    spoiled.replace_in_zip(path, "data.pkl", data)


def bare(path: Path, data: bytes) -> None:
    path.write_bytes(data)


PLACES: dict[str, tuple[str, Callable[[Path, bytes], None]]] = {
    "torch's metadata": ("torch folder", in_metadata),
    "our metadata": ("ours, version 2", in_metadata),
    "our first metadata": ("ours, version 1", in_metadata),
    "metadata beside tensors.json": ("ours", in_metadata),
    "objects": ("ours", in_objects),
    "a piece": ("torch folder", in_a_piece),
    "a piece of ours": ("ours", in_a_piece),
    "a file": ("torch file", in_a_file),
    "a bare pickle": ("torch file", bare),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.sampled(4)
def test_nothing_that_is_read_runs(
    place: str, good: dict[str, Path], net: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By load_checkpoint, latest, keep_last and the command line."""
    kind, put = PLACES[place]
    before = state_of(net)
    optimizer = None if kind == "torch folder" else net[1]
    for name, make in GADGETS.items():
        folder = tmp_path / name.replace(" ", "_")
        path = spoiled.copied(good[kind], folder)
        marker = folder / "ran"
        put(path, make(marker))
        if place == "metadata beside tensors.json":  # it is not looked into
            load_checkpoint(path, spoiled.Net(1))
        else:
            with pytest.raises(CheckpointError, match=str(path)):
                load_checkpoint(path, net[0], optimizer)
            assert main(["convert", str(path), str(folder / "to"), "--to", "torch"]) == 1
            assert str(path) in capsys.readouterr().err
        latest(folder)
        assert keep_last(folder, 1) == []
        assert not marker.exists(), name
    assert same(state_of(net)[:2], before[:2])


@pytest.mark.parametrize("what", PLANTERS)
def test_no_state_is_set(what: str, good: dict[str, Path], net: Any, tmp_path: Path) -> None:
    for kind in ("torch folder", "ours, version 2"):
        path = spoiled.copied(good[kind], tmp_path / kind)
        in_metadata(path, PLANTERS[what])
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            load_checkpoint(path, net[0])
        latest(path.parent)
    assert [hasattr(target, "planted") for target in targets_of_planters()] == [False] * 4


@pytest.mark.slow
def test_each_of_these_pickles_runs_something(tmp_path: Path) -> None:
    """In a process of its own, read by the module `pickle`."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.gadgets", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    made = {name for name in GADGETS if (tmp_path / name.replace(" ", "_")).exists()}
    assert made == set(GADGETS), done.stdout
    assert "planted: [True, False, True, True]" in done.stdout


@pytest.mark.slow
def test_the_command_line_runs_nothing(good: dict[str, Path], tmp_path: Path) -> None:
    path = spoiled.copied(good["torch folder"], tmp_path / "from")
    in_metadata(path, GADGETS["os.system"](tmp_path / "ran"))
    command = [sys.executable, "-m", "dmp", "convert", str(path), str(tmp_path / "to")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr.strip()
        == f"{path / '.metadata'} cannot be read: posix.system has no place in a checkpoint's metadata"
    )
    assert sorted(os.listdir(tmp_path)) == ["from"]


def old_metadata(relative_path: str = "__0_0") -> bytes:
    """ShardedTensor's time: other modules, a class of properties elsewhere."""
    old, shared = "torch.distributed._shard.checkpoint", "torch.distributed._shard.sharded_tensor.metadata"

    def made(name: str, state: Any, module: str = f"{old}.metadata") -> State:
        return State(Call(Name(module, name)), state)

    form, encoding = (
        Call(Name("torch.serialization", "_get_layout"), "torch.strided"),
        Name(shared, "MEM_FORMAT_ENCODING"),
    )
    properties = made("TensorProperties", (Name("torch", "float32"), form, False, Call(encoding, 0), False), shared)
    size, zero = Call(Name("torch", "Size"), (4, 2)), Call(Name("torch", "Size"), (0, 0))
    chunks = [made("ChunkStorageMetadata", {"offsets": zero, "sizes": size})]
    entry = made("TensorStorageMetadata", {"properties": properties, "size": size, "chunks": chunks})
    index = made("MetadataIndex", {"fqn": "w", "index": None, "offset": zero})
    place = {"relative_path": relative_path, "offset": 0, "length": 700}
    info = made("_StorageInfo", place, f"{old}.filesystem")
    held = {"w": entry, "b": Call(Name(f"{old}.metadata", "BytesStorageMetadata"))}
    return whole(made("Metadata", {"state_dict_metadata": held, "storage_data": {index: info}}))


def test_what_torch_wrote_before(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(old_metadata())
    ((key, found),) = read_metadata(tmp_path / ".metadata").items()
    assert (key, found.size, found.dtype) == ("w", (4, 2), torch.float32)
    assert found.pieces == [((0, 0), (4, 2), "__0_0", 0, 700, ())]


@pytest.mark.parametrize("kind", ["torch folder", "torch file", "ours"])
def test_tuples_in_tuples_without_end(kind: str, good: dict[str, Path], net: Any, tmp_path: Path) -> None:
    """To hash one ends the process; `torch.load(weights_only=True)` does."""
    operations = pickle.EMPTY_TUPLE + pickle.TUPLE1 * 200_000 + pickle.NONE + pickle.SETITEM
    data = pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + operations + pickle.STOP
    path = spoiled.copied(good[kind], tmp_path / "x")
    {"torch folder": in_metadata, "torch file": in_a_file, "ours": in_objects}[kind](path, data)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        load_checkpoint(path, net[0])


# ---- outside ----

OUT = ("../out", "/etc/hostname", "x/../../out", "..", "C:\\x", "\\\\host\\x", "")


@pytest.mark.parametrize("name", OUT)
def test_names_that_lead_out(name: str, good: dict[str, Path], net: Any, tmp_path: Path) -> None:
    def weight_map(path: Path) -> None:
        index = path / "model.safetensors.index.json"
        held = json.loads(index.read_text())
        held["weight_map"]["scale"] = name
        index.write_text(json.dumps(held))

    def tensors(path: Path) -> None:
        held = json.loads((path / "tensors.json").read_text())
        held["files"][0] = name
        (path / "tensors.json").write_text(json.dumps(held))
        spoiled.approve(path)

    def checksums(path: Path) -> None:
        held = json.loads((path / "checksums.json").read_text())
        (path / "checksums.json").write_text(json.dumps({**held, name: 1}))

    def metadata(path: Path) -> None:
        (path / ".metadata").write_bytes(old_metadata(name))

    cases = {"hugging face": weight_map, "ours": tensors, "ours, version 2": checksums, "torch folder": metadata}
    for kind, change in cases.items():
        path = spoiled.copied(good[kind], tmp_path / kind)
        (path.parent / "out").write_bytes(bytes(4096))
        change(path)
        with pytest.raises(CheckpointError, match=r"leads out of|expected the name of a file"):
            load_checkpoint(path, net[0])


@pytest.mark.parametrize("kind", ["ours", "torch folder"])
def test_a_link_that_leads_out(kind: str, good: dict[str, Path], net: Any, tmp_path: Path) -> None:
    path = spoiled.copied(good[kind], tmp_path / "x")
    file = next(path.glob("*.distcp"))
    file.rename(tmp_path / "moved")
    file.symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="leads out of"):
        load_checkpoint(path, net[0])


def test_links_of_hugging_faces_cache(good: dict[str, Path], tmp_path: Path) -> None:
    path = spoiled.copied(good["hugging face"], tmp_path / "snapshots")
    (tmp_path / "blobs").mkdir()
    for i, file in enumerate(sorted(path.iterdir())):
        file.rename(tmp_path / "blobs" / str(i))
        file.symlink_to(f"../../blobs/{i}")
    loaded = spoiled.Net(1)
    load_checkpoint(path, loaded)
    reference = spoiled.Net(2)
    load_checkpoint(good["hugging face"], reference)
    assert same(full_state_dict(loaded), full_state_dict(reference))


# ---- what is no file ----


@pytest.fixture
def clock() -> Iterator[None]:
    """What waits for a pipe is ended."""

    def end(*_: Any) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("kind", spoiled.KINDS)
def test_a_pipe_in_place_of_a_file(kind: str, good: dict[str, Path], net: Any, tmp_path: Path) -> None:
    files = [file.name for file in good[kind].iterdir()] if good[kind].is_dir() else [""]
    for name in files:
        if name == "plan.json" and kind == "ours, version 1":
            continue  # which nobody reads
        path = spoiled.copied(good[kind], tmp_path / f"x{name}")
        (path / name).unlink()
        os.mkfifo(path / name)
        with pytest.raises(CheckpointError):
            load_checkpoint(path, net[0])
        latest(path.parent)
        assert main(["convert", str(path), str(tmp_path / "to"), "--to", "torch"]) == 1


@pytest.mark.usefixtures("clock")
def test_paths_to_what_is_no_file(net: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for path, message in {
        "/dev/zero": "neither a folder nor a file",
        "/dev/null": "neither a folder nor a file",
        str(tmp_path / "loop"): "neither a folder nor a file",
        str(tmp_path): "is a folder; expected a file",
        str(tmp_path / "none"): "there is nothing at",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path, net[0])


def test_packed_entries_are_not_unpacked(good: dict[str, Path], net: Any, tmp_path: Path) -> None:
    path = spoiled.copied(good["torch file"], tmp_path)
    spoiled.replace_in_zip(path, "data/0", bytes(1 << 24), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 17
    with pytest.raises(CheckpointError, match="is packed or encrypted"):
        load_checkpoint(path, net[0])


# ---- seeds ----


def try_seed(kind: str, seed: int, good: Path, net: Any, folder: Path) -> bool:
    """Whether a spoiled copy is refused; it is by name, or every value is read."""
    path = spoiled.copied(good, folder)
    try:
        said = spoiled.spoil(path, seed)
    except spoiled.NOT_SPOILED:
        return False
    before = state_of(net)
    has_state = kind.startswith("ours") or kind == "torch file"
    try:
        load_checkpoint(path, net[0], net[1] if has_state else None)
    except CheckpointError as error:
        text = str(error)
    else:
        text = ""
        latest(folder)
    finally:
        after = state_of(net)
        assert not (folder / "RAN").exists(), said
        net[0].load_state_dict(before[0])
        net[1].load_state_dict(before[1])
        torch.set_rng_state(before[2])
    assert not text or same(after, before), said
    assert len(text) < 2000, said
    return bool(text)


@pytest.mark.parametrize("kind", spoiled.KINDS)
@pytest.mark.sampled(2)
def test_spoiled(kind: str, good: dict[str, Path], net: Any, tmp_path: Path) -> None:
    assert sum(try_seed(kind, seed, good[kind], net, tmp_path / "x") for seed in range(20)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", spoiled.KINDS)
def test_spoiled_more(kind: str, good: dict[str, Path], net: Any, tmp_path: Path) -> None:
    assert sum(try_seed(kind, seed, good[kind], net, tmp_path / "x") for seed in range(1000, 1400)) > 200


def test_what_cannot_be_set_is_found_before(good: dict[str, Path], net: Any, tmp_path: Path) -> None:
    """Options of an optimizer and random state, which are set when the tensors are in place."""
    before = state_of(net)
    path = spoiled.copied(good["ours"], tmp_path / "rate")
    objects = torch.load(path / "objects.pt", weights_only=True)
    for key, odd in {"lr": "fast", "betas": (0.9,), "amsgrad": 3, "eps": [1]}.items():
        (group,) = objects["param_groups"]
        torch.save({**objects, "param_groups": [{**group, key: odd}]}, path / "objects.pt")
        spoiled.approve(path)
        with pytest.raises(CheckpointError, match=f"{key} of '[a-z.]+' was saved as"):
            load_checkpoint(path, *net)
    path = spoiled.copied(good["ours"], tmp_path / "random")
    held = json.loads((path / "tensors.json").read_text())
    tensors = held["tensors"]
    for change in ({"size": [0], "pieces": []}, tensors["model.table.weight"]):
        (path / "tensors.json").write_text(json.dumps({**held, "tensors": {**tensors, "rng.0.cpu": change}}))
        spoiled.approve(path)
        with pytest.raises(CheckpointError, match=r"'rng\.0\.cpu' is |dtype"):
            load_checkpoint(path, *net)
    assert same(state_of(net), before)
