"""What a user passes to the planner, checked one by one: numbers and names."""

from __future__ import annotations

from math import inf
from numbers import Real
from sys import float_info
from typing import Any

from dmp import ShardingEnv, shown


def is_number(value: Any, *, or_zero: bool = False) -> bool:
    """Whether it is a real number above 0, which a float can be, infinity too; True and False are none."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and (0 < value <= float_info.max or value == inf or (or_zero and value == 0))


def positive(what: str, value: Any, *, or_zero: bool = False) -> None:
    """Raise `ValueError` unless `is_number`."""
    if not is_number(value, or_zero=or_zero):
        raise ValueError(f"{what} must be positive, a number; got {shown(value)}")


def check_env(env: Any) -> None:
    """Raise `ValueError` unless it is a mesh to plan for."""
    if not isinstance(env, ShardingEnv):
        raise ValueError(
            f"expected env to be a dmp.ShardingEnv; got {shown(env)}. ShardingEnv.from_process_group(group) and "
            "ShardingEnv.from_mesh(mesh) are of ranks that are here, ShardingEnv.abstract((8,), ('dp',)) of others"
        )


def names(what: str, value: Any) -> tuple[str, ...] | None:
    """One name or several as a tuple.

    Raises:
        ValueError: anything else.
    """
    if value is None:
        return None
    found = several(value, str)
    if not all(isinstance(name, str) for name in found):
        raise ValueError(f"{what} must be names of layouts such as 'row_wise'; got {shown(value)}")
    return found


def several(value: Any, one: type | tuple[type, ...]) -> tuple[Any, ...]:
    """What is given as one of a type, or as several in a list, as a tuple; of what is neither, None in one."""
    try:
        return (value,) if isinstance(value, one) else tuple(value)
    except TypeError:
        return (None,)
