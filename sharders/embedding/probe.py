"""Probes: how long the data path takes for made-up tables and batches, with no module around it.

Ids are uniform, over all rows or some. Every number is the quickest of several runs: what others on the machine add is
no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist

from dmp import Layout, ShardingEnv, ranks
from sharders.channel import over_group
from sharders.embedding.batches.batch import Ids
from sharders.embedding.data_path.engine import Engine
from sharders.embedding.exchange.placement import Table
from sharders.embedding.lookup.bank import Bank, RowRange
from sharders.embedding.lookup.kernels import compile_lookup, kernel_of
from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.embedding.lookup.reads import Bags
from sharders.shared_memory.memory_channel import MemoryChannel

_BATCHES = 3
OTHERS_BYTES = 8 << 20
"""What is read and written before each step that is timed, as a model's other layers do: else a step would find in the
caches what the one before it left there."""


@dataclass(frozen=True)
class Probe:
    """Tables and what is read of them, all pooled.

    Args:
        tables: rows and dim of each, which one feature reads.
        layouts: one for each table.
        batch_size: samples on each rank.
        bag: ids in each bag.
        optimizer: in-backward one.
        named: so many rows of each table, all over it, have all ids; 0: all rows have.
    """

    tables: tuple[tuple[int, int], ...]
    layouts: tuple[Layout, ...]
    batch_size: int
    bag: int
    optimizer: str
    named: int = 0


def means(env: ShardingEnv) -> str:
    """What the data path uses here, in words: the kernel of float32 tables, and the channel between these ranks."""
    kernel = kernel_of(_Kernel(Probe(((4, 4),), (), 1, 1, "sgd"), env.device).lookup)
    group = env.table_group
    if group is None or env.table_size == 1:
        return f"the {kernel} kernel"
    is_shared = isinstance(over_group(group, "tables"), MemoryChannel)
    through = "shared memory" if is_shared else f"connections of {ranks.backend_of(group)}"
    return f"the {kernel} kernel, exchanges through {through}"


def exchange_seconds(sends: Sequence[Sequence[Sequence[int]]], env: ShardingEnv, rounds: int) -> list[float]:
    """Of exchanges on the channel of tables, the slowest rank's time; all ranks begin each together.

    Args:
        sends: of each exchange, for each rank the elements of float32 that it has for each.
    """
    channel, device = over_group(env.table_group, "tables"), env.device
    cases = []
    for sizes in sends:
        send = channel.empty(sum(sizes[channel.rank]), torch.float32, device)
        cases.append((send.zero_(), sizes[channel.rank], [of_rank[channel.rank] for of_rank in sizes]))
    quickest = torch.full((len(cases),), float("inf"), dtype=torch.float64)
    for _ in range(rounds):
        times = []
        for case in cases:
            dist.barrier()
            start = _now(device)
            transfer = channel.all_to_all(*case)
            for rank in range(channel.size):
                transfer.part(rank)  # as results are: where they lie, which is read when they are placed
            transfer.end()
            times.append(_now(device) - start)
        quickest = quickest.minimum(_slowest(times, device))
    seconds: list[float] = quickest.tolist()
    return seconds


def _slowest(seconds: Sequence[object], device: torch.device) -> torch.Tensor:
    """Of all ranks, on the CPU."""
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.cpu()


def lookup_seconds(probes: Sequence[Probe], device: torch.device, rounds: int) -> list[tuple[float, float]]:
    """Of each probe's tables, whole on this rank, with one rank's batch: the lookup kernel's forward and its update."""
    made = [_Kernel(probe, device) for probe in probes]
    quickest = [(float("inf"), float("inf")) for _ in probes]
    for number in range(rounds):
        for i, kernel in enumerate(made):
            start = _now(device)
            kernel.forward(number)
            between = _now(device)
            kernel.backward(number)
            quickest[i] = min(quickest[i][0], between - start), min(quickest[i][1], _now(device) - between)
    return quickest


