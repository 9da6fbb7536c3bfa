"""A sharded module of TorchRec's, made: what is handed to their sharder, and what of the result is used."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dmp import (
    ChunkedTensor,
    Layout,
    RanksError,
    Shard,
    ShardError,
    ShardingEnv,
    is_replicated,
    is_torchrecs,
    room_for,
    type_name,
)
from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.quiet import quiet
from sharders.torchrec.averages import averaged_once
from sharders.torchrec.batches import Collection, collections_in
from sharders.torchrec.fused_tables import FusedTables, attach
from sharders.torchrec.local_shards import chunks_of
from sharders.torchrec.refused import CUT_ROWS, check_state, check_together
from sharders.torchrec.sharding_types import parameter_sharding, type_of


@dataclass(frozen=True)
class Made:
    """A sharded module of theirs, and what of it is used.

    Args:
        theirs: the module.
        env: where it runs.
        plain: of the unsharded module, on meta.
        parameters: all of the unsharded module's by name; those that are cut hold this rank's chunks.
        buffers: likewise.
        chunked: of the parameters that are cut, the chunks, as views.
        fused: the tables that are updated in the backward pass; None where there are none.
        collections: of tables in it.
        takes_weights: weights of ids come with the batch.
        needs_equal_sizes: batches of all ranks must have one size.
    """

    theirs: Any
    env: ShardingEnv
    plain: nn.Module
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    chunked: Mapping[str, ChunkedTensor]
    fused: FusedTables | None
    collections: Sequence[Collection]
    takes_weights: bool
    needs_equal_sizes: bool


@dataclass(frozen=True)
class Recipe:
    """How one is made, again and again.

    Args:
        sharder: theirs.
        plain: the unsharded module on meta.
        names: parameter name -> their name of the table.
        layouts: of each of those parameters.
        types: of theirs that the layouts may be.
        specs: parameter name -> optimizer that runs in the backward pass.
        env, device: where.
    """

    sharder: Any
    plain: nn.Module
    names: Mapping[str, str]
    layouts: Mapping[str, Layout]
    types: Sequence[str]
    specs: Mapping[str, OptimizerSpec]
    env: ShardingEnv
    device: torch.device

    def __call__(self) -> Made:
        """A new one; its values are not set yet."""
        given = self._stand_in()
        kept = dict(given.named_parameters())
        shards = {n: lay.shards(kept[n].shape, self.env) for n, lay in self.layouts.items()}
        kinds = {n: str(type_of(lay, kept[n].shape, self.env, self.types)) for n, lay in self.layouts.items()}
        check_together(type_name(self.sharder), given, {self.names[n]: kind for n, kind in kinds.items()})
        entries = {self.names[n]: parameter_sharding(kinds[n], self._kernel(n), shards[n], self.env) for n in shards}
        takes = inspect.signature(self.sharder.shard).parameters
        # A tower's own data-parallel part takes no list of CPUs, which it makes of a device.
        are_towers = self.device.type == "cpu" and is_torchrecs(given, "EmbeddingTower", "EmbeddingTowerCollection")
        options = {"device": self.device} if "device" in takes and not are_towers else {}
        collections = collections_in(self.plain)
        with quiet(), torch.random.fork_rng(devices=[]):
            theirs = self._sharded(given, entries, options)
            averaged_once(theirs, collections)
            state = theirs.state_dict()
        check_state(type_name(self.sharder), theirs, state, self.plain.state_dict())
        made = self._parameters(theirs, kept, shards)
        chunked = {
            n: chunks_of(n, state.get(n), kept[n].shape, of, self.env.table_rank, made[n])
            for n, of in shards.items()
            if not is_replicated(of, tuple(kept[n].shape))
        }
        of_theirs = dict(theirs.named_buffers())
        fused = FusedTables(theirs, shards, {v: k for k, v in self.names.items()}, self.specs) if self.specs else None
        return Made(
            theirs=theirs,
            env=self.env,
            plain=self.plain,
            parameters=made,
            buffers={n: of_theirs.get(n, b) for n, b in given.named_buffers()},
            chunked=chunked,
            fused=fused,
            collections=collections,
            takes_weights=not any(hasattr(m, "_feature_processors") for m in self.plain.modules()),
            needs_equal_sizes=any(kind in CUT_ROWS for kind in kinds.values()),
        )

    def _sharded(self, given: nn.Module, entries: dict[str, Any], options: dict[str, Any]) -> Any:
        try:
            return self.sharder.shard(given, entries, _their_env(self.env), **options)
        except RanksError:
            raise
        except Exception as error:  # of any kind: the other ranks are told
            raise ShardError(
                f"{type_name(self.sharder)} fails to shard a {type(given).__name__} on {self.device}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _kernel(self, name: str) -> str:
        return "fused" if name in self.specs else "dense"

    def _stand_in(self) -> nn.Module:
        """What their sharder is given: tables on meta, for it reads none (a user's own may), the rest on
        the device, optimizers where they look for them."""
        is_torchrecs_own = type(self.sharder).__module__.startswith("torchrec.")
        given = with_room(self.plain, self.device, self.layouts if is_torchrecs_own else ())
        for module in given.modules():
            if is_torchrecs_own and Collection.of(module) is not None:
                # Where theirs looks whether there are values to take over.
                module._device = torch.device("meta")  # type: ignore[assignment]
        for name, spec in self.specs.items():
            attach(given.get_parameter(name), spec, type(self.sharder).__name__)
        return given

    def _parameters(
        self, theirs: nn.Module, kept: Mapping[str, nn.Parameter], shards: Mapping[str, Sequence[Shard]]
    ) -> dict[str, nn.Parameter]:
        """Every parameter of the unsharded module: theirs, or room for none where this rank has no part of it."""
        found = dict(theirs.named_parameters())
        result = {}
        for name, parameter in kept.items():
            if name in found:
                result[name] = found[name]
            elif name in shards:
                result[name] = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=self.device))
            else:
                raise ShardError(
                    f"{type(self.sharder).__name__}.shard made a {type(theirs).__name__} that lacks {name!r}; it has "
                    f"{sorted(found)}"
                )
        return result


def _their_env(env: ShardingEnv) -> Any:
    """TorchRec's env of the table ranks; its own way makes a mesh of the first ranks of the world instead."""
    from torch.distributed.device_mesh import DeviceMesh
    from torchrec.distributed.types import ShardingEnv as TheirEnv

    made = TheirEnv.from_local(env.table_size, env.table_rank)
    made.process_group = env.table_group
    assert env.table_group is not None, "a module of theirs runs on processes"
    made.device_mesh = DeviceMesh.from_group(env.table_group, env.device_type)
    return made


def with_room(module: nn.Module, device: torch.device | str, but: Container[str] = ()) -> nn.Module:
    """A copy with uninitialised tensors on the device, and without what optimizers have left on parameters.

    Args:
        but: names of those that are on meta.
    """
    memo: dict[int, Any] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        memo[id(tensor)] = room_for(tensor, "meta" if name in but else device)
    return copy.deepcopy(module, memo)
