"""What a cost model is: `ShardTable` and a machine in, seconds by phase and bytes out; ours, or any such object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dmp import ParameterInfo, Shard, ShardingEnv, shown
from planner.costs.topology import Topology

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Integers = NDArray[np.int64]

EXCHANGE, ALL_REDUCE, WHOLE, SPLIT, AWAY, STRAIGHT, WIDTH, COPIES_WIDTH = range(8)
"""Kinds of set-up, that a plan pays once each: where there is any parameter, where one is replicated, where one is
sharded by whole rows or is not pooled, where bags are over several row blocks, where one is sharded at all (copies
alone send no ids and get no results), and where bags with ids go straight to the ranks of their samples beside the two
stages of others. The last two are paid with `SPLIT`, and `ALL_REDUCE`, for each further width of pooled tables."""
OF_GRADIENTS = "grad a2a", "lookup bwd", "replica sync"
"""Phases in which a frozen parameter has no part."""
BYTES = -1
"""Column of the memory, after the phases'."""
_UNKNOWN_STATE = 2
"""Tensors of the weights' size that an optimizer of which nobody told the state is charged: Adam's."""


class ShardInfo(NamedTuple):
    """One shard of one parameter: a row of a `ShardTable`, which says what each means."""

    rows: float
    columns: float
    table_rows: float
    item_bytes: float
    ids_per_sample: float
    features: float
    pooled: bool
    is_table: bool
    replicated: bool
    state_per_element: float
    state_per_row: float
    dense_gradient: bool
    row_share: float
    host_share: float = 1.0
    named_rows: float = 0.0
    row_blocks: float = 0.0
    named_rows_of_rank: float = 0.0
    trained: bool = True

    @classmethod
    def of(
        cls, info: ParameterInfo, shard: Shard, ids_per_sample: float, replicated: bool, host_share: float = 1.0
    ) -> ShardInfo:
        """What is known of a shard of a parameter."""
        item_bytes = info.dtype.itemsize
        per_element, per_row = info.state_bytes or (_UNKNOWN_STATE * item_bytes, 0)
        rows = shard.sizes[0] if shard.sizes else 1
        table_rows = max(1, info.shape[0]) if info.shape else 1
        return cls(
            rows,
            prod(shard.sizes[1:]),
            table_rows,
            item_bytes,
            ids_per_sample,
            info.num_features,
            info.pooled,
            info.kind == "table",
            replicated,
            per_element,
            per_row,
            info.optimizer is None and info.trained,
            rows / table_rows,
            host_share,
            trained=info.trained,
        )


@dataclass(frozen=True, eq=False)
class ShardTable:
    """Shards of parameters, a column of numbers for each thing that is known of them; all (shards,).

    Args:
        rows, columns: of the shard; any number of columns, for a family of cuts is costed at a few widths.
        table_rows: of the whole parameter, at least 1.
        item_bytes: of an element.
        ids_per_sample: mean number of ids of a sample in all features of the whole table.
        features: number of features that read it.
        pooled: a feature's rows are summed into one; else each goes back.
        is_table: batches look its rows up; else it is read whole.
        replicated: whole on every rank; one entry stands for all of them.
        state_per_element, state_per_row: bytes of the in-backward optimizer's state.
        dense_gradient: no optimizer runs in the backward pass: it leaves an ordinary gradient.
        row_share: part of the table's ids that this shard gets: rows / table_rows unless it was measured.
        host_share: 1 / number of row blocks of the same columns on the shard's host, which are summed there.
        named_rows: so many equally likely rows of the table would be named anew as often as its ids name rows in a step
            of all ranks; 0 where nobody has measured it: all rows.
        row_blocks: of the same columns on all hosts; 0 where nobody counted them: as many as rows say.
        named_rows_of_rank: as `named_rows`, for the ids of one rank: fewer, where few rows have most of the ids.
        trained: it gets a gradient; else it is frozen.
    """

    rows: Array
    columns: Array
    table_rows: Array
    item_bytes: Array
    ids_per_sample: Array
    features: Array
    pooled: Flags
    is_table: Flags
    replicated: Flags
    state_per_element: Array
    state_per_row: Array
    dense_gradient: Flags
    row_share: Array
    host_share: Array
    named_rows: Array
    row_blocks: Array
    named_rows_of_rank: Array
    trained: Flags

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, shards: Sequence[ShardInfo]) -> ShardTable:
        """The table of these rows."""
        return cls.from_columns(*np.array(shards, dtype=np.float64).reshape(len(shards), len(ShardInfo._fields)).T)

    @classmethod
    def from_columns(cls, *columns: Any) -> ShardTable:
        """The table of these columns, in the order of the fields; a number stands for a column of it."""
        made = np.broadcast_arrays(*(np.atleast_1d(np.asarray(column)) for column in columns))
        kinds = (bool if f.type == "Flags" else np.float64 for f in fields(cls))
        return cls(*(column.astype(kind) for column, kind in zip(made, kinds, strict=True)))

    def take(self, index: Integers | Flags) -> ShardTable:
        """The shards at these places, or where this is true."""
        return ShardTable(*(getattr(self, f.name)[index] for f in fields(self)))


