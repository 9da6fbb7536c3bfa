"""Habits and mistakes with state dicts, checkpoints and files."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dmp
from dmp import DistributedModelParallel, ShardingEnv, row_wise, table_wise
from tests.fuzz.outcome import ERROR, Wrong
from tests.fuzz.stepped import same, wrapped
from tests.wrapped_net import TABLES, Net


def _save_pieces(env: ShardingEnv) -> None:
    model, file = wrapped(env), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))


def _safetensors_pieces(env: ShardingEnv) -> None:
    from safetensors.torch import save

    save(dict(wrapped(env).state_dict()))
    if env.table_size > 1:
        raise Wrong("pieces were saved as if they were all")


def _pickle(env: ShardingEnv) -> None:
    pickle.dumps(wrapped(env))


def _wrong_shape_on_one(env: ShardingEnv) -> None:
    model = wrapped(env)
    state = dict(Net(5).state_dict())
    if env.rank == 1:
        state["over.weight"] = torch.zeros(3, 3)
    model.load_state_dict(state)


def _missing_on_one(env: ShardingEnv) -> None:
    model = wrapped(env)
    state = dict(Net(5).state_dict())
    if env.rank == 0:
        del state["items.weight"]
    model.load_state_dict(state)


def _state_of_another_plan(env: ShardingEnv) -> None:
    other = DistributedModelParallel(Net(), env=env, plan=dict.fromkeys(TABLES, table_wise(0)))
    model = DistributedModelParallel(Net(), env=env, plan=dict.fromkeys(TABLES, row_wise()))
    model.load_state_dict(other.state_dict())
    same(model, Net())


def _save_over(make: Callable[[Path], Any], at: str = "there") -> Callable[[ShardingEnv], None]:
    def habit(env: ShardingEnv) -> None:
        model = wrapped(env)
        path = Path("inner") if at == "." else Path(at)
        path.parent.mkdir(exist_ok=True)
        shared: list[Any] = [str(path.absolute())]
        torch.distributed.broadcast_object_list(shared, src=0)
        path = Path(shared[0])
        if env.rank == 0:
            make(path)
        torch.distributed.barrier()
        before = _content(path.parent)
        if at == ".":
            os.chdir(path)
        try:
            dmp.save_checkpoint(path if at != "." else ".", model)
        finally:
            after = _content(path.parent)
            torch.distributed.barrier()
        if not before.items() <= after.items():
            raise Wrong(f"{sorted(before.items() - after.items())[0]} is gone")

    return habit


def _content(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _folder_of_files(path: Path) -> None:
    path.mkdir(exist_ok=True)
    (path / "thesis.txt").write_text("mine")


def _load(path: str, make: Callable[[Path], Any]) -> Callable[[ShardingEnv], None]:
    def habit(env: ShardingEnv) -> None:
        make(Path(path))
        dmp.load_checkpoint(path, wrapped(env))

    return habit


def _keep(value: Any) -> Callable[[ShardingEnv], None]:
    return lambda env: dmp.save_checkpoint("run/step", wrapped(env), keep_last=value) and None


FILE_HABITS: dict[str, tuple[str, Callable[[ShardingEnv], None]]] = {
    "torch.save of pieces": ("", _save_pieces),
    "safetensors of pieces": ("", _safetensors_pieces),
    "pickled": (ERROR, _pickle),
    "a wrong shape on one rank": (ERROR, _wrong_shape_on_one),
    "a missing key on one rank": (ERROR, _missing_on_one),
    "pieces of another plan": ("", _state_of_another_plan),
    "a save over a folder of files": (ERROR, _save_over(_folder_of_files)),
    "a save over a file": (ERROR, _save_over(lambda path: path.write_text("mine"))),
    "a save over the working folder": (ERROR, _save_over(_folder_of_files, ".")),
    "a load of nothing": (ERROR, _load("nowhere", lambda path: None)),
    "a load of an empty folder": (ERROR, _load("empty", lambda path: path.mkdir())),
    "a load of a text": (ERROR, _load("text.txt", lambda path: path.write_text("hello"))),
    "a load of a pickle": (ERROR, _load("a.pkl", lambda path: path.write_bytes(pickle.dumps({"a": 1})))),
    "a load of a pipe": (ERROR, _load("pipe", lambda path: os.mkfifo(path))),
    "keep_last 0": (ERROR, _keep(0)),
    "keep_last -1": (ERROR, _keep(-1)),
    "keep_last text": (ERROR, _keep("1")),
}
"""As `HABITS`."""
