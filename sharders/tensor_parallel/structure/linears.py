"""What multiplies by one matrix: `nn.Linear`, and modules that are it but for the order of the weight's dims.

[Note: transposed] Hugging Face's `Conv1D`, of which GPT-2 is made, holds its weight as (in, out). Such a module is told
by its shapes: a matrix, a bias as long as the matrix's second dim, and nothing else. Of a square one shapes do not tell
the order, and of others not what `forward` does; a plan is proved.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

DOWN = re.compile(r"w_?2|fc_?2|lin(ear)?_?2|\w*(down|out|proj_out|wo|c_proj|contract)\w*|wo")
"""Names of what leads back to the hidden size, lower case."""


@dataclass(frozen=True)
class Features:
    """Of a module that multiplies by one matrix."""

    in_features: int
    out_features: int
    out_dim: int = 0
    """The dim of the weight that output features lie along; 1 where it is transposed."""


def features_of(module: nn.Module) -> Features | None:
    """None where the module is no such one, see [Note: transposed]."""
    if isinstance(module, nn.Linear):
        return Features(module.in_features, module.out_features)
    own = module._parameters
    if own.keys() != {"weight", "bias"} or module._modules or module._buffers:
        return None
    weight, bias = own["weight"], own["bias"]
    if weight is None or bias is None or nn.parameter.is_lazy(weight) or weight.dim() != 2:
        return None
    width, out = weight.shape
    return Features(width, out, out_dim=1) if tuple(bias.shape) == (out,) else None


def is_joint_attention(module: nn.Module | None) -> bool:
    """Whether it is torch's attention, whose query, key and value are one weight of its own; of its usual form."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and module.in_proj_weight is not None
        and module.bias_k is None
        and not module.add_zero_attn
    )


def is_transposed(module: nn.Module) -> bool:
    """Whether its weight is (in, out)."""
    features = features_of(module)
    return features is not None and features.out_dim == 1


def resize_output(module: nn.Module, was: int, now: int) -> None:
    """Have a transposed module know another number of output features, whatever it calls them."""
    for name in [name for name, value in vars(module).items() if type(value) is int and value == was]:
        setattr(module, name, now)


def kinds_in(model: nn.Module, paths: Iterable[str]) -> tuple[type, ...]:
    """Classes in the module around the first of these: attentions that are alike have the same."""
    around = next(iter(paths)).rpartition(".")[0]
    return tuple(type(module) for module in model.get_submodule(around).modules())
