"""`TableModule`: what the sharded versions of embedding modules share: parameters, state, moves and copies."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from dmp import Calls, ChunkedTensor, FusedParameter, Layout, ParameterInfo, ParameterSharding, ShardingEnv, ranks
from sharders.channel import over_group
from sharders.embedding.batches.batch import Ids
from sharders.embedding.data_path.engine import Engine
from sharders.embedding.exchange.codec import AS_COMPUTED, Codecs, Wire, codecs_of
from sharders.embedding.exchange.peers import find_peers
from sharders.embedding.exchange.placement import Table
from sharders.embedding.exchange.tensor_slice import tensor_ranks
from sharders.embedding.ids.call import Call
from sharders.embedding.lookup.kernels import kernel_of
from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.embedding.originals import carry_state, gathered, module_at, parameter_at
from sharders.embedding.representatives import representatives
from sharders.embedding.resting import apart, as_they_are, resting
from sharders.embedding.successor import hand_on
from sharders.embedding.torchrec_form import TorchRecForm, check_gradients_are_means, make_known
from sharders.embedding.weights.part_read import Part
from sharders.embedding.weights.same_form import SameForm
from sharders.embedding.weights.unread_weight import Unread

InitFn = Callable[[torch.Tensor], Any]
_FUSED_DEFAULT = OptimizerSpec.make("sgd", lr=0.01)  # FBGEMM's


class Watched(SameForm):
    """Holds tables' parameters: inside the model's forward each is an `Unread`. The lookup takes them elsewhere.

    Args:
        engine: whose tables they are.
        way_out: what to do about a read, for its message.
    """

    _engine: Engine
    _way_out: str
    _tables: dict[str, int]
    """Parameter -> its table."""

    def __init__(self, engine: Engine, way_out: str) -> None:
        super().__init__()
        # Past torch's `__setattr__`, which looks for modules and parameters among them: there are a thousand of these.
        vars(self).update(_engine=engine, _way_out=way_out, _tables={})

    @property
    def _parameters(self) -> dict[str, nn.Parameter | None]:
        """What torch's `parameters()` goes through."""
        held: dict[str, Any] = self.__dict__["_parameters"]
        engine: Engine | None = self.__dict__.get("_engine")  # not there yet while torch makes the module
        if engine is None or not engine.calls.is_forward:
            return held
        return {name: self._unread(name, parameter) for name, parameter in held.items()}

    @_parameters.setter
    def _parameters(self, held: dict[str, nn.Parameter | None]) -> None:
        self.__dict__["_parameters"] = held

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if name not in self._tables or name not in self.__dict__["_parameters"]:
            return value
        if self._engine.calls.is_forward:
            return self._unread(name, value)
        if self._engine.store.is_whole(self._tables[name]):
            return value
        return Part.of(value, *self._whole(name), self, self._engine.placement.shards[self._tables[name]])

    def __setattr__(self, name: str, value: Any) -> None:
        if type(value) is Part and name in self._tables and value.is_set_to(self.__dict__["_parameters"][name]):
            return  # `emb.weight -= ...` assigns what it has written to
        super().__setattr__(name, value)

    def _unread(self, name: str, parameter: Any) -> Any:
        if self._engine.env.size == 1 and self._engine.tables[self._tables[name]].optimizer is None:
            return parameter  # the whole table, whose gradient is whole
        return Unread.of(parameter, *self._whole(name), self._way_out)

    def _whole(self, name: str) -> tuple[tuple[int, int], str]:
        engine, table = self._engine, self._engine.tables[self._tables[name]]
        return (table.rows, table.dim), f"{engine.name}.{table.parameter}" if engine.name else table.parameter


class Holder(Watched):
    """A place for one parameter, so that it keeps its name."""

    def extra_repr(self) -> str:
        """Shapes of what is held."""
        return ", ".join(f"{name}: {tuple(p.shape)}" for name, p in self.named_parameters(recurse=False))

    def __deepcopy__(self, memo: dict[int, Any]) -> Holder:
        new = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():  # most are mappings of hooks without any, of a thousand holders
            is_bare = type(value) in (dict, OrderedDict, set) and not value
            vars(new)[name] = type(value)() if is_bare else copy.deepcopy(value, memo)
        return new


