"""Norms over all features of which a rank has a part: a norm's own code, with the statistics of all ranks' features.

[Note: statistics] The norm's code runs on this rank's part, in whatever dtypes it computes. Where it takes a mean, sum
or variance over the features it gets that of all ranks; torch's own two norms, which are one operation each, are
written out. What else it may do over all features is of the part alone, and a proof finds that wrong; a kernel that
the CPU of a proof does not see is told when it is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dmp import ShardError, type_name
from sharders.tensor_parallel.split.local import split_weights
from sharders.tensor_parallel.split.plain import entering, summed
from sharders.tensor_parallel.split.replicated_weights import read_local
from sharders.tensor_parallel.structure.wide_norms import COLWISE_NORM, width_of_norm
from sharders.unheard import made_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_TAKEN = "_dmp_statistics_taken"
_MEANS = (torch.mean, torch.Tensor.mean)
_SUMS = (torch.sum, torch.Tensor.sum)
_VARIANCES = (torch.var, torch.Tensor.var)
_LAYER_NORMS = (F.layer_norm, torch.layer_norm)
_RMS_NORMS = (F.rms_norm, torch.rms_norm)
_TAKING = (*_MEANS, *_SUMS, *_VARIANCES, *_LAYER_NORMS, *_RMS_NORMS)


def split_norm(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split a norm's weights, and have it called with a rank's part of the features; no communication, may be on meta.

    Forward: one all-reduce of a number for each row, for each mean, sum or variance. Backward: another.

    Args:
        mesh: the tensor axis, whose size divides the features.
    """
    width = width_of_norm(module)
    assert width is not None
    read_local(module, split_weights(module, mesh, COLWISE_NORM))
    kind: Any = type(module)
    module.__class__ = _across_ranks(kind, mesh, width // mesh.size())


@cache
def _across_ranks(kind: Any, mesh: DeviceMesh, width: int) -> type[nn.Module]:
    """The subclass that takes statistics over all ranks' features; named as `kind`, for code that asks."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        across = _Statistics(mesh, width)
        with across:
            output = kind.forward(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            self.__dict__[_TAKEN] = across.taken
        return output

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = kind.__call__(self, *args, **kwargs)
        # Also where somebody has put another forward in the place of the above.
        if not torch.compiler.is_compiling() and not self.__dict__.pop(_TAKEN, False):
            raise ShardError(
                f"a {type_name(self)} over {width * mesh.size()} features, of which this rank has {width}, took no "
                "mean, sum or variance of them by torch's functions: a kernel of its own would take that of this "
                f"rank's alone; turn the kernel off, or leave the module ({COLWISE_NORM!r}), and what it is of, "
                "out of the tensor-parallel plan"
            )
        return output

    made: type[nn.Module] = made_of(kind, {"forward": forward, "__call__": call})
    return made


class _Statistics(TorchFunctionMode):
    """Means, sums and variances over the last dim, where it is `width` long, are those of all ranks' parts of it."""

    def __init__(self, mesh: DeviceMesh, width: int) -> None:
        super().__init__()
        self.mesh, self.width = mesh, width
        self.taken = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else kwargs.get("input")
        if func not in _TAKING or x is None or x.shape[-1:] != (self.width,):
            return func(*args, **kwargs)
        if not args:
            args, kwargs = (x,), {name: value for name, value in kwargs.items() if name != "input"}
        if func in _LAYER_NORMS or func in _RMS_NORMS:
            self.taken = True
            return (_layer_norm if func in _LAYER_NORMS else _rms_norm)(self.mesh, func, *args, **kwargs)
        dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
        dims = (dim,) if isinstance(dim, int) else tuple(dim or range(x.dim()))
        if all(d % x.dim() != x.dim() - 1 for d in dims):
            return func(*args, **kwargs)
        self.taken = True
        if func in _VARIANCES:
            return _variance(self.mesh, *args, **kwargs)
        of_part = func(*args, **kwargs)
        return _mean(of_part, self.mesh) if func in _MEANS else _total(of_part, self.mesh)


def _total(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks', which each goes on to use for its own features: so gradients of it are summed, too."""
    return entering(summed(part, mesh), mesh)


def _mean(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return _total(part, mesh) / mesh.size()


def _variance(
    mesh: DeviceMesh,
    x: torch.Tensor,
    dim: int | tuple[int, ...] | None = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> torch.Tensor:
    dims = tuple(range(x.dim())) if dim is None else dim
    apart = x - _mean(x.mean(dims, keepdim=True), mesh)
    squares = _mean(apart.square().mean(dims, keepdim=keepdim), mesh)
    count = mesh.size() * math.prod(x.shape[d] for d in ((dims,) if isinstance(dims, int) else dims))
    less = float(unbiased) if correction is None else correction
    return squares * (count / (count - less))


def _layer_norm(
    mesh: DeviceMesh,
    func: Callable[..., torch.Tensor],
    x: torch.Tensor,
    _: Any,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *__: Any,
) -> torch.Tensor:
    wide = _computed(x)
    apart = wide - _mean(wide.mean(-1, keepdim=True), mesh)
    scaled = apart * torch.rsqrt(_mean(apart.square().mean(-1, keepdim=True), mesh) + eps)
    scaled = scaled if weight is None else scaled * weight
    return (scaled if bias is None else scaled + bias).to(_dtype_given(func, x))


def _rms_norm(
    mesh: DeviceMesh,
    func: Callable[..., torch.Tensor],
    x: torch.Tensor,
    _: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    wide = _computed(x)
    least = torch.finfo(x.dtype).eps if eps is None else eps
    scaled = wide * torch.rsqrt(_mean(wide.square().mean(-1, keepdim=True), mesh) + least)
    return (scaled if weight is None else scaled * weight).to(_dtype_given(func, x))


def _computed(x: torch.Tensor) -> torch.Tensor:
    """In the dtype in which torch's kernels compute."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _dtype_given(func: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.dtype:
    """Of what torch's norm gives; autocast has a say in it."""
    if not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return func(x.new_empty(0, x.shape[-1]), (x.shape[-1],)).dtype
