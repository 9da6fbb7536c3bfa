"""`make bench`: every benchmark with its goal beside it; see BENCHMARKS.md.

A figure means something beside another from the same run only: the machine may be shared.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import warnings
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.bench import (
    ablation,
    dlrm,
    fixed_cost,
    imports,
    kernels,
    memory,
    observed,
    phases,
    pipeline,
    predicted,
    state,
    step,
    transformer,
    wrap,
)
from tests.bench.report import HEADER, markdown, rewrite
from tests.ranks import close_pools

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = {
    "step": step.run,
    "kernels": kernels.run,
    "ablation": ablation.run,
    "fixed_cost": fixed_cost.run,
    "dlrm": dlrm.run,
    "pipeline": pipeline.run,
    "wrap": wrap.run,
    "memory": memory.run,
    "imports": imports.run,
    "predicted": predicted.run,
    "observed": observed.run,
    "transformer": transformer.run,
    "state": state.run,
}
"""What each finds goes into the section of its name in BENCHMARKS.md, with the text that may come with it."""
# glibc keeps what was freed, for both sides alike: else it maps each large buffer anew, which costs TorchRec more.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def machine() -> str:
    """What the figures are of, in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores of {model}, load average {os.getloadavg()[2]:.1f} over the last 15 minutes"


def main() -> int:
    """Run what was asked for; 1 when `--strict` and a goal is missed."""
    parser = argparse.ArgumentParser(description="Benchmarks with their goals; `make bench` runs them all.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--strict", action="store_true", help="end with status 1 when a goal is missed")
    parser.add_argument("--quick", action="store_true", help="few rounds, for a first look")
    parser.add_argument("--profile", action="store_true", help="only show where our time goes")
    parser.add_argument("--write", action="store_true", help="put the tables into BENCHMARKS.md")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"expected some of {list(BENCHMARKS)}; got {unknown}")
    warnings.simplefilter("ignore")  # of the libraries compared with; tests make ours errors
    if args.write and args.quick:
        parser.error("few rounds are for a first look: --write goes without --quick")
    if not set(ALLOCATOR) <= set(os.environ):  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})
    if args.profile:
        phases.run()
        return 0
    print(HEADER)
    results = []
    for name in args.names or BENCHMARKS:
        print(f"{name}: {machine()}", flush=True)
        found = BENCHMARKS[name](args.quick)
        found, text = found if isinstance(found, tuple) else (found, "")
        results += found
        if args.write:
            head = f"{date.today()}, {machine()}, torch {torch.__version__}:"
            rewrite(ROOT / "BENCHMARKS.md", f"{head}\n\n{markdown(found)}\n\n{text}".strip(), name)
    close_pools()
    missed, undecided = ([r for r in results if r.verdict == verdict] for verdict in ("MISSED", "UNDECIDED"))
    goals = sum(bool(r.verdict) for r in results)
    print(f"\n{len(missed)} of {goals} goals missed, {len(undecided)} undecided")
    print("\n".join(str(r) for r in missed + undecided))
    return 1 if args.strict and missed else 0


if __name__ == "__main__":
    sys.exit(main())