def step_seconds(probes: Sequence[Probe], env: ShardingEnv, rounds: int) -> list[tuple[float, float, float]]:
    """Of each probe's tables under its layouts, the slowest rank's time, part by part; all ranks begin each together.

    Returns:
        For each: ids to their owners; lookups to results; gradients to updates.
    """
    sides = [_Side(probe, env) for probe in probes]
    quickest = torch.full((len(probes), 3), float("inf"), dtype=torch.float64)
    others = torch.zeros(OTHERS_BYTES // 4, device=env.device)
    for number in range(rounds):
        times = []
        for side in sides:
            others.add_(1)
            times.append(side.step(number))
        seconds = _slowest(times, env.device)
        if number:  # in the first, buffers are made
            quickest = quickest.minimum(seconds)
    return [(a, b, c) for a, b, c in quickest.tolist()]


class _Side:
    def __init__(self, probe: Probe, env: ShardingEnv) -> None:
        spec = OptimizerSpec.make(probe.optimizer)
        self.device, self.is_alone = env.device, env.size == 1
        tables = [
            Table(f"t{i}", rows, dim, torch.float32, (f"f{i}",), optimizer=spec)
            for i, (rows, dim) in enumerate(probe.tables)
        ]
        self.engine = Engine(tables, probe.layouts, env, self.device)
        for parameter in self.engine.store.parameters:
            parameter.data.uniform_(-0.1, 0.1)  # what was never written lies in no memory yet
        generator = torch.Generator().manual_seed(env.rank)
        self.batches = [self._batch(probe, generator) for _ in range(_BATCHES)]
        self.grad = torch.randn(probe.batch_size, sum(dim for _, dim in probe.tables), device=self.device)

    def _batch(self, probe: Probe, generator: torch.Generator) -> Ids:
        values = _ids(probe, generator)
        lengths = torch.full((len(probe.tables), probe.batch_size), probe.bag)
        return Ids(values.to(self.device), lengths.to(self.device), tuple(range(len(probe.tables))))

    def step(self, number: int) -> tuple[float, float, float]:
        """Seconds of the three parts of a step."""
        batch = self.batches[number % _BATCHES]
        start = self._together()
        call = self.engine.begin(lambda: batch)
        call.payload.wait()
        sent = self._now()
        start_2 = self._together()
        (result,) = self.engine.finish(call)
        come = self._now()
        start_3 = self._together()
        result.backward(self.grad)
        return sent - start, come - start_2, self._now() - start_3

    def _together(self) -> float:
        if not self.is_alone:
            dist.barrier()
        return self._now()

    def _now(self) -> float:
        return _now(self.device)


class _Kernel:
    def __init__(self, probe: Probe, device: torch.device) -> None:
        spec = OptimizerSpec.make(probe.optimizer)
        self.bank = Bank([[of_table] for of_table in probe.tables], torch.float32, device, spec)
        self.lookup = compile_lookup(self.bank, [RowRange(chunk, 0, chunk.rows) for (chunk,) in self.bank.chunks])
        self.bank.weights.uniform_(-0.1, 0.1)
        generator = torch.Generator().manual_seed(0)
        self.ids = [_ids(probe, generator).to(device, torch.int32) for _ in range(_BATCHES)]
        self.offsets = torch.arange(0, self.ids[0].numel() + 1, probe.bag, dtype=torch.int32, device=device)
        self.grad = torch.randn(probe.batch_size, self.lookup.num_columns, device=device)

    def forward(self, number: int) -> None:
        self.lookup.pooled(Bags(self.ids[number % _BATCHES], self.offsets))

    def backward(self, number: int) -> None:
        self.bank.step()
        self.lookup.update_pooled(self.grad, Bags(self.ids[number % _BATCHES], self.offsets))


def _ids(probe: Probe, generator: torch.Generator) -> torch.Tensor:
    count, found = probe.batch_size * probe.bag, []
    for rows, _ in probe.tables:
        named = min(probe.named or rows, rows)
        found.append(torch.randint(0, named, (count,), generator=generator) * (rows // named))
    return torch.cat(found)


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter()
