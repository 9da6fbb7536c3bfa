"""`ShardedManagedCollision`: TorchRec's managed-collision embedding modules on a mesh: maps before sharded tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from dmp import Calls, ChunkedTensor, FusedParameter, ParameterSharding, join_name
from sharders.embedding.batches.batch import Ids
from sharders.embedding.batches.input_checks import check_batch
from sharders.embedding.batches.input_faults import Fault, Kind
from sharders.embedding.batches.keyed_ids import keyed_ids
from sharders.embedding.exchange.phases import INPUT, LastStep, Spent, phase
from sharders.embedding.table_module import ReshardedTables, TableModule
from sharders.managed_collision.growth import Growth
from sharders.managed_collision.id_map import EMPTY, IdMap, blocks_of
from sharders.managed_collision.remap import Remap
from sharders.managed_collision.reset import Reset
from sharders.managed_collision.travel import RawIds

MAPS = "_managed_collision_collection"
TABLES = "_embedding_module"
"""Where the unsharded module has its two parts."""


class Maps(nn.Module):
    """In place of TorchRec's `ManagedCollisionCollection`: the maps, each under its table's name."""

    def __init__(self, maps: Mapping[str, IdMap], configs: Sequence[Any]) -> None:
        super().__init__()
        self._managed_collision_modules = nn.ModuleDict(maps)
        self._configs = list(configs)

    def embedding_configs(self) -> list[Any]:
        """The tables' configs."""
        return list(self._configs)

    def resize(self, table: int, rows: int) -> None:
        """A table has so many rows by now."""
        self._configs[table] = replace(self._configs[table], num_embeddings=rows)


