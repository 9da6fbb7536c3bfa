"""Tables of which there are several replicas: gradients shared between them, and sums for data-parallel tables.

[Note: replicas] Replicas of shards (a replicate axis) stay equal because each gets the ids and gradients of all, in one
order. Whole tables on every rank (data-parallel) get the rows that batches touch (`touched_rows`). On one shard axis
these travel beside the gradients, so that a step needs no more collectives; else, or where they are large, in an
exchange of their own, or as whole tables by an all-reduce where that is fewer bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sharders.embedding.exchange.codec import decoded, encoded
from sharders.embedding.exchange.local_tables import TBE, TableStore
from sharders.embedding.exchange.output_dist import exchange_alone
from sharders.embedding.exchange.peers import Peers
from sharders.embedding.exchange.phases import SYNC, Spent, phase
from sharders.embedding.exchange.touched_rows import TouchedRows, go_beside
from sharders.embedding.lookup.torch_kernel import touched_of

OfLocal = torch.Tensor | TouchedRows
"""Gradients of data-parallel tables: whole as `joined` gives them, or by rows."""


class Replicas:
    """Keeps replicas of one module's tables equal.

    Args:
        sync_interval: 1 shares gradients at every step; k > 1 averages weights and state every k updates instead.
    """

    def __init__(self, store: TableStore, peers: Peers, sync_interval: int) -> None:
        self.store, self.peers, self.sync_interval = store, peers, sync_interval

    @property
    def mean_factor(self) -> float:
        """Makes a mean over batches of the sum of gradients over the ranks that share them."""
        return 1.0 / len(set(self.peers.data_ranks))

    def share(self, flat: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """All replicas' gradients of this rank's shards, one replica after the other.

        Args:
            flat: gradients of this replica's samples.
            sizes: elements from each of `Peers.sources`.
        """
        count = self.peers.num_replicas
        if count == 1:
            return flat
        each = len(sizes) // count
        totals = [sum(sizes[i * each : (i + 1) * each]) for i in range(count)]
        codec, channel = self.peers.codecs.gradients, self.peers.replicas
        wire = encoded(codec, flat, channel)
        came = channel.all_to_all(wire.repeat(count), [flat.numel()] * count, totals).wait()
        return decoded(codec, came, flat.dtype)

    def beside(self, local: OfLocal | None) -> TouchedRows | None:
        """The gradients of data-parallel tables, where they travel beside the others."""
        return local if isinstance(local, TouchedRows) and go_beside(local.nbytes, self.peers.is_flat) else None

    def finish(
        self, local: OfLocal | None, gradients: dict[int, torch.Tensor], spent: Spent
    ) -> list[torch.Tensor | None]:
        """Update data-parallel tables, average replicas when it is time, and cut gradients by table.

        Args:
            local: of data-parallel tables.
            gradients: id(tbe) -> flat gradient, of TBEs without in-backward optimizer.
            spent: by the call.

        Returns:
            For each table its ordinary gradient; None for those updated in place.
        """
        tbes = [tbe for tbe in self.store.local if tbe.is_trainable]
        if isinstance(local, TouchedRows):
            if local.total is None:
                with phase(spent, SYNC):
                    exchange_alone(self.peers.exchange, local)()
            self._update_by_rows(tbes, local, gradients)
            local.let_go()
        elif local is not None:
            with phase(spent, SYNC):
                self.peers.exchange.sum(local)
            self._update_wholly(tbes, local, gradients)
        if self.sync_interval > 1 and self.peers.replicas.size > 1:
            with phase(spent, SYNC):
                self._average()
        result: list[torch.Tensor | None] = [None] * len(self.store.parameters)
        for tbe in self.store.tbes:
            flat = gradients.get(id(tbe))
            for i, index in enumerate(tbe.tables if flat is not None else ()):
                result[index] = tbe.bank.table_view(i, self.store.placement.tables[index].dim, flat)
        return result

    def _update_by_rows(self, tbes: Sequence[TBE], local: TouchedRows, gradients: dict[int, torch.Tensor]) -> None:
        assert local.total is not None
        for tbe, of_ranks in zip(tbes, local.total, strict=True):
            if tbe.bank.spec is None:
                gradients[id(tbe)] = tbe.lookup.gradient_touched(of_ranks)
            else:
                tbe.bank.step()
                tbe.lookup.update_touched(of_ranks)

    def _update_wholly(self, tbes: Sequence[TBE], total: torch.Tensor, gradients: dict[int, torch.Tensor]) -> None:
        parts = total.split([n for tbe in tbes for n in (tbe.bank.weights.numel(), tbe.bank.total_rows)])
        for i, tbe in enumerate(tbes):
            flat, touched = parts[2 * i], parts[2 * i + 1] > 0
            if tbe.bank.spec is None:
                gradients[id(tbe)] = flat.to(tbe.bank.weights.dtype)
            else:
                tbe.bank.step()
                tbe.lookup.update_touched([touched_of(tbe.bank, flat, touched)])

    def _average(self) -> None:
        for tbe in self.store.tbes:
            if tbe.is_trainable and int(tbe.bank.steps[0]) % self.sync_interval == 0:
                tensors = (tbe.bank.weights, *tbe.bank.state.values())
                for tensor in filter(torch.is_floating_point, tensors):  # integers count: each replica its own
                    self.peers.replicas.sum(tensor)
                    tensor.div_(self.peers.replicas.size)


def joined(gradients: Sequence[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """(flat gradient, touched rows) of each trainable local TBE in a row, to be summed over the ranks."""
    return torch.cat([t.to(dtype) for pair in gradients for t in pair])
