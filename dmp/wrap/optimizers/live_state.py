"""`LiveState`: optimizer state by parameter, read from the model whenever it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

from dmp.contracts import FusedParameter
from dmp.errors import ShardError


class LiveState(MutableMapping[Any, Mapping[str, Any]]):
    """What `optimizer.state` is of parameters that the model itself updates: a move or another plan changes nothing
    for who holds it. Others put state of parameters of their own beside it, as TorchRec's `WarmupOptimizer` does.

    Args:
        fused: the parameters that the model updates; their state has live tensors, and no place for others.
    """

    def __init__(self, fused: Iterable[FusedParameter]) -> None:
        self._fused = {f.parameter: f for f in fused}
        self._others: dict[Any, Mapping[str, Any]] = {}

    def follow(self, fused: Iterable[FusedParameter]) -> None:
        """Have the model update these from now on, in place of those that it did."""
        self._fused = {f.parameter: f for f in fused}

    def __getitem__(self, parameter: Any) -> Mapping[str, Any]:
        if parameter in self._fused:
            return MappingProxyType(self._fused[parameter].state())
        return self._others[parameter]

    def __setitem__(self, parameter: Any, state: Mapping[str, Any]) -> None:
        self._check(parameter)
        self._others[parameter] = state

    def __delitem__(self, parameter: Any) -> None:
        self._check(parameter)
        del self._others[parameter]

    def _check(self, parameter: Any) -> None:
        if parameter in self._fused:
            raise ShardError(
                f"the state of {self._fused[parameter].name!r} is the model's, which updates it in the backward pass; "
                "copy into its tensors, or give model.fused_optimizer.load_state_dict other values"
            )

    def __iter__(self) -> Iterator[Any]:
        yield from self._fused
        yield from self._others

    def __len__(self) -> int:
        return len(self._fused) + len(self._others)
