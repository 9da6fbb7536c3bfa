"""What a user passes to the planner, checked one by one: numbers and names."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from numbers import Real
from typing import Any

from torch import nn

from dmp import ShardingEnv, shown


def is_number(value: Any, *, or_zero: bool = False) -> bool:
    """Whether it is a real number above 0, which a float can be, infinity too; True and False are none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        number = float(value)  # of NumPy's too, which overflow where they are compared as what they are
    except OverflowError:
        return False
    return number > 0 or (or_zero and number == 0)


def positive(what: str, value: Any, *, or_zero: bool = False) -> None:
    """Raise `ValueError` unless `is_number`."""
    if not is_number(value, or_zero=or_zero):
        raise ValueError(f"{what} must be positive, a number; got {shown(value)}")


def finite(what: str, value: Any) -> None:
    """Raise `ValueError` unless it is a number above 0 of which others can be made."""
    positive(what, value)
    if value == inf:
        raise ValueError(f"{what} must be a finite number; got {shown(value)}")


def whole(what: str, value: Any) -> None:
    """Raise `ValueError` unless it is an integer above 0."""
    positive(what, value)
    if not isinstance(value, int):
        raise ValueError(f"{what} must be a whole number; got {shown(value)}")


def yes_no_or_none(what: str, value: Any) -> None:
    """Raise `ValueError` unless it is True, False or None."""
    if not (value is None or isinstance(value, bool)):
        raise ValueError(f"{what} must be True, False or None; got {shown(value)}")


def check_module(module: Any) -> None:
    """Raise `ValueError` unless it is a module that has been made."""
    if not isinstance(module, nn.Module):
        hint = ": call it" if isinstance(module, type) else ""
        raise ValueError(f"expected module to be an nn.Module; got {shown(module)}{hint}")


def check_constraints(constraints: Any) -> None:
    """Raise `ValueError` unless it is a dict, whatever it has, or None."""
    if constraints is not None and not isinstance(constraints, Mapping):
        raise ValueError(f"constraints must be a dict of parameter name -> Constraint; got {shown(constraints)}")


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
