"""Ranks that part ways, or of which one is gone: every living one is told, with names, within seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dmp import PlanError, RanksError
from tests.parting_jobs import (
    compile_for_long,
    losses_of_different_tables,
    meet_elsewhere,
    part,
    part_and_listen,
    together_where_one_raises,
    wait_in_full_tensor,
    wrap_with,
    wrap_with_a_planner_that_raises,
)
from tests.ranks import run_ranks
from tests.test_survival import mortal_ranks

TOLD_S = 10.0
slow = pytest.mark.slow

# What ranks 0 and 1 do, and what each is said to be in.
PARTED = {
    "save | step": ("save_checkpoint", "the forward of 'sparse'"),
    "load | step": ("load_checkpoint", "the forward of 'sparse'"),
    "gather | step": ("full_state_dict", "the forward of 'sparse'"),
    "clip | step": ("clip_grad_norm_", "the forward of 'sparse'"),
    "verify | step": ("verify", "the forward of 'sparse'"),
    "wrap | step": ("wrapping Sparse", "the forward of 'sparse'"),
    "step | forward_alone": ("the backward of 'sparse'", "the forward of 'sparse'"),
    "step | backward_twice": ("the forward of 'sparse'", "the backward of 'sparse'"),  # told by the header
    "step | between": ("the backward of 'sparse'", "the forward of 'sparse'"),
    "step | save": ("the forward of 'sparse'", "save_checkpoint"),
    "save | barrier": ("save_checkpoint", "torch's barrier"),
    "step | other_sizes": ("the forward of 'sparse'", "torch's all_gather_object"),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case == "save | step" else slow) for case in PARTED])
def test_parted_in_a_model_with_tables(case: str, tmp_path: Path) -> None:
    for rank, (message, seconds) in enumerate(mortal_ranks(2, part, "sparse", str(tmp_path), case.split(" | "))):
        first, second = PARTED[case]
        if not (rank == 1 and second.startswith("torch's")):  # there it is torch that raises, after the log
            assert message.startswith("RanksError: the ranks have parted ways: "), message
            assert f"rank 0 is in {first} (" in message and f"rank 1 is in {second} (" in message, message
        assert message and seconds < TOLD_S, (message, seconds)


@slow
def test_a_loss_that_is_dropped_on_one_rank(tmp_path: Path) -> None:
    for message, seconds in mortal_ranks(2, part, "sparse", str(tmp_path), ["step", "drop"]):
        assert message.startswith("RanksError: the ranks have parted ways: "), message
        assert "rank 0 is in the backward of 'sparse' (" in message, message
        assert "rank 1 is in code of its own (parting_jobs.py:" in message, message
        assert "has let go of the result of call" in message and seconds < TOLD_S, (message, seconds)


@pytest.mark.parametrize("kind", ["dense", "sparse", "fsdp"])
@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.sampled(6)
def test_a_pass_that_raises_on_one_rank_which_then_does_nothing(kind: str, which: str, tmp_path: Path) -> None:
    for message, seconds in mortal_ranks(2, part, kind, str(tmp_path), ["step", f"raise_in_{which}"]):
        assert message.startswith("RanksError: the ranks have parted ways: rank 0 is in "), message
        assert f"where the {which} pass raised ValueError: no such id; " in message, message
        assert seconds < TOLD_S, seconds


@slow
def test_a_rank_that_compiles_is_waited_for() -> None:
    """However still it stands; without a word of it, it would have parted from the others."""
    assert run_ranks(2, compile_for_long, True) == ["", ""]
    for text in mortal_ranks(2, compile_for_long, False):
        assert "have parted ways: rank 0 is in the forward " in text and "rank 1 is in the backward of " in text, text


@slow
def test_who_is_waited_for_is_said(tmp_path: Path) -> None:
    (message, said), (other, nothing) = run_ranks(2, part_and_listen, "sparse", str(tmp_path), ["step", "keep"])
    assert (message, other, nothing) == ("", "", []) and len(said) == 1, said
    assert "s in the backward of 'sparse': rank 1 is in code of its own (parting_jobs.py:" in said[0]
    assert "), last in the lookup of 'sparse', call " in said[0]


@slow
@pytest.mark.parametrize("kind", ["dense", "fsdp"])
@pytest.mark.parametrize("case", ["save | step", "clip | step", "gather | step", "load | step", "step | save"])
def test_parted_where_torch_waits(kind: str, case: str, tmp_path: Path) -> None:
    """In the gradients' or weights' collectives of DDP and FSDP2, which no entry of ours is around."""
    replies = mortal_ranks(2, part, kind, str(tmp_path), case.split(" | "))
    for message, seconds in replies:
        assert message and seconds < TOLD_S, (message, seconds)
    assert sum(m.startswith("RanksError: the ranks have parted ways: ") for m, _ in replies) >= 1, replies


def test_a_rank_that_asks_alone_for_a_whole_tensor_is_seen_to_wait(tmp_path: Path) -> None:
    """It was in code of its own, for which the others wait: torch has frames of its library between."""
    assert run_ranks(2, wait_in_full_tensor, str(tmp_path)) == ["torch's full_tensor", ""]


@slow
@pytest.mark.parametrize("case", ["save | step | step | step", "step | step | step | between"])
def test_parted_on_four_ranks(case: str, tmp_path: Path) -> None:
    for message, seconds in mortal_ranks(4, part, "sparse", str(tmp_path), case.split(" | ")):
        assert "RanksError: the ranks have parted ways: " in message and seconds < TOLD_S, (message, seconds)


@pytest.mark.parametrize("case", ["save | clip", pytest.param("gather | load", marks=slow)])
def test_calls_that_meet_in_a_header_leave_the_groups_as_they_were(case: str, tmp_path: Path) -> None:
    calls = {
        "save": "save_checkpoint",
        "clip": "clip_grad_norm_",
        "gather": "full_state_dict",
        "load": "load_checkpoint",
    }
    first, second = (calls[name] for name in case.split(" | "))
    for message in run_ranks(2, meet_elsewhere, str(tmp_path), case.split(" | ")):
        assert f"rank 0 is in {first}" in message and f"rank 1 is in {second}" in message, message


def test_a_rank_that_is_slow_is_waited_for(tmp_path: Path) -> None:
    assert [message for message, _ in run_ranks(2, part, "sparse", str(tmp_path), ["step", "sleep"])] == ["", ""]


OPTIONS = ["options sync_interval 2", "options kernel torch", "options validate False"]


@pytest.mark.parametrize("change", ["plan", "role", "device", "init_parameters", "sharders", *OPTIONS])
@pytest.mark.sampled(2)
def test_arguments_are_compared_first(change: str) -> None:
    fails = "wrapping a model: rank 1: ShardError: device='meta' holds no values"
    expected = dict.fromkeys(OPTIONS, "ranks disagree on sharders")
    expected |= {"plan": "ranks disagree on whether a plan is given", "role": "ranks disagree on the mesh"}
    for error in run_ranks(2, wrap_with, change, expect=(PlanError,)):
        assert {**expected, "device": fails}.get(change, f"ranks disagree on {change}") in str(error), error


def test_optimizers_in_the_backward_pass_are_compared() -> None:
    """Each rank would train its part of a table by its own."""
    change = "optimizers in the backward pass"
    for error in run_ranks(2, wrap_with, change, expect=(PlanError,)):
        assert f"ranks disagree on {change}: rank 0 has 'sparse.weight: SGD(" in str(error)
        assert "lr=0.1" in str(error) and "lr=0.2" in str(error)


def test_a_planner_that_raises_on_one_rank() -> None:
    first, second = run_ranks(2, wrap_with_a_planner_that_raises, expect=(RanksError, ValueError))
    assert "rank 1 is in wrapping Sparse, after planning, where the planner raised ValueError: no plan today" in str(
        first
    )
    assert str(second) == "no plan today"


def test_what_fails_here_is_no_lost_rank() -> None:
    expected = "CheckpointError: asking: rank 1: RuntimeError: Connection closed by the database"
    assert run_ranks(2, together_where_one_raises) == [expected] * 2


def test_losses_that_reach_different_tables() -> None:
    for error in run_ranks(2, losses_of_different_tables, expect=RanksError):
        assert "rank 0: the backward of 'first'; rank 1: the backward of 'second'" in str(error), error


@slow
@pytest.mark.parametrize("kind", ["sparse", "dense", "fsdp"])
@pytest.mark.parametrize("death", ["kill", "stop"])
@pytest.mark.parametrize("other", ["step", "save", "save_in_background", "gather"])
def test_a_rank_that_is_gone_is_named(kind: str, death: str, other: str, tmp_path: Path) -> None:
    replies = mortal_ranks(2, part, kind, str(tmp_path), [other, death], timeout=30.0)
    message, seconds = replies[0]
    assert seconds < TOLD_S + 4.0, (message, seconds)  # the setting's
    if kind != "dense" or other != "step":  # else it is DDP that raises what gloo says
        assert message.startswith("PeerLost: ") and "rank 1 " in message, message


PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
import dmp
dist.init_process_group("gloo")
rank, case = dist.get_rank(), sys.argv[1]
started = time.monotonic()
try:
    if case == "wrap alone":
        if rank == 0:
            dmp.DistributedModelParallel(nn.Linear(2, 1))
        else:
            dist.barrier()
    elif case == "wrap against the end":
        if rank == 0:
            dmp.DistributedModelParallel(nn.Linear(2, 1))
    elif case == "one ends":
        model = dmp.DistributedModelParallel(nn.EmbeddingBag(20_000, 8), plan={"weight": dmp.row_wise()})
        for step in range(3):
            if rank == 1 and step == 2:
                sys.exit(1)
            model(torch.arange(6).view(2, 3)).sum().backward()
    elif case == "rank 0 is killed as it plans":
        import planner
        planner.ShardingPlanner.plan = lambda *_, **__: time.sleep(3) or os.kill(os.getpid(), signal.SIGKILL)
        dmp.DistributedModelParallel(nn.EmbeddingBag(20_000, 8))
    else:
        model = dmp.DistributedModelParallel(nn.EmbeddingBag(20_000, 8), plan={"weight": dmp.row_wise()})
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(3):
            model(torch.arange(6).view(2, 3)).sum().backward()
except Exception as error:
    print(f"{type(error).__name__}: {error}", round(time.monotonic() - started), flush=True)
"""


@slow
@pytest.mark.parametrize(
    ("case", "rank", "expected"),
    [
        ("wrap alone", 0, "RanksError: the ranks have parted ways: rank 0 is in wrapping Linear"),
        ("wrap against the end", 0, "PeerLost: wrapping a model: rank 1 is gone: "),
        ("one ends", 0, "PeerLost: rank 1 is gone: "),
        ("rank 0 is killed", 1, "PeerLost: what hosts the process group's store is gone (rank 0"),
        ("rank 0 is killed as it plans", 1, "PeerLost: what hosts the process group's store is gone (rank 0"),
    ],
)
def test_as_a_program_of_its_own(case: str, rank: int, expected: str, unused_port: int) -> None:
    """Rank 0 hosts the store."""
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, case],
            env={**environment, "RANK": str(each)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in range(2)
    ]
    told = [process.communicate(timeout=90) for process in processes]
    assert expected in told[rank][0], told
    assert int(told[rank][0].split()[-1]) < TOLD_S
    assert all(p.returncode in (0, 1, -signal.SIGKILL) for p in processes), told
    assert "ways: rank 0" in told[rank][1] or " gone" in told[rank][1], "nothing on stderr without logging configured"


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
