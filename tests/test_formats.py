"""Checkpoints of others, in and out: names, safetensors files, Hugging Face folders, and how much is read."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
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
    save_checkpoint,
)
from dmp.checkpoint.sources import stored_piece
from tests import formats_jobs
from tests.bench.state_peak import peak_above
from tests.equality import attach
from tests.formats_jobs import LAYOUTS, ROOT, Model, assert_equal, once, save_hugging_face, sharded
from tests.programs import run_program
from tests.ranks import mesh, run_ranks

pytestmark = formats_jobs.pytestmark


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


class Grown(nn.Module):
    """A later run's model: a table more, and another layer above."""

    def __init__(self, tables: int) -> None:
        super().__init__()
        torch.manual_seed(tables)
        self.tables = nn.ModuleDict({f"t{i}": nn.EmbeddingBag(9 + i, 8) for i in range(tables)})
        self.register_module(f"top{tables}", nn.Linear(8 * tables, 1))
        attach(self.tables["t1"], "adagrad")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        top = self.get_submodule(f"top{len(self.tables)}")
        return top(torch.cat([table(ids) for table in self.tables.values()], 1))


def grow(path: str) -> list[Any]:
    states = []
    for tables, layout in ((2, row_wise()), (3, column_wise([1, 0]))):
        pinned = {f"tables.t{i}.weight": layout for i in range(tables)}
        model = DistributedModelParallel(Grown(tables), plan=pinned)
        optimizer = torch.optim.Adam([p for n, p in model.named_parameters() if "t1" not in n], lr=0.1)
        model(torch.arange(8).view(4, 2)).sum().backward()
        optimizer.step()
        if tables == 2:
            save_checkpoint(path, model, optimizer)
        else:
            with pytest.raises(CheckpointError, match=r"missing key 'tables\.t2\.weight'"):
                load_checkpoint(path, model, optimizer)
            states.append((full_state_dict(model), full_optimizer_state_dict(model, optimizer)["state"]))
            load_checkpoint(path, model, optimizer, strict=False)
        states.append((full_state_dict(model), full_optimizer_state_dict(model, optimizer)["state"]))
    with pytest.raises(CheckpointError, match="none of its names is the model's"):
        load_checkpoint(path, DistributedModelParallel(nn.Linear(2, 1)), strict=False)
    return states


def test_tables_that_were_added_since(tmp_path: Path) -> None:
    """A checkpoint of fewer tables was refused, and its optimizer state lost to who went by `load_state_dict`."""
    for saved, before, after in run_ranks(2, grow, str(tmp_path / "saved")):
        for of_saved, of_before, of_after in zip(saved, before, after, strict=True):
            assert of_after.keys() == of_before.keys()
            for name, value in of_after.items():
                torch.testing.assert_close(value, (of_saved if name in of_saved else of_before)[name], rtol=0, atol=0)


# ---- safetensors and Hugging Face folders ----


def load_weights(path: str, layout: str) -> Any:
    model = sharded(layout)
    assert load_checkpoint(path, model) is None
    return full_state_dict(model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.sampled(2)
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
@pytest.mark.sampled(2)
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

    first, rows = TALL // 4 + 3, TALL // 4
    mine = torch.full((rows, WIDE), -1.0)

    class Part(nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {"weight": ChunkedTensor((TALL, WIDE), [mine], [(first, 0)])}

    read: list[int] = []
    true_fill = stored_piece._fill_buffer
    monkeypatch.setattr(
        "dmp.checkpoint.sources.stored_piece._fill_buffer",
        lambda f, to, path: (read.append(len(to)), true_fill(f, to, path)),
    )
    _, peak = peak_above(lambda: load_checkpoint(tmp_path / "table.safetensors", Part()))
    assert torch.equal(mine, table[first : first + rows])
    assert sum(read) == mine.nbytes
    assert peak < 8 << 20, peak


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_example(processes: int) -> None:
    done = run_program(["examples/load_checkpoint.py"], processes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the same weights as one process") == processes
    assert len((ROOT / "examples" / "load_checkpoint.py").read_text().splitlines()) <= 40
