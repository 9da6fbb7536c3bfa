"""Sharders of TorchRec's `ManagedCollisionEmbeddingBagCollection` and `ManagedCollisionEmbeddingCollection`.

[Note: where a map is] A map's entries are where its table's rows are; raw ids are looked up there. Which rank has an id
is known by the order of ids, not by a hash of theirs: so the map stays the one map of the unsharded module, cut, and
what enters and leaves it is decided over all of it. TorchRec cuts the ids into as many ranges as there are ranks, each
with a map of its own, whose results differ with the number of ranks. A copy of the map on every rank would save two
exchanges, and cost 24 to 32 bytes for each row of all tables on each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from dmp import Layout, ParameterInfo, ParameterSharding, ShardError, ShardingEnv, ranks
from sharders.channel import Channel, over_group
from sharders.embedding.collections import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from sharders.embedding.exchange.peers import find_peers
from sharders.embedding.exchange.phases import counted
from sharders.embedding.table_module import TableModule, TableSharder
from sharders.managed_collision.growth import Growth
from sharders.managed_collision.id_map import IdMap, blocks_of
from sharders.managed_collision.module import TABLES, ShardedManagedCollision
from sharders.managed_collision.remap import Remap
from sharders.managed_collision.reset import Reset


class _NotImported(nn.Module):
    """In place of TorchRec's classes as long as nobody has imported them: no model holds one."""


class _ManagedCollisionSharder:
    """What the two share. The tables are run by the sharder of their collection.

    Args:
        reset_evicted: a row whose raw id is evicted gets initial values, and its optimizer state is zero, as in
            TorchRec's sharded modules; by default it stays as it is, as in its unsharded ones.
        max_rows: tables, by name, that get more rows as long as new ids come, up to so many; only then are ids evicted.
            See [Note: growing] of growth.py.
        options: of the tables' sharder.
    """

    type_name: str
    tables_sharder: type[TableSharder]

    def __init__(
        self, *, reset_evicted: bool = False, max_rows: Mapping[str, int] | None = None, **options: Any
    ) -> None:
        if options.get("sync_interval", 1) != 1:
            raise ShardError(
                f"sync_interval={options['sync_interval']!r} averages copies of tables that drift apart; copies whose "
                "rows stand for ids of one map share gradients at every step: sync_interval=1"
            )
        self._reset_evicted, self._max_rows = reset_evicted, dict(max_rows or {})
        self._tables = self.tables_sharder(**options)

    @property
    def module_type(self) -> type[nn.Module]:
        """TorchRec's class."""
        imported = sys.modules.get("torchrec.modules.mc_embedding_modules")
        found: type[nn.Module] = getattr(imported, self.type_name, _NotImported)
        return found

    def parameters(self, module: Any) -> Mapping[str, ParameterInfo]:
        """The tables; none of a subclass with a forward of its own."""
        if type(module).forward is not self.module_type.forward:
            return {}
        of_tables = self._tables.parameters(module._embedding_module)
        return {f"{TABLES}.{name}": info for name, info in of_tables.items()}

    def layouts(self, info: ParameterInfo, env: ShardingEnv) -> Iterable[Layout]:
        """As of the tables."""
        return self._tables.layouts(info, env)

    def accepts(self, info: ParameterInfo, layout: Layout, env: ShardingEnv) -> bool:
        """As of the tables."""
        return self._tables.accepts(info, layout, env)

    def connect(self, env: ShardingEnv) -> None:
        """Make the process groups that tables and maps use; collective."""
        self._tables.connect(env)

    def shard(
        self, module: Any, plan: Mapping[str, ParameterSharding], env: ShardingEnv, device: torch.device
    ) -> nn.Module:
        """The module on the mesh; one that could not be cut is itself where there is but one rank.

        Raises:
            ShardError: a map that cannot be cut.
        """
        collection = module._managed_collision_collection
        configs = collection.embedding_configs()
        try:
            _check(collection, configs)
        except ShardError:
            if env.size == 1:
                return module  # type: ignore[no-any-return]
            raise
        if not self._reset_evicted:
            ranks.say_once(_KEPT, by_first=True)
        own = {name.removeprefix(f"{TABLES}."): entry for name, entry in plan.items()}
        tables: Any = self._tables.shard(module._embedding_module, own, env, device)
        assert isinstance(tables, TableModule)
        maps: dict[str, IdMap] = {}
        for config, table in zip(configs, tables._engine.tables, strict=True):
            blocks = blocks_of(own[table.parameter].layout, (table.rows, table.dim), env)
            original = collection._managed_collision_modules[config.name]
            maps[config.name] = IdMap(original, blocks, env.table_rank, device).train(original.training)
        peers = find_peers(env, True, by_stages=self._tables.is_pooled, transport=counted(over_group))
        remap = Remap(
            [config.feature_names for config in configs],
            peers,
            repr([(name, of.size, of.interval, of.blocks) for name, of in maps.items()]),
            env.axes("tensor"),
        )
        growth = self._growth(tables, [own[t.parameter].layout for t in tables._engine.tables], configs, peers.table)
        for of, limit in zip(maps.values(), growth.limits, strict=True):
            of.most = limit
        reset = Reset([config.init_fn for config in configs]) if self._reset_evicted else None
        return ShardedManagedCollision(module, tables, maps, remap, reset, growth)

    def _growth(self, tables: TableModule, layouts: list[Layout], configs: Any, ranks: Channel) -> Growth:
        """What gives tables more rows.

        Raises:
            ShardError: one that cannot grow.
        """
        limits = [self._max_rows.get(config.name) for config in configs]
        growth = Growth(limits, layouts, [config.init_fn for config in configs], ranks)
        growth.check(tables)
        return growth

    @property
    def options(self) -> str:
        """What it was made with, which the ranks compare."""
        return f"reset_evicted={self._reset_evicted}, max_rows={self._max_rows}, {self._tables.options}"


