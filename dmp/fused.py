"""`FusedOptimizer`: a torch optimizer over the parameters that are updated in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from dmp.chunked import ChunkedTensor
from dmp.contracts import FusedParameter
from dmp.errors import CheckpointError, ShardError


class FusedOptimizer(torch.optim.Optimizer):
    """Shows and sets what the backward pass uses: a new `lr` in `param_groups` takes effect at the next backward.

    `step` has nothing left to do. State has torch.optim's names and the unsharded parameters' shapes.

    Args:
        fused: the parameters, with fully-qualified names.
    """

    def __init__(self, fused: Iterable[FusedParameter]) -> None:
        self.fused = {f.name: f for f in fused}
        groups: dict[int, dict[str, Any]] = {}
        self._names: dict[int, list[str]] = {}
        for f in self.fused.values():
            group = groups.setdefault(id(f.options), f.options)
            if id(f.options) not in self._names:
                group["params"] = []
                self._names[id(f.options)] = []
            group["params"].append(f.parameter)
            self._names[id(f.options)].append(f.name)
            if not hasattr(f.parameter, "_in_backward_optimizers"):  # by which TorchRec's filter leaves it out
                f.parameter._in_backward_optimizers = []  # type: ignore[attr-defined]
        super().__init__([{"params": []}], {"lr": 0.0})
        self.param_groups = list(groups.values())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Nothing: the backward pass has updated the parameters. Returns the closure's result if there is one."""
        return closure() if closure is not None else None

    def state_dict(self) -> dict[str, Any]:
        """`{"state": {parameter name: {state name: tensor}}, "param_groups": [...]}`; tensors are live, not copies."""
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": list(self._names[id(group)])}
            for group in self.param_groups
        ]
        return {"state": {name: f.state() for name, f in self.fused.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy values in: whole tensors, or pieces that hold what this rank needs.

        Raises:
            CheckpointError: a parameter or state that is missing, unknown, or of another shape; nothing is changed.
        """
        given = state_dict["state"]
        own = {name: f.state() for name, f in self.fused.items()}
        wrong = _mismatches(own, given)
        if wrong:
            raise CheckpointError("fused optimizer state does not fit the model: " + "; ".join(wrong[:5]))
        for name, states in own.items():
            for key, target in states.items():
                fill(target, given[name][key], f"{name}.{key}")
        for saved in state_dict.get("param_groups", ()):
            for name in saved["params"]:
                if name in self.fused:
                    self.fused[name].options.update({k: v for k, v in saved.items() if k != "params"})


def fill(target: torch.Tensor, source: torch.Tensor, name: str) -> None:
    """Copy `source` into a live state tensor, whole or in pieces."""
    try:
        with torch.no_grad():
            if isinstance(target, ChunkedTensor):
                target.fill_from(source)
            else:
                target.copy_(source)
    except ShardError as error:
        raise CheckpointError(f"{name}: {error}") from error


def _mismatches(own: Mapping[str, Mapping[str, torch.Tensor]], given: Mapping[str, Mapping[str, Any]]) -> list[str]:
    wrong = [f"no state for {name!r}" for name in own if name not in given]
    wrong += [f"unknown parameter {name!r}" for name in given if name not in own]
    for name, states in own.items():
        for key in sorted({*states, *given.get(name, {})}) if name in given else ():
            have, got = states.get(key), given[name].get(key)
            if have is None or got is None:
                wrong.append(f"{name!r} has {'no' if got is None else 'an unknown'} state {key!r}")
            elif tuple(have.shape) != tuple(got.shape):
                wrong.append(f"{name!r} state {key!r} has shape {tuple(got.shape)}, expected {tuple(have.shape)}")
    return wrong
