"""The embedding data path of one module: input dist, lookup, output dist, and back.

A call has two phases. `begin`: header exchange -> payload exchange (input dist), which is under way when it returns.
`finish`: lookup -> output exchange (output dist); backward is one exchange of gradients and the update.
All tables of a module travel together whatever their layouts. Gradients are means over the data ranks.
Ranks along a tensor axis hold the same batch: each sends its part, and one more exchange gathers the results.
A module called twice in a step is updated once for each call, in the order of their backward passes; gradients of
weights of ids are worked out of the rows as they are then.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import is_not
from typing import Any

import torch
from torch._compile import _disable_dynamo

from dmp import Calls, InputError, Layout, ShardError, ShardingEnv, ranks
from sharders.channel import GroupChannel, Transfer, Transport, over_group
from sharders.embedding.batches.batch import Batch, Ids
from sharders.embedding.batches.input_checks import check_batch
from sharders.embedding.batches.input_faults import Fault, Kind
from sharders.embedding.data_path.pooled import PooledPath
from sharders.embedding.data_path.unpooled import UnpooledPath
from sharders.embedding.exchange.codec import AS_COMPUTED, Codecs
from sharders.embedding.exchange.local_tables import TableStore
from sharders.embedding.exchange.peers import find_peers
from sharders.embedding.exchange.phases import GRADIENT, INPUT, TENSOR, LastStep, Spent, counted, phase
from sharders.embedding.exchange.placement import Placement, Table
from sharders.embedding.exchange.replicas import Replicas
from sharders.embedding.exchange.tensor_slice import checksum, cut_batch, even_cut, gather_rows, tensor_ranks
from sharders.embedding.exchange.touched_rows import are_fewer, touched_at_most
from sharders.embedding.ids.call import Call, Sent
from sharders.embedding.ids.header import Behind, Handshake, Header
from sharders.embedding.ids.input_dist import InputDist
from sharders.embedding.ids.told_rows import ToldRows
from sharders.embedding.lookup.kernels import kernel_of
from sharders.embedding.lookup.numba_kernel import may_run
from sharders.embedding.weights.handed_out import hand_out
from sharders.embedding.weights.loss_terms import mark


class Engine:
    """The data path of one module's tables.

    Args:
        tables: in the order of the module's results.
        layouts: one for each table.
        env: the mesh.
        device: of the tables.
        unpooled: results are rows instead of bags.
        validate: an id outside its table is an `InputError`; else it is looked up as the nearest row of the table.
            Lengths and weights that do not fit are errors in either case.
        sync_interval: with a replicate axis: 1 shares gradients between the copies at every step, so that they stay
            equal to one process; k > 1 averages weights and optimizer state every k updates.
        transport: opens the channels of the tables.
        codecs: of what travels on them; results and gradients as they are computed, by default.
        kernel: name of the lookup kernel; see `choose_kernel`.
        options: live param groups, see `TableStore`.

    Raises:
        ShardError: a mesh or a combination that the data path cannot run.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        layouts: Sequence[Layout],
        env: ShardingEnv,
        device: torch.device,
        *,
        unpooled: bool = False,
        validate: bool = True,
        sync_interval: int = 1,
        transport: Transport = over_group,
        codecs: Codecs = AS_COMPUTED,
        kernel: str | None = None,
        options: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        _check_supported(tables, env, sync_interval)
        self.env, self.tables, self.unpooled, self.validate = env, list(tables), unpooled, validate
        self.sync_interval = sync_interval
        self.calls = Calls()
        """Calls of the model that are under way; the wrapper sets the model's."""
        self.last = LastStep()
        """What its calls have taken, by phase."""
        transport = counted(transport)
        self.tensor = tensor_ranks(env, transport)
        self.peers = find_peers(env, sync_interval == 1, by_stages=not unpooled, transport=transport, codecs=codecs)
        self.placement = Placement(tables, layouts, env, unpooled)
        self.is_local = not any(self.placement.slots)
        """Whether all tables are whole on every rank."""
        self.payloads = GroupChannel(None) if self.is_local else self.peers.exchange
        """Where ids travel: nowhere where all tables are data-parallel."""
        self.store = TableStore(self.placement, env.table_rank, device, kernel, options)
        # Copies that different kernels update would part by their rounding.
        kernels = sorted({kernel_of(tbe.lookup) for tbe in self.store.local if tbe.is_trainable})
        self.handshake = Handshake(
            repr(([(t, str(lay)) for t, lay in zip(tables, layouts, strict=True)], kernels)),
            [f.name for f in self.placement.features],
            self.peers.headers,
            self.peers.data_ranks,
            self.peers.ranks,
            env.axes("tensor"),
            self.peers.replicas if sync_interval > 1 else None,
        )
        self._rows = tuple(self.tables[f.table].rows for f in self.placement.features)
        self.trains = [t.trains for t in tables]
        """Which get gradients."""
        # What autograd sees of them: those that get a gradient, or one, so that the results want theirs.
        trained = [i for i, t in enumerate(tables) if t.trains]
        self.learning = [i for i in trained if tables[i].optimizer is None] or trained[:1]
        """Tables whose parameters autograd knows as inputs of the lookup."""
        self.places: list[tuple[dict[str, Any], str]] = []  # of the parameters in the module, set by it
        self._open: dict[int, weakref.ref[Call]] = {}  # calls that were begun and not finished, by their numbers
        self.is_replaced = False
        """Whether the module has tables of another plan by now: what was begun before has nowhere to go."""
        self._compile(device)

    def _compile(self, device: torch.device) -> None:
        """Build what depends on the device or refers to the store."""
        self.device = device
        is_double = any(p.dtype == torch.float64 for p in self.store.parameters)
        dtype = torch.float64 if is_double else torch.float32
        wide = dtype == torch.float64 or any(t.rows >= 2**31 for t in self.tables)
        of_ids = wide, self.unpooled, self.store.kernel, self.store.sums_first
        self._compiles = may_run(self.store.kernel, device)
        self.input_dist = InputDist(self.placement, self.peers, device, *of_ids)
        replicas = Replicas(self.store, self.peers, self.sync_interval)
        self.path = (UnpooledPath if self.unpooled else PooledPath)(self.input_dist, replicas, dtype, device)
        self.told = ToldRows(self.store, self.peers, dtype, self.env.replica_of(self.env.rank) == 0)
        hand_out(self)

    @property
    def name(self) -> str:
        """The module's name in messages; part of what ranks compare."""
        return self.handshake.name

    def dtype_of(self, table: int) -> torch.dtype:
        """Elements of a table as they are now: a module may be moved to another dtype."""
        return self.store.parameters[table].dtype

    def rename(self, name: str) -> None:
        """Set `name`."""
        self.handshake.rename(name or "the model", self.calls)

    def belong_to(self, calls: Calls) -> None:
        """Be a part of the model whose calls these are."""
        self.calls = calls
        self.handshake.rename(self.name, calls)

    def move(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace storage by `fn` of it, and compile for its device."""
        self.store.apply(fn)
        self._compile(next((tbe.bank.weights.device for tbe in self.store.tbes), self.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        """Own storage; placement and process groups are shared."""
        new = copy.copy(self)
        memo[id(self)] = new
        new._open, new.last = {}, LastStep()
        new.handshake = copy.copy(self.handshake)
        new.store = copy.deepcopy(self.store, memo)
        new._compile(self.device)
        return new

    @property
    def travels(self) -> bool:
        """Whether ids are under way when a call was begun: on the CPU not those that come with their headers, nor where
        they stay on this rank. All that is done takes its time whenever it is done there."""
        return self.device.type != "cpu" or (self.payloads.size > 1 and not self.input_dist.goes_along)

    def begin(self, parse: Callable[[], Ids]) -> Call:
        """Check a batch, tell all ranks of it, and have its ids be sent: input dist, which is under way at return.

        Two calls may be begun before the first is finished: the ids of a batch travel while the one before it
        computes. All ranks begin and finish in one order. A call that is never finished leaves nothing behind.

        Args:
            parse: reads the module's input; may raise `Fault`.

        Raises:
            InputError: on every rank: what is wrong with one rank's batch. Calls begun before go on.
            ShardError: a parameter of a table was replaced, or `torch.export`, `torch.jit.trace` or a mode of fake
                tensors runs the model.
        """
        if _is_for_show():
            raise ShardError(
                f"{self.name} is sharded, and is neither exported nor traced, nor run on fake tensors: what ranks "
                "exchange is real, and no part of a graph. dmp.to_unsharded(model) is a plain module with the same "
                "weights, which can be"
            )
        spent, is_alone = Spent(), self._needs_nobody()
        group = None if is_alone else self.peers.exchange.group
        with ranks.entry(self.handshake.forward, group) as here, phase(spent, INPUT):
            wants_grad = [p.requires_grad for p in self.store.parameters]
            is_training = torch.is_grad_enabled() and any(wants_grad)
            ready: _Ready | None = None
            problem: Exception | None = None
            try:
                if is_training and wants_grad != self.trains:
                    changed = next(i for i, wants in enumerate(wants_grad) if wants != self.trains[i])
                    raise Fault(Kind.FROZEN, next((f.index for f in self.placement.features if f.table == changed), -1))
                ready = self._make_ready(parse, spent)
            except Exception as error:  # the others wait in the handshake: they are told, and this error is shown here
                problem = error
            headers, came = self._meet(ready, is_training, problem, None if is_alone else here)
            assert ready is not None, "what was wrong has been raised"
            words, touched = [header.words for header in headers], [header.touched for header in headers]
            call = Call(
                self.path,
                ready.whole,
                ready.batch,
                ready.sent,
                words,
                [header.batch_sizes for header in headers],
                is_training,
                ready.wants_weight_gradient,
                all(header.is_sparse for header in headers),
                touched if are_fewer(self.placement, touched, self.peers.is_flat, self.path.dtype.itemsize) else None,
                here.number,
                spent,
                {"payload": came if came is not None else self.payloads.all_to_all(ready.payload, ready.words, words)},
                is_alone=is_alone,
            )
            if not is_alone:
                self._open[call.number] = weakref.ref(call)
            if is_training:
                here.await_backward(call)
            return call

    def _needs_nobody(self) -> bool:
        """Whether a forward now is this rank's alone, as `DistributedDataParallel`'s is: every table is whole here, and
        nothing will be learned. So one rank may evaluate while the others train, and its errors are its own."""
        return self.is_local and self.tensor.size == 1 and not torch.is_grad_enabled()

    def can_finish(self, call: Call) -> bool:
        """Whether this module has begun the call, as it is now, and wants the gradients that it wanted then."""
        wants_grad = [p.requires_grad for p in self.store.parameters]
        is_training = torch.is_grad_enabled() and any(wants_grad)
        weights = call.batch.weights
        of_weights = weights is not None and weights.requires_grad and torch.is_grad_enabled()
        return (
            call.path is self.path
            and call.is_training == is_training
            and call.wants_weight_gradient == of_weights
            and not (is_training and wants_grad != self.trains)
        )

    def finish(self, call: Call) -> list[torch.Tensor]:
        """Look up what a call's input dist brings, and give it back: output dist. What autograd sees.

        Tables are looked up as they are now: with the updates of all backward passes since the call was begun, and
        with what was loaded since. Whether gradients follow was settled in `begin`. A call is finished by the module
        that began it, as long as that is neither moved nor cast; a copy begins calls of its own.

        Returns:
            Pooled: (B, sum of dims), results of all features side by side. Unpooled: for each feature its ids' rows
            (N_f, dim).

        Raises:
            ShardError: another module's call, or the module was moved since.
        """
        if call.path is not self.path:
            raise ShardError(
                f"{self.name} finishes a call that it has not begun, or that it began before it was moved, cast, "
                "copied or resharded; begin the batch again"
            )
        group = None if call.is_alone else self.peers.exchange.group
        with ranks.entry(f"{self.handshake.lookup}, call {call.number}", group) as here:
            self.last.add(call.spent, self.calls.number if self.calls.is_forward else None)
            with phase(call.spent, INPUT):
                self._take_turn(call, here)
            self.store.take_back(self.name)
            if self.calls.watch is not None and call.is_training:
                self.told.of_call(self.calls.watch, self.name, call, self.input_dist.receive(call))
            parameters = [self.store.parameters[i] for i in self.learning] if call.is_training else []
            weights = call.batch.weights if call.wants_weight_gradient else None
            results: Sequence[torch.Tensor] = _Lookup.apply(self, call, weights, *parameters)  # type: ignore[no-untyped-call]
            if self.tensor.size > 1:
                cuts = [even_cut(rows, self.tensor.size) for rows in self.path.row_counts(call.whole)]
                with phase(call.spent, TENSOR):
                    results = gather_rows(results, cuts, self.tensor)
            return list(results)

    def _take_turn(self, call: Call, here: ranks.entry) -> None:
        """Calls are finished in the order they were begun; out of it, or after one that was dropped, the ranks meet.

        Else one could look up another call than the others, with the same sizes and for wrong numbers.

        Raises:
            RanksError: they finish different calls.
        """
        if not call.is_alone and next(iter(self._open), None) != call.number and self.peers.exchange.size > 1:
            self.handshake.take_turn(f"finishes call {call.number}", self.device, here)
            self._open = {n: of for n, of in self._open.items() if n > call.number or of() is not None}
        self._open.pop(call.number, None)

    def check_parameters(self) -> None:
        """Whether the module's parameters are those that are looked up and updated here; their values may be others.

        Raises:
            ShardError: a table's parameter that was replaced.
        """
        found = [held.get(name) for held, name in self.places]
        if any(map(is_not, found, self.store.parameters)):
            for parameter, held, table in zip(self.store.parameters, found, self.tables, strict=False):
                if held is parameter:
                    continue
                by = "nothing" if held is None else f"a {type(held).__name__} of shape {tuple(held.shape)}"
                raise ShardError(
                    f"the parameter of table {table.parameter!r} of {self.name} was replaced by {by}, which would "
                    "neither be looked up nor trained; copy values into the one that was there (model.load_state_dict "
                    "takes whole tensors), and leave a wrapped model to no other wrapper"
                )
        self.store.take_back(self.name)

    def _make_ready(self, parse: Callable[[], Ids], spent: Spent) -> _Ready:
        """What this rank does by itself before it meets the others.

        Raises:
            Fault: what is wrong with the batch.
            ShardError: a parameter of a table was replaced.
        """
        self.check_parameters()
        whole = check_batch(parse(), self._rows, self.validate, self._compiles)
        batch = cut_batch(whole, self.tensor, self.unpooled, spent)
        if self.store.local:
            # Its ids are read here until the backward pass, and the caller may use his tensors again before.
            weights = None if batch.weights is None else batch.weights.clone()
            batch = replace(batch, values=batch.values.clone(), lengths=batch.lengths.clone(), weights=weights)
        wants_weights = batch.weights is not None and batch.weights.requires_grad and torch.is_grad_enabled()
        return _Ready(whole, batch, wants_weights, *self.input_dist.send(batch, wants_weights))

    def _meet(
        self, ready: _Ready | None, is_training: bool, problem: Exception | None, here: ranks.entry | None
    ) -> tuple[list[Header], Transfer | None]:
        """Headers of all ranks, once it is known that every rank is ready, and the payloads that came with them.

        Args:
            here: None where this rank is alone: to it the others have no samples.
        """
        behind: Behind | None = None
        if ready is None:
            fault = problem if isinstance(problem, Fault) else Fault(Kind.UNREADABLE)
            mine = [Header((0,), 0, is_training, False, False, 0, fault)] * len(self.peers.table_ranks)
        else:
            shared = checksum(ready.whole) if self.validate and self.tensor.size > 1 else 0
            sizes, is_weighted = ready.batch.batch_sizes, ready.batch.weights is not None
            wants_gradient = ready.wants_weight_gradient
            sent = None, ready.sent.is_sparse, touched_at_most(self.placement, ready.batch)
            mine = [Header(sizes, n, is_training, is_weighted, wants_gradient, shared, *sent) for n in ready.words]
            if self.input_dist.goes_along:
                behind = Behind(ready.payload, [self.input_dist.room_for(n) for n in ready.words])
        try:
            if here is None:
                return self.handshake.alone(mine), None
            return self.handshake.exchange(mine, self.device, here, behind)
        except InputError as error:
            if isinstance(problem, ShardError):  # of this rank's module, not of its batch
                raise problem from error
            raise error from None if isinstance(problem, Fault) else problem


@dataclass(frozen=True)
class _Ready:
    """A batch that only waits for the other ranks: its parts are those of `Call`."""

    whole: Batch
    batch: Batch
    wants_weight_gradient: bool
    payload: torch.Tensor
    words: list[int]
    sent: Sent


class _Lookup(torch.autograd.Function):
    """Forward: results of lookup and output dist. Backward: gradients to their owners, who update or return `.grad`.

    As torch's saved tensors the batch is let go by the backward that does not retain the graph: a loss that is kept
    would keep it.

    The gradient of the weights (N,), where they want one, comes back from the owners in one more exchange; it is this
    rank's own, not a mean.
    """

    @staticmethod
    def forward(
        ctx: Any, engine: Engine, call: Call, weights: torch.Tensor | None, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.engine, ctx.call, ctx.number, ctx.is_again = engine, call, call.number, False
        ctx.learning = engine.learning[: len(parameters)]
        # No views, to autograd: they may be changed in place, as the unsharded module's results.
        return tuple(result.data if result._is_view() else result for result in call.path.forward(call))

    @staticmethod
    @_disable_dynamo  # which compiled autograd would have it trace
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        engine = ctx.engine
        if engine.is_replaced:
            raise ShardError(
                f"{engine.name} is asked for gradients of a forward from before model.reshard(plan), or before one of "
                "its tables grew, which has moved them: their update would be lost. Finish the backward pass "
                "first, or run the forward again"
            )
        way_back = ranks.entry(engine.handshake.backward, engine.peers.exchange.group, backward_of=ctx.number)
        with engine.calls.backward, way_back:
            if ctx.call is None:
                raise RuntimeError(
                    f"a second backward through {engine.name}, whose batch the first has let go; "
                    "give the first retain_graph=True"
                )
            if ctx.is_again and engine.peers.exchange.size > 1:
                with phase(ctx.call.spent, GRADIENT):
                    engine.handshake.take_turn(f"goes back through call {ctx.number} again", engine.device, way_back)
            ctx.is_again = True
            of_weights, *gradients = ctx.call.path.backward(ctx.call, grads)
            engine.calls.note_update()
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                ctx.call = None
            found = [gradients[i] for i in ctx.learning]
            mark(found)
            return None, None, of_weights, *found


def _is_for_show() -> bool:
    """Whether tensors have no values, or what is done with them becomes a graph."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _check_supported(tables: Sequence[Table], env: ShardingEnv, sync_interval: int) -> None:
    if env.mesh is None and env.size > 1:
        raise ShardError(f"{env} is abstract: it can be planned for, not run on; use ShardingEnv.from_mesh")
    if not isinstance(sync_interval, int) or sync_interval < 1:
        raise ShardError(f"sync_interval must be an integer >= 1; got {sync_interval!r}")
    plain = [t.parameter for t in tables if t.trainable and t.optimizer is None]
    if sync_interval > 1 and plain:
        raise ShardError(
            f"sync_interval={sync_interval} averages copies of tables that are updated in the backward pass; "
            f"{plain[0]!r} has no in-backward optimizer: apply one, or use sync_interval=1"
        )
