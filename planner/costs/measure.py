"""What calibration measures on every rank, and of which tables and batches: raw times, no figures yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dmp import Layout, ShardingEnv, column_wise, data_parallel, row_wise, table_wise

_COPIED_BYTES, _MATRIX = 1 << 26, 512
_LARGE_BYTES = 24 << 20  # of a table that is in no cache, with three others
EXCHANGED_BYTES = (0, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 23)
"""What a rank has for each other one."""
SUMMED_BYTES = (1 << 8, 1 << 10, 1 << 12, 1 << 18, 1 << 21, 1 << 22, 1 << 23, 1 << 24)
"""Of what a collective of dense weights sums: of the small and of the large enough that one bad time is outvoted."""
OPTIMIZERS = {"plain": "sgd", "rowwise": "rowwise_adagrad", "pointwise": "adagrad"}
"""Of each kind of state, the one that is measured."""


@dataclass(frozen=True)
class ProbeShape:
    """Arguments of a probe of the sharders': tables, and what is read of them."""

    tables: tuple[tuple[int, int], ...]
    layouts: tuple[Layout, ...]
    batch_size: int
    bag: int
    optimizer: str
    named: int = 0


class Probes(NamedTuple):
    """What times the sharders' data path: see the functions of these names in `sharders.embedding.probe`."""

    shape: type[Any]
    means: Callable[..., str]
    exchanges: Callable[..., list[float]]
    lookups: Callable[..., list[tuple[float, float]]]
    steps: Callable[..., list[tuple[float, float, float]]]


@dataclass(frozen=True)
class Measured:
    """Seconds of everything, the slowest rank's.

    Args:
        means: what the data path used, in words.
        exchanged: (kind, bytes for each other rank, seconds): `even` where all send, `one` where the first rank alone.
        summed: (bytes, seconds) of all-reduces, as of dense weights' gradients.
        lookups: by optimizer, of each of `lookup_probes(...)`: forward, update.
        steps: of each of `step_probes(...)`: ids, results, gradients.
        copy: of a byte, from memory to memory.
        product: of a multiplication and an addition in a product of matrices.
    """

    means: str
    exchanged: list[tuple[str, int, float]]
    summed: list[tuple[int, float]]
    lookups: dict[str, list[tuple[float, float]]]
    steps: list[tuple[float, float, float]]
    copy: float
    product: float


