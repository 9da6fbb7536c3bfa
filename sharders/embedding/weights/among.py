"""Ranks that average what each reads of a table past its lookup, or tell each other that one of them does not."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from dmp import ShardError, ranks
from sharders.channel import Channel
from sharders.embedding.ids.header import Handshake

_NUMBERS, _AS_WORDS = struct.Struct("=2d"), struct.Struct("=2q")


class Among(NamedTuple):
    """Ranks that each have a table, or a part of it.

    Args:
        exchange: between them.
        handshake: of the module.
        device: of the table.
    """

    exchange: Channel
    handshake: Handshake
    device: torch.device

    def mean(self, gradient: torch.Tensor, name: str) -> torch.Tensor:
        """Of what each has got for a table; two exchanges, the second as large as the table."""
        if gradient.requires_grad:
            raise ShardError(
                f"the loss has a term over values of table {name!r} itself, whose gradient is averaged over the ranks, "
                "which create_graph=True does not go through. Give the table the plan entry replicate()"
            )
        with self._entry(name) as here:
            self.handshake.take_turn(_doing(name), self.device, here)
            total = gradient.clone(memory_format=torch.contiguous_format)
            self.exchange.sum(total)
            return total.div_(self.exchange.size)

    def mean_of_number(self, number: torch.Tensor, name: str, within: float) -> torch.Tensor:
        """Of what comes to a term over a table on each rank; one exchange.

        Args:
            number: ().
            name: of the table.
            within: of what the term multiplies by below, to be the same on all ranks.
        """
        with self._entry(name) as here:
            told = _AS_WORDS.unpack(_NUMBERS.pack(float(number), within))
            all_told = self.handshake.take_turn(_doing(name), self.device, here, told)
        if len({of_constants for _, of_constants in all_told}) > 1:
            raise ShardError(
                f"the loss has a term over values of table {name!r} itself that multiplies them by another number on "
                "each rank, and only the number of the rank that has them would count. Multiply what is made of all of "
                "them, as in c * p.square().sum() or c * p.norm(), which gives the mean over the ranks; or give every "
                "rank the whole table: data_parallel() in the plan"
            )
        numbers = [_NUMBERS.unpack(_AS_WORDS.pack(*words))[0] for words in all_told]
        return torch.full_like(number, sum(numbers) / len(numbers))

    def _entry(self, name: str) -> ranks.entry:
        return ranks.entry(f"the average of what the loss reads of {name}", self.exchange.group)


def _doing(name: str) -> str:
    return f"averages what the loss reads of {name}"
