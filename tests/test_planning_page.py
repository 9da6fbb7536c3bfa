"""`docs/planning.md` is run as printed: its programs in order, its commands, in a folder that has its files."""

from __future__ import annotations

import json
import re
import shlex
import sys
import warnings
from pathlib import Path

import pytest

from dmp.__main__ import main

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's of its own TorchScript
    import torch.distributed.optim  # noqa: F401

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "planning.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first is `clicks.py`; a JSON block is `constraints.json`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *filter(None, sys.path)])
    monkeypatch.delitem(sys.modules, "clicks", raising=False)
    Path("clicks.py").write_text(BLOCKS[0][1])
    commands = 0
    for kind, text in BLOCKS:
        if kind == "json":
            assert json.loads(text)
            Path("constraints.json").write_text(text)
        elif kind == "python":
            exec(compile(text, "planning.md", "exec"), {"__name__": "planning"})
        else:
            assert kind == "sh"
            for line in text.splitlines():
                python, dash_m, package, *arguments = shlex.split(line)
                assert (python, dash_m, package) == ("python", "-m", "dmp")
                code = main(arguments)
                assert code == 0 or (code, arguments[0]) == (1, "diff"), (line, capsys.readouterr().err)
                commands += 1
    assert commands >= 8
    assert "<html" in Path("plan.html").read_text()
    assert "users" in capsys.readouterr().out


def test_machines_are_named() -> None:
    import planner

    machines = {path.stem for path in (Path(planner.__file__).parent / "costs" / "machines").glob("*.json")}
    assert machines <= set(re.findall(r"`([a-z]\w+)`", PAGE))