def lookup_probes(optimizer: str) -> list[ProbeShape]:
    """Few and many ids for a bag, narrow and wide rows, rows that come once and again and again."""
    reads = ((2048, 1), (1024, 16))
    shapes = [
        (4, rows, dim, *read)
        for read, dim in product(reads, (16, 64, 128))
        for rows in (1_000, _LARGE_BYTES // (4 * dim))
    ]
    shapes += [(24, 50_000, 32, 128, 1), (24, 50_000, 32, 16, 1), (2, 50_000, 32, 16, 1), (2, 100_000, 64, 2048, 3)]
    few = [(8, 50_000, 64, 2048, 1, 300), (8, 25_000, 128, 2048, 1, 300)]
    return [
        ProbeShape(((rows, dim),) * tables, (table_wise(0),) * tables, batch, bag, optimizer, *named)
        for tables, rows, dim, batch, bag, *named in [*shapes, *few]
    ]


def step_probes(ranks: int) -> list[ProbeShape]:
    """Each layout, and all together, with small and large batches, few and many tables, few and many ids; ids that name
    few rows of a table, as real ones do, where rows that are there cost more than rows that there is room for.

    Two tables are large enough that copies of them are summed whole, by an all-reduce: all others' go by rows.
    """
    large, small = 60_000, 2_000

    def one(i: int) -> Layout:
        return table_wise(i % ranks)

    def pairs(i: int) -> Layout:
        return table_wise(i // 2 % ranks)

    def scattered(i: int) -> Layout:
        return table_wise((i * i // 3 + i // 4) % ranks)

    def rows(i: int) -> Layout:
        return row_wise()

    def columns(i: int) -> Layout:
        return column_wise(list(range(ranks)))

    def copies(i: int) -> Layout:
        return data_parallel()

    sizes = (  # layouts; tables, rows and dim or some in turn, samples, ids of a bag, rows that they name if not all
        ((one,), (8, large, 16, 16, 1), (48, large, 16, 16, 1), (12, large, 64, 1536, 1), (24, large, 32, 512, 1)),
        ((one,), (12, large, 32, 384, 12), (4, large, 128, 768, 3), (12, small, 32, 256, 24)),
        ((rows,), (4, large, 16, 16, 1), (24, large, 16, 16, 1), (8, large, 64, 1536, 1), (20, large, 32, 512, 1)),
        ((rows,), (8, large, 32, 384, 12), (4, large, 128, 768, 3), (12, small, 32, 256, 24)),
        ((columns,), (24, large, 16, 16, 1), (8, large, 64, 1536, 1), (8, large, 64, 384, 12)),
        ((copies,), (4, small, 16, 16, 1), (24, small // 10, 16, 16, 1), (8, small, 64, 1536, 1)),
        ((copies,), (12, small, 32, 384, 4), (4, large // 6, 16, 256, 1)),
        ((copies,), (12, 3 * small, 32, 512, 1), (8, 4 * small, 64, 2048, 1)),
        ((copies,), (8, small, (16, 32, 64, 128), 16, 1), (12, 3 * small, (16, 32, 64, 128), 512, 1)),
        ((scattered,), (16, large, 64, 768, 1), (20, large, 32, 256, 6)),
        ((scattered, columns, scattered), (16, large, (32, 128), 1024, 1)),
        ((one, rows, columns), (12, large, 32, 768, 1), (12, large, 64, 256, 8)),
        ((rows, one, copies, columns), (16, 2 * small, 32, 512, 2)),
        ((one, rows), (8, large, 16, 16, 1), (12, large, 64, 512, 2)),
        ((copies, rows), (8, small, 16, 16, 1)),
        ((rows,), (16, large, (16, 32, 64, 128), 16, 1), (16, large, (16, 32, 64, 128), 512, 1)),
        ((one,), (16, large, (16, 32, 64, 128), 512, 1)),
        ((rows, one, columns, copies, one), (20, large // 2, (16, 32, 64, 128), 512, 1)),
        ((one,), (24, large, 64, 2048, 1), (24, large, 32, 2048, 1)),
        ((rows,), (24, large, 64, 2048, 1), (12, (small // 5, large), 64, 1024, 1)),
        ((copies,), (24, small, 64, 2048, 1), (24, (small // 20, small // 5), 64, 2048, 1)),
        ((copies,), (12, (small // 5, 2 * small, large // 2), 64, 1024, 1)),
        ((copies,), (1, 66_000, 128, 2048, 33), (1, 258_000, 32, 2048, 123)),
        ((copies, rows), (24, (small, large), 64, 2048, 1), (12, (small, large), 16, 2048, 1)),
        ((copies, pairs), (24, (small, large), 64, 2048, 1), (12, (5 * small, large), 128, 768, 1)),
        ((rows, pairs), (24, large, 64, 2048, 1)),
        ((copies, rows, one, scattered), (24, (small, large), 64, 1024, 1)),
        (
            (copies,),
            (24, 7 * small, 64, 2048, 1, 150),
            (12, 7 * small, 128, 1024, 1, 100),
            (12, large, 16, 2048, 1, 400),
        ),
        ((copies, one, one), (24, 7 * small, 64, 2048, 1, 150)),
        ((one,), (24, 7 * small, 64, 2048, 1, 150), (12, 7 * small, 128, 1024, 1, 100)),
        ((rows,), (16, 7 * small, 64, 1024, 1, 150)),
    )
    return [
        ProbeShape(
            tuple((counts[i % len(counts)], dims[i % len(dims)]) for i in range(tables)),
            tuple(layouts[i % len(layouts)](i) for i in range(tables)),
            batch,
            bag,
            "rowwise_adagrad",
            *named,
        )
        for layouts, *of_layouts in sizes
        for tables, num_rows, dim, batch, bag, *named in of_layouts
        for dims, counts in [(_in_turn(dim), _in_turn(num_rows))]
    ]


def _in_turn(numbers: Any) -> tuple[int, ...]:
    return numbers if isinstance(numbers, tuple) else (numbers,)


def measure(device_type: str, rounds: int, probes: Probes) -> Measured:
    """On every rank: time everything. Called by `on_ranks`.

    Args:
        rounds: of the steps; other things are measured as often as takes about as long.
    """
    ranks = dist.get_world_size()
    env = ShardingEnv.from_mesh(init_device_mesh(device_type, (ranks,), mesh_dim_names=("dp",)))

    def made(shapes: Sequence[ProbeShape]) -> list[Any]:
        return [probes.shape(**vars(shape)) for shape in shapes]

    cases = [] if ranks == 1 else list(product(("even", "one"), EXCHANGED_BYTES))
    of_cases = probes.exchanges([_sends(kind, size // 4, ranks) for kind, size in cases], env, rounds)
    exchanged = [(*case, seconds) for case, seconds in zip(cases, of_cases, strict=True)]
    kernels: dict[str, list[tuple[float, float]]] = {}
    for optimizer in OPTIMIZERS.values():
        now = probes.lookups(made(lookup_probes(optimizer)), env.device, max(5, rounds // 4))
        seconds = torch.tensor(now, dtype=torch.float64, device=env.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        kernels[optimizer] = [(a, b) for a, b in seconds.tolist()]
    of_steps = probes.steps(made(step_probes(ranks)), env, rounds)
    summed = [] if ranks == 1 else _sums(env.device, rounds)
    return Measured(probes.means(env), exchanged, summed, kernels, of_steps, *_device_speeds(env.device, rounds))


def _sends(kind: str, count: int, ranks: int) -> list[list[int]]:
    """What each rank has for each: as much for each other, or only the first has some."""
    everyone = range(ranks)
    return [[count if to != rank and (kind == "even" or rank == 0) else 0 for to in everyone] for rank in everyone]


def _sums(device: torch.device, rounds: int) -> list[tuple[int, float]]:
    """Bytes and seconds of all-reduces: the slowest rank's, the quickest of several."""
    quickest = torch.full((len(SUMMED_BYTES),), float("inf"), dtype=torch.float64)
    tensors = [torch.zeros(size // 4, device=device) for size in SUMMED_BYTES]
    for _ in range(max(5, rounds // 4)):
        times = []
        for tensor in tensors:
            dist.barrier()
            start = _clock(device)
            dist.all_reduce(tensor)
            times.append(_clock(device) - start)
        now = torch.tensor(times, dtype=torch.float64, device=device)
        dist.all_reduce(now, dist.ReduceOp.MAX)
        quickest = quickest.minimum(now.cpu())
    return list(zip(SUMMED_BYTES, quickest.tolist(), strict=True))


def _device_speeds(device: torch.device, rounds: int) -> tuple[float, float]:
    """Seconds of a byte copied, and of a flop: all ranks at once."""
    values, matrix = torch.zeros(_COPIED_BYTES // 4, device=device), torch.zeros(_MATRIX, _MATRIX, device=device)
    out, product_out = torch.empty_like(values), torch.empty_like(matrix)
    quickest = torch.full((2,), float("inf"), dtype=torch.float64)
    for _ in range(max(3, rounds // 4)):
        times = [_clock(device)]
        out.copy_(values)
        times.append(_clock(device))
        torch.mm(matrix, matrix, out=product_out)
        times.append(_clock(device))
        now = torch.tensor([b - a for a, b in pairwise(times)], dtype=torch.float64, device=device)
        dist.all_reduce(now, dist.ReduceOp.MAX)
        quickest = quickest.minimum(now.cpu())
    copied, multiplied = quickest.tolist()
    return copied / _COPIED_BYTES, multiplied / (2 * _MATRIX**3)


def _clock(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter()
