"""What a rank holds above its shards while it saves or loads 256 MB, and how much it reads of them."""

from __future__ import annotations

from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import torch.distributed as dist

import dmp
from tests.bench.report import Result
from tests.bench.state_peak import peak_above
from tests.bench.state_workload import FORMATS, LAYOUTS, OURS, RANKS, SAVED, bytes_read, own_bytes, wrapped
from tests.ranks import close_pools, run_ranks

MB, GOAL_MB = 1e6, 32.0


class Taken(NamedTuple):
    """Bytes, of one rank and format."""

    held: int
    """Above what was there before, at most."""

    read: int
    own: int
    """Of the rank's chunks."""


def run(quick: bool, folder: Path) -> list[Result]:
    """The rank that holds most; on the layout that was saved, where a rank needs a quarter, the one that reads most."""
    results: list[Result] = []
    for layout in LAYOUTS[:2]:
        close_pools()  # what earlier calls have left in the allocator would hide what is held
        saved = run_ranks(RANKS, peak_of_save, str(folder), layout, timeout=300)
        of_ranks = run_ranks(RANKS, peaks_of_loads, str(folder), layout, timeout=300)
        results.append(held(f"memory above own shards, save, ours, {layout}", saved))
        for i, kind in enumerate(FORMATS):
            results.append(held(f"memory above own shards, load, {kind.name}, {layout}", [r[i] for r in of_ranks]))
        for i, kind in enumerate(FORMATS) if layout == SAVED else ():
            most = max((r[i] for r in of_ranks), key=lambda taken: taken.read)
            name = f"read for a quarter of the rows, {kind.name}"
            ratio = most.own / max(most.read, 1)
            results.append(Result(name, "MB", most.own / MB, most.read / MB, ratio, None))
            print(results[-1], flush=True)
    close_pools()
    return results


def held(name: str, of_ranks: list[int] | list[Taken]) -> Result:
    """The largest."""
    most = max(taken if isinstance(taken, int) else taken.held for taken in of_ranks)
    result = Result(name, "MB", None, most / MB, None, GOAL_MB)
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


def peaks_of_loads(name: str, layout: str) -> list[Taken]:
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
        before = bytes_read()
        dmp.load_checkpoint(kind.path(folder), model)
        read = bytes_read() - before
        dist.barrier()
        _, peak = peak_above(lambda: dmp.load_checkpoint(kind.path(folder), model))  # noqa: B023
        results.append(Taken(peak, read, own_bytes(model)))
    return results
