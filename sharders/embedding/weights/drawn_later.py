"""What `torch.nn.init` draws in a table that is on a mesh: of the whole's fans, and other values for each part.

A rank's parameter is its part of a table. Drawn as it stands, equal parts on ranks that were seeded alike would have
equal values, parts of another size would leave the ranks' generators, and so all dense weights drawn next, apart, and a
fan would be the part's. So a call takes one number of the rank's generator, and draws by that and the part's place:
copies of a part get equal values where the ranks were seeded alike. So does what torch's operations draw in what
`seen_part` hands out, as noise on a gradient (`torch.randn_like(p.grad)`). What a parameter itself is asked for, by
`p.data.normal_()`, is not seen.

[Note: the same functions] torch's functions stay the objects that they are, and get other code: programs and modules
have imported them by name long before, and objects that hold one (TorchRec's configurations of tables do) are pickled
by its name, for which it must be what is found there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from inspect import signature
from types import FunctionType
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


_DRAWS = frozenset(
    ("normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_")
    + ("randn_like", "rand_like", "normal", "bernoulli")
)
"""Operations that take a generator by name, and draw a number for each element."""


@cache
def _stand_in() -> None:
    _stand_in_for(nn.init._calculate_fan_in_and_fan_out, _fans_of_the_whole)
    for name in _DRAW | _OF_THE_WHOLE:
        _stand_in_for(getattr(nn.init, name), _knowing)


def _stand_in_for(function: Any, takes: Callable[..., Any]) -> None:
    """See [Note: the same functions].

    Args:
        takes: the function as it was, and its arguments.
    """
    was = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    was.__kwdefaults__ = function.__kwdefaults__
    function.__wrapped__ = was  # by which its signature is the same

    def called(*args: Any, _dmp_takes: Any, **options: Any) -> Any:
        return _dmp_takes(*args, **options)

    function.__code__ = called.__code__
    function.__defaults__ = None
    function.__kwdefaults__ = {"_dmp_takes": partial(takes, was)}


def _fans_of_the_whole(own: Any, tensor: torch.Tensor) -> Any:
    here = getattr(tensor, "_dmp_place", None)
    return own(tensor if here is None else torch.empty(here.whole, device="meta"))


def _knowing(own: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    here = getattr(tensor, "_dmp_place", None)
    if here is None:
        return own(tensor, *args, **options)
    name = own.__name__
    if name in _OF_THE_WHOLE and not here.is_whole:
        raise ShardError(
            f"torch.nn.init.{name} is asked of a part of a table of shape {here.whole}: this rank has "
            f"{tuple(tensor.shape)}, and each value depends on the whole. Call it before the model is wrapped, or "
            "give the table the plan entry data_parallel()"
        )
    given = signature(own).bind(tensor, *args, **options).arguments
    generator = given.pop("generator", None)
    seed = _seed(here, generator)
    if tensor.numel() == 0 or tensor.is_meta:
        return tensor  # torch warns of none, and draws none for meta
    return own(**given, generator=torch.Generator(tensor.device).manual_seed(seed))


def draw_by_place(function: Any, name: str, part: torch.Tensor) -> Any:
    """The function itself, or what draws by the part's place in its stead.

    Args:
        name: of the function.
        part: what it draws in, or like.
    """
    here = getattr(part, "_dmp_place", None)
    if here is None or name not in _DRAWS:
        return function

    def draw(*args: Any, generator: torch.Generator | None = None, **options: Any) -> Any:
        of_part = torch.Generator(part.device).manual_seed(_seed(here, generator))
        return function(*args, **options, generator=of_part)

    return draw


def _seed(here: _Place, generator: torch.Generator | None) -> int:
    """By one number of the program's generator, and the place."""
    device = None if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device)) ^ here.digest
