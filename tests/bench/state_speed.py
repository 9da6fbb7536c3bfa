"""Saving and loading a 256 MB table on four ranks, beside `cp` of the same bytes on the same disk.

In each round `cp` copies what is loaded, or what was saved, and then we load or save (or the other way round); the page
cache has it for both. Ours puts what it saves on the disk before it returns, so there `cp` is followed by `sync -d` of
each file; a load is held against `cp` alone. A call's start-up, which is what it takes on a table of 256 rows, is no
part of the ratio: the quickest is subtracted, and shown in rows of its own.
"""

from __future__ import annotations

import gc
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import dmp
from tests.bench.report import Result
from tests.bench.rounds import both, quartiles, slowest
from tests.bench.state_workload import FORMATS, LAYOUTS, OURS, RANKS, Format, check, chunks_of, size_of, wrapped
from tests.ranks import run_ranks

ROUNDS, QUICK_ROUNDS, STARTS = 7, 2, 3
GOAL, MB = 0.8, 1e6
Times = tuple[list[float], list[float], list[float]]  # cp, ours, ours on tiny tables


def run(quick: bool, folder: Path) -> list[Result]:
    """Our save from each layout, then the load of each format into each layout."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    results: list[Result] = []
    for layout in LAYOUTS:
        times = run_ranks(RANKS, time_saves, str(folder), layout, rounds, timeout=300)
        results += shown(f"save {size_of(OURS.path(folder)) / MB:.0f} MB", f"ours, {layout}, beside cp and sync", times)
    for layout in LAYOUTS:
        of_ranks = run_ranks(RANKS, time_loads, str(folder), layout, rounds, timeout=300)
        for i, kind in enumerate(FORMATS):
            what = f"load {size_of(kind.path(folder)) / MB:.0f} MB"
            results += shown(what, f"{kind.name}, {layout}, beside cp", [times[i] for times in of_ranks])
    return results


def shown(what: str, how: str, of_ranks: Sequence[Times]) -> list[Result]:
    """The ratio without start-up, and the start-up."""
    copied, ours, tiny = (slowest([times[i] for times in of_ranks]) for i in range(3))
    start = min(tiny)
    ours = [seconds - start for seconds in ours]
    results = [
        Result(f"{what}, {how}", "s", *both(copied, ours, 1.0), GOAL, quartiles(copied, ours)),
        Result(f"start-up of: {what.partition(' ')[0]}, {how.rpartition(',')[0]}", "s", None, start, None, None),
    ]
    print(*results, sep="\n", flush=True)
    return results


def time_saves(name: str, layout: str, rounds: int) -> Times:
    """On each rank: seconds of each round, after one that does not count."""
    folder = Path(name)
    models = [wrapped(OURS.work(tiny), layout) for tiny in (False, True)]
    dmp.load_checkpoint(OURS.path(folder), models[0])
    source, copied, saved, small = OURS.path(folder), folder / "copy", folder / "saved", folder / "small"

    def save(path: Path, model: Any) -> Callable[[], Any]:
        return lambda: dmp.save_checkpoint(path, model)

    def copy() -> None:
        cp(source, copied, sync=True)

    return in_turns([(copy, copied), (save(saved, models[0]), saved), (save(small, models[1]), small)], rounds)


def time_loads(name: str, layout: str, rounds: int) -> list[Times]:
    """On each rank: for each format the seconds of each round, after one that is checked and does not count."""
    folder = Path(name)
    models: dict[tuple[int, bool], Any] = {}
    return [load_one(folder, layout, kind, rounds, models) for kind in FORMATS]


def load_one(folder: Path, layout: str, kind: Format, rounds: int, models: dict[tuple[int, bool], Any]) -> Times:
    """One format; models of as many tables are made once."""
    for tiny in (False, True):
        if (kind.tables, tiny) not in models:
            models[kind.tables, tiny] = wrapped(kind.work(tiny), layout)
    model, small = (models[kind.tables, tiny] for tiny in (False, True))
    for chunk in chunks_of(model).values():
        chunk.fill_(torch.nan)
    copied = folder / "copy"
    times = in_turns(
        [
            (lambda: cp(kind.path(folder), copied, sync=False), copied),
            (lambda: dmp.load_checkpoint(kind.path(folder), model), None),
            (lambda: dmp.load_checkpoint(kind.path(folder, tiny=True), small), None),
        ],
        rounds,
    )
    check(model, folder)
    return times


def in_turns(calls: Sequence[tuple[Callable[[], Any], Path | None]], rounds: int) -> Times:
    """Seconds of `cp` (rank 0 alone), of ours and of ours on tiny tables, several in a round; what they write goes."""
    times: Times = ([], [], [])
    for i in range(-1, rounds):
        for which in (0, 1, *[2] * STARTS) if i % 2 == 0 else (*[2] * STARTS, 1, 0):
            call, wrote = calls[which]
            gc.collect()
            dist.barrier()
            start = perf_counter()
            if which or dist.get_rank() == 0:
                call()
            seconds = perf_counter() - start
            dist.barrier()
            if dist.get_rank() == 0 and wrote is not None:
                shutil.rmtree(wrote) if wrote.is_dir() else wrote.unlink()
            if i >= 0:
                times[which].append(seconds)
    return times


def cp(source: Path, target: Path, sync: bool) -> None:
    """Every byte copied, where the file system could share them; with `sync`, and on the disk."""
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
    if sync:
        subprocess.run(["sync", "-d", *(p for p in target.rglob("*") if p.is_file())], check=True)