class ShardedManagedCollision(nn.Module):
    """Takes a `KeyedJaggedTensor` of raw ids; gives what the unsharded module gives: results, and the batch with rows
    in place of ids, or None.

    In training mode its maps learn from the ids of all ranks, as one process does from the whole batch. A forward has
    no phases as a `TableModule`'s: a map that has counted a batch cannot take that back where the batch is dropped.

    Args:
        original: the module in whose place this one stands; its values are kept.
        tables: its tables on the mesh.
        maps: for each table its map, in the order of the tables' configs.
        remap: the maps' exchange.
        reset: gives rows of evicted ids new values; None leaves them as they are, as the unsharded module does.
        growth: gives tables more rows.
    """

    tells_rows = True
    """Of its tables."""

    def __init__(
        self,
        original: Any,
        tables: TableModule,
        maps: Mapping[str, IdMap],
        remap: Remap,
        reset: Reset | None,
        growth: Growth,
    ) -> None:
        super().__init__()
        configs = original._managed_collision_collection.embedding_configs()
        self._managed_collision_collection = Maps(maps, configs)
        self._embedding_module = tables
        self._unsharded_types = type(original), type(original._managed_collision_collection)
        self._return_remapped_features = bool(original._return_remapped_features)
        self._in_place = bool(original._allow_in_place_embed_weight_update)
        self._features = [name for config in configs for name in config.feature_names]
        self._num_features = [len(config.feature_names) for config in configs]
        self._remap, self._reset, self._growth = remap, reset, growth
        self._last = LastStep()

    @property
    def maps(self) -> list[IdMap]:
        """In the order of the tables' configs."""
        return list(self._managed_collision_collection._managed_collision_modules.children())  # type: ignore[arg-type]

    @_disable_dynamo  # as of its tables
    def forward(self, features: Any, mutate_miss_lengths: bool = True) -> tuple[Any, Any]:
        """As the unsharded module's; lengths stay as they are, whatever `mutate_miss_lengths` says, as there."""
        read: list[tuple[Any, Any]] = []

        def raw_ids() -> RawIds:
            batch, inverse, ids = self._read(features)
            read.append((batch, inverse))
            return ids

        learns = self._managed_collision_collection.training
        spent = Spent()
        self._last.add(spent, self.calls.number if self.calls.is_forward else None)
        with phase(spent, INPUT):
            remapped = self._remap(self.maps, raw_ids, learns, self._embedding_module._engine.device, self._grow)
        ((raw, inverse),) = read
        batch = _with_values(raw, remapped.rows.to(raw.values().dtype), inverse)
        if self._reset is not None:
            self._reset(self._embedding_module, self.maps, remapped.changed)
        found = self._embedding_module(batch)
        return found, batch if self._return_remapped_features else None

    def _grow(self, index: int, rows: int) -> None:
        self._growth(self._embedding_module, self.maps, index, rows)
        self._managed_collision_collection.resize(index, rows)

    def _read(self, features: Any) -> tuple[Any, Any, RawIds]:
        """A batch with the features in the tables' order, its inverse indices, and its ids as the maps know them.

        Raises:
            Fault: what is wrong with it.
        """
        ids: Ids = keyed_ids(features, self._features, False, is_pooled=not self._embedding_module._engine.unpooled)
        batch = check_batch(replace(ids, key_of=()), (), True)  # ids may be anything
        features, inverse = ids.source, ids.source.inverse_indices_or_none()
        if features.keys() != self._features:
            features = features.permute(list(ids.key_of))  # which drops the inverse indices
        counts = tuple(batch.counts[key] for key in ids.key_of)
        self._check_ids(features.values(), counts)
        per_map, at = [], 0
        for num in self._num_features:
            per_map.append(sum(counts[at : at + num]))
            at += num
        values = features.values().long().split(per_map)
        hashed = [of.hashed(raw) for of, raw in zip(self.maps, values, strict=True)]
        return features, inverse, RawIds(torch.cat(hashed), counts)

    def _check_ids(self, values: torch.Tensor, counts: Sequence[int]) -> None:
        is_empty = values == EMPTY
        if bool(is_empty.any()):
            feature = next(f for f, ids in enumerate(is_empty.split(list(counts))) if bool(ids.any()))
            raise Fault(Kind.RAW_ID, feature, EMPTY)

    @property
    def module_path(self) -> str:
        """Path in the model, for messages; set by the wrapper."""
        return self._remap.handshake.name

    @module_path.setter
    def module_path(self, path: str) -> None:
        self._remap.handshake.rename(path or "the model")
        self._embedding_module.module_path = join_name(path, TABLES)

    @property
    def calls(self) -> Calls:
        """Calls of the model that are under way; set by the wrapper."""
        return self._embedding_module.calls

    @calls.setter
    def calls(self, calls: Calls) -> None:
        self._embedding_module.calls = calls

    def phases(self) -> Mapping[str, tuple[float, int]]:
        """Of the tables, and of the maps: raw ids to their owners, and rows back, are part of the input dist."""
        found = dict(self._embedding_module.phases())
        for name, own in self._last.total().items():
            seconds, sent = found.get(name, (0.0, 0))
            found[name] = seconds + own[0], sent + own[1]
        return found

    def chunked_state(self) -> Mapping[str, ChunkedTensor]:
        """Pieces of tables and of maps."""
        state = {f"{TABLES}.{name}": chunks for name, chunks in self._embedding_module.chunked_state().items()}
        for path, of in self.named_modules():
            if isinstance(of, IdMap):
                state.update({f"{path}.{name}": chunks for name, chunks in of.chunked_state().items()})
        return state

    def filled(self) -> list[str]:
        """Buffers of maps: one that was on meta is a new map."""
        return [name for name, _ in self.named_buffers()]

    def fused_parameters(self) -> Iterable[FusedParameter]:
        """Tables that are updated in the backward pass."""
        for fused in self._embedding_module.fused_parameters():
            yield replace(fused, name=f"{TABLES}.{fused.name}")

    def resharded(self, plan: Mapping[str, ParameterSharding]) -> ReshardedManagedCollision:
        """Its tables under another plan: see `dmp.Resharded`; maps follow in the next forward."""
        own = {name.removeprefix(f"{TABLES}."): entry for name, entry in plan.items()}
        return ReshardedManagedCollision(self, self._embedding_module.resharded(own), own)

    def unsharded(self) -> nn.Module:
        """A plain module of the same structure: its tables on meta, its maps new ones."""
        kind, collection = self._unsharded_types
        names = self._managed_collision_collection._managed_collision_modules.keys()
        maps = {name: of.unsharded() for name, of in zip(names, self.maps, strict=True)}
        configs = self._managed_collision_collection.embedding_configs()
        made: nn.Module = kind(
            self._embedding_module.unsharded(),
            collection(maps, configs),
            return_remapped_features=self._return_remapped_features,
            allow_in_place_embed_weight_update=self._in_place,
        )
        return made


class ReshardedManagedCollision:
    """A module's tables under another plan, beside those in force; a `dmp.Resharded`."""

    def __init__(
        self, module: ShardedManagedCollision, tables: ReshardedTables, plan: Mapping[str, ParameterSharding]
    ) -> None:
        self._module, self._tables, self._plan = module, tables, plan

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """One for each table."""
        return {f"{TABLES}.{name}": parameter for name, parameter in self._tables.parameters().items()}

    def chunked_state(self) -> Mapping[str, ChunkedTensor]:
        """Pieces of every table that is cut, as views."""
        return {f"{TABLES}.{name}": chunks for name, chunks in self._tables.chunked_state().items()}

    def fused_parameters(self) -> Iterable[FusedParameter]:
        """Tables that are updated in the backward pass; they keep their param groups."""
        return [replace(fused, name=f"{TABLES}.{fused.name}") for fused in self._tables.fused_parameters()]

    def take_place(self) -> nn.Module:
        """The module, which is the same as before, looks up these from now on."""
        engine = self._tables.take_place()._engine
        for of, table in zip(self._module.maps, engine.tables, strict=True):
            of.blocks_to_be = blocks_of(self._plan[table.parameter].layout, (table.rows, table.dim), engine.env)
        return self._module


def _with_values(features: Any, values: torch.Tensor, inverse: Any) -> Any:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=values,
        weights=features.weights_or_none(),
        lengths=features.lengths(),
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        inverse_indices=inverse,
    )
