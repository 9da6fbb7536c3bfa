"""`FusedOptimizer`: a torch optimizer over the parameters that are updated in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from dmp.chunked import ChunkedTensor
from dmp.contracts import FusedParameter
from dmp.errors import CheckpointError
from dmp.wrap.column_blocks import between_blocks

_FORM = 'expected {"state": {parameter name: {state name: tensor}}, "param_groups": [{"params": [names], ..}]}'


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
            key = id(f.options)  # parameters that share their options are one group, whose dict is those options
            if key not in groups:
                groups[key], self._names[key] = f.options, []
                f.options["params"] = []
            f.options["params"].append(f.parameter)
            self._names[key].append(f.name)
            if not hasattr(f.parameter, "_in_backward_optimizers"):  # by which TorchRec's filter leaves it out
                f.parameter._in_backward_optimizers = []  # type: ignore[attr-defined]
        super().__init__([{"params": []}], {"lr": 0.0})
        self.param_groups = list(groups.values())

    def follow(self, fused: Iterable[FusedParameter]) -> None:
        """Show others of the same names in the places of what there is; groups stay the dicts that they are."""
        for f in fused:
            self.fused[f.name] = f
        for group in self.param_groups:
            group["params"][:] = [self.fused[name].parameter for name in self._names[id(group)]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Nothing: the backward pass has updated the parameters. Returns the closure's result if there is one."""
        return closure() if closure is not None else None

    def state_dict(self) -> dict[str, Any]:
        """`{"state": {parameter name: {state name: tensor}}, "param_groups": [...]}`; tensors are live, not copies.

        Where columns are cut, `column_widths` says by name how wide the blocks are, see [Note: column blocks] of
        column_blocks.py.
        """
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": list(self._names[id(group)])}
            for group in self.param_groups
        ]
        state = {"state": {name: f.state() for name, f in self.fused.items()}, "param_groups": groups}
        widths = {name: f.widths for name, f in self.fused.items() if f.widths is not None}
        return {**state, "column_widths": widths} if widths else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy values in: whole tensors, or chunks that hold what this rank needs.

        Row-wise state of another plan loads too: one value per row (as `full_optimizer_state_dict` gives it), or whole
        tensors of one per row and column block with the `column_widths` that `state_dict` gives.

        Raises:
            CheckpointError: a parameter or state that is missing, unknown, or of another shape; nothing is changed.
        """
        given, groups, widths = _read(state_dict)
        own = {name: f.state() for name, f in self.fused.items()}
        wrong = _unnamed(own, given)
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, states in own.items():
            for key, target in states.items() if not wrong else ():
                fitting = _fitting(given[name][key], widths.get(name), target, self.fused[name].widths)
                if isinstance(fitting, torch.Tensor):
                    found.append((target, fitting))
                else:
                    wrong.append(f"{name!r} state {key!r} {fitting}")
        if wrong:
            raise CheckpointError("fused optimizer state does not fit the model: " + "; ".join(wrong[:5]))
        with torch.no_grad():
            for target, fitting in found:
                if isinstance(target, ChunkedTensor):
                    target.fill_from(fitting)
                else:
                    target.copy_(fitting)
        for saved in groups:
            for name in saved["params"]:
                if name in self.fused:
                    self.fused[name].options.update({k: v for k, v in saved.items() if k != "params"})


def _read(state_dict: Any) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]], Mapping[str, Any]]:
    """(state, param groups, column widths) of what came, if it has the form of a state dict."""
    if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("state"), Mapping):
        raise _misshapen(f"{_FORM}; got {type(state_dict).__name__} without a dict of state")
    state: Mapping[str, Any] = state_dict["state"]
    groups: Sequence[Any] = state_dict.get("param_groups") or ()
    widths: Any = state_dict.get("column_widths") or {}
    for name, values in state.items():
        if not isinstance(values, Mapping):
            raise _misshapen(f"{_FORM}; the state of {name!r} is a {type(values).__name__}")
    if not all(isinstance(g, Mapping) and isinstance(g.get("params"), (list, tuple)) for g in groups):
        raise _misshapen(f"{_FORM}; a param group has no list of params")
    if not isinstance(widths, Mapping) or not all(map(_are_widths, widths.values())):
        raise _misshapen("expected column_widths as lists of numbers by parameter name")
    return state, groups, widths


def _misshapen(what: str) -> CheckpointError:
    return CheckpointError(f"fused optimizer state: {what}")


def _are_widths(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(n) is int and n > 0 for n in value)


def _unnamed(own: Mapping[str, Mapping[str, Any]], given: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is missing or unknown."""
    wrong = [f"no state for {name!r}" for name in own if name not in given]
    wrong += [
        f"unknown parameter {name!r} (none of those that the backward pass updates: {', '.join(sorted(own)) or 'none'})"
        for name in given
        if name not in own
    ]
    for name in own:
        states = given.get(name, own[name])
        wrong += [f"{name!r} has no state {key!r}" for key in sorted({*own[name]} - {*states})]
        wrong += [f"{name!r} has an unknown state {key!r}" for key in sorted({*states} - {*own[name]}, key=str)]
    return wrong


def _fitting(
    value: Any, given: Sequence[int] | None, target: torch.Tensor, wanted: Sequence[int] | None
) -> torch.Tensor | str:
    """What to copy into a live state, or what is wrong.

    Args:
        given, wanted: widths of the column blocks of `value`, and of `target`; None where it has none.
    """
    expected = f"expected {tuple(target.shape)}"
    if not isinstance(value, torch.Tensor):
        if type(value) in (int, float) and not target.dim():
            return torch.tensor(value, dtype=target.dtype)
        return f"is a {type(value).__name__}; expected a tensor of {tuple(target.shape)}"
    if not isinstance(value, ChunkedTensor):
        fitting = between_blocks(value, given, target, wanted)
        if fitting is not None:
            return fitting
        if value.dim() == 2 and given is None:
            expected += "; or one value per row and column block, with the column_widths that state_dict() gives"
    elif value.shape == target.shape:
        if isinstance(target, ChunkedTensor) and target.lacks(value) is None:
            return value
        return f"comes in chunks that do not hold what this rank needs; {expected}, whole"
    return f"has shape {tuple(value.shape)}, {expected}"
