"""What a module of tables is asked before a sharded one takes its place: its parameters, and their optimizers' work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dmp import ChunkedTensor, FusedParameter
from sharders.embedding.exchange.placement import Table
from sharders.embedding.lookup.given_optimizers import OptimizerReader
from sharders.embedding.resting import at_first


def module_at(module: nn.Module, path: str) -> nn.Module:
    """As torch's `get_submodule`, of a path that is known to be one of modules: it is asked for each of many tables."""
    for part in path.split(".") if path else ():
        module = module._modules[part]  # type: ignore[assignment]
    return module


def parameter_at(module: nn.Module, name: str) -> nn.Parameter:
    """Likewise `get_parameter`."""
    path, _, own = name.rpartition(".")
    return module_at(module, path)._parameters[own]  # type: ignore[return-value]


def make_table(
    parameter: nn.Parameter, name: str, features: Sequence[str], optimizers: OptimizerReader, *, mean: bool = False
) -> Table:
    """A table from its parameter, with the optimizer that `apply_optimizer_in_backward` left on it.

    Args:
        optimizers: of all tables of the module.
    """
    rows, dim = parameter.shape
    optimizer = optimizers.read(parameter, name) if parameter.requires_grad else None
    return Table(name, rows, dim, parameter.dtype, tuple(features), mean, optimizer, *at_first(parameter))


def gathered(original: nn.Module, names: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """What the optimizers of tables have gathered, of those that have stepped before wrapping."""
    found: dict[str, Mapping[str, Any]] = {}
    for name in names:
        parameter = parameter_at(original, name)
        optimizers = getattr(parameter, "_in_backward_optimizers", ())
        if optimizers and (state := getattr(optimizers[0], "state", {}).get(parameter)):
            found[name] = state
    return found


def carry_state(given: Mapping[str, Any], fused: FusedParameter) -> None:
    """Take over what the original's in-backward optimizer has gathered."""
    for name, target in fused.state().items():
        value = torch.as_tensor(given.get(name, target))
        if value is not target and not value.is_meta:
            if value.shape != target.shape:  # row-wise: (rows, 1) to (rows,), or to a column for each column block
                value = value.view(-1) if target.dim() == 1 else value.expand(target.shape)
            (target.fill_from if isinstance(target, ChunkedTensor) else target.copy_)(value)
