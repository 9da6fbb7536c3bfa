"""A *codec*: how values travel. Lookups and gradients are computed in one dtype and may be sent in another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from dmp import ShardError
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

Wire = torch.dtype | tuple[torch.dtype | None, torch.dtype | None] | None
"""What a user says of it: dtypes of results and of gradients, one for both, or None for as they are computed."""

_WIRE_DTYPES = (torch.bfloat16, torch.float16)


def codecs_of(wire: Wire, codecs: Codecs) -> Codecs:
    """The codecs of a user's dtypes, or these where he gives none.

    Raises:
        ShardError: another dtype, no pair, or both.
    """
    if wire is None:
        return codecs
    if codecs != AS_COMPUTED:
        raise ShardError(f"wire and codecs both say how values travel; got {wire=} and {codecs=}")
    pair = wire if isinstance(wire, tuple) else (wire, wire)
    if len(pair) != 2 or any(dtype is not None and dtype not in _WIRE_DTYPES for dtype in pair):
        raise ShardError(
            f"wire must be torch.bfloat16 or torch.float16, a pair (of results, of gradients) of these and None, or "
            f"None for values as they are computed; got {wire!r}"
        )
    return Codecs(*(None if dtype is None else Cast(dtype) for dtype in pair))


def encoded(codec: Codec | None, values: torch.Tensor, channel: Channel) -> torch.Tensor:
    """What is sent on a channel for the flat `values`."""
    if codec is None:
        return values
    out = channel.empty(values.numel(), codec.wire_dtype(values.dtype), values.device)
    codec.encode(values, out)
    return out


def decoded(
    codec: Codec | None, sent: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The values, of `dtype`, of what came; in `out` where they are decoded and there is one."""
    if codec is None:
        return sent
    if out is None:
        out = torch.empty_like(sent, dtype=dtype)
    codec.decode(sent, out)
    return out
