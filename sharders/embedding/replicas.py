"""Tables of which there are several copies: gradients shared between replicas, and sums for data-parallel tables.

[Note: copies] Copies of pieces (a replicate axis) stay equal because each gets the ids and gradients of all, in one
order. Whole tables on every rank (data-parallel) get the sum of dense gradients. On one shard axis that sum rides in
the gradients' exchange, so that a step needs no more collectives; else, or where it is large, it is an all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sharders.embedding.local_tables import TBE, TableStore
from sharders.embedding.lookup.torch_kernel import update_dense
from sharders.embedding.peers import Peers

_RIDER_BYTES = 64 << 20  # a larger sum goes by all-reduce


class Copies:
    """Keeps copies of one module's tables equal.

    Args:
        sync_interval: 1 shares gradients at every step; k > 1 averages weights and state every k updates instead.
    """

    def __init__(self, store: TableStore, peers: Peers, sync_interval: int) -> None:
        self.store, self.peers, self.sync_interval = store, peers, sync_interval

    @property
    def mean_factor(self) -> float:
        """Makes a mean over batches of the sum of gradients over the ranks that share them."""
        return 1.0 / len(set(self.peers.data_ranks))

    @property
    def sources(self) -> list[int]:
        """Ranks of the exchange whose gradients this rank's pieces get, in the order of sources."""
        return self.peers.everyone if self.peers.num_replicas > 1 else self.peers.own

    def share(self, flat: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """All replicas' gradients of this rank's pieces, one replica after the other.

        Args:
            flat: gradients of this replica's samples.
            sizes: elements from each source of `sources`.
        """
        count = self.peers.num_replicas
        if count == 1:
            return flat
        each = len(sizes) // count
        totals = [sum(sizes[i * each : (i + 1) * each]) for i in range(count)]
        return self.peers.replicas.all_to_all(flat.repeat(count), [flat.numel()] * count, totals).wait()

    def rides(self, rider: torch.Tensor | None) -> bool:
        """Whether the sum of data-parallel gradients travels in the gradients' exchange."""
        if rider is None or self.peers.outer.size > 1 or self.peers.num_replicas > 1:
            return False
        return rider.numel() * rider.element_size() * len(self.peers.own) <= _RIDER_BYTES

    def finish(
        self, rider: torch.Tensor | None, is_summed: bool, gradients: dict[int, torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Update data-parallel tables, average copies when it is time, and cut gradients by table.

        Args:
            rider: gradients of the trainable local TBEs and, after each, which rows were touched.
            is_summed: the exchange has summed it.
            gradients: id(tbe) -> flat gradient, of TBEs without in-backward optimizer.

        Returns:
            For each table its ordinary gradient; None for those updated in place.
        """
        if rider is not None:
            if not is_summed:
                self.peers.exchange.sum(rider)
            self._update_local(rider, gradients)
        self._average()
        result: list[torch.Tensor | None] = [None] * len(self.store.parameters)
        for tbe in self.store.tbes:
            flat = gradients.get(id(tbe))
            for i, index in enumerate(tbe.tables if flat is not None else ()):
                result[index] = tbe.bank.table_view(i, self.store.placement.tables[index].dim, flat)
        return result

    def _update_local(self, rider: torch.Tensor, gradients: dict[int, torch.Tensor]) -> None:
        tbes = trainable_local(self.store)
        parts = rider.split([n for tbe in tbes for n in (tbe.bank.weights.numel(), tbe.bank.total_rows)])
        for i, tbe in enumerate(tbes):
            flat, touched = parts[2 * i].to(tbe.bank.weights.dtype), parts[2 * i + 1] > 0
            if tbe.bank.spec is None:
                gradients[id(tbe)] = flat
            else:
                tbe.bank.step()
                update_dense(tbe.bank, flat, touched)

    def _average(self) -> None:
        if self.sync_interval == 1 or self.peers.replicas.size == 1:
            return
        for tbe in self.store.tbes:
            if tbe.is_trainable and int(tbe.bank.steps[0]) % self.sync_interval == 0:
                for tensor in (tbe.bank.weights, *tbe.bank.state.values()):
                    self.peers.replicas.sum(tensor)
                    tensor.div_(self.peers.replicas.size)


def trainable_local(store: TableStore) -> list[TBE]:
    """Data-parallel TBEs that get gradients."""
    return [tbe for tbe in store.local if tbe.is_trainable]


def make_rider(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor | None:
    """(flat gradient, touched rows) of each trainable local TBE as one flat tensor; None when there are none."""
    return torch.cat([t.to(dtype) for pair in parts for t in pair]) if parts else None
