"""Checkpoints of others, in and out: safetensors, Hugging Face folders, torch's and TorchRec's distributed ones."""

from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
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
    table_wise,
)
from dmp.checkpoint.sources import stored_chunk as stored
from dmp.checkpoint.sources.dcp import sort_keys
from tests import equality, test_torchrec_opinion
from tests.bench.state_peak import peak_above
from tests.ranks import mesh, run_ranks

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [
    *([test_torchrec_opinion.pytestmark] if not isinstance(test_torchrec_opinion.pytestmark, list) else []),
    # TorchRec gives its state dicts as torch's ShardedTensor, whose writing torch.distributed.checkpoint deprecates.
    pytest.mark.filterwarnings("ignore:.*(TypedStorage|_shard|ShardedTensor).*"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


class Model(nn.Module):
    """Two tables, a tied pair, every kind of leaf: matrix, vector, scalar, buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.users = nn.EmbeddingBag(10, 16, mode="sum")
        self.items = nn.EmbeddingBag(7, 16, mode="sum")
        self.up = nn.Linear(16, 8, bias=False)
        self.down = nn.Linear(16, 8, bias=False)
        self.down.weight = self.up.weight
        self.low = nn.Linear(8, 2, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.randn(()))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        x = self.up(self.users(users)) + self.down(self.items(items))
        return self.low(self.norm(x * self.scale).bfloat16())


LAYOUTS: dict[str, Callable[[int], Any]] = {
    "rows": lambda n: {"users.weight": row_wise(), "items.weight": row_wise()},
    "columns": lambda n: {"users.weight": column_wise(range(n)), "items.weight": table_wise(n - 1)},
}


def sharded(layout: str, seed: int = 1) -> DistributedModelParallel:
    env = ShardingEnv.from_mesh(mesh((dist.get_world_size(),)))
    return DistributedModelParallel(Model(seed), env, plan=LAYOUTS[layout](env.table_size))


def assert_equal(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert state[name].dtype == value.dtype, name
        assert torch.equal(state[name], value), name


def once(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As Hugging Face stores it: a tied weight under one name."""
    return {name: value.clone() for name, value in state.items() if name != "down.weight"}


def save_hugging_face(folder: Path, state: dict[str, torch.Tensor], files: int) -> None:
    folder.mkdir()
    if files == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    places = {name: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(state)}
    for file in set(places.values()):
        save_file({n: t for n, t in state.items() if places[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


# ---- names ----

RENAMES: dict[str, tuple[Callable[[str], str], Any]] = {
    "prefix": (lambda name: "module." + name, None),
    "two prefixes": (lambda name: "module._orig_mod." + name, None),
    "function": (lambda name: name.upper(), str.lower),
    "parameter": (lambda name: name.replace("scale", "gain"), {"gain": "scale"}),
    "module": (lambda name: name.replace("users.", "a.people."), {"a.people": "users"}),
    "no module": (lambda name: "net.0." + name, {"net.0": ""}),
    "parameter and prefix": (lambda name: "model." + name.replace("scale", "gain"), {"model.gain": "model.scale"}),
}


@pytest.mark.parametrize("case", RENAMES)
def test_names(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    change, rename = RENAMES[case]
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8).view(4, 2), torch.zeros(4, 1, dtype=torch.long)).sum().backward()
    optimizer.step()
    expected, state = full_state_dict(model), full_optimizer_state_dict(model, optimizer)
    changed = {
        "state": {change(name): values for name, values in state["state"].items()},
        "param_groups": [{**group, "params": [change(n) for n in group["params"]]} for group in state["param_groups"]],
    }
    torch.save({"model": {change(n): t for n, t in expected.items()}, "optimizer": changed}, tmp_path / "full.pt")
    other = Model(1)
    restored = torch.optim.AdamW(other.parameters(), lr=1.0)
    with caplog.at_level(logging.INFO, logger="dmp"):
        load_checkpoint(tmp_path / "full.pt", other, restored, rename=rename)
    assert_equal(full_state_dict(other), expected)
    loaded = full_optimizer_state_dict(other, restored)
    assert loaded["state"].keys() == state["state"].keys()
    for name, values in state["state"].items():
        assert_equal(loaded["state"][name], values)
    assert restored.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    said = [r.getMessage() for r in caplog.records if "prefix" in r.getMessage()]
    assert len(said) == ("prefix" in case or case == "two prefixes"), said


def test_a_prefix_that_the_file_lacks(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "inner.pt")
    model = nn.ModuleDict({"model": nn.Linear(2, 3)})
    load_checkpoint(tmp_path / "inner.pt", model)
    assert_equal(model["model"].state_dict(), torch.load(tmp_path / "inner.pt", weights_only=True))


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"wieght": "weight"}, "rename has 'wieght', which is neither a parameter nor a module"),
        ({"bias": "weight"}, "would both be named 'model.weight'"),
        ({"bias": "shift"}, "missing key 'bias'; unexpected key 'shift'"),
    ],
)
def test_names_that_do_not_fit(rename: dict[str, str], message: str, tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 1).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "weights.pt", nn.Linear(3, 1), rename=rename)


