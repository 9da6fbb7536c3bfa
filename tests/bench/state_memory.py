"""What a rank holds above its shards while it saves or loads 256 MB."""

from __future__ import annotations

from pathlib import Path
from shutil import rmtree
from typing import Any

import torch.distributed as dist

import dmp
from tests.bench.report import Result
from tests.bench.state_peak import peak_above
from tests.bench.state_workload import FORMATS, LAYOUTS, OURS, RANKS, wrapped
from tests.ranks import close_pools, run_ranks

MB, GOAL_MB = 1e6, 32.0


def run(quick: bool, folder: Path) -> list[Result]:
    """The rank that holds most, on the layout that was saved and on one that takes parts of rows."""
    results: list[Result] = []
    for layout in LAYOUTS[:2]:
        close_pools()  # what earlier calls have left in the allocator would hide what is held
        saved = run_ranks(RANKS, peak_of_save, str(folder), layout, timeout=300)
        of_ranks = run_ranks(RANKS, peaks_of_loads, str(folder), layout, timeout=300)
        results.append(held(f"memory above own shards, save, ours, {layout}", saved))
        for i, kind in enumerate(FORMATS):
            results.append(held(f"memory above own shards, load, {kind.name}, {layout}", [r[i] for r in of_ranks]))
    close_pools()
    return results


def held(name: str, of_ranks: list[int]) -> Result:
    """The largest."""
    result = Result(name, "MB", None, max(of_ranks) / MB, None, GOAL_MB)
    print(result, flush=True)
    return result


def peak_of_save(name: str, layout: str) -> int:
    """On each rank: the bytes held at most, after a save of tiny tables."""
    folder = Path(name)
    small, model = (wrapped(OURS.work(tiny), layout) for tiny in (True, False))
    dmp.load_checkpoint(OURS.path(folder), model)
    dmp.save_checkpoint(folder / "small", small)
    dist.barrier()
    _, peak = peak_above(lambda: dmp.save_checkpoint(folder / "saved", model))
    dist.barrier()
    if dist.get_rank() == 0:
        for path in ("saved", "small"):
            rmtree(folder / path)
    return peak


def peaks_of_loads(name: str, layout: str) -> list[int]:
    """On each rank and for each format, after a load of tiny tables."""
    folder = Path(name)
    models: dict[int, tuple[Any, Any]] = {}
    results = []
    for kind in FORMATS:
        if kind.tables not in models:
            models[kind.tables] = wrapped(kind.work(tiny=True), layout), wrapped(kind.work(), layout)
            for chunk in models[kind.tables][1].parameters():
                chunk.detach().fill_(0.0)  # what the shards take is there before
        small, model = models[kind.tables]
        dmp.load_checkpoint(kind.path(folder, tiny=True), small)
        dmp.load_checkpoint(kind.path(folder), model)
        dist.barrier()
        _, peak = peak_above(lambda: dmp.load_checkpoint(kind.path(folder), model))  # noqa: B023
        results.append(peak)
    return results
