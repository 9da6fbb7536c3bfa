"""Checkpoints of every kind that is read, and ways to spoil them: byte by byte, or as one who knows the format.

`KINDS` writes a good one of each kind, `MUTATIONS` spoils it; a seed decides what, and both say what they did. What a
spoiled one must not do is in `tests/test_spoiled.py`.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dmp import full_optimizer_state_dict, full_state_dict, save_checkpoint
from tests.gadgets import GADGETS

Random = random.Random


class Net(nn.Module):
    """A table, a matrix, a vector, a scalar, a buffer that is no float."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(12, 4)
        self.over = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.over(self.table(ids))) * self.scale


def trained(net: Net, lr: float = 0.1) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    net(torch.arange(8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _ours(path: Path, net: Net, optimizer: torch.optim.Optimizer) -> None:
    save_checkpoint(path, net, optimizer, extra={"step": 3, "list": [1.5, (2, "x")]})


def _before(version: int) -> Callable[[Path, Net, torch.optim.Optimizer], None]:
    def write(path: Path, net: Net, optimizer: torch.optim.Optimizer) -> None:
        _ours(path, net, optimizer)
        (path / "tensors.json").unlink()
        about = json.loads((path / "dmp.json").read_text())
        (path / "dmp.json").write_text(json.dumps({**about, "version": version}))
        if version == 1:
            (path / "checksums.json").unlink()
        else:
            crcs = json.loads((path / "checksums.json").read_text())
            (path / "checksums.json").write_text(json.dumps({k: v for k, v in crcs.items() if k != "tensors.json"}))
            approve(path)

    return write


def _torch_folder(path: Path, net: Net, optimizer: torch.optim.Optimizer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": net.state_dict(), "step": 3}, checkpoint_id=path, no_dist=True)


def _torch_file(path: Path, net: Net, optimizer: torch.optim.Optimizer) -> None:
    state = {
        "model": full_state_dict(net),
        "optimizer": full_optimizer_state_dict(net, optimizer),
        "extra": {"step": 3},
    }
    torch.save(state, path)


def header_of(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header and data, of float32 and int64 tensors."""
    header: dict[str, Any] = {}
    data = b""
    names = {torch.float32: "F32", torch.int64: "I64"}
    for name, tensor in tensors.items():
        raw = bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return header, data


def write_header(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def _safetensors(path: Path, net: Net, optimizer: torch.optim.Optimizer) -> None:
    write_header(path, *header_of(full_state_dict(net)))


def _hugging_face(path: Path, net: Net, optimizer: torch.optim.Optimizer) -> None:
    path.mkdir()
    places = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(full_state_dict(net))}
    for file in set(places.values()):
        write_header(path / file, *header_of({n: t for n, t in full_state_dict(net).items() if places[n] == file}))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


KINDS: dict[str, Callable[[Path, Net, torch.optim.Optimizer], None]] = {
    "ours": _ours,
    "ours, version 2": _before(2),
    "ours, version 1": _before(1),
    "torch folder": _torch_folder,
    "torch file": _torch_file,
    "safetensors": _safetensors,
    "hugging face": _hugging_face,
}
"""Kind -> writes a good one to a path that is not there. A safetensors file's path must end so: see `path_for`."""


def path_for(kind: str, folder: Path) -> Path:
    return folder / ("one.safetensors" if kind == "safetensors" else "one")


def make(kind: str, folder: Path) -> Path:
    """A good checkpoint of a kind, in a folder."""
    path, net = path_for(kind, folder), Net()
    KINDS[kind](path, net, trained(net))
    return path


def approve(path: Path) -> None:
    """Write the checksums that a spoiled folder of ours would have: one who means harm can."""
    listed = path / "checksums.json"
    if path.is_dir() and listed.is_file():
        crcs = {name: zlib.crc32((path / name).read_bytes()) for name in json.loads(listed.read_text())}
        listed.write_text(json.dumps(crcs))


# ---- byte by byte ----


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def flip(path: Path, rng: Random) -> str:
    file = rng.choice(_files(path))
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    return f"bit of byte {at} of {file.name}"


def cut(path: Path, rng: Random) -> str:
    file = rng.choice(_files(path))
    data = file.read_bytes()
    at = rng.randrange(len(data))
    file.write_bytes(data[:at])
    return f"{file.name} cut to {at} bytes"


def splice(path: Path, rng: Random) -> str:
    """Some bytes are doubled, dropped, zeroed or made random; checksums are written again."""
    file = rng.choice(_files(path))
    data = file.read_bytes()
    at, count = rng.randrange(len(data)), rng.choice((1, 2, 4, 8, 64))
    how = rng.choice(("double", "drop", "zero", "random", "full"))
    part = data[at : at + count]
    new = {"double": part * 2, "drop": b"", "zero": bytes(len(part)), "full": b"\xff" * len(part)}
    file.write_bytes(data[:at] + new.get(how, rng.randbytes(len(part))) + data[at + count :])
    _approve_if_possible(path)
    return f"{how} {count} bytes from {at} of {file.name}"


def _approve_if_possible(path: Path) -> None:
    with suppress(OSError, ValueError, AttributeError):
        approve(path)


def lose(path: Path, rng: Random) -> str:
    file = rng.choice(_files(path))
    how = rng.choice(("gone", "empty", "a folder", "a link out", "another file"))
    files = _files(path)
    data = rng.choice(files).read_bytes()
    file.unlink()
    if how == "empty":
        file.write_bytes(b"")
    elif how == "a folder":
        file.mkdir()
    elif how == "a link out":
        file.symlink_to("/etc/hostname")
    elif how == "another file":
        file.write_bytes(data)
    return f"{file.name} is {how}"


# ---- as one who knows the format ----

ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "../x", "/etc/passwd", "..", ".", "a\0b", "C:\\x", "\ud800", "x" * 10_000),
    *([], {}, [[]], [None], {"x": 1}, [-1], ["1"], [2**63], [1.0]),
]


def _deep(rng: Random) -> Any:
    value: Any = 0
    for _ in range(rng.choice((50, 500))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in nested JSON."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from places_in(value[key])


def change_json(value: Any, rng: Random) -> str:
    """One change somewhere in nested JSON, in place."""
    places = list(places_in(value))
    holder, key = rng.choice(places)
    how = rng.choice(("odd", "odd", "near", "drop", "swap", "double", "deep"))
    old = holder[key]
    if how == "near" and type(old) is int:
        holder[key] = old + rng.choice((-1, 1, 8, -old))
    elif how == "drop":
        del holder[key]
    elif how == "swap":
        other, at = rng.choice(places)
        holder[key] = json.loads(json.dumps(other[at])) if _has(other, at) else None
    elif how == "double" and isinstance(holder, list):
        holder.append(old)
    elif how == "deep":
        holder[key] = _deep(rng)
    else:
        holder[key] = rng.choice(ODD)
    return f"{how} at {key!r}"


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def odd_json(path: Path, rng: Random) -> str:
    """A change in one of the JSON files, or in a safetensors header."""
    texts = [p for p in _files(path) if p.suffix == ".json"]
    heads = [p for p in _files(path) if p.suffix == ".safetensors"]
    if not texts + heads:
        return splice(path, rng)
    file = rng.choice(texts + heads)
    if rng.random() < 0.1:
        text = rng.choice((b"[" * 100_000, b'{"a":' * 100_000, b"NaN", b"", b"null", b"[]", b'"x"', b"\xff\xfe", b"1"))
        if file in heads:
            write_header(file, text, b"")
        else:
            file.write_bytes(text)
        said = f"{text[:9]!r}"
    elif file in heads:
        header, data = read_header(file)
        said = change_json(header, rng)
        write_header(file, header, data)
    else:
        value = json.loads(file.read_text())
        said = change_json(value, rng)
        file.write_text(json.dumps(value))
    if file.name != "checksums.json":
        _approve_if_possible(path)
    return f"{said} in {file.name}"


def gadget(path: Path, rng: Random) -> str:
    """A pickle that would run something, wherever there is a pickle; it would make a file `RAN` beside the path."""
    name = rng.choice(sorted(GADGETS))
    data = GADGETS[name](path.with_name("RAN"))
    pickles = [p for p in _files(path) if p.name == ".metadata"]
    archives = [p for p in _files(path) if zipfile.is_zipfile(p)]
    if not pickles + archives:
        return odd_json(path, rng)
    file = rng.choice(pickles + archives)
    if file in pickles:
        file.write_bytes(data)
    else:
        replace_in_zip(file, "data.pkl", data)
    _approve_if_possible(path)
    return f"{name} in {file.name}"


def replace_in_zip(file: Path, name: str, data: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    """Write a zip archive anew, with other bytes under each entry that ends with a name."""
    with zipfile.ZipFile(file) as archive:
        entries = {e.filename: archive.read(e) for e in archive.infolist()}
    with zipfile.ZipFile(file, "w", compression) as archive:
        for entry, held in entries.items():
            archive.writestr(entry, data if entry.endswith(name) else held)


def odd_archive(path: Path, rng: Random) -> str:
    """A zip archive with entries packed, doubled, renamed, or of other lengths."""
    archives = [p for p in _files(path) if zipfile.is_zipfile(p)]
    if not archives:
        return odd_json(path, rng)
    file = rng.choice(archives)
    with zipfile.ZipFile(file) as archive:
        entries = [(e.filename, archive.read(e)) for e in archive.infolist()]
    at = rng.randrange(len(entries))
    how = rng.choice(("packed", "twice", "renamed", "shorter", "longer", "gone", "shuffled"))
    name, data = entries[at]
    if how == "renamed":
        entries[at] = rng.choice(("../x", "/x", "x", name + "x", "")), data
    elif how in ("shorter", "longer"):
        entries[at] = name, data[: len(data) // 2] if how == "shorter" else data * 2
    elif how == "gone":
        del entries[at]
    elif how == "twice":
        entries.append((name, rng.randbytes(len(data))))
    elif how == "shuffled":
        rng.shuffle(entries)
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
        warnings.simplefilter("ignore")
        for i, (name, data) in enumerate(entries):
            archive.writestr(name, data, zipfile.ZIP_DEFLATED if how == "packed" and i == at else zipfile.ZIP_STORED)
    _approve_if_possible(path)
    return f"{how} entry {at} of {file.name}"


MUTATIONS: dict[str, Callable[[Path, Random], str]] = {
    "flip": flip,
    "cut": cut,
    "splice": splice,
    "lose": lose,
    "odd json": odd_json,
    "gadget": gadget,
    "odd archive": odd_archive,
}
"""Name -> spoils the checkpoint at a path, which may be a folder or a file, in place; says how."""


NOT_SPOILED = (OSError, ValueError, IndexError, TypeError, KeyError, EOFError, zipfile.BadZipFile, struct.error)


def spoil(path: Path, seed: int) -> str:
    """One mutation, or two, that a seed decides; what was done.

    Raises:
        Exception: one of `NOT_SPOILED`: there is nothing that could be spoiled so.
    """
    rng = Random(seed)
    done = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        name = rng.choice(sorted(MUTATIONS))
        try:
            done.append(f"{name}: {MUTATIONS[name](path, rng)}")
        except NOT_SPOILED as error:
            if not done:  # a second one may find nothing left to spoil
                raise
            done.append(f"{name}: {type(error).__name__}")
    return "; ".join(done)


def copied(good: Path, folder: Path) -> Path:
    """A copy of a checkpoint, to be spoiled; what lay in the folder goes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = folder / good.name
    if good.is_dir():
        shutil.copytree(good, path)
    else:
        shutil.copy(good, path)
    return path
