"""Tied parameters: one parameter in several places of a model, which must stay one whatever is done to each place."""

from __future__ import annotations

from torch import nn

from dmp.errors import ShardError

Tie = list[tuple[nn.Module, str]]


def find_ties(module: nn.Module) -> list[Tie]:
    """The places of each parameter that has several."""
    places: dict[int, dict[tuple[int, str], tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), {})[id(owner), name] = (owner, name)
    return [list(found.values()) for found in places.values() if len(found) > 1]


def restore_ties(ties: list[Tie]) -> None:
    """Put ties back that tensor parallelism has cut: torch distributes the weight of each module by itself."""
    for (first, name), *others in ties:
        parameter = first._parameters[name]
        for owner, other in others:
            mine = owner._parameters[other]
            if mine is not parameter and getattr(mine, "placements", None) != getattr(parameter, "placements", None):
                raise ShardError(
                    f"a weight that {type(first).__name__}.{name} and {type(owner).__name__}.{other} share was split "
                    f"in two ways: {getattr(parameter, 'placements', 'whole')}, {getattr(mine, 'placements', 'whole')}"
                )
            owner._parameters[other] = parameter
