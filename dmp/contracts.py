"""What a sharder's author agrees with the wrapper: plain data in, a module out. No base class is needed.

[Note: names]
Parameter names are relative to the module that a sharder is asked about (`weight`, `embeddings.t1.weight`), here and in
the plan it is given; the wrapper adds and removes the module's path.

[Note: hooks]
The members of a Protocol are what one must have. What one may have beside them is this, and is in `HOOKS`:

- `accepts(info, layout, env) -> bool`, of a `ModuleSharder`: whether `shard` runs this layout; in place of the rule
  that a plan may name what is of a kind in `layouts`.
- `why_not(info, layout, env) -> str`, of a `ModuleSharder`: of a layout that it does not run, why, for the error.
- `connect(env)`, of a `ModuleSharder`: makes, on all ranks, the process groups that `shard` uses, which then is local.
- `options: str`, of a sharder: what it was made with, in words; the ranks compare them before they wrap.
- `module_path: str`, of a `ShardedModule`: set by the wrapper to the module's path, for messages.
- `calls: Calls`, of a `ShardedModule`: set by the wrapper: whether the model's forward is under way, in which nobody
  but the module itself should read its chunks.
- `tells_rows: bool`, of a `ShardedModule` with `calls`: whether it tells `calls.watch`, where there is one, of the rows
  that its training forwards read.
- `begin(*inputs, **keywords) -> call`, of a `ShardedModule`, with the next two: the first phase of its forward, which
  is `finish(begin(...))`. Other calls may be begun before one is finished, so that a pipeline has the ids of the next
  batch travel while this one computes. It reads no parameter; what is wrong with a batch is raised on all ranks. All
  ranks begin and finish in one order; a call that is never finished leaves nothing behind.
- `finish(call) -> result`, of a `ShardedModule`: the second phase, which reads the parameters as they are now.
- `can_finish(call) -> bool`, of a `ShardedModule`: whether `finish` gives what the forward would now: not where
  gradients came to be wanted since, or the module was moved. The same on all ranks.
- `travels: bool`, of a `ShardedModule` with these three: whether ids are still on their way when `begin` has returned,
  so that to begin a batch ahead gains something; where it is absent they are. The same on all ranks.
- `phases() -> {name: (seconds, bytes)}`, of a `ShardedModule`: of its part in the last step, by phase: seconds of this
  rank's clock, and bytes that this rank has sent to others. Local.
- `filled() -> names`, of a `ShardedModule`: of what was on meta and has its first values already, names relative.
- `unsharded() -> nn.Module`, of a `ShardedModule`: a plain module of the same structure and names on meta, for
  `to_unsharded`.
- `stand_for(original)`, of a `ShardedModule`: makes the module in whose place it was put this very one, for whoever
  holds it still: a loss, a sampler, a function that was made before.
- `resharded(plan) -> Resharded`, of a `ShardedModule`: its parameters under another plan, for `model.reshard`; local,
  and nothing of the module is changed. Without it the sharder makes the module again from `unsharded`, where none of
  its parameters is updated in the backward pass.
- `notes: Iterable[str]`, of a `ModelPlacement`: what is left whole, and why, for showing.
- `kept: Collection[int]`, of a `ModelPlacement`: set by the wrapper before `apply`: ids of weights that the model keeps
  beside their places (in a list or dict of its own) and goes on reading there: they stay the parameters that they are.
  Of none where the mesh has no tensor axis.
- `shards_in_place(env, has_dtensors) -> bool`, of a `DataParallelWrapper`: whether `wrap` returns the module that it
  was given, and takes parameters on meta, which are filled afterwards; `has_dtensors`: weights are tensor-parallel.
- `check(module, env, placed, ignored)`, of a `DataParallelWrapper`: raises what `wrap` would, before anything is
  changed; `placed` are the layouts of what tensor parallelism will split.
- `found`, of a `Planner`: a keyword of `collective_plan`, and of `plan` where there is one: what the sharders take of
  the module (`dmp.Found`), for a planner that need not ask them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from dmp.chunked import ChunkedTensor
from dmp.env import ShardingEnv
from dmp.layouts.layout import Layout, ParameterSharding


@dataclass(frozen=True)
class ParameterInfo:
    """What the planner may know of a parameter: it sees no module and no tensor.

    Args:
        shape: of the unsharded parameter.
        dtype: of its elements.
        kind: `"table"` for rows that batches look up, else a word of the sharder's own.
        optimizer: name of the optimizer that runs in the backward pass (`"sgd"`, `"adagrad"`, `"rowwise_adagrad"`,
            `"adam"`, or one that was registered), or None when an ordinary one will.
        pooling_factor: mean ids per sample of each feature that reads the table; None when nobody said.
        num_features: number of features that read it.
        features: their names, in order, where they have any; parameters that differ in these alone are alike.
        pooled: whether a feature's rows are summed into one, or returned one by one.
        init_fn: fills a block of whole rows in place with initial values, for parameters still on meta; None when the
            module's own `reset_parameters` does it.
        state_bytes: of that optimizer's state, for each element and for each row; None when nobody said: by its name,
            where that is registered.
        mixes_columns: whether that optimizer reads a row's other columns to update one, as for a norm of the row, so
            that cut columns change numbers; None when nobody said: by its name, else where it has bytes for each row.
        trained: whether it gets a gradient. The wrapper says that a parameter is frozen, and has no state; where the
            sharder names an optimizer all the same, which its module will run, that is believed.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    optimizer: str | None = None
    pooling_factor: float | tuple[float, ...] | None = None
    num_features: int = 1
    pooled: bool = True
    init_fn: Callable[[torch.Tensor], Any] | None = None
    state_bytes: tuple[float, float] | None = None
    mixes_columns: bool | None = None
    features: tuple[str, ...] = field(default=(), compare=False)
    trained: bool = True


