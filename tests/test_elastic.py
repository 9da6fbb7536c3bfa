"""A training run that loses a machine, or gains one, goes on from its last checkpoint with the ranks that there are."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dmp import ShardingEnv
from tests import elastic_run
from tests.elastic_run import SAVE_EVERY, STEPS
from tests.programs import IS_FRESH
from tests.ranks import _fork_server
from tests.survival_jobs import GLOBAL_BATCH, dense_optimizer, make, train

SCRIPT = Path(__file__).with_name("elastic_run.py")
PATIENCE_S = 180.0
LAST_CALL_S, KEEP_ALIVE_S, MISSED = 1, 1, 6  # in whole seconds: what torchrun's rendezvous takes; cores may be busy


def agent(name: str, folder: str, store: str, script: list[str], environment: dict[str, str]) -> None:
    """What `torchrun` runs: one machine's agent, with one worker. This one forks what it would else have to import."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args, run

    os.setsid()
    with open(os.path.join(folder, f"{name}.err"), "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment, AGENT=name)
    args = parse_args(
        [
            "--nnodes=1:2",
            "--nproc-per-node=1",
            "--max-restarts=3",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={store}",
            "--rdzv-id=elastic",
            "--local-addr=127.0.0.1",
            f"--rdzv-conf=is_host=false,last_call_timeout={LAST_CALL_S},keep_alive_interval={KEEP_ALIVE_S},"
            f"keep_alive_max_attempt={MISSED}",
            *script,
        ]
    )
    if IS_FRESH:
        run(args)
    else:
        config, _, _ = config_from_args(args)
        config.start_method = "fork"
        elastic_launch(config, elastic_run.main)(Path(folder), script[2:])


class Agents:
    """Agents of one job, which meet in a store of this process: it outlives each of them."""

    def __init__(self, folder: Path, holds: list[str], environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self.script = [str(SCRIPT), str(folder), *holds]
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: dict[str, BaseProcess] = {}

    def start(self, name: str) -> None:
        store = f"127.0.0.1:{self.store.port}"
        settings = (name, str(self.folder), store, self.script, self.environment)
        self.processes[name] = _fork_server().Process(target=agent, args=settings)
        self.processes[name].start()

    def lines(self, event: str) -> list[dict[str, Any]]:
        log = self.folder / "log"
        text = log.read_text() if log.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if line["event"] == event]

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            ended = [name for name, process in self.processes.items() if process.exitcode]
            if ended or time.monotonic() > deadline:
                texts = [f"---- {p.name} ----\n{p.read_text()[-5000:]}" for p in sorted(self.folder.glob("*.err"))]
                pytest.fail(f"waiting for {what}; agents that failed: {ended}\n" + "\n".join(texts))
            time.sleep(0.05)

    def lose(self, name: str) -> None:
        """The machine is gone: agent and worker, at once and without a word."""
        process = self.processes.pop(name)
        process.kill()
        process.join()
        os.kill(self.lines("hold")[-1]["pid"], signal.SIGKILL)

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()  # so that it ends its worker
        for process in self.processes.values():
            process.join(20)
            process.kill()
            process.join()


@contextmanager
def job(folder: Path, holds: list[str], **environment: str) -> Iterator[Agents]:
    agents = Agents(folder, holds, environment)
    try:
        yield agents
    finally:
        agents.close()


def assert_one_run(agents: Agents, lives: dict[tuple[int, int], range]) -> None:
    """Each life made these steps, on the samples of each, and all of it comes to what one process would have done.

    Args:
        lives: number of ranks and first step -> the steps, in order of time.
    """
    steps = agents.lines("step")
    assert list(dict.fromkeys(tuple(line["life"]) for line in steps)) == list(lives)
    module = make()
    optimizer = dense_optimizer(module)
    expected = train(module, optimizer, range(STEPS), ShardingEnv.single())
    for (size, _), made in lives.items():
        mine = [line for line in steps if line["life"] == [size, made[0]]]
        assert [line["step"] for line in mine if line["rank"] == 0] == list(made)
        for step in made:
            lines = sorted((line for line in mine if line["step"] == step), key=lambda line: line["rank"])
            assert [line["rank"] for line in lines] == list(range(size))
            samples = [sample for line in lines for sample in range(*line["samples"])]
            assert samples == list(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))
            assert sum(line["loss"] for line in lines) / size == pytest.approx(expected[step], abs=1e-5)
    weights = torch.load(agents.folder / "weights.pt", weights_only=True)
    assert weights.keys() == module.state_dict().keys()
    for name, value in module.state_dict().items():
        assert (weights[name] - value).abs().max() < 1e-5, name
    assert set(os.listdir(agents.folder / "checkpoints")) == {f"step-{STEPS - SAVE_EVERY}", f"step-{STEPS}"}


def plan_of(agents: Agents, size: int) -> set[str]:
    """Layouts of the tables where there were that many ranks; the planner made them, the same on each rank."""
    lines = [line for line in agents.lines("start") if line["life"][0] == size]
    assert lines and all(line["planned"] and line["plan"] == lines[0]["plan"] for line in lines)
    return set(lines[0]["plan"].values())


def test_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    with job(tmp_path, ["2:7:b"]) as agents:
        agents.start("a")
        agents.start("b")
        agents.wait("two ranks in the middle of step 7", lambda: agents.lines("hold"))
        agents.lose("b")
        agents.wait("the end", lambda: agents.processes["a"].exitcode == 0)
    assert [line["loaded"] for line in agents.lines("start")] == [None, None, "step-6"]
    assert plan_of(agents, 2) == {"table_wise(0)", "table_wise(1)"}
    assert plan_of(agents, 1) == {"table_wise(0)"}
    assert_one_run(agents, {(2, 0): range(7), (1, 6): range(6, STEPS)})


@pytest.mark.slow
def test_goes_on_with_more_ranks(tmp_path: Path) -> None:
    """Two, one, two: what is lost comes back.

    Agents that share the rendezvous's store tell a newcomer nothing after the first round (torch 2.13): it would wait
    for the address of rank 0 until it gives up.
    """
    with job(tmp_path, ["2:4:b", "1:8:a"], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as agents:
        agents.start("a")
        agents.start("b")
        agents.wait("two ranks in the middle of step 4", lambda: agents.lines("hold"))
        agents.lose("b")
        agents.wait("one rank before step 8", lambda: len(agents.lines("hold")) == 2)
        agents.start("c")
        agents.wait("the end", lambda: all(process.exitcode == 0 for process in agents.processes.values()))
    loaded = sorted(line["loaded"] or "" for line in agents.lines("start"))
    assert loaded == ["", "", "step-3", "step-6", "step-6"]
    assert_one_run(agents, {(2, 0): range(4), (1, 3): range(3, 8), (2, 6): range(6, STEPS)})
