"""What `torch.nn.init` draws in a table that is on a mesh: of the whole's fans, and other values for each part.

A rank's parameter is its part of a table. Drawn as it stands, equal parts on ranks that were seeded alike would have
equal values, parts of another size would leave the ranks' generators, and so all dense weights drawn next, apart, and a
fan would be the part's. So a call takes one number of the rank's generator, and draws by that and the part's place:
copies of a part get equal values where the ranks were seeded alike. What `tensor.normal_()` draws is not seen.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache, wraps
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import nn

from dmp import Shard, ShardError


class _Place(NamedTuple):
    """Of a part in its table; kept in the parameter."""

    whole: tuple[int, int]
    digest: int
    is_whole: bool


def place(parameter: torch.Tensor, shards: Sequence[Shard], size: tuple[int, int]) -> None:
    """From now on `torch.nn.init` knows of which table this is a part.

    Args:
        parameter: this rank's part.
        shards: those that it holds.
        size: of the table.
    """
    _stand_in()
    digest = zlib.crc32(repr([(*s.offsets, *s.sizes) for s in shards]).encode())
    parameter._dmp_place = _Place(size, digest, tuple(parameter.shape) == size)  # type: ignore[attr-defined]


def carry_place(parameter: torch.Tensor, read: torch.Tensor) -> None:
    """What a method of the model's reads in the parameter's stead is drawn as it would be."""
    if (here := getattr(parameter, "_dmp_place", None)) is not None:
        read._dmp_place = here  # type: ignore[attr-defined]


_OF_THE_WHOLE = frozenset(("orthogonal_", "sparse_", "eye_", "dirac_"))
"""Whose values in one row depend on the others, or on its number."""

_DRAW = frozenset(
    ("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_")
)


@cache
def _stand_in() -> None:
    fans: Any = nn.init._calculate_fan_in_and_fan_out

    @wraps(fans)
    def of_the_whole(tensor: torch.Tensor) -> Any:
        here = getattr(tensor, "_dmp_place", None)
        return fans(tensor if here is None else torch.empty(here.whole, device="meta"))

    nn.init._calculate_fan_in_and_fan_out = of_the_whole
    for name in _DRAW | _OF_THE_WHOLE:
        setattr(nn.init, name, _knowing(getattr(nn.init, name), name))


def _knowing(own: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(own)
    def run(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        here = getattr(tensor, "_dmp_place", None)
        if here is None:
            return own(tensor, *args, **options)
        if name in _OF_THE_WHOLE and not here.is_whole:
            raise ShardError(
                f"torch.nn.init.{name} is asked of a part of a table of shape {here.whole}: this rank has "
                f"{tuple(tensor.shape)}, and each value depends on the whole. Call it before the model is wrapped, or "
                "give the table the plan entry data_parallel()"
            )
        given = signature(own).bind(tensor, *args, **options).arguments
        generator = given.pop("generator", None)
        seed = torch.randint(2**62, (), generator=generator, device=None if generator is None else generator.device)
        if tensor.numel() == 0 or tensor.is_meta:
            return tensor  # torch warns of none, and draws none for meta
        of_part = torch.Generator(tensor.device).manual_seed(int(seed) ^ here.digest)
        return own(**given, generator=of_part)

    return run