@runtime_checkable
class ModuleSharder(Protocol):
    """Knows one kind of module: its parameters, the layouts it can run them in, and how to run them so."""

    @property
    def module_type(self) -> type[nn.Module]:
        """The kind of module, subclasses included; the nearest in a module's MRO wins."""
        ...

    def parameters(self, module: nn.Module) -> Mapping[str, ParameterInfo]:
        """Parameters of `module` that a plan places; the others, all where empty, are the data-parallel part's."""
        ...

    def layouts(self, info: ParameterInfo, env: ShardingEnv) -> Iterable[Layout]:
        """Every kind of layout that `shard` can run for such a parameter; the planner chooses only here.

        One representative of a kind stands for all its choices of ranks. A plan may also name another layout of a kind
        offered here; a sharder that runs more than these kinds says so by the hook `accepts`.
        """
        ...

    def shard(
        self, module: nn.Module, plan: Mapping[str, ParameterSharding], env: ShardingEnv, device: torch.device
    ) -> nn.Module:
        """A module for `module`'s place, with the same parameter and buffer names, on `device`.

        `plan` names exactly what `parameters` named. Values present are kept. What is on meta, buffers too, is
        allocated here, uninitialised, and filled by the wrapper afterwards, whatever its form: chunks, a DTensor, or
        the whole. Gradients of what `parameters` named are means over the data ranks (`env.data_size`). Parameters
        that it did not name are kept whole, and belong to the data-parallel part, which averages their gradients;
        buffers stay with the module. `module` itself is not changed, so that a failure loses nothing.
        What fails here on one rank is raised on all, if no rank waits for another in it: see the hook `connect`.
        The result has `chunked_state` (see `ShardedModule`) unless every parameter is whole or a DTensor.
        """
        ...


@runtime_checkable
class ShardedModule(Protocol):
    """What the wrapper asks of a module that holds chunks of parameters. Hooks: `module_path`,
    `calls`, `unsharded`, `filled`; `begin` with `finish` and `can_finish`."""

    def chunked_state(self) -> Mapping[str, ChunkedTensor]:
        """For each sharded parameter its chunks on this rank, as views of the local storage, names relative."""
        ...


@dataclass
class FusedParameter:
    """A parameter whose optimizer runs in the backward pass.

    Args:
        name: relative to the module.
        parameter: the local parameter.
        options: the live param group: `lr` and others, read at every update; shared by parameters updated together.
        state: gives the live state by torch.optim's names, in the unsharded parameter's shape: chunks, or whole.
        widths: of the column blocks, where row-wise state has a value for each; None where there is one per row.
    """

    name: str
    parameter: nn.Parameter
    options: dict[str, Any]
    state: Callable[[], dict[str, torch.Tensor]] = field(repr=False)
    widths: tuple[int, ...] | None = None


