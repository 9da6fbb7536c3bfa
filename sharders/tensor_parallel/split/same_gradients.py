"""Whole weights must have the same gradients on all ranks of a tensor axis, or they part, while the first forward is
right.

They have not where each rank's loss is another, as of labels of its own to the same samples: nobody averages over this
axis. And where a plan that is not proved has missed that a weight is used on a rank's part of the activations, as a
norm of single heads is, and has a part of its gradient on each rank. So ranks compare gradients at the end of the first
backward passes, and then ever more rarely: before the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import Variable

from dmp import InputError, is_dtensor, local_of, ranks, tensors_of
from sharders.tensor_parallel.split.replicated_weights import outside_tables

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OFTEN = 8
_SHARE, _FLOOR = 1e-2, 1e-6
"""Of a gradient's norm: rounding, also of bfloat16 sums in another order, stays below. Of the largest norm: what is
smaller may be rounding itself."""
_NONE = (0.0, 0.0)
_OF_LOSSES = (
    "ranks along it have the same samples and must compute the same of them, so that labels, factors of the loss, what "
    "is drawn, the order of the model's parts (a set has another one in each process) and the steps before must be the "
    "same. Averages over ranks are of other axes; env.data_rank numbers those"
)


def compare_gradients(model: nn.Module, mesh: DeviceMesh, *, is_unproved: bool = False) -> None:
    """At the end of a backward pass, which raises `InputError` on all ranks of a tensor group where gradients of whole
    weights differ. One small exchange, not at every pass.

    Args:
        model: whose weights are split.
        mesh: the tensor axis.
        is_unproved: whether the plan may be wrong itself.
    """
    (axis,), group, num_calls = mesh.mesh_dim_names or ("tensor",), mesh.get_group(), 0

    def compare() -> None:
        named = dict(_whole(model, axis))
        sizes = {name: _sizes(p.grad) for name, p in named.items() if p.grad is not None}
        here = [each.to(mesh.device_type) for each in sizes.values()]
        read = torch.stack(here).tolist() if here else []  # of a device at once
        mine = dict(zip(sizes, read, strict=True))
        told = ranks.gather_objects("comparing gradients of whole weights", mine, group)
        least = _FLOOR * max((norm for theirs in told for _, norm in theirs.values()), default=0.0)
        for other, theirs in enumerate(told):
            for name in sorted(theirs.keys() | told[0].keys()):
                if _differ(told[0].get(name, _NONE), theirs.get(name, _NONE), least):
                    of_plan = (
                        "or it is used on a part of the activations, which a tensor-parallel plan that could not be "
                        f"proved does not say. Name its module in the plan, {{..., {name.rpartition('.')[0]!r}: "
                        "'sum_gradients'}, or leave out of it what gives it parts"
                    )
                    raise InputError(
                        f"parameter {name!r} is whole on each rank of mesh axis {axis!r}, and its gradient on rank "
                        f"{other} along it is not that on rank 0: {_OF_LOSSES}{f'; {of_plan}' if is_unproved else ''}"
                    )

    def later() -> None:  # behind what is queued already, which may be what brings the gradients
        Variable._execution_engine.queue_callback(compare)

    def ask(_: nn.Module, args: Any, output: Any) -> None:
        nonlocal num_calls
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        num_calls += 1
        if num_calls > _OFTEN and num_calls & (num_calls - 1):
            return
        asked = False

        def at_end(_: torch.Tensor) -> None:
            nonlocal asked
            if not asked:
                asked = True
                Variable._execution_engine.queue_callback(later)

        for x in [x for _, x in tensors_of(output) if x.requires_grad]:
            x.register_hook(at_end)

    if mesh.size() > 1:
        model.register_forward_hook(ask)


def _whole(model: nn.Module, axis: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters that every rank along the axis has all of, or the same part."""
    outside = {id(p) for m in outside_tables(model) for p in m.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if id(parameter) not in outside:
            continue
        placed = parameter if parameter.grad is None else parameter.grad
        if not is_dtensor(placed):
            yield name, parameter
            continue
        axes = placed.device_mesh.mesh_dim_names or ()
        if axis in axes and placed.placements[axes.index(axis)].is_replicate():
            yield name, parameter


def _sizes(gradient: torch.Tensor) -> torch.Tensor:
    """(2,) The sum of its numbers, and its norm."""
    here = local_of(gradient).detach()
    here = here.coalesce().values() if here.is_sparse else here
    return torch.stack([here.sum(), here.norm()]).double()  # whole tables of tokens are too large for a copy in double


def _differ(one: Sequence[float], other: Sequence[float], least: float) -> bool:
    largest = max(one[1], other[1])
    return largest > least and any(abs(a - b) > _SHARE * largest for a, b in zip(one, other, strict=True))
