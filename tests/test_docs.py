"""Programs in `docs/` run as printed, on two ranks; `test_planning_page.py` has those of planning."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dmp
from dmp import ShardingEnv
from tests.ranks import mesh, run_ranks
from tests.test_own_heads import Model

DOCS = Path(__file__).parent.parent / "docs"
FOLDERS = r"\]\(((?!http)[^)#]+)\)"


def _run(page: str, **given: Any) -> dict[str, Any]:
    names = {name: getattr(dmp, name) for name in dmp.__all__} | {"torch": torch} | given
    for block in re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, page, "exec"), names)
    return names


def _all() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("dp",)))
    torch.manual_seed(env.rank)
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(2)]
    torch.manual_seed(0)
    trained = _run("training.md", module=nn.Linear(3, 1), env=env, batches=batches)
    gathered = [torch.empty(1, 3) for _ in range(2)]
    torch.distributed.all_gather(gathered, trained["model"].module.weight.detach())
    assert torch.equal(*gathered)
    saved = _run("checkpoints.md", model=trained["model"], optimizer=trained["optimizer"])
    assert saved["latest"]("run").name == "step_1000"
    split = _run("transformers.md", module=Model(), env=ShardingEnv.from_mesh(mesh((1, 2), ("shard", "tp"))))
    assert "colwise" in str(split["model"].plan)


def _in(folder: str) -> None:
    before = Path.cwd()
    os.chdir(folder)
    try:
        _all()
    finally:
        os.chdir(before)


def test_programs_of_the_pages_run(tmp_path: Path) -> None:
    run_ranks(2, _in, str(tmp_path))


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")) + ["../README.md"])
def test_what_a_page_refers_to_is_there(page: str) -> None:
    path = DOCS / page
    assert [to for to in re.findall(FOLDERS, path.read_text()) if not (path.parent / to).exists()] == []
