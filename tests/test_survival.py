"""What a training run survives: a process killed in the middle of a save, a disk that takes no more."""

from __future__ import annotations

import errno
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dmp import CheckpointError, latest, load_checkpoint
from tests import ranks
from tests.ranks import run_ranks
from tests.survival_jobs import (
    IN_ITS_FOLDER,
    METADATA,
    TROUBLES,
    Death,
    State,
    assert_equal,
    dense_optimizer,
    load_and_save_again,
    make,
    save_and_die,
    save_in_trouble,
    whole,
)

NOTICED_S = 20.0
"""A peer's death closes its connections, which gloo sees at once; far below its timeout."""


def mortal_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """`run_apart` where no rank may hang."""
    ends = ranks.run_apart(world_size, fn, *args, timeout=timeout)
    assert None not in ends, "a rank hangs"
    return ends


def load_here(path: Path) -> tuple[int, State]:
    """Into a plain module of a process that had no part in the save."""
    module = make()
    optimizer = dense_optimizer(module)
    extra = load_checkpoint(path, module, optimizer)
    return extra["step"], whole(module, optimizer)


# What dies where, during a save to the path of the last checkpoint or to another one; then the step that `last` is of.
DEATHS: dict[str, tuple[str, Death, int]] = {
    "1 before its first file": ("other", Death(1, "open", IN_ITS_FOLDER), 2),
    "1 in the middle of its data": ("other", Death(1, ""), 2),
    "1 in the middle of its data, again to last": ("last", Death(1, ""), 2),
    "1 after its data": ("other", Death(1, "open", METADATA, by=0), 2),
    "1 after its data, again to last": ("last", Death(1, "open", METADATA, by=0), 2),
    "0 before it says what is where": ("other", Death(0, "open", METADATA), 2),
    "0 before the rename": ("other", Death(0, "os.rename", r".*/NAME"), 2),
    "0 before the exchange": ("last", Death(0, "ctypes.dlsym", "renameat2"), 2),
    "0 after the exchange": ("last", Death(0, "os.rename", r".*/\.NAME\.replaced"), 4),
    "0 before the old one is removed": ("last", Death(0, "os.remove", r".*/\.NAME\.replaced/.*"), 4),
}
IN_EVERY_RUN = [
    "1 in the middle of its data",
    "0 before the rename",
]


@pytest.mark.parametrize(
    ("case", "asynchronous"),
    [
        *((case, False) for case in IN_EVERY_RUN),
        ("1 in the middle of its data", True),
        *(pytest.param(case, False, marks=pytest.mark.slow) for case in DEATHS if case not in IN_EVERY_RUN),
    ],
)
@pytest.mark.sampled(3)
def test_a_rank_killed_in_the_middle_of_a_save(
    case: str, asynchronous: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, death, step = DEATHS[case]
    folder = tmp_path / "checkpoints"
    replies = mortal_ranks(2, save_and_die, str(folder), name, death, asynchronous)
    end = -signal.SIGKILL if death.event else -signal.SIGXFSZ
    assert f"the process ended with exit code {end:d}\n" in replies[death.victim]
    message, seconds = replies[1 - death.victim]
    assert message.startswith("PeerLost: ") and f"rank {death.victim} is gone" in message and name in message, message
    assert seconds < NOTICED_S

    states = torch.load(tmp_path / "checkpoints.pt", weights_only=True)
    found, state = load_here(folder / "last")
    assert found == step
    assert_equal(state, states[step])

    half = folder / f".{name}.saving"
    assert half.exists() == (case != "0 before the old one is removed")
    if name != "last":
        with pytest.raises(CheckpointError, match=rf"{name}.*\.{name}\.saving is a save that was cut short"):
            load_checkpoint(folder / name, make())
    caplog.clear()
    with caplog.at_level(logging.WARNING, "dmp"):
        assert latest(folder) == folder / "last"
    named = [record for record in caplog.records if str(half) in record.getMessage()]
    assert len(named) == len(caplog.records) == (half.exists() and step == 2)

    loaded, loaded_step, saved = run_ranks(2, load_and_save_again, str(folder), name)[0]
    assert loaded_step == step
    assert_equal(loaded, states[step])
    found, state = load_here(folder / name)
    assert found == 6
    assert_equal(state, saved)
    assert latest(folder) == folder / name
    assert set(os.listdir(folder)) == {name, "last"}


@pytest.fixture
def folder_for_all() -> Iterator[Path]:
    """One that other users may read too; pytest's own are for the user alone."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


WHY = {"full at the end": os.strerror(errno.ENOSPC), "read-only": os.strerror(errno.EACCES), "below a file": "file/new"}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "in the background"])
@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.sampled(12)
def test_a_disk_that_takes_no_more(trouble: str, asynchronous: bool, folder_for_all: Path) -> None:
    """Onto the last checkpoint; every rank says why and where, and nothing is changed or left behind."""
    (folder_for_all / "file").touch()
    path = "file/new" if trouble == "below a file" else "last"
    run = mortal_ranks if trouble == "full at the end" else run_ranks
    replies = run(2, save_in_trouble, str(folder_for_all), path, trouble, asynchronous)
    for left, message in replies:
        assert left == ["file", "last"]
        assert str(folder_for_all / path) in message
        assert WHY.get(trouble, os.strerror(errno.EFBIG)) in message
        if trouble in ("full for rank 0", "full for rank 1"):
            assert f"{trouble[-6:]}: " in message
