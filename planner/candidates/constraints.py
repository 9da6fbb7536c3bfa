"""`Constraint`: what a user asks of the plan for some parameters, and which parameters a key means."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from numbers import Real
from typing import Any

from dmp import NameIndex, PlanError, shown
from planner.arguments import is_number, names, several


@dataclass(frozen=True)
class Constraint:
    """What the plan must keep for the parameters that a key names; None leaves a point open.

    On a single rank, where all layouts are the same, `layouts` and `forbid` are passed over.

    Args:
        layouts: names of the only layouts to choose from (`"row_wise"`).
        forbid: names of layouts not to choose.
        ranks: table ranks that may hold the parameter.
        colocate: name of a group whose members are cut alike and lie on the same ranks.
        spread: name of a group no two members of which share a rank.
        pooling_factor: mean ids per sample and feature, a number or one per feature; over what the sharder says.
        kernel: `"fused"` or `"dense"`, see `ParameterSharding`.
        min_columns: of a block where columns are cut; 32 where nobody says, fewer where nothing else is left.
    """

    layouts: tuple[str, ...] | None = None
    forbid: tuple[str, ...] | None = None
    ranks: tuple[int, ...] | None = None
    colocate: str | None = None
    spread: str | None = None
    pooling_factor: float | tuple[float, ...] | None = None
    kernel: str | None = None
    min_columns: int | None = None

    def __init__(
        self,
        layouts: Sequence[str] | str | None = None,
        forbid: Sequence[str] | str | None = None,
        ranks: Sequence[int] | int | None = None,
        colocate: str | None = None,
        spread: str | None = None,
        pooling_factor: float | Sequence[float] | None = None,
        kernel: str | None = None,
        min_columns: int | None = None,
    ) -> None:
        given = None if ranks is None else several(ranks, int)
        if given is not None and not (given and all(map(_is_rank, given))):
            raise ValueError(f"Constraint.ranks must be table ranks, at least one; got {shown(ranks)}")
        numbers = None if given is None else tuple(sorted(set(given)))
        only = names("Constraint.layouts", layouts)
        if only == ():
            raise ValueError("Constraint.layouts is empty, which leaves no choice; pass None to allow all")
        for what, group in (("colocate", colocate), ("spread", spread)):
            if group is not None and not isinstance(group, str):
                raise ValueError(f"Constraint.{what} must be the name of a group; got {shown(group)}")
        if kernel not in (None, "fused", "dense"):
            raise ValueError(f"Constraint.kernel is 'fused', 'dense' or None; got {shown(kernel)}")
        if min_columns is not None and not (_is_rank(min_columns) and min_columns > 0):
            raise ValueError(f"Constraint.min_columns must be a number of columns > 0; got {shown(min_columns)}")
        factors = _factors(pooling_factor)
        banned = names("Constraint.forbid", forbid)
        values = (only, banned, numbers, colocate, spread, factors, kernel, min_columns)
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    def given(self) -> dict[str, Any]:
        """The points that it does not leave open."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    def without_groups(self) -> Constraint:
        """The same without `colocate` and `spread`: what parameters need not share to be alike."""
        return self if self.colocate is None and self.spread is None else replace(self, colocate=None, spread=None)


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _factors(value: Any) -> float | tuple[float, ...] | None:
    if value is None:
        return None
    given = (None,) if isinstance(value, (str, Mapping)) else several(value, Real)
    if not all(is_number(p, or_zero=True) and p < inf for p in given):
        raise ValueError(
            "Constraint.pooling_factor must be mean ids per sample, a number >= 0 or one per feature; got "
            f"{shown(value)}"
        )
    factors = tuple(map(float, given))
    return factors[0] if isinstance(value, Real) else factors


def constraints_of(constraints: Mapping[str, Constraint], parameters: Collection[str]) -> dict[str, Constraint]:
    """The constraint of each parameter: patterns in the order given, then exact names; later ones win point by point.

    A key is a parameter's full name, a module that holds it, a table's name (the last part of its module's), or a
    pattern of one of these (see `NameIndex`).

    Raises:
        PlanError: a key that no parameter answers to, or what is no constraint.
    """
    if not all(isinstance(key, str) for key in constraints):
        raise PlanError(f"constraints must be a dict of parameter name -> Constraint; got {shown(constraints)}")
    known = Answering(parameters)
    found = dict.fromkeys(parameters, Constraint())
    for key in sorted(constraints, key=known.keys.__contains__):
        constraint = constraints[key]
        if not isinstance(constraint, Constraint):
            raise PlanError(f"constraints[{key!r}] must be a Constraint; got {shown(constraint)}")
        matched = known.named(key)
        if not matched:
            raise PlanError(
                f"constraints name {key!r}, which no parameter that a sharder takes answers to; {known.keys.hint(key)}"
            )
        for name in matched:
            before = found[name].given()
            found[name] = replace(constraint, **{**before, **constraint.given()}) if before else constraint
    return found


class Answering:
    """Parameters by the keys of constraints that mean them, to be asked of many keys.

    Args:
        parameters: their full names.
    """

    def __init__(self, parameters: Collection[str]) -> None:
        self._names: dict[str, list[str]] = {}
        for name in parameters:
            for key in _answers_to(name):
                self._names.setdefault(key, []).append(name)
        self.keys = NameIndex(self._names)

    def named(self, key: str) -> list[str]:
        """The parameters that a key means, in order."""
        return [*dict.fromkeys(name for known in self.keys.matching(key) for name in self._names[known])]


def _answers_to(name: str) -> tuple[str, ...]:
    """`a.t1.weight` -> itself, `a`, `a.t1`, `t1`."""
    words = name.split(".")
    holders = [".".join(words[:end]) for end in range(1, len(words))]
    return tuple(dict.fromkeys([name, *holders, *words[-2:-1]]))


def named_by(key: str, parameters: Collection[str]) -> tuple[list[str], str]:
    """The parameters that a key of constraints means, in order; where there are none, what may have been meant."""
    known = Answering(parameters)
    matched = known.named(key)
    return matched, "" if matched else known.keys.hint(key)
