"""Checkpoints in another floating dtype: an error that names `cast=True`, which rounds them as `Tensor.to` does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
from tests.oracle import attach
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
@pytest.mark.sampled(3)
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


def test_eight_bits_are_told(tmp_path: Path) -> None:
    """Which torch does not promote."""
    module = nn.Linear(2, 1)
    torch.save({"weight": torch.ones(1, 2).to(torch.float8_e4m3fn), "bias": torch.ones(1)}, tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"'weight' has dtype torch.float8_e4m3fn, expected torch.float32"):
        load_checkpoint(tmp_path / "saved", module)


def load_tables(folder: str) -> None:
    """Tables of bfloat16 under Adam in the backward pass, trained; state of 16 bits, then of 64."""
    models = [_tables_of_16_bits(), _tables_of_16_bits()]
    for step in range(2):
        models[0](torch.arange(6).view(3, 2) + step).float().sum().backward()
    saved = {of: full_optimizer_state_dict(models[0], models[0].fused_optimizer) for of in ("narrow", "wide")}
    for of, dtype in (("narrow", torch.bfloat16), ("wide", torch.float64)):
        (states,) = saved[of]["state"].values()
        states.update({key: value.to(dtype) for key, value in states.items() if key != "step"})
        weights = full_state_dict(models[0])
        if dist.get_rank() == 0:
            torch.save({"model": weights, "optimizer": saved[of]}, Path(folder) / of)
            dcp.save({"model": weights, **saved[of]}, checkpoint_id=Path(folder) / f"dcp_{of}", no_dist=True)
    dist.barrier()
    for name in ("narrow", "dcp_narrow"):
        load_checkpoint(Path(folder) / name, models[1])
        (states,) = full_optimizer_state_dict(models[1], models[1].fused_optimizer)["state"].values()
        (expected,) = saved["narrow"]["state"].values()
        for key, value in states.items():
            assert value.dtype == torch.float32 and torch.equal(value, expected[key].float()), (name, key)
        models[1](torch.arange(6).view(3, 2)).float().sum().backward()
    with pytest.raises(CheckpointError, match=r"has dtype torch.float64, expected torch.float32; .*cast=True"):
        load_checkpoint(Path(folder) / "wide", models[1])


def _tables_of_16_bits() -> DistributedModelParallel:
    module = nn.Sequential(nn.EmbeddingBag(40, 8, mode="sum", dtype=torch.bfloat16))
    attach(module, "adam")
    return DistributedModelParallel(module, plan={"0.weight": row_wise()})


def test_state_of_tables_of_16_bits_widens(tmp_path: Path) -> None:
    """Nothing is lost where it was saved in 16 bits, as torch's optimizers keep it: it needs no `cast`."""
    run_ranks(2, load_tables, str(tmp_path))
