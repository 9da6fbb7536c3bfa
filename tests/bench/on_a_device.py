"""Lookup kernels on an accelerator: forward and update by torch's operators and by what triton compiles, in turns.

    .venv/bin/python tests/bench/on_a_device.py

Beside each stands the least time: bytes of distinct rows, results, gradients and ids at the speed of a large copy on
the same device. On a CPU, with TRITON_INTERPRET=1 and --small, it shows that it runs, and measures nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sharders.embedding.lookup.bank import Bank, RowRange
from sharders.embedding.lookup.kernels import Lookup, compile_lookup
from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.embedding.lookup.reads import Bags

KERNELS = ("torch", "triton")
KINDS = ("sgd", "rowwise_adagrad", "adam")
CELLS = ((64, 1, False), (64, 20, False), (128, 20, False), (128, 20, True))
"""Columns, most ids of a bag, and whether a few ids come most often."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Lookup kernels on an accelerator.")
    parser.add_argument("--small", action="store_true", help="few rows and samples")
    small = parser.parse_args().small
    found = torch.accelerator.current_accelerator(check_available=True)
    device = found if found is not None else torch.device("cpu")
    tables, rows, samples, rounds = (2, 100, 8, 1) if small else (26, 1_000_000, 16_384, 20)
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    speed = _speed(device, 1 << 16 if small else 1 << 28)
    print(f"{name}: {tables} tables of {rows} rows, {samples} samples, float32; a copy moves {speed / 1e9:.0f} GB/s")
    print(f"{'columns, most ids, update':34} {'torch':>17} {'triton':>17} {'least':>17}   ms of lookup, update")
    for width, longest, skewed in CELLS:
        ids, offsets = _ids(tables, rows, samples, longest, skewed)
        numbers = ids + torch.arange(tables).repeat_interleave(offsets[::samples].diff()) * rows
        distinct, results, read = len(numbers.unique()), samples * tables, 4 * len(ids)
        least = [(n * distinct + results) * 4 * width + read for n in (1, 2)]
        bags = Bags(ids.int().to(device), offsets.int().to(device))
        for kind in KINDS:
            lookups = [_lookup(tables, rows, width, kind, kernel, device) for kernel in KERNELS]
            grad = torch.randn(samples, tables * width, device=device)
            times = _in_turns(lookups, bags, grad, rounds, device)
            cells = [*times, [seconds / speed for seconds in least]]
            shown = "".join(f"{1e3 * forward:9.3f} {1e3 * update:7.3f} " for forward, update in cells)
            print(f"{width:4} {longest:3}{' skewed' * skewed} {kind:20}".ljust(34), shown)


def _ids(tables: int, rows: int, samples: int, longest: int, skewed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, longest + 1, (tables * samples,), generator=g)
    drawn = torch.rand(int(lengths.sum()), generator=g)
    ids = ((drawn**4 if skewed else drawn) * rows).long().clamp_(max=rows - 1)
    return ids, torch.tensor([0, *accumulate(lengths.tolist())])


def _lookup(tables: int, rows: int, width: int, kind: str, kernel: str, device: torch.device) -> Lookup:
    bank = Bank([[(rows, width)]] * tables, torch.float32, device, OptimizerSpec.make(kind, lr=0.01))
    bank.weights.uniform_(-0.1, 0.1)
    return compile_lookup(bank, [RowRange(chunk, 0, rows) for (chunk,) in bank.chunks], kernel=kernel)


def _in_turns(
    lookups: list[Lookup], bags: Bags, grad: torch.Tensor, rounds: int, device: torch.device
) -> list[tuple[float, float]]:
    """Of each, medians of seconds of lookup and of update with its order, after two rounds."""
    found: list[list[tuple[float, float]]] = [[] for _ in lookups]
    for _ in range(rounds + 2):
        for lookup, times in zip(lookups, found, strict=True):
            lookup.bank.step()
            forward = _timed(device, lambda of=lookup: of.pooled(bags))
            times.append((forward, _timed(device, lambda of=lookup: of.update_pooled(grad, bags))))
    return [tuple(median(part) for part in zip(*times[2:], strict=True)) for times in found]  # type: ignore[misc]


def _timed(device: torch.device, call: Callable[[], object]) -> float:
    _wait(device)
    began = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _speed(device: torch.device, elements: int) -> float:
    """Bytes read and written in a second by a copy."""
    source, target = torch.ones(elements, device=device), torch.ones(elements, device=device)
    return 2 * 4 * elements / min(_timed(device, lambda: target.copy_(source)) for _ in range(5))


if __name__ == "__main__":
    main()
