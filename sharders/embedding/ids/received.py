"""What has come of all ranks' batches: ids, lengths and weights of the slots of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sharders.embedding.lookup.numba_layout import address, longs
from sharders.embedding.lookup.numba_training import entry_of
from sharders.embedding.lookup.reads import Bags


@dataclass(frozen=True)
class Received:
    """Payloads of all sources, cut; `lengths[s]` is (S, B_s), and `counts[s]` has the ids of each slot.

    Where results are rows it is (S, 1).

    `bags[s]`: how many of each slot's have ids; only where some travel as partials.
    `straight`: tables whose partials go straight where others' results go in two stages; see stages.py.
    """

    lengths: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor] | None
    counts: list[list[int]]
    bags: list[list[int]]
    straight: frozenset[int] = frozenset()

    def let_go(self) -> None:
        """Keep numbers alone: all has been read that this rank reads of it."""
        for of_sources in (self.lengths, self.ids, self.weights or []):
            of_sources.clear()

    def span(self, source: int, slots: range) -> slice:
        """Where the ids of neighbouring slots are among a source's."""
        counts = self.counts[source]
        start = sum(counts[: slots.start])
        return slice(start, start + sum(counts[slots.start : slots.stop]))

    def bags_of(
        self, sources: Sequence[int], of_slots: Sequence[int], chosen: torch.Tensor, dtype: torch.dtype
    ) -> Bags:
        """Bags of some slots, slot by slot and in the order of `sources`, by one compiled call; words of 32 bits.

        Torch's operators take ten, and copy twice: 170 microseconds of a step of 512 samples from each of four ranks.

        Args:
            of_slots: ascending.
            chosen: for each slot here whether it is one, int64.
            dtype: of the weights.
        """
        num, samples = sum(self.ids[s].numel() for s in sources), sum(self.lengths[s].shape[1] for s in sources)
        num_slots = chosen.shape[0]
        if len(of_slots) < num_slots:
            num = sum(self.counts[s][slot] for s in sources for slot in of_slots)
        bounds = torch.empty(len(of_slots) * samples + 1, dtype=torch.int32, device="cpu")
        ids, weights = torch.empty(num, dtype=torch.int32, device="cpu"), None
        if self.weights is not None:
            weights = torch.empty(num, dtype=torch.float32, device="cpu")
        told = [
            word
            for s in sources
            for word in (
                *(self.lengths[s].data_ptr(), self.lengths[s].shape[1], self.ids[s].data_ptr()),
                *(0 if self.weights is None else self.weights[s].data_ptr(), 0),
            )
        ]
        _kept, at = longs(told)
        to = ids.data_ptr(), bounds.data_ptr(), address(weights)
        entry_of("by_slot")(at, len(sources), num_slots, chosen.data_ptr(), *to)
        return Bags(ids, bounds, None if weights is None else weights.to(dtype))

    def slot_major(
        self, sources: Sequence[int], pieces: Sequence[range]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Ids (N,), lengths (S, sum of B) and weights of `sources`, slot by slot and in the order of `sources`.

        Args:
            pieces: of the slots, neighbours in each; at least one.
        """
        weights = self._by_slot(self.weights, sources, pieces) if self.weights else None
        of_sources = [[self.lengths[s][piece.start : piece.stop] for piece in pieces] for s in sources]
        return self._by_slot(self.ids, sources, pieces), joined([joined(of) for of in of_sources], 1), weights

    def _by_slot(
        self, of_sources: Sequence[torch.Tensor], sources: Sequence[int], pieces: Sequence[range]
    ) -> torch.Tensor:
        """Source by source and slot by slot to slot by slot and source by source."""
        if len(sources) == 1:
            return joined([of_sources[sources[0]][self.span(sources[0], piece)] for piece in pieces])
        if len(pieces) == 1 and all(is_even(self.counts[s][pieces[0].start : pieces[0].stop]) for s in sources):
            spans = [of_sources[s][self.span(s, pieces[0])] for s in sources]
            return torch.cat([of_slots.view(len(pieces[0]), -1) for of_slots in spans], 1).view(-1)
        cut = [of_sources[s].split(self.counts[s]) for s in sources]
        return torch.cat([of_source[slot] for piece in pieces for slot in piece for of_source in cut])


def joined(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """One after the other; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def is_even(counts: Sequence[int]) -> bool:
    """Whether all are the same, and not 0."""
    return bool(counts) and counts[0] > 0 and len(set(counts)) == 1
