"""`python -m dmp plan`, `explain` and `diff`: no process group, no accelerator, and mistakes in one line."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from dmp import ShardingPlan, column_wise
from dmp.__main__ import main
from dmp.commands.machine import number_of_bytes
from planner import observe

ROOT = Path(__file__).resolve().parents[1]
MODELS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.EmbeddingBag(10**7, 64, mode="sum")
        self.items = nn.EmbeddingBag(1000, 16, mode="sum")
        self.top = nn.Linear(80, 1)

def make():
    return Model()

def needs(rows):
    return Model()

def gives_nothing():
    pass


def gives_a_number():
    return 3

def raises():
    raise RuntimeError("no rows")

def reads_values():
    return nn.Linear(int(torch.ones(1)), 2)

class Namespace:
    make = staticmethod(make)

class Tagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.EmbeddingBag(10**5, 16, mode="sum")

    def forward(self, users):
        return self.users(users)

class Huge(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.EmbeddingBag(10**12, 64, mode="sum")

def make_huge():
    return Huge()

def loader():
    return [(torch.randint(100, (64, 7)),)] * 3

def broken_loader():
    yield (torch.randint(100, (64, 7)),)
    raise OSError("the disk is gone")

def no_samples():
    return [{"users": torch.zeros(0, 3, dtype=torch.long)}] * 2

no_loader = 7

a_module = nn.EmbeddingBag(100, 8)
a_number = 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a stranger's models in it."""
    (tmp_path / "strangers_models.py").write_text(MODELS)
    (tmp_path / "dies.py").write_text("import sys\nsys.exit('no licence')\n")
    (tmp_path / "lacks.py").write_text("import not_installed_here\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    for name in ("strangers_models", "dies", "lacks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.slow
def test_a_plan_for_4096_ranks_in_a_fresh_process(folder: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "dmp", "plan", "strangers_models:make"]
    command += ["--mesh", "512x8", "--axes", "host,local", "--topology", "h100", "--out", "plan.json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "lower bound" in done.stdout
    assert set(ShardingPlan.from_json((folder / "plan.json").read_text())) == {"users.weight", "items.weight"}


@pytest.mark.parametrize("model", ["Model", "a_module", "Namespace.make"])
def test_forms_of_models(model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"strangers_models:{model}", "--mesh", "4"]) == 0
    assert "step" in capsys.readouterr().out


def test_what_is_given_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["plan", "strangers_models:make", "--mesh", "2x2", "--device", "cpu", "--memory", "20GB"]
    (folder / "constraints.json").write_text(json.dumps({"users": {"layouts": ["row_wise"]}}))
    assert main([*common, "--constraints", "constraints.json", "--out", "a.json", "--html", "a.html"]) == 0
    assert "<html" in (folder / "a.html").read_text()
    a = ShardingPlan.from_json((folder / "a.json").read_text())
    assert str(a["users.weight"]) == "row_wise()"
    assert (
        main(
            [
                *common,
                "--pinned",
                "a.json",
                "--out",
                "b.json",
                "--batch-size",
                "9",
                "--time-budget",
                "9",
                "--effort",
                "2",
            ]
        )
        == 0
    )
    assert ShardingPlan.from_json((folder / "b.json").read_text()) == a
    capsys.readouterr()
    assert main(["diff", "a.json", "b.json"]) == 0
    assert "0 of 2 parameters change" in capsys.readouterr().out
    assert main([*common, "--out", "c.json", "--batch-size", "100000"]) == 0
    assert main(["diff", "a.json", "c.json"]) == (a != ShardingPlan.from_json((folder / "c.json").read_text()))
    assert "batch" in capsys.readouterr().out


def test_explain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the report beside the plan; one that is of another plan is passed over."""
    assert main(["plan", "strangers_models:make", "--mesh", "4", "--out", "a.json"]) == 0
    capsys.readouterr()
    assert main(["explain", "a.json", "users"]) == 0
    assert "because" in capsys.readouterr().out
    assert main(["explain", "a.json", "nobody"]) == 2
    said = capsys.readouterr().err
    assert "no planned parameter answers to 'nobody'" in said and "dense weights are by block" in said
    plan = ShardingPlan.from_json((folder / "a.json").read_text())
    (folder / "a.json").write_text(plan.merged({"users.weight": column_wise([1, 2])}).to_json())
    assert main(["explain", "a.json", "users.weight"]) == 0
    told = capsys.readouterr()
    assert "column_wise([1, 2])" in told.out and "is the report of another plan" in told.err
    (folder / "a.report.json").unlink()
    assert main(["explain", "a.json", "users.weight"]) == 0
    assert main(["explain", "a.json", "users"]) == 2


@pytest.mark.parametrize(
    ("place", "value"),
    [(("planned", "class_of", "numbers"), float("inf")), (("planned", "shapes"), []), (("phase_seconds", 0), None)],
    ids=str,
)
def test_a_damaged_report(
    place: tuple[str | int, ...], value: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "strangers_models:make", "--mesh", "4", "--out", "plan.json"]) == 0
    beside = folder / "plan.report.json"
    data = json.loads(beside.read_text())
    *holders, last = place
    reduce(lambda held, key: held[key], holders, data["report"])[last] = value
    beside.write_text(json.dumps(data))
    capsys.readouterr()
    found = [main(["explain", "plan.json", "users"]), main(["diff", "plan.json", "plan.json"])]
    said = capsys.readouterr().err.splitlines()
    assert 2 in found and set(found) <= {0, 2} and said
    assert all("damaged" in line for line in said)


def test_observe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["plan", "strangers_models:Tagged", "--mesh", "2", "--device", "cpu"]
    assert main([*common, "--observe", "strangers_models:loader", "--observe-batches", "2"]) == 0
    said = capsys.readouterr().out
    assert "2 batches of 64 samples" in said and "batch 64 on each of 2 ranks" in said
    observe([{"users": torch.zeros(32, 5, dtype=torch.long)}]).save(folder / "seen.json")
    assert main([*common, "--observe", "seen.json"]) == 0
    assert "batch 32 on each" in capsys.readouterr().out
    for name, code, message in (
        ("strangers_models:broken_loader", 1, "the loader: OSError: the disk is gone"),
        ("strangers_models:no_samples", 1, "the loader: the 2 batches of list have no samples"),
        ("strangers_models:no_loader", 1, "the loader: expected a loader, which gives batches; got int"),
        ("none.json", 2, "none.json: No such file"),
        ("dies.py", 2, "dies.py is no JSON"),
    ):
        assert main([*common, "--observe", name]) == code
        assert message in capsys.readouterr().err
    huge = ["plan", "strangers_models:make_huge", "--mesh", "2", "--memory", "1000TB"]
    for name in ("strangers_models:make_huge", "strangers_models:Huge"):  # the model itself is not made for real
        assert main([*huge, "--observe", name]) == 2
        assert f"the loader: expected a loader, which gives batches; {name} gives the model" in capsys.readouterr().err
    assert main([*common, "--cost-model", "planner:CostModel"]) == 0
    assert main([*common, "--cost-model", "strangers_models:no_loader"]) == 2


def test_propose_mesh(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["propose-mesh", "strangers_models:make", "--devices", "8"]
    assert main([*common, "--topology", "a100_80gb", "--batch-size", "4096", "--top", "2"]) == 0
    assert "dp=8" in capsys.readouterr().out
    assert main([*common, "--memory", "1MB"]) == 3
    assert "no mesh: " in capsys.readouterr().err
    assert main([*common, "--top", "0"]) == 2
    capsys.readouterr()
    assert main([*common[:-1], "10000000"]) == 2
    assert "--devices has 10,000,000 ranks; at most 131,072 are planned" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("no_such_module:make", 2, "there is no module 'no_such_module'"),
        ("lacks:make", 1, "importing 'lacks' raises ModuleNotFoundError: No module named 'not_installed_here' (lacks"),
        ("dies:make", 1, "importing 'dies' raises SystemExit: no licence"),
        ("strangers_models", 2, "expected package.module:name"),
        ("strangers_models.py:make", 2, "is a file"),
        ("strangers_models:mke", 2, "has no 'mke'; it has make"),
        ("strangers_models:needs", 2, "needs arguments (rows)"),
        ("strangers_models:a_number", 2, "an object of int; expected a function"),
        ("strangers_models:gives_a_number", 2, "gives an object of int; expected an nn.Module"),
        ("strangers_models:raises", 1, "RuntimeError: no rows (strangers_models.py:"),
        ("strangers_models:reads_values", 1, "--build-on cpu"),
        ("strangers_models:make --mesh 4x", 2, "got '4x'"),
        ("strangers_models:make --mesh 4x0", 2, "got '4x0'"),
        ("strangers_models:make --mesh 99999999x8", 2, "has 799,999,992 ranks; at most"),
        ("strangers_models:make --mesh 4x2x2", 2, "name them: --axes"),
        ("strangers_models:make --mesh 4x2 --axes dp", 2, "has 2 axes, --axes dp names 1"),
        ("strangers_models:make --mesh 4x2 --axes dp,b", 2, "'b' has no role"),
        ("strangers_models:make --batch-size 0", 2, "batch_size must be positive"),
        ("strangers_models:make --topology pdp-11", 2, "no topology 'pdp-11': expected a file"),
        ("strangers_models:make --topology dies.py", 2, "dies.py is no JSON"),
        ("strangers_models:make --device tpu", 2, "no default topology for device type 'tpu'"),
        ("strangers_models:make --memory 80GX", 2, "--memory is a size"),
        ("strangers_models:make --memory 1e400", 2, "--memory is a size"),
        ("strangers_models:make --memory 1GB", 3, "no plan: 'users.weight' does not fit"),
        ("strangers_models:make --constraints none.json", 2, "none.json: No such file"),
        ("strangers_models:make --constraints dies.py", 2, "dies.py is not constraints"),
        ("strangers_models:make --pinned dies.py", 2, "dies.py is not a plan"),
        ("strangers_models:make --out no/plan.json", 2, "there is no folder"),
        ("strangers_models:make --out .", 2, "expected a file to write; it is a folder"),
        ("strangers_models:make --html .", 2, "expected a file to write; it is a folder"),
        ("strangers_models:make --out p.json --html ./p.json", 2, "both the plan and the page would be written there"),
        ("strangers_models:make --out p.json --html p.report.json", 2, "both the report and the page would be"),
        ("strangers_models:make --observe-batches 5", 2, "--observe-batches 5: nothing is read; it is of a loader"),
        ("strangers_models:make --observe seen.json --observe-batches 5", 2, "nothing is read; it is of a loader"),
        ("strangers_models:make --observe strangers_models:loader --observe-batches 0", 2, "at least 1; got 0"),
        ("strangers_models:make --cost-model strangers_models:gives_nothing", 2, "gives_nothing gives None"),
        ("strangers_models:make --cost-model strangers_models:gives_a_number", 2, "lacks phases, spans, costs, setups"),
    ],
)
def test_mistakes(arguments: str, code: int, message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = arguments.split()
    mesh = [] if "--mesh" in words else ["--mesh", "4"]
    assert main(["plan", *words, *mesh]) == code
    said = capsys.readouterr().err
    assert message in said
    assert code == 3 or said.count("\n") == 1


def test_a_package_that_the_factory_imports_may_read_values(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Packages make tensors of their own when they are imported; only the model goes on meta."""
    (folder / "reads_at_import.py").write_text("import torch\nvalue = torch.ones(1).item()\n")
    (folder / "imports_it.py").write_text("import reads_at_import\n")
    late = "def make():\n    import imports_it\n    import strangers_models\n    return strangers_models.make()\n"
    (folder / "imports_late.py").write_text(f"{late}\ndef fails():\n    import dies\n")
    assert main(["plan", "imports_late:make", "--mesh", "4", "--out", "plan.json"]) == 0
    assert capsys.readouterr() and (folder / "plan.json").is_file()
    assert main(["plan", "imports_late:fails", "--mesh", "4"]) == 1
    assert "imports 'dies', which raises SystemExit: no licence" in capsys.readouterr().err


def test_a_constraint_of_another_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "c.json").write_text(json.dumps({"users": {"layout": "row_wise"}}))
    assert main(["plan", "strangers_models:make", "--mesh", "2", "--constraints", "c.json"]) == 2
    assert "'users' has ['layout']; a constraint has layouts, " in capsys.readouterr().err


def test_names_that_the_terminal_has_no_letters_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "german_words.py").write_text(
        'from torch import nn\n\n\ndef make():\n    return nn.ModuleDict({"größe": nn.EmbeddingBag(9, 8)})\n', "utf-8"
    )
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    assert main(["plan", "german_words:make", "--mesh", "2", "--out", "plan.json"]) == 0
    assert rb"gr\xf6\xdfe" in written.getvalue()
    assert list(ShardingPlan.from_json(Path("plan.json").read_text("utf-8"))) == ["größe.weight"]


def test_sizes() -> None:
    sizes = ("80GB", "80 GiB", "1.5tb", "1e9", "1000")
    assert [number_of_bytes(text) for text in sizes] == [80e9, 80 * 2**30, 1.5e12, 1e9, 1e3]
