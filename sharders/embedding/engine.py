"""The embedding data path of one module: route, lookup, deliver, and back.

One call is: header exchange -> payload exchange -> lookup -> output exchange; backward is one exchange of gradients and
the update. All tables of a module travel together whatever their layouts. Gradients are means over the data ranks.
Ranks along a tensor axis hold the same batch: each sends its part, and one more exchange gathers the results.
A module called twice in a step is updated once for each call, in the order of their backward passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dmp import Calls, InputError, Layout, ShardError, ShardingEnv, ranks
from sharders.channel import Transport, over_group
from sharders.embedding.header import Handshake, Header
from sharders.embedding.input_checks import check_batch
from sharders.embedding.input_dist import Batch, Call, InputDist, Sent
from sharders.embedding.input_faults import Fault, Kind
from sharders.embedding.local_tables import TableStore
from sharders.embedding.peers import find_peers
from sharders.embedding.placement import Placement, Table
from sharders.embedding.pooled import PooledPath
from sharders.embedding.replicas import Copies
from sharders.embedding.tensor_slice import checksum, cut_batch, even_cut, gather_rows, tensor_ranks
from sharders.embedding.unpooled import UnpooledPath


class Engine:
    """The data path of one module's tables.

    Args:
        tables: in the order of the module's results.
        layouts: one for each table.
        env: the mesh.
        device: of the tables.
        unpooled: results are rows instead of bags.
        validate: check every batch before any exchange (ids in range, lengths, weights).
        sync_interval: with a replicate axis: 1 shares gradients between the copies at every step, so that they stay
            equal to one process; k > 1 averages weights and optimizer state every k updates.
        transport: opens the channels of the tables.
        kernel: name of the lookup kernel; see `choose_kernel`.

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
        kernel: str | None = None,
    ) -> None:
        _check_supported(tables, env, sync_interval)
        self.env, self.tables, self.unpooled, self.validate = env, list(tables), unpooled, validate
        self.sync_interval = sync_interval
        self.calls = Calls()
        """Calls of the model that are under way; the wrapper sets the model's."""
        self.placement = Placement(tables, layouts, env, unpooled)
        self.tensor = tensor_ranks(env, transport)
        self.peers = find_peers(env, sync_interval == 1, by_stages=not unpooled, transport=transport)
        self.store = TableStore(self.placement, env.table_rank, device, kernel)
        self.handshake = Handshake(
            repr([(t, str(lay)) for t, lay in zip(tables, layouts, strict=True)]),
            [f.name for f in self.placement.features],
            self.peers.headers,
            self.peers.data_ranks,
            env.axes("tensor"),
            self.peers.replicas if sync_interval > 1 else None,
            [r for r in range(env.size) if env.replica_of(r) == env.replica_of(env.rank)]
            if sync_interval > 1
            else None,
        )
        self._rows = [self.tables[f.table].rows for f in self.placement.features]
        self._num_slots = len(self.placement.slots[env.table_rank])
        self._trainable = [t.trainable for t in tables]
        self.places: list[tuple[dict[str, Any], str]] = []  # of the parameters in the module, set by it
        self._compile(device)

    def _compile(self, device: torch.device) -> None:
        """Build what depends on the device or refers to the store."""
        self.device = device
        is_double = any(p.dtype == torch.float64 for p in self.store.parameters)
        dtype = torch.float64 if is_double else torch.float32
        wide = dtype == torch.float64 or any(t.rows >= 2**31 for t in self.tables)
        self.input_dist = InputDist(
            self.placement, self.peers.table_ranks, device, wide, self.unpooled, self.store.kernel
        )
        copies = Copies(self.store, self.peers, self.sync_interval)
        if self.unpooled:
            self.unpooled_path = UnpooledPath(self.peers, self.store, copies, dtype, device)
        else:
            self.pooled_path = PooledPath(self.peers, self.input_dist, self.store, copies, dtype, device)

    @property
    def name(self) -> str:
        """The module's name in messages; part of what ranks compare."""
        return self.handshake.name

    def dtype_of(self, table: int) -> torch.dtype:
        """Elements of a table as they are now: a module may be moved to another dtype."""
        return self.store.parameters[table].dtype

    def rename(self, name: str) -> None:
        """Set `name`."""
        self.handshake.rename(name or "the model")

    def move(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace storage by `fn` of it, and compile for its device."""
        self.store.apply(fn)
        self._compile(next((tbe.bank.weights.device for tbe in self.store.tbes), self.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        """Own storage; placement and process groups are shared."""
        new = copy.copy(self)
        memo[id(self)] = new
        new.handshake = copy.copy(self.handshake)
        new.store = copy.deepcopy(self.store, memo)
        new._compile(self.device)
        return new

    def pooled(self, parse: Callable[[], Batch]) -> torch.Tensor:
        """(B, sum of dims): results of all features side by side. `parse` may raise `Fault`."""
        with ranks.entry(self.handshake.forward, self.peers.exchange.group) as here:
            whole, call, parameters = self._start(parse, here)
            result: torch.Tensor = _Pooled.apply(self, self.pooled_path, call, call.batch.weights, *parameters)  # type: ignore[no-untyped-call]
            return self._whole([result], [[whole.batch_size]])[0]

    def rows(self, parse: Callable[[], Batch]) -> list[torch.Tensor]:
        """For each feature its ids' rows (N_f, dim). `parse` may raise `Fault`."""
        with ranks.entry(self.handshake.forward, self.peers.exchange.group) as here:
            whole, call, parameters = self._start(parse, here)
            out: tuple[torch.Tensor, ...] = _Rows.apply(self, self.unpooled_path, call, *parameters)  # type: ignore[no-untyped-call]
            return self.unpooled_path.split(whole, self._whole(out, self.unpooled_path.counts_by_dim(whole)))

    def way_back(self) -> ranks.entry:
        """The backward pass, as a call of all ranks."""
        return ranks.entry(self.handshake.backward, self.peers.exchange.group, is_backward=True)

    def _check_parameters(self) -> None:
        """Whether the module's parameters are those that are looked up and updated here; their values may be others.

        Raises:
            ShardError: a table's parameter that was replaced.
        """
        for parameter, (held, name), table in zip(self.store.parameters, self.places, self.tables, strict=False):
            if held.get(name) is not parameter:
                raise ShardError(
                    f"the parameter of table {table.parameter!r} of {self.name} was replaced by "
                    f"{_described(held.get(name))}, which would neither be looked up nor trained; copy values into "
                    "the one that was there (model.load_state_dict takes whole tensors), and "
                    "leave a wrapped model to no other wrapper"
                )
        self.store.take_back(self.name)

    def _whole(self, results: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]) -> Sequence[torch.Tensor]:
        """Results of the tensor group's batch, whose segments have these rows, from each rank's part of it."""
        if self.tensor.size == 1:
            return results
        return gather_rows(results, [even_cut(n, self.tensor.size) for n in counts], self.tensor)

    def _start(self, parse: Callable[[], Batch], here: ranks.entry) -> tuple[Batch, Call, list[torch.Tensor]]:
        """The batch; this rank's part of it on its way; and the parameters that gradients will be for."""
        wants_grad = [p.requires_grad for p in self.store.parameters]
        is_training = torch.is_grad_enabled() and any(wants_grad)
        wants_weights = False
        shared = 0
        whole: Batch | None = None
        batch: Batch | None = None
        sent: Sent | None = None
        fault: Fault | None = None
        cause: Exception | None = None
        try:
            self._check_parameters()
            if is_training and wants_grad != self._trainable:
                changed = next(i for i, w in enumerate(wants_grad) if w != self._trainable[i])
                raise Fault(Kind.FROZEN, next((f.index for f in self.placement.features if f.table == changed), -1))
            whole = parse()
            if self.validate:
                check_batch(whole, self._rows)
                shared = checksum(whole) if self.tensor.size > 1 else 0
            batch = cut_batch(whole, self.tensor, self.unpooled)
            sent = self.input_dist.send(batch)
            wants_weights = batch.wants_weight_gradient and not self.unpooled
        except Fault as found:
            fault = found
        except Exception as error:  # the others wait in the handshake: they are told, and this error is shown here
            fault, cause = Fault(Kind.UNREADABLE), error
        size = batch.batch_size if batch is not None else 0
        weighted = batch is not None and batch.weights is not None
        words = sent.words if sent is not None else [0] * len(self.peers.table_ranks)
        mine = [Header(size, n, is_training, weighted, wants_weights, shared, fault) for n in words]
        try:
            headers = self.handshake.exchange(mine, self.device, here)
        except InputError as error:
            if isinstance(cause, ShardError):  # of this rank's module, not of its batch
                raise cause from error
            raise error from cause
        assert whole is not None and batch is not None and sent is not None, "a fault has been raised"
        words = [h.words for h in headers]
        payload = self.peers.exchange.all_to_all(sent.payload, sent.words, words).wait()
        batch_sizes = [h.batch_size for h in headers]
        received = self.input_dist.receive(payload, words, batch_sizes, self._num_slots, weighted)
        parameters: list[torch.Tensor] = [*self.store.parameters] if is_training or wants_weights else []
        return whole, Call(batch, sent, received, batch_sizes), parameters


