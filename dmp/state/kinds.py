"""torch's operations over lists of tensors, for lists of tables and DTensors: each kind by itself.

Optimizers with `foreach=True` or `fused=True`, clipping and `AveragedModel` put what is of one device and dtype in one
call, which takes no plain tensors beside DTensors, nor DTensors of two meshes. All of them group tensors by one
function of torch's, as other packages' optimizers do, but for `zero_grad`; from the first wrapping on others stand in
for both, which tell the kinds apart too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer

from dmp.places import is_dtensor
from dmp.put_around import put_around

_OWNER = "torch.utils._foreach_utils"
_USERS = ("torch.nn.utils.clip_grad", "torch.optim.optimizer", "torch.optim.swa_utils")
_NAME = "_group_tensors_by_device_and_dtype"


def _by_kind(own: Callable[..., Any]) -> Callable[..., Any]:
    def group(tensorlistlist: Any, with_indices: bool = False) -> Any:
        """As torch's: (device, dtype and kind) -> lists, their places in those given; by the first of the lists."""
        kinds = [tensor.device_mesh if is_dtensor(tensor) else None for tensor in tensorlistlist[0]]
        found = dict.fromkeys(kinds)
        if len(found) < 2:
            return own(tensorlistlist, with_indices)
        groups = {}
        for kind in found:
            places = [i for i, each in enumerate(kinds) if each == kind]
            of_kind = [[tensors[i] for i in places] if tensors else tensors for tensors in tensorlistlist]
            for (device, dtype), (lists, inner) in own(of_kind, with_indices).items():
                groups[device, (dtype, kind)] = (lists, [places[i] for i in inner])
        return groups

    return group


def tell_kinds_apart() -> None:
    """From now on, wherever torch groups tensors, or another package by its function; once."""
    own, _ = getattr(importlib.import_module(_OWNER), _NAME), [*map(importlib.import_module, _USERS)]
    stand_in = _by_kind(own)
    for user in list(sys.modules.values()):
        if getattr(user, "__dict__", {}).get(_NAME) is own:  # who imports it later has it from its owner
            setattr(user, _NAME, stand_in)
    put_around(Optimizer, "zero_grad", _zeros_apart)


def _zeros_apart(own: Callable[..., None], optimizer: Optimizer, set_to_none: bool = True) -> None:
    groups = () if set_to_none else optimizer.param_groups
    held = [(p, p.grad) for group in groups for p in group["params"] if is_dtensor(p) and p.grad is not None]
    for p, _ in held:
        p.grad = None
    own(optimizer, set_to_none)
    for p, gradient in held:
        p.grad = gradient.detach().zero_()
