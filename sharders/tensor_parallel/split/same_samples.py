"""Ranks along a tensor axis must call a model with the same samples, and draw the same numbers in it: each has a part
of the weights for all, or the same weights, which nobody averages.

Where a data loader, or what samples the next token, goes by the rank, sums of parts of different samples train the
model, without a word. So it is where a program has seeded ranks apart after wrapping, or one rank alone has drawn
something (a loader of its own, as for validation): they drop different parts of what is one activation. So ranks
compare what they call the model with, and the generators that its forward has drawn from: the first few times of
training, and of what comes between without gradients, which is when such a program is found out, and now and then, for
where devices compute it is waited for.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dmp import InputError, RandomNumbers, checksum, is_dtensor, ranks, tensors_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OFTEN, _SELDOM, _ELEMENTS = 8, 64, 1 << 16
_BACKBONE = 0.5  # of the weights that are split: what has more is no block among several


def compare_calls(model: nn.Module, mesh: DeviceMesh) -> None:
    """Before and after a forward of the model, which raises `InputError` on all ranks of a tensor group that call it
    otherwise than each other, or draw other numbers in it; of its backbone, too, which others call past that, as trl's
    trainers. Two small exchanges, not at every call.

    Args:
        model: whose weights are split already.
        mesh: the tensor axis.
    """
    if mesh.size() == 1:
        return
    (axis,), group, num_calls = mesh.mesh_dim_names or ("tensor",), mesh.get_group(), 0
    outermost: nn.Module | None = None
    before: Sequence[int] = ()
    is_trained, num_alike = False, 0

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal num_calls, num_alike, outermost, before, is_trained
        is_inner = outermost not in (None, module)  # the module itself: an interrupt has ended its last call
        if torch.compiler.is_compiling() or is_inner or torch._C._current_graph_task_id() >= 0:
            return
        outermost = module
        if torch.is_grad_enabled() != is_trained:  # steps that have both kinds are no change from training to another
            num_calls = 0 if num_alike > _OFTEN else num_calls
            is_trained, num_alike = torch.is_grad_enabled(), 0
        num_calls, num_alike, before = num_calls + 1, num_alike + 1, ()
        if num_calls > _OFTEN and num_calls % _SELDOM:
            return
        if not any(map(is_lazy, module.parameters())):  # the first values of these, which are rank 0's in the end
            before = _marks(mesh.device_type)
        mine = [_fingerprint(t) for t in _compared(args, kwargs)]
        if not mine:
            return
        told = ranks.gather_words("the forward of a split model", [zlib.crc32(repr(mine).encode()), 0], group)
        if all(of_rank == told[0] for of_rank in told):
            return
        other = next(rank for rank, of_rank in enumerate(told) if of_rank != told[0])
        raise InputError(
            f"ranks 0 and {other} along mesh axis {axis!r} call the model with different batches; ranks along it must "
            "all have the same samples, for each has a part of the weights. Does a data loader shard over all ranks? "
            "Its sampler's num_replicas is env.data_size, its rank env.data_rank. Does chance decide, as where "
            "tokens are sampled? Give these ranks the same seed. Where each rank loads samples of its own on purpose, "
            "sharders.gather_batch(batch, env) makes one batch of them"
        )

    def compare_drawn(module: nn.Module, *_: Any) -> None:
        if outermost is not module or not before:
            return
        drawn = [(a if a != b else 0) for a, b in zip(before, _marks(mesh.device_type), strict=True)]
        words = [drawn[0] << 31 ^ drawn[1], drawn[2] << 31 ^ drawn[3]]
        told = ranks.gather_words("the random numbers of a split model's forward", words, group)
        if all(of_rank == told[0] for of_rank in told):
            return
        other = next(rank for rank, of_rank in enumerate(told) if of_rank != told[0])
        whose = "torch's" if told[other][0] != told[0][0] else "Python's or NumPy's"
        raise InputError(
            f"the model's forward has drawn other numbers on rank {other} along mesh axis {axis!r} than on rank 0, of "
            f"{whose} generator, as for dropout: ranks along it compute the same activations and must drop the same. "
            "Wrapping the model has made their generators alike. Were they seeded by the rank since then? Seed them by "
            "env.data_rank. Has one rank drawn something by itself, as by going through a DataLoader? Give that a "
            "generator of its own: DataLoader(..., generator=torch.Generator())"
        )

    def end(module: nn.Module, *_: Any) -> None:
        nonlocal outermost
        if outermost is module:
            outermost = None

    num_split = _num_split(model)
    for each in model.modules():
        if each is model or _num_split(each) > _BACKBONE * num_split:
            each.register_forward_pre_hook(compare, with_kwargs=True)
            each.register_forward_hook(compare_drawn)
            each.register_forward_hook(end, always_call=True)


def _marks(device_type: str) -> tuple[int, int, int, int]:
    """Of the generators that a forward may draw from: the device's, torch's of the CPU, Python's, NumPy's; 32 bits."""
    cpu = device_type == "cpu"
    device = 0 if cpu else checksum(torch.get_device_module(device_type).get_rng_state()) % (1 << 32)
    return device, *RandomNumbers.now().marks()


def _num_split(module: nn.Module) -> int:
    return sum(map(is_dtensor, module.parameters()))


def _compared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """What is told apart to the bit: numbers that are whole, wherever; others that are handed in as they are, not by
    another model, nor kept from an earlier call: caches have each rank's own heads. Nor from a device, where each rank
    may have computed them, and no two times to the same bits.
    """
    given = [*args, *kwargs.values()]
    handed = [*given, *(each for value in given if isinstance(value, Mapping) for each in value.values())]
    leaves = {id(t) for t in handed if isinstance(t, torch.Tensor) and not t.requires_grad}
    for _, t in tensors_of((args, kwargs)):
        is_whole = not t.is_floating_point() and not t.is_complex()
        if (
            (is_whole or (id(t) in leaves and t.device.type == "cpu"))
            and t.layout == torch.strided
            and not (is_dtensor(t) or t.is_meta)
        ):
            yield t


def _fingerprint(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Of all elements, or of some that lie evenly among many."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _ELEMENTS)].cpu().contiguous()
    return tensor.dtype, tuple(tensor.shape), zlib.crc32(ctypes.string_at(some.data_ptr(), some.nbytes))