class ManagedCollisionEmbeddingBagCollectionSharder(_ManagedCollisionSharder):
    """Shards TorchRec's `ManagedCollisionEmbeddingBagCollection`: tables in any layout, maps with their rows."""

    type_name = "ManagedCollisionEmbeddingBagCollection"
    tables_sharder = EmbeddingBagCollectionSharder


class ManagedCollisionEmbeddingCollectionSharder(_ManagedCollisionSharder):
    """Shards TorchRec's `ManagedCollisionEmbeddingCollection`: tables in any layout, maps with their rows."""

    type_name = "ManagedCollisionEmbeddingCollection"
    tables_sharder = EmbeddingCollectionSharder


_KEPT = (
    "managed collision: a row whose raw id is evicted keeps its values for the next id, as in TorchRec's unsharded "
    "modules; its sharded ones give it new ones, as reset_evicted=True of the sharder does here"
)


def _check(collection: Any, configs: Any) -> None:
    """Raise `ShardError` for what cannot be run as one process runs it, but cut."""
    features = [name for config in configs for name in config.feature_names]
    shared = sorted({name for name in features if features.count(name) > 1})
    if shared:
        raise ShardError(
            f"feature {shared[0]!r} is read by several tables, each with a map of its own: TorchRec's module looks all "
            "of them up with the rows of the last map; give each table a feature of its own, with the same ids"
        )
    for name, of in collection._managed_collision_modules.items():
        if type(of).__name__ != "MCHManagedCollisionModule" or not type(of).__module__.startswith("torchrec."):
            why = _WHY.get(type(of).__name__, "only TorchRec's own MCHManagedCollisionModule is cut by rows")
            raise ShardError(f"the map of table {name!r} is a {type(of).__module__}.{type(of).__name__}: {why}")


_WHY: Mapping[str, str] = {
    "HashZchManagedCollisionModule": (
        "FBGEMM's kernel of it learns on CUDA alone, and it is not sharded here; take MCHManagedCollisionModule "
        "(zero-collision hash with LFU, LRU or DistanceLFU eviction)"
    )
}
