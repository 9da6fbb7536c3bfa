"""A *codec*: how values travel. Lookups and gradients are computed in one dtype and may be sent in another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sharders.channel import Channel


class Codec(Protocol):
    """A wire format, element by element; equal on all ranks."""

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of what is sent for values of `dtype`."""

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write what is sent for the flat `values` to `out`."""

    def decode(self, sent: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of what came to `out`."""


@dataclass(frozen=True)
class Cast:
    """Sends values as another floating dtype, held to what that can hold.

    Args:
        dtype: on the wire.
        scale: what values are multiplied by before they are sent, and divided by again.
    """

    dtype: torch.dtype
    scale: float = 1.0

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """See `Codec`."""
        return self.dtype

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """See `Codec`."""
        limit = torch.finfo(self.dtype).max
        out.copy_((values if self.scale == 1.0 else values * self.scale).clamp(-limit, limit))

    def decode(self, sent: torch.Tensor, out: torch.Tensor) -> None:
        """See `Codec`."""
        out.copy_(sent)
        if self.scale != 1.0:
            out.div_(self.scale)


@dataclass(frozen=True)
class Codecs:
    """Of results and of gradients; None sends values as they are, without a copy."""

    results: Codec | None = None
    gradients: Codec | None = None


AS_COMPUTED = Codecs()


def encoded(codec: Codec | None, values: torch.Tensor, channel: Channel) -> torch.Tensor:
    """What is sent on a channel for the flat `values`."""
    if codec is None:
        return values
    out = channel.empty(values.numel(), codec.wire_dtype(values.dtype), values.device)
    codec.encode(values, out)
    return out


def decoded(codec: Codec | None, sent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values, of `dtype`, of what came."""
    if codec is None:
        return sent
    out = torch.empty_like(sent, dtype=dtype)
    codec.decode(sent, out)
    return out
