"""A layout as one of TorchRec's sharding types: which of theirs cuts a table so, and their `ParameterSharding` of it.

Theirs names a type, and its code computes from that name which rank has which rows: so a layout is one of their types
where its rectangles are exactly those that the type's code assumes, and none where they are not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
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
    row_wise,
    sharding_types,
    table_row_wise,
    table_wise,
)

Shards = Sequence[Shard]
COPIES, _GRID = "data_parallel", "grid_shard"
_OF_COLUMNS = ("column_wise", "table_column_wise")


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
            kind = type_of(layout, info.shape, env, types)
        except ShardError:
            continue
        if kind is not None:
            yield layout


def type_of(layout: Layout, shape: Sequence[int], env: ShardingEnv, types: Collection[str]) -> str | None:
    """The first of their `types` that a layout is and that their code runs; None where there is none.

    Theirs hangs on a rank without rows, and has the columns of a rank in one matrix, in multiples of 4.

    Args:
        types: names of theirs: `"table_wise"`, ...
    """
    named = sharding_types(layout, tuple(shape), env, len(hosts(env)[0]))
    return next((name for name, shards in named.items() if name in types and _runs(name, shards)), None)


def _runs(kind: str, shards: Sequence[Any]) -> bool:
    widths: dict[int, set[int]] = {}
    for s in shards:
        widths.setdefault(s.rank, set()).add(s.sizes[-1])
    if kind in _OF_COLUMNS and any(len(of_rank) > 1 for of_rank in widths.values()):
        return False
    are_whole = kind not in (*_OF_COLUMNS, _GRID) or all(s.sizes[-1] % 4 == 0 for s in shards)
    return are_whole and all(all(s.sizes) for s in shards)


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
    # A device of an accelerator has a number, which torch compares with that of the tensor that lies there.
    numbers = 0 if env.device_type == "cpu" else torch.accelerator.device_count()
    where = [f"{env.device_type}:{rank % numbers}" if numbers else env.device_type for rank in places]
    metadata = [ShardMetadata([*s.offsets], [*s.sizes], f"rank:{places[s.rank]}/{where[s.rank]}") for s in ordered]
    return ParameterSharding(
        sharding_type=kind,
        compute_kernel=kernel,
        ranks=[s.rank for s in ordered],
        sharding_spec=EnumerableShardingSpec(metadata),
    )


def hosts(env: ShardingEnv) -> list[range]:
    """Table ranks of each coordinate of the outer table axis; all are one host where there is but one axis."""
    inner = env.table_size // env.table_shape[0] if len(env.table_shape) > 1 else env.table_size
    return [range(start, start + inner) for start in range(0, env.table_size, inner)]
