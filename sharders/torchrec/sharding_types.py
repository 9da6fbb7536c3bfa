"""A layout as one of TorchRec's sharding types: which of theirs cuts a table so, and their `ParameterSharding` of it.

Theirs names a type, and its code computes from that name which rank has which rows: so a layout is one of their types
where its rectangles are exactly those that the type's code assumes, and none where they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from dmp import (
    Layout,
    ParameterInfo,
    Shard,
    ShardError,
    ShardingEnv,
    column_wise,
    data_parallel,
    grid,
    is_replicated,
    row_wise,
    table_row_wise,
    table_wise,
)

Shards = Sequence[Shard]
COPIES, _GRID = "data_parallel", "grid_shard"


def representatives(types: Collection[str], info: ParameterInfo, env: ShardingEnv) -> Iterator[Layout]:
    """A layout for every one of their types that fits the parameter and the mesh."""
    size = env.table_size
    offered: list[Layout] = [table_wise(0)]
    if size > 1:
        blocks = [2**i for i in range(1, 12) if 2**i <= size]
        offered += [row_wise(), data_parallel(), *(column_wise(range(n)) for n in blocks)]
    if len(env.table_shape) == 2:
        inner = env.table_shape[1]
        offered += [table_row_wise(0), grid([[i, inner + i] for i in range(inner)])]
    for layout in offered:
        try:
            shards = layout.shards(info.shape, env)
        except ShardError:
            continue
        if type_of(shards, info.shape, env, types) is not None:
            yield layout


def type_of(shards: Shards, shape: Sequence[int], env: ShardingEnv, types: Collection[str]) -> str | None:
    """The first of their `types` whose code assumes exactly these rectangles; None where there is none.

    Args:
        types: names of theirs: `"table_wise"`, ...
    """
    fitting = [name for name, fits in _FITS if fits(shards, tuple(shape), env)]
    fitting = [COPIES] if COPIES in fitting else fitting
    return next((name for name in fitting if name in types), None)


def parameter_sharding(kind: str, kernel: str, shards: Shards, env: ShardingEnv) -> Any:
    """Their `ParameterSharding` of one of their types."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
    from torchrec.distributed.types import ParameterSharding

    if kind == COPIES:
        return ParameterSharding(sharding_type=kind, compute_kernel=kernel, ranks=list(range(env.table_size)))
    ordered = sorted(shards, key=lambda s: s.offsets[::-1] if kind == _GRID else s.offsets)
    # Ranks of theirs count in their group; placements are looked up among all processes.
    places = dist.get_process_group_ranks(env.table_group)
    metadata = [ShardMetadata([*s.offsets], [*s.sizes], f"rank:{places[s.rank]}/{env.device_type}") for s in ordered]
    return ParameterSharding(
        sharding_type=kind,
        compute_kernel=kernel,
        ranks=[s.rank for s in ordered],
        sharding_spec=EnumerableShardingSpec(metadata),
    )


def _is_table_wise(shards: Shards, shape: tuple[int, ...], env: ShardingEnv) -> bool:
    return len(shards) == 1


def _is_column_wise(shards: Shards, shape: tuple[int, ...], env: ShardingEnv) -> bool:
    """Whole columns, of one width on each rank: theirs puts those of a rank beside each other as one matrix."""
    widths: dict[int, set[int]] = {}
    for s in shards:
        widths.setdefault(s.rank, set()).add(s.sizes[-1])
    return (
        len(shape) == 2
        and all(s.sizes[0] == shape[0] and s.sizes[1] % 4 == 0 for s in shards)
        and all(len(of_rank) == 1 for of_rank in widths.values())
    )


def _is_row_wise(shards: Shards, shape: tuple[int, ...], env: ShardingEnv) -> bool:
    return _are_row_blocks(shards, shape, range(env.table_size))


def _is_table_row_wise(shards: Shards, shape: tuple[int, ...], env: ShardingEnv) -> bool:
    return any(_are_row_blocks(shards, shape, host) for host in hosts(env))


def _is_table_column_wise(shards: Shards, shape: tuple[int, ...], env: ShardingEnv) -> bool:
    ranks = {s.rank for s in shards}
    return _is_column_wise(shards, shape, env) and any(ranks <= {*host} for host in hosts(env))


def _is_grid(shards: Shards, shape: tuple[int, ...], env: ShardingEnv) -> bool:
    """Each column block is row-wise in one host."""
    if len(shape) != 2:
        return False
    blocks: dict[tuple[int, int], list[Shard]] = {}
    for s in shards:
        whole_rows = Shard((s.offsets[0], 0), s.sizes, s.rank)
        blocks.setdefault((s.offsets[1], s.sizes[1]), []).append(whole_rows)
    return all(
        width % 4 == 0 and any(_are_row_blocks(block, (shape[0], width), host) for host in hosts(env))
        for (_, width), block in blocks.items()
    )


def _is_data_parallel(shards: Shards, shape: tuple[int, ...], env: ShardingEnv) -> bool:
    return len(shards) > 1 and is_replicated(tuple(shards), shape)


def _are_row_blocks(shards: Shards, shape: tuple[int, ...], ranks: Sequence[int]) -> bool:
    """Whether these are blocks of ceil(rows / n) rows, one on each of `ranks` in their order, none of them empty."""
    block = -(-shape[0] // len(ranks))
    expected = [((i * block, 0), rank) for i, rank in enumerate(ranks)]
    return (
        len(shape) == 2
        and [(s.offsets, s.rank) for s in shards] == expected
        and all(s.sizes[1] == shape[1] for s in shards)
    )


def hosts(env: ShardingEnv) -> list[range]:
    """Table ranks of each coordinate of the outer table axis; all are one host where there is but one axis."""
    inner = env.table_size // env.table_shape[0] if len(env.table_shape) > 1 else env.table_size
    return [range(start, start + inner) for start in range(0, env.table_size, inner)]


_FITS: tuple[tuple[str, Callable[[Shards, tuple[int, ...], ShardingEnv], bool]], ...] = (
    (COPIES, _is_data_parallel),
    ("table_wise", _is_table_wise),
    ("row_wise", _is_row_wise),
    ("column_wise", _is_column_wise),
    ("table_row_wise", _is_table_row_wise),
    ("table_column_wise", _is_table_column_wise),
    (_GRID, _is_grid),
)
"""Type -> whether rectangles are what its code assumes; the plainest first."""