class TableModule(Watched, TorchRecForm):
    """Tables on a mesh, run by an `Engine`; subclasses read inputs (`ids_of`) and make results (`result_of`).

    The forward is `finish(begin(input))`, both of which see all ranks: `Engine.begin` says what may lie between.
    So the ids of the next batch travel while this one computes:

        call = module.begin(batch)
        for following in batches:
            out, call = module.finish(call), module.begin(following)
            loss(out).backward()

    Args:
        original: the module in whose place this one stands; its values are kept.
        tables: its tables.
        plan: relative parameter name -> entry.
        env, device: where to run.
        options: passed to `Engine`.
    """

    way_out = (
        "Read it outside the forward (full_state_dict(model) gives whole tables), or leave its module to the "
        "data-parallel part: pass sharders without the one that takes it"
    )

    ids_of: Callable[..., Ids]
    """What the forward's arguments ask for; may raise `Fault`."""

    result_of: Callable[[Call, Sequence[torch.Tensor]], Any]
    """What the unsharded module returns, from what `Engine.finish` gives."""

    def __init__(
        self,
        original: nn.Module,
        tables: Sequence[Table],
        plan: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device,
        **options: Any,
    ) -> None:
        layouts = [plan[t.parameter].layout for t in tables]
        super().__init__(Engine(tables, layouts, env, device, **options), self.way_out)
        self._unsharded_type = type(original)
        make_known(type(self))
        self._options = options
        self._of_store: tuple[Any, dict[str, FusedParameter]] = (None, {})
        values = {i: parameter_at(original, t.parameter) for i, t in enumerate(tables)}
        self._engine.store.load_all({i: v for i, v in values.items() if not v.is_meta})
        known = self.gathered(original, [table.parameter for table in tables if table.optimizer is not None])
        for fused in self._engine.store.fused_parameters() if known else ():
            if fused.name in known:
                carry_state(known[fused.name], fused)
        for index, parameter in enumerate(self._engine.store.parameters):
            self._place(index, parameter, original)
        self._tell_places()

    def extra_repr(self) -> str:
        """By which kernels its rows are looked up."""
        names = dict.fromkeys(kernel_of(tbe.lookup) for tbe in self._engine.store.tbes)
        return f"kernel={'+'.join(names)}" if names else ""

    @staticmethod
    def gathered(original: Any, names: Iterable[str]) -> Mapping[str, Mapping[str, Any]]:
        """What the optimizers of tables in the original have gathered, of those that have stepped before wrapping."""
        return gathered(original, names)

    def stand_for(self, original: nn.Module) -> None:
        """Have the original hand everything on to this module."""
        hand_on(original, self)

    def _place(self, index: int, parameter: nn.Parameter, original: nn.Module) -> None:
        """Under its name, in dicts of modules where the original has them, so that code reads it as before."""
        *path, name = self._engine.tables[index].parameter.split(".")
        module: nn.Module = self
        for part in path:
            original = module_at(original, part)
            if part not in module._modules:
                is_dict = isinstance(original, nn.ModuleDict)
                module.add_module(part, nn.ModuleDict() if is_dict else Holder(self._engine, self.way_out))
            module = module_at(module, part)
        assert isinstance(module, Watched)
        module.register_parameter(name, parameter)
        module._tables[name] = index

    def _tell_places(self) -> None:
        """Where its parameters stand in this module, so that the engine sees when one is replaced."""
        paths = [table.parameter.rpartition(".") for table in self._engine.tables]
        self._engine.places = [(module_at(self, path).__dict__["_parameters"], name) for path, _, name in paths]

    def begin(self, *inputs: Any, **keywords: Any) -> Call:
        """Input dist of a batch, of the forward's arguments: see `Engine.begin`."""
        if (rest := resting(self._engine)) is not None:
            self.run_by(apart(self._engine, rest, self._options))
        return self._engine.begin(lambda: self.ids_of(*inputs, **keywords))

    def finish(self, call: Call) -> Any:
        """The forward's result, of a call that was begun: see `Engine.finish`."""
        return self.result_of(call, self._engine.finish(call))

    @property
    def travels(self) -> bool:
        """Whether ids are under way when a call was begun: see `Engine.travels`."""
        return self._engine.travels

    def can_finish(self, call: Call) -> bool:
        """Whether a call that was begun is what `forward` would begin now: see `Engine.can_finish`."""
        return self._engine.can_finish(call)

    @_disable_dynamo  # what is compiled in its stead would not keep memory that kernels read by its address
    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """As the unsharded module's; what ranks exchange is plain memory, inside of torch.func's `jvp`, too."""
        with temporarily_clear_interpreter_stack():
            return self.finish(self.begin(*inputs, **keywords))

    @property
    def module_path(self) -> str:
        """Path in the model, for messages; set by the wrapper."""
        return self._engine.name

    @module_path.setter
    def module_path(self, path: str) -> None:
        self._engine.rename(path)

    @property
    def calls(self) -> Calls:
        """Calls of the model that are under way; set by the wrapper."""
        return self._engine.calls

    @calls.setter
    def calls(self, calls: Calls) -> None:
        self._engine.belong_to(calls)

    def phases(self) -> Mapping[str, tuple[float, int]]:
        """Of its last step: phase -> seconds by this rank's clock, and bytes sent to other ranks."""
        return self._engine.last.total()

    def chunked_state(self) -> Mapping[str, ChunkedTensor]:
        """Pieces of every table that is cut, as views; of what a user put in a parameter's place too."""
        self._engine.store.take_back(self._engine.name)
        return self._engine.store.chunked_state()

    def fused_parameters(self) -> Iterable[FusedParameter]:
        """Tables that are updated in the backward pass."""
        for fused in self._engine.store.fused_parameters():
            yield replace(fused, state=partial(self._state_of, fused.name))

    def _state_of(self, name: str) -> dict[str, torch.Tensor]:
        """Optimizer state of a table as it is by now: it may be stored beside others."""
        if self._of_store[0] is not self._engine.store:
            self._of_store = self._engine.store, {f.name: f for f in self._engine.store.fused_parameters()}
        return self._of_store[1][name].state()

    def resharded(self, plan: Mapping[str, ParameterSharding]) -> ReshardedTables:
        """Its tables under another plan, without their values: see `dmp.Resharded`."""
        old = self._engine
        old.check_parameters()
        tables = as_they_are(old)
        layouts = [plan[table.parameter].layout for table in tables]
        options = {"options": old.store.options, **self._options}
        return ReshardedTables(self, Engine(tables, layouts, old.env, old.device, **options))

    @property
    def engine_options(self) -> dict[str, Any]:
        """With which its engine was made."""
        return dict(self._options)

    def run_by(self, engine: Engine) -> None:
        """Have another engine's tables in place of those that there are, in the same modules."""
        old, self._of_store = self._engine, (None, {})  # which would keep the tables that there were
        engine.belong_to(old.calls)
        engine.rename(old.name)
        engine.store.count_as(old.store)
        for module in self.modules():
            if isinstance(module, Watched):
                module._engine = engine
        for (held, name), parameter in zip(old.places, engine.store.parameters, strict=True):
            held[name] = parameter
        engine.places, old.is_replaced = old.places, True

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TableModule:
        """Storage moves as a whole, for the parameters are views of it."""
        self._engine.store.take_back(self._engine.name)
        self._engine.move(fn)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TableModule:
        self._engine.store.take_back(self._engine.name)
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        copy.deepcopy(self._engine, memo)  # first, for it tells `memo` the parameters' copies
        new.__dict__ = copy.deepcopy({**self.__dict__, "_of_store": (None, {})}, memo)
        new._tell_places()
        return new


