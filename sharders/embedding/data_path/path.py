"""What pooled and unpooled lookups share: what a path is made of, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch

from dmp import ranks
from sharders.embedding.exchange.local_tables import TBE
from sharders.embedding.exchange.output_dist import Beside, exchange_alone
from sharders.embedding.exchange.phases import BACKWARD, GRADIENT, SYNC, phase
from sharders.embedding.exchange.replicas import OfLocal, Replicas, joined
from sharders.embedding.exchange.touched_rows import TouchedRows
from sharders.embedding.ids.call import Call
from sharders.embedding.ids.input_dist import InputDist
from sharders.embedding.lookup.torch_kernel import Into, RowGradients, spread

Given = TypeVar("Given")  # gradients of the results, as a path takes them
Returned = tuple[list[torch.Tensor], torch.Tensor | None]
Trained = Iterator[tuple[TBE, torch.Tensor | None]]


class Path(Generic[Given]):
    """Lookup and output dist of one module, and the way back. Subclasses say how they are looked up and exchanged.

    Args:
        dtype: of results and gradients; what travels may have another, see codec.py.
        device: of the tables.
    """

    _given: Callable[[Call, Sequence[torch.Tensor]], Given]
    """Gradients of the results, in `dtype`."""

    _local_row_gradients: Callable[[Call, Given], Callable[[int, Into | None], RowGradients]]
    """Of each trainable local TBE, from this rank's own ids: which of them, and memory that may be used."""

    _send_back: Callable[[Call, Given, Beside | None, Callable[[], None]], Returned]
    """Flat gradients, times `factor`, of what was looked up here for the own sources, one tensor for each way that
    they came; that of the weights if wanted. Calls the last argument while they travel."""

    _sizes: Callable[[Call], list[list[int]]]
    """Of each of them the elements from each of `Peers.sources`."""

    _order: Callable[[Call], object]
    """Order the ids for what `_train` updates; see `Lookup`."""

    _train: Callable[[Call, Sequence[torch.Tensor]], Trained]
    """Update the sharded TBEs lookup by lookup; flat gradients of those without in-backward optimizer."""

    def __init__(self, input_dist: InputDist, replicas: Replicas, dtype: torch.dtype, device: torch.device) -> None:
        self.input_dist, self.replicas, self.dtype, self.device = input_dist, replicas, dtype, device
        self.peers, self.store, self.factor = replicas.peers, replicas.store, replicas.mean_factor
        self._last_pass = -1
        self.dims = [self.store.placement.tables[f.table].dim for f in self.store.placement.features]

    def wants_landing(self, call: Call) -> bool:
        """Whether gradients come back, and no sums beside them."""
        return (call.is_training or call.wants_weight_gradient) and (not self.store.local or self._sends_apart(call))

    def _say_of_calls(self) -> None:
        """Say, once, that a pass makes several updates of tables whose optimizers keep something of each gradient."""
        this, before = torch._C._current_graph_task_id(), self._last_pass
        self._last_pass = this
        if this != before:
            return
        tables = [tbe for tbe in (*self.store.sharded, *self.store.local) if tbe.is_trainable]
        keeping = [tbe.bank.spec for tbe in tables if tbe.bank.spec is not None and tbe.bank.spec.optimizer.state]
        if keeping:
            ranks.say_once(
                f"tables are looked up more than once before a backward pass, and the {keeping[0].kind} that updates "
                "them in it makes an update for each lookup, as under TorchRec, where an optimizer that is stepped "
                "makes one of their sum: look all ids up in one call, or leave these tables' optimizer out of the "
                "backward pass",
                by_first=True,
            )

    def _sends_apart(self, call: Call) -> bool:
        """Whether sums have an exchange of their own, as what they would be beside would be copied for it: more than
        they are; or as there is nothing else, and they need not be copied out of it. On all ranks alike."""
        return not any(self.store.placement.slots)

    def order_ids(self, call: Call) -> None:
        """What of the update is known with the ids: worked out while results travel."""
        if call.is_training:
            self._order(call)

    def _of_local(self, call: Call, given: Given) -> OfLocal | None:
        """What data-parallel tables get from this rank's own ids."""
        tbes = [tbe for tbe in self.store.local if tbe.is_trainable]
        if not tbes:
            return None
        of_tbe = self._local_row_gradients(call, given)
        if call.touched is None:
            return joined([spread(tbe.bank, of_tbe(i, None)) for i, tbe in enumerate(tbes)], self.dtype)

        def gradients(number: int, into: Into | None) -> RowGradients:
            with phase(call.spent, BACKWARD):
                return of_tbe(number, into)

        return TouchedRows(gradients, tbes, call.touched, self.dtype)

    def backward(self, call: Call, grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradients back to the owners, and updates.

        Returns:
            The gradient of the batch's weights where it is wanted, then for each table its ordinary gradient, or None.
        """
        spent = call.spent
        with phase(spent, BACKWARD):
            given = self._given(call, grads)
            local = self._of_local(call, given) if call.is_training else None
        with phase(spent, GRADIENT):
            beside = self.replicas.beside(local)
            alone = beside if self._sends_apart(call) else None
            ends: list[Callable[[], None]] = []

            def meanwhile() -> None:
                if alone is not None:
                    ends.append(exchange_alone(self.peers.exchange, alone))

            grads, of_weights = self._send_back(call, given, beside if alone is None else None, meanwhile)
            for end in ends:
                end()
        if not call.is_training:  # all tables are frozen: the gradient is for the weights
            return [of_weights, *[None] * len(self.store.parameters)]
        self._say_of_calls()
        if self.peers.num_replicas > 1:
            with phase(spent, SYNC):
                grads = [self.replicas.share(*of) for of in zip(grads, self._sizes(call), strict=True)]
        with phase(spent, BACKWARD):
            gradients: dict[int, torch.Tensor] = {}
            for tbe in self.store.sharded:
                if not tbe.is_trainable:
                    continue
                if tbe.bank.spec is not None:
                    tbe.bank.step()
                elif not tbe.slots:
                    gradients[id(tbe)] = torch.zeros_like(tbe.bank.weights)
            for tbe, flat in self._train(call, grads):
                if flat is not None:
                    gradients[id(tbe)] = gradients[id(tbe)].add_(flat) if id(tbe) in gradients else flat
            return [of_weights, *self.replicas.finish(local, gradients, spent)]
