"""`docs/coming_from_torchrec.md` is true line by line: each row names the tests that hold it, and they are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "coming_from_torchrec.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| their", "| ---"))]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_tests_that_are_there(row: str) -> None:
    cells = row.strip().strip("|").split("|")
    assert len(cells) == 4, "their call, ours, what differs, tests"
    named = re.findall(r"`(\w+)::(test_\w+)`", cells[3])
    assert named, "a row without a test is a promise"
    for file, test in named:
        texts = [path.read_text() for path in (ROOT / "tests").rglob(f"{file}.py")]
        is_there = any(f"\ndef {test}(" in text for text in texts)
        assert is_there, f"{file}.py has no {test}"


def test_there_are_rows() -> None:
    assert len(ROWS) > 30
