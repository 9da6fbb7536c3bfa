"""What a split attention gives out beside its output, of a rank's own heads: brought together where it is first used.

Most calls drop attention weights, so nobody exchanges them where they are made. They stay what they are, and become a
class that says what they are of: whatever is computed of them, be it a mean over heads, a stack of layers or a loss, is
computed of all heads. Until they had that class, such numbers were of a rank's own heads, in silence.

Keys and values for a cache come out of attentions as well, and so do biases of positions; they go back in, and stay a
rank's own. Weights are told from them by what a softmax leaves, numbers from 0 on that sum to 1; and means of a rank's
own heads from what all ranks have by being no rank's but its own. All ranks decide that together.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import detach_variable

from dmp import ranks
from sharders.tensor_parallel.split.plain import plain, summed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ROUNDING = 1e-2
_DROPPED = 2.0
"""What rows sum to on average at most, where dropout leaves a few that are larger; those of a mask do to more."""
_SAME = {
    getattr(torch.Tensor, name).__get__
    for name in ("dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf", "is_meta", "ndim", "_version")
    + ("is_cuda", "is_nested", "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn")
} | {
    getattr(torch.Tensor, name)
    for name in ("dim", "is_floating_point", "is_complex", "is_inference", "register_hook", "requires_grad_")
}
"""What is alike of a rank's heads and of all, or is done to a rank's."""


@dataclass(frozen=True)
class Of:
    """What a tensor is of.

    Args:
        mesh: the tensor axis.
        heads: the dimension of heads; None where they are averaged.
        is_scaled: dropout may have made what a softmax leaves larger.
        told: called when it has turned out to be weights.
        other: called when it has turned out not to be, and to be another on each rank.
    """

    mesh: DeviceMesh
    heads: int | None
    is_scaled: bool
    told: Callable[[], object] = lambda: None
    other: Callable[[], object] = lambda: None


class OwnHeads(torch.Tensor):
    """Of this rank's heads; what is computed of it is computed of all ranks'."""

    _dmp_of: Of
    _dmp_whole: torch.Tensor | None

    _base = None  # who writes it writes the whole, which is no view

    def _is_view(self) -> bool:
        return False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Of all heads, but for what is alike."""
        kwargs = kwargs or {}
        if func in _SAME:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        is_passed_on = func is torch.autograd.backward or sys._getframe(1).f_code is detach_variable.__code__
        args, kwargs = tree_map(
            lambda each: whole(each, is_passed_on=is_passed_on) if isinstance(each, OwnHeads) else each,
            (args, dict(kwargs)),
        )
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Of the same heads: a rank may copy its model alone."""
        copied = copy.deepcopy(own(self), memo)
        mark(copied, self._dmp_of)
        return copied


def mark(given: torch.Tensor, of: Of) -> None:
    """Have a tensor say that it is of this rank's heads; who holds it already holds the same."""
    given.__class__ = OwnHeads
    given._dmp_of, given._dmp_whole = of, None  # type: ignore[attr-defined]


def own(given: OwnHeads) -> torch.Tensor:
    """This rank's, as a plain tensor: for an attention, which goes on with its own heads."""
    with torch._C.DisableTorchFunctionSubclass():
        return given.as_subclass(torch.Tensor)


def whole(given: OwnHeads, *, is_passed_on: bool = False) -> torch.Tensor:
    """Of all heads, where it is weights; else as it is.

    Forward: an exchange of two numbers, then an all-gather or, of means, an all-reduce; once for each tensor. Backward:
    nothing.

    Args:
        is_passed_on: nothing is computed of it, `checkpoint` hands it on.
    """
    if given._dmp_whole is None:
        given._dmp_whole = _together(own(given), given._dmp_of, is_passed_on)
    return given._dmp_whole


def _together(mine: torch.Tensor, of: Of, is_passed_on: bool) -> torch.Tensor:
    if mine.is_meta:
        return mine
    values = mine.detach().nan_to_num()  # of rows that are masked whole
    sums = values.sum(-1)
    is_weights = (values >= 0).all() & (sums.mean() <= _DROPPED if of.is_scaled else (sums <= 1 + _ROUNDING).all())
    is_weights &= (sums > 0).any()  # as keys and values that are zero at first are not
    # By its own numbers one rank alone might bring them together, and wait.
    print_of = int(values.double().square().sum().view(torch.int64))
    words = [int(is_weights), print_of]
    group: Any = of.mesh.get_group()
    ask = getattr(group, "gather_words", None) or ranks.gather_words  # simulated ranks answer each other
    told = ask("attention weights that a split model gives out", words, group)
    is_one = all(of_rank == told[0] for of_rank in told)
    if not all(of_rank[0] for of_rank in told):
        if not is_one and not is_passed_on:
            of.other()
        return mine
    of.told()
    if of.heads is not None:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placed = DTensor.from_local(mine, of.mesh, [Shard(of.heads)], run_check=False)
        return plain(placed.redistribute(placements=[Replicate()]))
    return mine if is_one else summed(mine / of.mesh.size(), of.mesh)