@runtime_checkable
class FusedModule(Protocol):
    """A sharded module that updates some of its parameters itself, in the backward pass."""

    def fused_parameters(self) -> Iterable[FusedParameter]:
        """Those parameters, with their options and state."""
        ...


class Resharded(Protocol):
    """Parameters of a sharded module under another plan, beside those in force: room for values, without them yet."""

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Each local parameter, names relative."""
        ...

    def chunked_state(self) -> Mapping[str, ChunkedTensor]:
        """As of `ShardedModule`."""
        ...

    def fused_parameters(self) -> Iterable[FusedParameter]:
        """As of `FusedModule`; `options` are the very dicts of the module's own."""
        ...

    def take_place(self) -> nn.Module:
        """Now that all is filled, run by them, for good: local, and does not fail. Returns the module, or another."""
        ...


class ModelPlacement(Protocol):
    """What a `ModelSharder` found it can do with one model on one mesh: nothing is changed before `apply`.

    Hooks: `notes`, `kept`.
    """

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Fully-qualified name of every parameter that `apply` splits -> how."""
        ...

    def apply(self, model: nn.Module) -> None:
        """Split them in place: they become DTensors under their names; hooks convert activations."""
        ...


@runtime_checkable
class ModelSharder(Protocol):
    """Splits dense parameters anywhere in a model, in place: after the tables are replaced, before data parallel."""

    def place(self, model: nn.Module, given: Mapping[str, Layout], env: ShardingEnv) -> ModelPlacement:
        """What to split on this mesh.

        Args:
            model: unsharded, parameters possibly on meta; it is not changed.
            given: a plan's entries for dense parameters; empty leaves the choice to the sharder.
            env: the mesh, possibly abstract.

        Returns:
            A placement whose layouts are those of `given` that it runs (in full), or its own choice.

        Raises:
            PlanError: something that does not divide, naming the module, the size and the axis.
        """
        ...


AnySharder = ModuleSharder | ModelSharder


class DataParallelWrapper(Protocol):
    """Runs what no sharder owns with gradients averaged over the data ranks.

    Hooks: `shards_in_place`, `check`.
    """

    def wrap(self, module: nn.Module, env: ShardingEnv, device: torch.device, ignored: frozenset[str]) -> nn.Module:
        """A module that runs `module` so; parameters and buffers named in `ignored` are left alone."""
        ...


class Planner(Protocol):
    """Chooses a layout for every parameter that a plan must place. Hook: `found`."""

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Iterable[AnySharder],
        env: ShardingEnv,
        pinned: Mapping[str, ParameterSharding | Layout] | None = None,
    ) -> Mapping[str, ParameterSharding | Layout]:
        """The same plan on every rank of the env, all of which call this; `pinned` entries are kept as they are."""
        ...


VERSION = 7
"""Of the contracts: higher by one where a member or a hook comes, goes, or means something else."""

HOOKS: Mapping[str, int] = {
    **dict.fromkeys(
        ("accepts", "connect", "module_path", "calls", "unsharded", "notes", "shards_in_place", "check", "found"), 1
    ),
    **dict.fromkeys(("resharded", "options", "begin", "finish", "can_finish", "why_not"), 2),
    "filled": 2,
    "phases": 3,
    "travels": 4,
    "stand_for": 5,
    "tells_rows": 6,
    "kept": 7,
}
"""Name of each optional member -> the first version that knows it, see [Note: hooks]."""


def hook(of: object, name: str) -> Any:
    """The optional member of that name, one of `HOOKS`; None where the object has none."""
    assert name in HOOKS, name
    return getattr(of, name, None)


def set_hook(of: object, name: str, value: Any) -> None:
    """Set the optional member of that name, one of `HOOKS`, where the object has it."""
    assert name in HOOKS, name
    if hasattr(of, name):
        setattr(of, name, value)


def takes_found(planner: Planner) -> bool:
    """Whether a planner has the hook `found`: in each of its methods, for a subclass may override one of them."""
    methods = [getattr(planner, name) for name in ("collective_plan", "plan") if hasattr(planner, name)]
    return all("found" in signature(method).parameters for method in methods)