class ReshardedTables:
    """A module's tables under another plan, beside those in force; a `dmp.Resharded`."""

    def __init__(self, module: TableModule, engine: Engine) -> None:
        self._module, self._engine = module, engine

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """One for each table."""
        of_tables = zip(self._engine.tables, self._engine.store.parameters, strict=True)
        return {table.parameter: parameter for table, parameter in of_tables}

    def chunked_state(self) -> Mapping[str, ChunkedTensor]:
        """Pieces of every table that is cut, as views."""
        return self._engine.store.chunked_state()

    def fused_parameters(self) -> Iterable[FusedParameter]:
        """Tables that are updated in the backward pass; they keep their param groups."""
        return self._engine.store.fused_parameters()

    def take_place(self) -> TableModule:
        """The module, which is the same as before, looks up these from now on."""
        self._module.run_by(self._engine)
        return self._module


class TableSharder:
    """What the sharders of embedding modules share: any layout, one data path.

    Subclasses say which modules (`module_type`), what takes their place (`sharded_type`) and which tables they have.

    Args:
        validate: an id outside its table is an `InputError` on every rank; with False it is looked up, and its row
            trained, as the table's nearest. Lengths and weights that do not fit are errors in either case.
        sync_interval: with a replicate axis: share gradients at every step (1), or average the copies every k updates.
        kernel: which lookup kernel to use ("fbgemm", "torch", or one that was registered); by default the fastest that
            takes the tables. One that does not is a `ShardError` that says why, when the module is sharded.
        optimizer: runs in the backward pass of trained tables that `apply_optimizer_in_backward` gave none.
        wire: torch.bfloat16 or torch.float16: results and gradients travel as that, each value rounded once, those
            beyond float16's range to its largest; or a pair of results' and gradients'. None: as they are computed.
        codecs: in place of `wire`, formats of one's own.
    """

    sharded_type: type[TableModule]
    is_pooled: bool
    names_features = True
    """Its modules' inputs have names."""

    def __init__(
        self,
        *,
        validate: bool = True,
        sync_interval: int = 1,
        kernel: str | None = None,
        optimizer: OptimizerSpec | None = None,
        wire: Wire = None,
        codecs: Codecs = AS_COMPUTED,
    ) -> None:
        self.optimizer = optimizer
        self._options: dict[str, Any] = {"validate": validate, "sync_interval": sync_interval, "kernel": kernel}
        self._options["codecs"] = codecs_of(wire, codecs)

    @property
    def options(self) -> str:
        """What it was made with."""
        given = {**self._options, "optimizer": self.optimizer}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())

    def tables(self, module: nn.Module) -> list[tuple[Table, InitFn | None]]:
        """The module's tables and how each is filled; none where the data path would not give the same results."""
        raise AssertionError("a subclass says which tables there are")

    def parameters(self, module: nn.Module) -> Mapping[str, ParameterInfo]:
        """One table each."""
        return {
            table.parameter: ParameterInfo(
                shape=(table.rows, table.dim),
                dtype=table.dtype,
                kind="table",
                optimizer=table.optimizer.kind if table.optimizer else None,
                state_bytes=table.optimizer.optimizer.state_bytes(table.dtype) if table.optimizer else None,
                mixes_columns=table.optimizer.optimizer.mixes_columns if table.optimizer else None,
                num_features=len(table.features),
                features=tuple(table.features) if self.names_features else (),
                pooled=self.is_pooled,
                init_fn=init_fn,
            )
            for own, init_fn in self.tables(module)
            for table in [self._updated(own, None)]
        }

    def _updated(self, table: Table, kernel: str | None) -> Table:
        """A table with the optimizer that the sharder, or the kernel of its plan's entry, gives to one without.

        One that has its own takes what only the sharder's options say; none where the kernel is `"dense"`, for scripts
        give such a table to another afterwards: both as under TorchRec. One that is frozen gets no state.
        """
        optimizer = None if kernel == "dense" else self.optimizer
        if not table.trainable or ((optimizer or table.optimizer) is None and kernel != "fused"):
            return table
        if table.rests:
            return replace(table, trainable=False, rests=False)
        if kernel == "dense":
            ranks.say_once(
                "the plan's kernel 'dense' makes ordinary parameters of tables that have an optimizer from "
                "apply_optimizer_in_backward, which is forgotten, as under TorchRec. Give them to one that you step "
                "(in_backward_optimizer_filter has them), or they are not trained; data_parallel() alone keeps theirs",
                by_first=True,
            )
            return replace(table, optimizer=None)
        if table.optimizer is not None:
            return table if self.optimizer is None else replace(table, optimizer=table.optimizer.over(self.optimizer))
        if optimizer is None:
            ranks.say_once(
                "the plan says that tables are fused, and nobody gave them an optimizer: they are updated in the "
                "backward pass as TorchRec does it then, by SGD with lr 0.01. apply_optimizer_in_backward, or "
                "fused_params, gives them another; the kernel 'dense' leaves them to an ordinary optimizer",
                by_first=True,
            )
        return replace(table, optimizer=optimizer or _FUSED_DEFAULT)

    def layouts(self, info: ParameterInfo, env: ShardingEnv) -> Iterable[Layout]:
        """Representatives of every way to cut a table; the planner chooses the ranks."""
        return representatives(info.shape[1], env.table_shape)

    def accepts(self, info: ParameterInfo, layout: Layout, env: ShardingEnv) -> bool:
        """Any rectangles that cover the table."""
        return len(info.shape) == 2

    def connect(self, env: ShardingEnv) -> None:
        """Make the process groups that the tables use; collective."""
        tensor_ranks(env, over_group)
        find_peers(env, self._options["sync_interval"] == 1, by_stages=self.is_pooled, transport=over_group)

    def shard(
        self, module: nn.Module, plan: Mapping[str, ParameterSharding], env: ShardingEnv, device: torch.device
    ) -> nn.Module:
        """The module on the mesh; inputs and results as of the unsharded one."""
        check_gradients_are_means(type(module).__name__, env.data_size)
        tables = [self._updated(table, plan[table.parameter].kernel) for table, _ in self.tables(module)]
        return self.sharded_type(module, tables, plan, env, device, unpooled=not self.is_pooled, **self._options)
