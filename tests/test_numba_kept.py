"""Machine code is made once on a machine, and what is kept is whole or made again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import pytest

from sharders.embedding.lookup import numba_functions, numba_kept
from sharders.embedding.lookup.numba_kept import Compiled, kept

CODE = Compiled("f", True, 3, b"\x7fELF\n\n\0of many\nlines")


class Maker:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Compiled:
        self.calls += 1
        sleep(0.02)
        return CODE


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "new"))
    numba_kept._folder.cache_clear()
    yield tmp_path / "new"
    numba_kept._folder.cache_clear()


def test_one_makes_it_and_others_wait(folder: Path) -> None:
    make = Maker()
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda _: kept("a", "1", make), range(4))] == [CODE] * 4
    assert make.calls == 1
    assert kept("b", "1", make) == CODE and make.calls == 2
    assert sorted(path.name for path in folder.iterdir()) == ["a-1", "a-1.lock", "b-1", "b-1.lock"]


def test_what_older_sources_left_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the sources, of which there is one version; a folder of several installations is left alone."""
    make = Maker()
    kept("a", "1", make), kept("a", "2", make)
    assert len([*folder.iterdir()]) == 4
    monkeypatch.setattr(numba_kept, "_beside_sources", lambda: folder)
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda of: kept("a", of, make), ["3", "3", "3", "3"])] == [CODE] * 4
    assert {path.name for path in folder.iterdir()} >= {"a-3", "a-3.lock"}
    assert not [*folder.glob("a-[12]*")] and make.calls == 3


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "lines"])
def test_what_is_damaged_is_made_again(folder: Path, damage: str) -> None:
    make = Maker()
    kept("a", "1", make)
    whole = (folder / "a-1").read_bytes()
    others = {"cut": whole[:-1], "changed": whole.replace(b"many", b"most"), "empty": b"", "lines": b"\xff\n\n\n"}
    (folder / "a-1").write_bytes(others[damage])
    assert kept("a", "1", make) == CODE and make.calls == 2
    assert (folder / "a-1").read_bytes() == whole


def test_where_nothing_can_be_kept_it_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And it is said once."""
    folder.parent.joinpath("file").write_text("")
    monkeypatch.setattr(numba_kept, "_folders", lambda: iter([folder.parent / "file" / "below"]))
    make = Maker()
    assert [kept("a", "1", make), kept("a", "1", make)] == [CODE] * 2
    assert make.calls == 2 and len(caplog.messages) == 1 and "no folder" in caplog.messages[0]


def test_code_is_kept_for_all_sources_that_it_is_made_of() -> None:
    """A file that vectors or helpers are imported into is one of them, and what names the blocks."""
    folder = Path(numba_kept.__file__).parent
    of = {path.stem: path.read_text() for path in folder.glob("numba_*.py")}
    made_of = {name for name, text in of.items() if "numba_vectors import" in text or "numba_compile import" in text}
    made_of.remove("numba_functions")  # where `compiled` is called
    assert {*made_of, "numba_vectors", "numba_layout"} == {f"numba_{name}" for name in numba_functions.COMPILED}


_LOOK_UP = """
import sys, torch
from sharders.embedding.lookup import numba_kernel
assert not numba_kernel.problem(torch.float32, "sgd"), numba_kernel.problem(torch.float32, "sgd")
print("numba" in sys.modules)
"""


@pytest.mark.slow
def test_a_process_that_finds_all_kept_does_without_numba(folder: Path) -> None:
    ran = [subprocess.run([sys.executable, "-c", _LOOK_UP], capture_output=True, text=True) for _ in range(2)]
    assert [process.stdout for process in ran] == ["True\n", "False\n"], [process.stderr for process in ran]
