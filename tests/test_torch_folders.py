"""Folders of torch's distributed checkpoint, and TorchRec's, as they load."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from dmp import (
    CheckpointError,
    ChunkedTensor,
    DistributedModelParallel,
    ShardingEnv,
    full_optimizer_state_dict,
    full_state_dict,
    load_checkpoint,
    row_wise,
    table_wise,
)
from dmp.checkpoint.convert import convert
from dmp.checkpoint.sources.dcp import sort_keys
from tests import equality, formats_jobs, test_torchrec_opinion
from tests.formats_jobs import Model, assert_equal
from tests.ranks import mesh, run_ranks

pytestmark = formats_jobs.pytestmark


# ---- torch's distributed checkpoint ----


def save_dtensors(path: str) -> Any:
    """Weights and optimizer state by torch's own functions, of a model that FSDP2 has sharded."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    fully_shard(module, mesh=mesh((3,), ("fsdp",)))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    state = {"net": module.state_dict(), "optim": get_optimizer_state_dict(module, optimizer), "step": torch.ones(2)}
    dcp.save({**state, "lr": 0.1}, checkpoint_id=path)
    return full_state_dict(module), full_optimizer_state_dict(module, optimizer)


def test_a_folder_of_torch(tmp_path: Path) -> None:
    weights, state = run_ranks(3, save_dtensors, str(tmp_path / "torch"))[0]
    other = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    load_checkpoint(tmp_path / "torch", other, optimizer)
    assert_equal(full_state_dict(other), weights)
    loaded = full_optimizer_state_dict(other, optimizer)["state"]
    for name, values in state["state"].items():
        assert_equal(loaded[name], values)
    assert optimizer.param_groups[0]["lr"] == 0.5
    load_checkpoint(tmp_path / "torch", other)


def test_whatever_lies_in_a_folder_of_torch(tmp_path: Path) -> None:
    """Scalars, empty tensors, strides, every dtype, a module that is called state."""
    state = {
        "state.a.weight": torch.randn(6, 4).t(),
        "state.b.a": torch.randn(3),
        "scalar": torch.tensor(3),
        "none": torch.empty(0, 4),
        "half": torch.randn(5).bfloat16(),
        "flags": torch.tensor([True, False]),
        "view": torch.randn(10)[3:5],
    }
    dcp.save(dict(state), checkpoint_id=tmp_path / "torch", no_dist=True)

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = {name: torch.zeros_like(value) for name, value in state.items()}

        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return self.held

    holder = Holder()
    load_checkpoint(tmp_path / "torch", holder)
    assert_equal(holder.held, state)


