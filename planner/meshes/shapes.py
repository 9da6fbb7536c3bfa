"""The meshes that come into question for a number of devices: every way to split, copy and shard that fits hosts.

Tensor parallelism stays inside a host, for a step waits for it many times. Groups that share one copy, of weights or
tables, are whole hosts or parts of one, for else some host's ranks would belong to two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dmp import ShardingEnv


class Shape(NamedTuple):
    """A mesh: sizes and names of its axes, outer first."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]

    def env(self, device_type: str) -> ShardingEnv:
        """Env of it, for planning."""
        return ShardingEnv.abstract(self.sizes, self.names, device_type)

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


def shapes(num_devices: int, ranks_per_host: int, tensor_sizes: Sequence[int], has_tables: bool) -> list[Shape]:
    """Each mesh once, those with fewer axes first.

    Args:
        tensor_sizes: ways to split weights over a tensor axis, 1 for none.
        has_tables: whether there are tables to shard.
    """
    found: list[Shape] = []
    for tensor in tensor_sizes:
        if num_devices % tensor == 0 and ranks_per_host % tensor == 0:
            for axes in _data_axes(num_devices // tensor, tensor, ranks_per_host, has_tables):
                given = [(name, size) for name, size in (*axes, ("tp", tensor)) if size > 1] or [("dp", 1)]
                found.append(Shape(tuple(size for _, size in given), tuple(name for name, _ in given)))
    return sorted(dict.fromkeys(found), key=lambda shape: len(shape.sizes))


def _data_axes(ranks: int, tensor: int, of_host: int, has_tables: bool) -> Iterator[list[tuple[str, int]]]:
    """Axes of samples, outer first."""
    yield from _copies(ranks, tensor, of_host, has_tables)
    for copies in _divisors(ranks):
        group = ranks // copies
        if group > 1 and (group * tensor % of_host == 0 or of_host % (group * tensor) == 0):  # whole hosts, or in one
            yield [("replicate", copies), ("shard", group)]


def _copies(ranks: int, tensor: int, of_host: int, has_tables: bool) -> Iterator[list[tuple[str, int]]]:
    """Those along which dense weights are copies; tables are sharded over groups of them."""
    yield [("dp", ranks)]
    if not has_tables or tensor > 1:
        return
    for copies in _divisors(ranks):
        group = ranks // copies
        if group > of_host and group % of_host == 0:
            yield [("replicate", copies), ("host", group // of_host), ("local", of_host)]
        elif copies > 1 and group == of_host:
            yield [("replicate", copies), ("dp", group)]


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
