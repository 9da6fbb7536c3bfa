"""Checkpoints in another floating dtype: an error that names `cast=True`, which rounds them as `Tensor.to` does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from dmp import (
    CheckpointError,
    DistributedModelParallel,
    ShardingEnv,
    column_wise,
    full_optimizer_state_dict,
    full_state_dict,
    load_checkpoint,
    row_wise,
    save_checkpoint,
)
from tests import formats_jobs
from tests.formats_jobs import Model, assert_equal, once, save_hugging_face, sharded
from tests.ranks import mesh, run_ranks

pytestmark = formats_jobs.pytestmark
DTYPES = (torch.bfloat16, torch.float16, torch.float64)


def to_dtype(state: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: v.to(dtype) if v.is_floating_point() else v for name, v in state.items()}


def write_all(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A model in every format that is read; its values as a model of the usual dtypes should get them."""
    module = Model()
    state = {key: value.clone() for key, value in module.state_dict().items()}
    given = to_dtype(state, dtype)
    save_file(once(given), folder / "one.safetensors")
    save_hugging_face(folder / "hugging_face", once(given), 2)
    torch.save({"model": given}, folder / "torch.pt")
    dcp.save(given, checkpoint_id=folder / "dcp", no_dist=True)
    save_checkpoint(folder / "own", copy.deepcopy(module).to(dtype))
    return {key: given[key].to(value.dtype) for key, value in state.items()}


def load_all(folder: str, layout: str, expected: dict[str, torch.Tensor]) -> None:
    for name in ("one.safetensors", "hugging_face", "torch.pt", "dcp", "own"):
        model = sharded(layout)
        before = copy.deepcopy(full_state_dict(model))
        with pytest.raises(CheckpointError, match=r"has dtype .*, expected .*; load_checkpoint\(..., cast=True\)"):
            load_checkpoint(Path(folder) / name, model)
        assert_equal(full_state_dict(model), before)
        load_checkpoint(Path(folder) / name, model, cast=True)
        assert_equal(full_state_dict(model), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.sampled(2)
def test_every_format(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = write_all(tmp_path, dtype)
    for layout in ("rows", "columns"):
        run_ranks(2, load_all, str(tmp_path), layout, expected)


def load_split(path: str, expected: dict[str, torch.Tensor]) -> None:
    for shape, names in (((2, 2), ("replicate", "shard")), ((2, 2), ("shard", "tp"))):
        env = ShardingEnv.from_mesh(mesh(shape, names))
        plan = {"users.weight": row_wise(), "items.weight": column_wise(range(env.table_size))}
        model = DistributedModelParallel(Model(1), env, plan=plan)
        load_checkpoint(path, model, cast=True)
        assert_equal(full_state_dict(model), expected)


@pytest.mark.slow
def test_two_axes(tmp_path: Path) -> None:
    expected = write_all(tmp_path, torch.bfloat16)
    for name in ("hugging_face", "dcp"):
        run_ranks(4, load_split, str(tmp_path / name), expected)


def test_optimizer_state(tmp_path: Path) -> None:
    """It takes the parameter's dtype, as torch's own loading has it; step counts stay as they were."""
    modules = [nn.Linear(3, 2, dtype=dtype) for dtype in (torch.float64, torch.float32)]
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.1) for module in modules]
    modules[0](torch.randn(4, 3, dtype=torch.float64)).sum().backward()
    optimizers[0].step()
    save_checkpoint(tmp_path / "saved", modules[0], optimizers[0])
    load_checkpoint(tmp_path / "saved", modules[1], optimizers[1], cast=True)
    own, saved = (
        full_optimizer_state_dict(m, o)["state"] for m, o in zip(modules[::-1], optimizers[::-1], strict=True)
    )
    for name, values in saved.items():
        for key, value in values.items():
            wanted = value if key == "step" else value.float()
            assert own[name][key].dtype == wanted.dtype and torch.equal(own[name][key], wanted), (name, key)


def test_whole_numbers_are_not_cast(tmp_path: Path) -> None:
    module = nn.Linear(2, 1)
    torch.save({"weight": torch.ones(1, 2, dtype=torch.int64), "bias": torch.ones(1)}, tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"'weight' has dtype torch.int64, expected torch.float32$"):
        load_checkpoint(tmp_path / "saved", module, cast=True)