def test_state_over_the_end_of_a_column_block_is_refused(tmp_path: Path) -> None:
    """Two column blocks one after another, stored as one piece: half of it would have been left unfilled."""
    halves = [torch.zeros(6, 4), torch.ones(6, 4)]
    weight = ChunkedTensor((6, 8), halves, [(0, 0), (0, 4)])
    state = {"model.t.weight": weight, "optim.state.t.weight.t.momentum1": torch.arange(12.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    model = nn.ModuleDict({"t": nn.Embedding(6, 8)})
    with pytest.raises(CheckpointError, match=r"at 0 has 12 values, over the end of a column block of 6 rows"):
        load_checkpoint(tmp_path / "saved", model)


def test_sorting_keys() -> None:
    keys = [
        "model.ebc.t0.weight",
        "model.over.weight",
        "fused.state.ebc.t0.weight.t0.momentum1",
        "fused.state.ebc.t0.weight.t0.exp_avg_sq",
        "dense.state.over.weight.step",
        "epoch",
    ]
    assert sort_keys(keys) == {
        "model.ebc.t0.weight": keys[0],
        "model.over.weight": keys[1],
        "optimizer.state.ebc.t0.weight.exp_avg": keys[2],
        "optimizer.state.ebc.t0.weight.exp_avg_sq": keys[3],
        "optimizer.state.over.weight.step": keys[4],
    }
    assert sort_keys(["a.state.b.weight"]) == {"model.a.state.b.weight": "a.state.b.weight"}


def test_a_damaged_folder_of_torch(tmp_path: Path) -> None:
    dcp.save(dict(nn.Linear(2, 3).state_dict()), checkpoint_id=tmp_path / "torch", no_dist=True)
    file = next((tmp_path / "torch").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"distcp has \d+ bytes, \d+ are needed: it is cut short; it holds"):
        load_checkpoint(tmp_path / "torch", nn.Linear(2, 3))


# ---- TorchRec ----


def save_torchrec(path: str, layout: str, optimizer: str, as_dtensors: bool = False) -> Any:
    from torchrec.distributed import ShardingEnv as TorchRecsEnv

    def env_of(group: Any) -> Any:
        return TorchRecsEnv(group.size(), group.rank(), group, output_dtensor=as_dtensors)

    with mock.patch.object(TorchRecsEnv, "from_process_group", env_of):
        model = test_torchrec_opinion.theirs(layout, optimizer)
    for step in range(2):
        model(test_torchrec_opinion.batch(dist.get_rank(), step)).sum().backward()
    state = {"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}
    dcp.save(state, checkpoint_id=path)


def save_torchrec_on_hosts(path: str, layout: str, optimizer: str) -> None:
    """Two hosts of two ranks each, as TorchRec's kinds of sharding that know of hosts want them."""
    from torchrec.distributed import DistributedModelParallel as TorchRecs
    from torchrec.distributed import ShardingEnv as TorchRecsEnv
    from torchrec.distributed import comm, sharding_plan
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingPlan

    logging.getLogger("torchrec").setLevel(logging.ERROR)  # it tells which groups it makes
    kinds = {
        "table_row_wise": {"t0": sharding_plan.table_row_wise(0), "t1": sharding_plan.table_row_wise(1)},
        "grid": {"t0": sharding_plan.grid_shard([0, 1]), "t1": sharding_plan.grid_shard([1, 0])},
    }
    model, sharder, world = test_torchrec_opinion.Model("meta"), EmbeddingBagCollectionSharder(), dist.group.WORLD
    equality.attach(model.ebc, optimizer)
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(dist.get_rank() % 2)),
        mock.patch.object(comm, "_INTRA_PG", None),  # made once for a process, of what is then the host's size
        mock.patch.object(comm, "_CROSS_PG", None),
        mock.patch.object(sharding_plan, "MIN_CW_DIM", 4),  # columns of a block, so that 8 are two blocks
    ):
        plan = sharding_plan.construct_module_sharding_plan(
            model.ebc, kinds[layout], sharder=sharder, local_size=2, world_size=4, device_type="cpu"
        )
        theirs = TorchRecs(
            model,
            env=TorchRecsEnv.from_process_group(world),
            device=torch.device("cpu"),
            plan=ShardingPlan({"ebc": plan}),
            sharders=[sharder],
        )
        for step in range(2):
            theirs(test_torchrec_opinion.batch(dist.get_rank(), step)).sum().backward()
    dcp.save({"model": theirs.state_dict(), "optim": theirs.fused_optimizer.state_dict()}, checkpoint_id=path)


def load_torchrec(path: str, layout: str, optimizer: str) -> Any:
    model = test_torchrec_opinion.ours(layout, optimizer)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    load_checkpoint(path, model)
    return full_state_dict(model), full_optimizer_state_dict(model)["state"]


def read_whole(path: str) -> dict[str, torch.Tensor]:
    """By torch's reader alone."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    state = {k: torch.empty(e.size, dtype=e.properties.dtype) for k, e in entries.items() if hasattr(e, "size")}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


@pytest.mark.parametrize("layout", ["table_wise", "row_wise", "column_wise", "mixed"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.sampled(6)
def test_torchrec(layout: str, optimizer: str, tmp_path: Path) -> None:
    path = str(tmp_path / "torchrec")
    run_ranks(2, save_torchrec, path, layout, optimizer)
    saved = read_whole(path)
    other = {"table_wise": "row_wise", "row_wise": "column_wise", "column_wise": "table_wise", "mixed": "row_wise"}
    for weights, state in run_ranks(2, load_torchrec, path, other[layout], optimizer):
        assert_equal(weights, {k.removeprefix("model."): v for k, v in saved.items() if k.startswith("model.")})
        momenta = {k: v for k, v in saved.items() if k.startswith("optim.state.")}
        assert len(momenta) == (0 if optimizer == "sgd" else 2)
        for key, value in momenta.items():
            name, _, short = key.removeprefix("optim.state.").rpartition(".t")
            assert short.endswith(".momentum1")
            rows = len(weights[name])
            if (
                optimizer == "rowwise_adagrad" and len(value) > rows
            ):  # two column blocks of one width, one after another
                value = (value[:rows].double() + value[rows:]).div(2).float()
            assert torch.equal(state[name]["sum"], value), key


def squares_gathered(over: torch.Tensor) -> dict[str, torch.Tensor]:
    """Table -> Adagrad's state after the two steps of `save_torchrec_on_hosts`: the gradient of a row is that of its
    features' columns in the loss, averaged over the ranks, as often as it was looked up."""
    columns = dict(zip("abc", over.view(3, -1), strict=True))
    state = {table: torch.zeros(rows, over.numel() // 3) for table, rows in test_torchrec_opinion.ROWS.items()}
    for step in range(2):
        grads = {table: torch.zeros_like(value) for table, value in state.items()}
        for features in (test_torchrec_opinion.batch(rank, step) for rank in range(4)):
            for feature, table in {"a": "t0", "b": "t0", "c": "t1"}.items():
                counts = features[feature].values().bincount(minlength=len(grads[table]))
                grads[table] += counts[:, None] * columns[feature] / 4
        for table, grad in grads.items():
            state[table] += grad.square()
    return state


@pytest.mark.parametrize("layout", ["table_row_wise", "grid"])
@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad"])
@pytest.mark.sampled(6)
def test_torchrec_on_hosts(layout: str, optimizer: str, tmp_path: Path) -> None:
    path = str(tmp_path / "torchrec")
    run_ranks(4, save_torchrec_on_hosts, path, layout, optimizer)
    saved = read_whole(path)
    squares = squares_gathered(saved["model.over.weight"])
    for weights, state in run_ranks(4, load_torchrec, path, "mixed", optimizer):
        assert_equal(weights, {k.removeprefix("model."): v for k, v in saved.items() if k.startswith("model.")})
        for table, rows in test_torchrec_opinion.ROWS.items():
            name = f"ebc.embedding_bags.{table}.weight"
            value = saved[f"optim.state.{name}.{table}.momentum1"]
            if optimizer == "rowwise_adagrad" and layout == "grid":  # two column blocks, one after another
                value = value.view(2, rows).double().mean(0).float()
            assert torch.equal(state[name]["sum"], value), name
            expected = squares[table] if optimizer == "adagrad" else squares[table].mean(1)
            torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("layout", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.sampled(3)
def test_torchrecs_dtensors(layout: str, tmp_path: Path) -> None:
    path = str(tmp_path / "torchrec")
    run_ranks(2, save_torchrec, path, layout, "adagrad", True)
    saved = read_whole(path)
    for weights, state in run_ranks(2, load_torchrec, path, "mixed", "adagrad"):
        assert_equal(weights, {k.removeprefix("model."): v for k, v in saved.items() if k.startswith("model.")})
        for table in ("t0", "t1"):
            name = f"ebc.embedding_bags.{table}.weight"
            assert torch.equal(state[name]["sum"], saved[f"optim.state.{name}.{table}.momentum1"])


def test_torchrecs_tables_without_state(tmp_path: Path) -> None:
    """Of SGD's nothing is kept, and nothing names them; other tables' state is there, and is loaded."""
    sums = torch.rand(7, 16)
    saved = {"model": Model().state_dict(), "optim": {"state": {"items.weight": {"items.momentum1": sums}}}}
    dcp.save(saved, checkpoint_id=tmp_path / "torchrec", no_dist=True)
    convert(tmp_path / "torchrec", tmp_path / "converted", "dmp")
    for users, is_refused in (("sgd", False), ("adagrad", True)):
        model = Model()
        equality.attach(model.users, users)
        equality.attach(model.items, "adagrad")
        plan = {"users.weight": table_wise(0), "items.weight": row_wise()}
        wrapped = DistributedModelParallel(model, ShardingEnv.single(), plan=plan)
        dense = torch.optim.SGD([p for name, p in wrapped.named_parameters() if "weight" not in name], lr=0.1)
        for folder in ("torchrec", "converted"):
            if is_refused:
                with pytest.raises(CheckpointError, match=r"no optimizer state for 'users.weight'"):
                    load_checkpoint(tmp_path / folder, wrapped, dense)
                continue
            load_checkpoint(tmp_path / folder, wrapped, dense)
            assert torch.equal(full_optimizer_state_dict(wrapped)["state"]["items.weight"]["sum"], sums)


def test_torchrecs_adam(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """FBGEMM has it on GPUs alone: the keys that TorchRec gives it there, with whole tensors."""
    model = Model()
    model.down.weight = nn.Parameter(model.down.weight.detach().clone())
    name, size = "users.weight", (10, 16)
    moments = {"momentum1": torch.randn(size), "exp_avg_sq": torch.rand(size)}
    saved = {"model": model.state_dict(), "optim": {"state": {name: {f"users.{k}": t for k, t in moments.items()}}}}
    dcp.save(saved, checkpoint_id=tmp_path / "torchrec", no_dist=True)
    equality.attach(model.users, "adam")
    wrapped = DistributedModelParallel(
        model, ShardingEnv.single(), plan={name: table_wise(0), "items.weight": row_wise()}
    )
    load_checkpoint(tmp_path / "torchrec", wrapped)
    state = full_optimizer_state_dict(wrapped)["state"][name]
    assert torch.equal(state["exp_avg"], moments["momentum1"]) and torch.equal(
        state["exp_avg_sq"], moments["exp_avg_sq"]
    )
    assert not state["step"].any()
    assert "no step count for 'users.weight'" in caplog.text