@runtime_checkable
class CostProtocol(Protocol):
    """Tells what shards cost. `CostModel` is one; for another of your own, `ShardingPlanner(cost_model=...)`.

    [Note: what a model says] A step takes the sum over `phases` of the slowest rank, for ranks wait for each other
    between them, plus what the set-ups cost that the plan needs. Costs add up: those of all shards on a rank are the
    rank's. They should be affine in `ShardTable.columns`, all else equal: then columns are cut anywhere; where they are
    not, columns are cut evenly only.
    """

    @property
    def phases(self) -> Sequence[str]:
        """Names, in the order of a step. One name may stand several times, for stages of one thing."""
        ...

    def spans(self, env: ShardingEnv) -> Integers:
        """(phases,): how many consecutive table ranks share a phase's load, as a network card; mostly 1.

        In a phase of span s a shard's cost is what it adds to the load of the s ranks, wherever it lies among them.
        """
        ...

    def costs(self, shards: ShardTable, env: ShardingEnv, topology: Topology, batch_size: float) -> tuple[Array, Array]:
        """What each shard costs.

        Args:
            batch_size: samples per data rank.

        Returns:
            `local`, on the shard's rank (for a replicated one: on every rank), and `everywhere`, on every rank besides,
            where samples are; both (shards, phases + 1): seconds by phase, then bytes.
        """
        ...

    def setups(self, env: ShardingEnv, topology: Topology) -> Array:
        """Seconds by phase, (kinds, phases), that a plan pays once, see `EXCHANGE`: the first 2 kinds, 4 or more."""
        ...


def setups_of(model: CostProtocol, env: ShardingEnv, topology: Topology, infos: Iterable[ParameterInfo]) -> Array:
    """Set-ups as plans of these parameters pay them, up to `STRAIGHT`; see `CostProtocol.setups`.

    Row blocks of one width are looked up and travel together, and so do gradients of copies. Which widths a plan
    splits, or copies, is taken to be all that there are: one more or less is far less than whether there are any.
    Where all are frozen nothing is paid in phases that have the names of `OF_GRADIENTS`.
    """
    infos = list(infos)
    found: Array = np.array(model.setups(env, topology))
    if infos and not any(info.trained for info in infos):
        found[:, [phase in OF_GRADIENTS for phase in model.phases]] = 0
    if len(found) <= WIDTH:
        return found
    widths = {info.shape[1] for info in infos if info.kind == "table" and info.pooled and len(info.shape) == 2}
    setups = found[:WIDTH]
    for kind, width in zip((SPLIT, ALL_REDUCE), found[WIDTH:], strict=False):
        setups[kind] += max(0, len(widths) - 1) * width
    return setups


def settled_of(model: CostProtocol, tables: ShardTable, env: ShardingEnv, batch_size: float) -> CostProtocol:
    """A model as it is of one plan, if it tells plans apart: what depends on which tables are copied, for one.

    A model does so that has `settled`, with these arguments; costs are then what this gives. One that has none is the
    same for all plans.

    Args:
        tables: all parameters, each as one shard, and `replicated` where every rank has it whole.
        batch_size: samples per data rank.
    """
    settled = getattr(model, "settled", None)
    found: CostProtocol = model if settled is None else settled(tables, env, batch_size)
    return found


def ways_of(model: CostProtocol, tables: ShardTable, env: ShardingEnv, batch_size: float) -> tuple[CostProtocol, ...]:
    """What `settled_of` may give for plans of these parameters, whatever they copy; so no plan costs less than by all.

    A model that has `settled` has `ways` too, with these arguments.
    """
    ways = getattr(model, "ways", None)
    found: tuple[CostProtocol, ...] = (model,) if ways is None else tuple(ways(tables, env, batch_size))
    return found


def conditions_of(
    model: CostProtocol, tables: ShardTable, env: ShardingEnv, batch_size: float
) -> list[tuple[Array, float]]:
    """What is so of all plans for which `settled_of` gives this model, but for those that copy nothing.

    A model may say so by `conditions`, with these arguments; it makes bounds higher.

    Returns:
        For each condition: (parameters,) what each adds that is copied, and what the sum is at least.
    """
    said = getattr(model, "conditions", None)
    found: list[tuple[Array, float]] = [] if said is None else said(tables, env, batch_size)
    return found


def kinds_of(is_copied: Flags, is_summed: Flags, is_straight: Flags) -> Integers:
    """(parameters,) set-ups that each needs, a bit each.

    Args:
        is_copied: every rank has the whole.
        is_summed: pooled tables whose rows are cut, see `is_pooled`.
        is_straight: see `goes_straight`.
    """
    split: Integers = 1 << EXCHANGE | 1 << AWAY | np.where(is_summed, 1 << SPLIT, 1 << WHOLE)
    return np.where(is_copied, 1 << EXCHANGE | 1 << ALL_REDUCE, split | is_straight.astype(np.int64) << STRAIGHT)


def is_pooled(info: ParameterInfo) -> bool:
    """Whether ranks that have parts of its rows have sums of them: sums over row blocks are of tables alone."""
    return info.kind == "table" and info.pooled


def checked(model: Any) -> CostProtocol:
    """A cost model that a user passed.

    Raises:
        ValueError: it lacks a member of `CostProtocol`, or is a class.
    """
    wanted = ("phases", "spans", "costs", "setups")
    missing = [name for name in wanted if not hasattr(model, name)]
    if isinstance(model, type) or missing:
        what = f"lacks {', '.join(missing)}" if missing else "is a class: call it"
        raise ValueError(
            f"expected a cost model, an object with {', '.join(wanted)} as planner.CostModel() has; "
            f"{shown(model)} {what}"
        )
    if not (isinstance(model.phases, Iterable) and all(isinstance(p, str) for p in model.phases)):
        raise ValueError(f"a cost model's phases are names; {shown(model)} has {shown(model.phases)}")
    found: CostProtocol = model
    return found
