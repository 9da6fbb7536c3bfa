"""Programs as a user runs them: `run_program(["train.py", "--steps", "8"], processes=2)`, alone or by torchrun.

An interpreter takes seconds to import torch and TorchRec, and torchrun's own agent as long again. So a program is
forked from the server of tests/ranks.py, which has them imported: a `__main__` of its own, with the arguments, folder
and environment that it would have had, and its own end. Where the variable FRESH_INTERPRETERS is set (`make test-all`
does), it is a fresh interpreter, and where there are several, torchrun's.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist

from tests.ranks import _fork_server

ROOT = Path(__file__).resolve().parents[1]
IS_FRESH = bool(os.environ.get("FRESH_INTERPRETERS"))


def run_program(
    arguments: Sequence[str],
    processes: int = 1,
    *,
    cwd: Path = ROOT,
    path: Sequence[Path] = (),
    is_fresh: bool = IS_FRESH,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end.

    Args:
        arguments: those of `python`: a file, "-c" and the text, or "-m" and a module; then the program's own.
        processes: as torchrun starts them, where there are several.
        path: what comes before the project on the path of modules.
        is_fresh: in interpreters of their own.
    """
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))}
    run = _fresh if is_fresh else _forked
    return run(arguments, processes, cwd, environment, timeout)


def _fresh(
    arguments: Sequence[str], processes: int, cwd: Path, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    return subprocess.run(
        [sys.executable, *launcher, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def _forked(
    arguments: Sequence[str], processes: int, cwd: Path, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    if processes > 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the agent's
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "none"}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        started = []
        for rank in range(processes):
            of_rank = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) if processes > 1 else {}
            given = (list(arguments), str(cwd), {**environment, **of_rank}, [str(file) for file in files])
            started.append(_fork_server().Process(target=_become, args=given))
            started[-1].start()
        deadline = time.monotonic() + timeout
        running = {process.sentinel: process for process in started}
        code = 0
        while running and not code:
            ended = wait([*running], max(0.0, deadline - time.monotonic()))
            for sentinel in ended:
                process = running.pop(sentinel)  # type: ignore[index]
                process.join()
                code = code or process.exitcode or 0
            if not ended:
                break
        is_late = bool(running) and not code
        for process in running.values():  # as torchrun does where one has failed
            process.kill()
            process.join()
        said = [file.read_text() if file.exists() else "" for file in files]
    if is_late:
        raise subprocess.TimeoutExpired([*arguments], timeout, *said)
    return subprocess.CompletedProcess([*arguments], code if processes == 1 else min(abs(code), 1), *said)


def _is_kept(name: str, file: str) -> bool:
    return "site-packages" in file or name.partition(".")[0] in ("dmp", "sharders", "planner")


def _become(arguments: list[str], cwd: str, environment: dict[str, str], files: list[str]) -> None:
    """What `python ARGUMENTS` does once it has imported what the server has."""
    for number, file in enumerate(files, 1):
        with open(file, "ab") as to:
            os.dup2(to.fileno(), number)
    os.chdir(cwd)
    os.environ.update(environment)
    for name in {*os.environ} - {*environment, "GLOO_SOCKET_IFNAME"}:
        del os.environ[name]
    for name, module in [*sys.modules.items()]:  # of tests and examples: of a program's own it would take another's
        file = getattr(module, "__file__", None)
        if file and Path(file).is_relative_to(ROOT) and not _is_kept(name, file):
            del sys.modules[name]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    installed = [entry for entry in sys.path if not Path(entry or cwd).is_relative_to(ROOT) or "site-packages" in entry]
    sys.path[:] = [*os.environ["PYTHONPATH"].split(os.pathsep), *installed]
    try:
        if arguments[0] == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        elif arguments[0] == "-m":
            sys.path.insert(0, cwd)
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str((Path(cwd) / arguments[0]).resolve().parent))
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which a process of multiprocessing leaves out
