"""Time of `import dmp` beside `import torch`, each in a fresh interpreter, in turns; from bytecode, as installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.bench.report import Result

ROOT = Path(__file__).resolve().parents[2]
RUNS, ALLOWED = 7, 1.1


def run(quick: bool) -> list[Result]:
    """The quickest of several runs of each: what is above it is the machine's."""
    times: dict[str, list[float]] = {"torch": [], "dmp": []}
    _seconds("dmp")  # writes the bytecode that an installation has, of torch and of us
    for _ in range(3 if quick else RUNS):
        for module in times:
            times[module].append(_seconds(module))
    torch_s, dmp_s = min(times["torch"]), min(times["dmp"])
    results = [
        Result("import dmp, beside import torch", "s", torch_s, dmp_s, torch_s / dmp_s, round(1 / ALLOWED, 3)),
    ]
    print(results[0], flush=True)
    return results


def _seconds(module: str) -> float:
    code = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return float(done.stdout)
