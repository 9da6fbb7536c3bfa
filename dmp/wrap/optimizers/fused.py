"""`FusedOptimizer`: a torch optimizer over the parameters that are updated in the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dmp.chunked import ChunkedTensor
from dmp.contracts import FusedParameter
from dmp.errors import CheckpointError, ShardError
from dmp.foreign import type_name
from dmp.places import taking_hooks
from dmp.wrap.optimizers.column_blocks import between_blocks, is_per_block
from dmp.wrap.optimizers.live_state import LiveState

_FORM = 'expected {"state": {parameter name: {state name: tensor}}, "param_groups": [{"params": [names], ..}]}'


def _guard(fused: FusedParameter) -> None:
    """Have a gradient that comes to the parameter itself be an error: what updates it takes those of lookups alone.

    One of zeros is let go, as of `0 * p.sum()`, by which programs have every parameter reached.
    """
    parameter, name = fused.parameter, fused.name
    if not hasattr(parameter, "_dmp_is_guarded"):
        parameter._dmp_is_guarded = True  # type: ignore[attr-defined]
        refuse = partial(_refuse_gradient, name=name)
        refuse._dmp_own = True  # type: ignore[attr-defined]  # the next parameter of this table has one too
        with taking_hooks(parameter):
            parameter.register_post_accumulate_grad_hook(refuse)


def _refuse_gradient(parameter: torch.Tensor, name: str) -> None:
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None and gradient.any():
        raise ShardError(
            f"a gradient came to the parameter {name!r} itself, as of a penalty on weights in the loss, and would be "
            "lost: it is updated in the backward pass, by the gradients of what was looked up. Its optimizer's "
            "weight_decay decays what batches look up; without an optimizer in backward it takes any gradient"
        )


class FusedOptimizer(torch.optim.Optimizer):
    """Shows and sets what the backward pass uses: a new `lr` in `param_groups` takes effect at the next backward.

    `step` has nothing left to do. State has torch.optim's names and the unsharded parameters' shapes. In form it is a
    keyed optimizer of TorchRec's, so that its wrappers take it (`CombinedOptimizer`, `WarmupOptimizer`, ...); where
    TorchRec is imported by class too, see keyed.py.

    Args:
        fused: the parameters, with fully-qualified names.
        is_part: of what another one shows, whose groups it has.
    """

    params: dict[str, Any]
    """Name -> parameter; a wrapper of TorchRec's may add one of its own, for its state."""

    def __init__(self, fused: Iterable[FusedParameter], is_part: bool = False) -> None:
        super().__init__([{"params": []}], {"lr": 0.0, "_save_param_groups": False})
        self.fused = {f.name: f for f in fused}
        self.params = {f.name: f.parameter for f in self.fused.values()}
        self.state = LiveState(self.fused.values())  # type: ignore[assignment]
        groups: dict[int, dict[str, Any]] = {}
        self._names: dict[int, list[str]] = {}
        for f in self.fused.values():
            key = id(f.options)  # parameters that share their options are one group, whose dict is those options
            if key not in groups:
                groups[key], self._names[key] = f.options, []
                if not is_part:
                    f.options["params"] = []
            if not is_part:
                f.options["params"].append(f.parameter)
            self._names[key].append(f.name)
            if not hasattr(f.parameter, "_in_backward_optimizers"):  # by which TorchRec's filter leaves it out
                f.parameter._in_backward_optimizers = []  # type: ignore[attr-defined]
            _guard(f)
        self.param_groups = list(groups.values())

    def follow(self, fused: Iterable[FusedParameter]) -> None:
        """Show others of the same names in the places of what there is; groups stay the dicts that they are."""
        for f in fused:
            self.fused[f.name] = f
            self.params[f.name] = f.parameter
            _guard(f)
        self.state.follow(self.fused.values())  # type: ignore[attr-defined]
        for group in self.param_groups:
            group["params"][:] = [self.fused[name].parameter for name in self._names[id(group)]]

    def part(self, own: Iterable[FusedParameter]) -> FusedOptimizer:
        """What one module updates, under its own names. Groups are the model's: a new `lr` is for all in one.

        Args:
            own: as the module gives them.
        """
        names = {id(f.parameter): f.name for f in own}
        known = [(f, names.get(id(f.parameter))) for f in self.fused.values()]
        return FusedOptimizer((replace(f, name=name) for f, name in known if name is not None), is_part=True)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Nothing: the backward pass has updated the parameters. Returns the closure's result if there is one."""
        return closure() if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """These parameters get no gradient; one that somebody has put there goes."""
        for f in self.fused.values():
            f.parameter.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused.

        Raises:
            ShardError: what is updated in the backward pass is settled when the model is wrapped.
        """
        if "fused" not in self.__dict__:  # torch's own call, while it is made
            return super().add_param_group(param_group)
        raise ShardError(
            "model.fused_optimizer shows what the backward pass updates, which is settled when a model is wrapped: "
            "give the parameters to an optimizer of their own, or apply_optimizer_in_backward before wrapping"
        )

    def init_state(self, sparse_grad_parameter_names: Any = None) -> None:
        """Nothing: state is there from the start."""

    def save_param_groups(self, save: bool) -> None:
        """Whether TorchRec's wrappers around this one put param groups into state dicts; our own always has them."""
        self.defaults["_save_param_groups"] = save

    def post_load_state_dict(self) -> None:
        """Nothing: what is loaded is in force."""

    def set_optimizer_step(self, step: int) -> None:
        """Set the number of updates of every table whose optimizer counts them."""
        for f in self.fused.values():
            if "step" in (state := f.state()):
                state["step"].fill_(step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Set options of all groups, by the names of `param_groups` or FBGEMM's (`beta1`, `beta2`).

        Raises:
            ShardError: a name that some group does not have; nothing is changed.
        """
        new = [_options_of(group, params_dict) for group in self.param_groups]
        for group, options in zip(self.param_groups, new, strict=True):
            group.update(options)

    def state_dict(self) -> dict[str, Any]:
        """`{"state": {parameter name: {state name: tensor}}, "param_groups": [...]}`; tensors are live, not copies.

        Where state has a value for each column block, `column_widths` says by name how wide the blocks are, see [Note:
        column blocks] of column_blocks.py.
        """
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": list(self._names[id(group)])}
            for group in self.param_groups
        ]
        others = {name: self.state[p] for name, p in self._others().items() if p in self.state}
        states = {**{name: f.state() for name, f in self.fused.items()}, **others}
        state = {"state": states, "param_groups": groups}
        widths = {name: f.widths for name, f in self.fused.items() if f.widths and _has_blocks(states[name], f.widths)}
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
        others = self._others()
        wrong = _unnamed(own, {name: values for name, values in given.items() if name not in others})
        wrong += [f"no state for {name!r}" for name, p in others.items() if p in self.state and name not in given]
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
        for name in others.keys() & given.keys():
            self.state[others[name]] = copy.deepcopy(dict(given[name]))
        for saved in groups:
            for name in saved["params"]:
                if name in self.fused:
                    self.fused[name].options.update({k: v for k, v in saved.items() if k != "params"})

    def _others(self) -> dict[str, Any]:
        """Parameters that wrappers of TorchRec's have added."""
        return {name: p for name, p in self.params.items() if name not in self.fused}


def _has_blocks(state: Mapping[str, torch.Tensor], widths: Sequence[int]) -> bool:
    """Whether some of a table's state has a value for each block; other state is the same on every plan, names too."""
    return any(is_per_block(value.shape, widths) for value in state.values())


def _options_of(group: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """New options of a group, with FBGEMM's names in torch's."""
    options = {name: value for name, value in given.items() if name not in ("beta1", "beta2")}
    if "betas" in group and len(options) < len(given):
        beta1, beta2 = group["betas"]
        options["betas"] = (given.get("beta1", beta1), given.get("beta2", beta2))
    elif len(options) < len(given):
        options = dict(given)
    known = group.keys() - {"params"}
    if unknown := options.keys() - known:
        raise ShardError(f"update_hyper_parameters got {sorted(unknown)}; the tables' optimizer has {sorted(known)}")
    return options


def _read(state_dict: Any) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]], Mapping[str, Any]]:
    """(state, param groups, column widths) of what came, if it has the form of a state dict."""
    if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("state"), Mapping):
        raise _misshapen(f"{_FORM}; got {type_name(state_dict)} without a dict of state")
    state: Mapping[str, Any] = state_dict["state"]
    groups: Sequence[Any] = state_dict.get("param_groups") or ()
    widths: Any = state_dict.get("column_widths") or {}
    for name, values in state.items():
        if not isinstance(values, Mapping):
            raise _misshapen(f"{_FORM}; the state of {name!r} is a {type_name(values)}")
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
        return f"is a {type_name(value)}; expected a tensor of {tuple(target.shape)}"
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