class _Pooled(torch.autograd.Function):
    """Forward: (B, D) pooled results. Backward: gradients to their owners, who update or return `.grad`.

    The gradient of the weights (N,), where they want one, comes back from the owners in one more exchange; it is this
    rank's own, not a mean.
    """

    @staticmethod
    def forward(
        ctx: Any, engine: Engine, path: PooledPath, call: Call, weights: torch.Tensor | None, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.engine, ctx.path, ctx.call = engine, path, call
        return path.forward(call).data  # no view, to autograd: it may be changed in place, as the unsharded result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with ctx.engine.calls.backward, ctx.engine.way_back():
            of_weights, of_tables = ctx.path.backward(ctx.call, grad, ctx.needs_input_grad[3])
        return None, None, None, of_weights, *of_tables


class _Rows(torch.autograd.Function):
    """Forward: one (N, dim) tensor of rows for each distinct dim. Backward: as `_Pooled`."""

    @staticmethod
    def forward(
        ctx: Any, engine: Engine, path: UnpooledPath, call: Call, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.engine, ctx.path, ctx.call = engine, path, call
        return tuple(rows.data for rows in path.forward(call))  # as above

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with ctx.engine.calls.backward, ctx.engine.way_back():
            of_tables = ctx.path.backward(ctx.call, grads)
        return None, None, None, *of_tables


def _described(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__} of shape {tuple(value.shape)}"


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