# ---- safetensors and Hugging Face folders ----


def load_weights(path: str, layout: str) -> Any:
    model = sharded(layout)
    assert load_checkpoint(path, model) is None
    return full_state_dict(model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_hugging_face_folders(layout: str, files: int, prefix: str, tmp_path: Path) -> None:
    expected = Model().state_dict()
    save_hugging_face(tmp_path / "hf", {prefix + n: t for n, t in once(expected).items()}, files)
    for state in run_ranks(2, load_weights, str(tmp_path / "hf"), layout):
        assert_equal(state, expected)


def test_a_safetensors_file(tmp_path: Path) -> None:
    expected = Model().state_dict()
    save_file(once(expected), tmp_path / "weights.safetensors")
    other = Model(1)
    load_checkpoint(tmp_path / "weights.safetensors", other)
    assert_equal(other.state_dict(), expected)
    for state in run_ranks(3, load_weights, str(tmp_path / "weights.safetensors"), "rows"):
        assert_equal(state, expected)


def test_a_transformer(tmp_path: Path) -> None:
    """As `save_pretrained` writes it and `from_pretrained` reads it: tied, and in several files."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    first, second = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    first.save_pretrained(tmp_path / "hf", max_shard_size="8KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    load_checkpoint(tmp_path / "hf", second)
    assert_equal(second.state_dict(), first.state_dict())
    assert second.lm_head.weight is second.model.embed_tokens.weight
    config.save_pretrained(tmp_path / "out")
    export_safetensors(tmp_path / "out", second, max_shard_bytes=8000)
    third = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert_equal(third.state_dict(), first.state_dict())


def llama_on_a_mesh(source: str, target: str, config: dict[str, Any]) -> Any:
    import transformers

    env = ShardingEnv.from_mesh(mesh((2, 2), ("shard", "tp")))
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model = DistributedModelParallel(module, env)
    load_checkpoint(source, model)
    export_safetensors(target, model, max_shard_bytes=8000)
    return full_state_dict(model)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_a_transformer_on_a_mesh(is_tied: bool, tmp_path: Path) -> None:
    """From `save_pretrained` to a model fully sharded and tensor-parallel, and back to `from_pretrained`."""
    import transformers

    config = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "tie_word_embeddings": is_tied}
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    plain.save_pretrained(tmp_path / "hf")
    for state in run_ranks(4, llama_on_a_mesh, str(tmp_path / "hf"), str(tmp_path / "out"), config):
        assert_equal(state, plain.state_dict())
    plain.config.save_pretrained(tmp_path / "out")
    assert_equal(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict(), plain.state_dict())


def cut(folder: Path) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def without(folder: Path) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["more"] = index["weight_map"]["scale"]
    file.write_text(json.dumps(index))


def resave(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = once(Model().state_dict())
    change(state)
    for file in folder.iterdir():
        file.unlink()
    save_file(state, folder / "model.safetensors")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut short": (cut, r"model-00002-of-00003.safetensors has \d+ bytes, '[\w.]+' ends at \d+: it is cut short"),
    "no shard": (
        lambda folder: (folder / "model-00001-of-00003.safetensors").unlink(),
        r"model-00001-of-00003.safetensors is missing; model.safetensors.index.json says that it holds 'scale'",
    ),
    "not in its shard": (without, "does not hold 'more', as model.safetensors.index.json says"),
    "no header": (
        lambda folder: (folder / "model-00001-of-00003.safetensors").write_bytes(b"\xff" * 7 + b"\0{}"),
        "model-00001-of-00003.safetensors has 10 bytes and no whole header: it is cut short",
    ),
    "junk": (
        lambda folder: (folder / "model-00001-of-00003.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"[]"),
        "model-00001-of-00003.safetensors cannot be read as a safetensors file",
    ),
    "bad index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
        "index.json cannot be read as an index of safetensors files",
    ),
    "unknown": (lambda folder: resave(folder, lambda s: s.update(more=torch.ones(1))), "unexpected key 'more'"),
    "missing": (lambda folder: resave(folder, lambda s: s.pop("scale")), "missing key 'scale'"),
    "tied, both missing": (lambda folder: resave(folder, lambda s: s.pop("up.weight")), "missing key 'up.weight'"),
    "dtype": (
        lambda folder: resave(folder, lambda s: s.update(scale=s["scale"].double())),
        "'scale' has dtype torch.float64, expected torch.float32",
    ),
}


def load_damaged(path: str) -> None:
    model = sharded("rows")
    before = copy.deepcopy(full_state_dict(model))
    try:
        load_checkpoint(path, model)
    finally:
        assert_equal(full_state_dict(model), before)


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_named_on_every_rank(how: str, tmp_path: Path) -> None:
    spoil, message = DAMAGE[how]
    save_hugging_face(tmp_path / "hf", once(Model().state_dict()), 3)
    spoil(tmp_path / "hf")
    for error in run_ranks(2, load_damaged, str(tmp_path / "hf"), expect=CheckpointError):
        with pytest.raises(CheckpointError, match=message):
            raise error


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
def test_torchrecs_dtensors(layout: str, tmp_path: Path) -> None:
    path = str(tmp_path / "torchrec")
    run_ranks(2, save_torchrec, path, layout, "adagrad", True)
    saved = read_whole(path)
    for weights, state in run_ranks(2, load_torchrec, path, "mixed", "adagrad"):
        assert_equal(weights, {k.removeprefix("model."): v for k, v in saved.items() if k.startswith("model.")})
        for table in ("t0", "t1"):
            name = f"ebc.embedding_bags.{table}.weight"
            assert torch.equal(state[name]["sum"], saved[f"optim.state.{name}.{table}.momentum1"])


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


# ---- how much is read and held ----

TALL, WIDE = 1 << 17, 64  # 32 MB


def tall(path: Path, kind: str) -> torch.Tensor:
    table = torch.randn(TALL, WIDE)
    if kind == "safetensors":
        save_file({"weight": table}, path)
    else:
        dcp.save({"weight": table}, checkpoint_id=path, no_dist=True)
    return table


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_rank_reads_its_rows_a_piece_at_a_time(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tall(tmp_path / "table.safetensors", kind)
    from dmp import ChunkedTensor

    first, rows = TALL // 4 + 3, TALL // 4
    mine = torch.full((rows, WIDE), -1.0)

    class Part(nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {"weight": ChunkedTensor((TALL, WIDE), [mine], [(first, 0)])}

    read: list[int] = []
    true_fill = stored._fill_buffer
    monkeypatch.setattr(
        "dmp.checkpoint.sources.stored_chunk._fill_buffer",
        lambda f, to, path: (read.append(len(to)), true_fill(f, to, path)),
    )
    _, peak = peak_above(lambda: load_checkpoint(tmp_path / "table.safetensors", Part()))
    assert torch.equal(mine, table[first : first + rows])
    assert sum(read) == mine.nbytes
    assert peak < 8 << 20, peak


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_example(processes: int) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    done = subprocess.run(
        [sys.executable, *launch, "examples/load_checkpoint.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the same weights as one process") == processes
    assert len((ROOT / "examples" / "load_checkpoint.py").read_text().splitlines()) <= 40
