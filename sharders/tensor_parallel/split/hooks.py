"""Hooks that move activations where torch has no style for it: shared inputs, and the hidden state's sequence.

B samples, T positions, D hidden size; a chunk is (B, T / n, D) on each of the n ranks of the tensor axis.

[Note: shared inputs] torch's colwise style takes each Linear's plain input to a DTensor by itself, and sums the
gradient of each over the axis: three all-reduces for query, key and value of one hidden state. Here Linears that are
called with the same tensor share one DTensor, so that autograd adds their gradients first and sums once.

[Note: nested input] In evaluation with a padding mask, torch's nn.TransformerEncoder calls its layers with a nested
tensor, of each sample's real positions alone, which no DTensor holds. A layer with split weights pads it, computes with
the mask of what was padded, and gives a nested one back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dmp import InputError
from sharders.tensor_parallel.split.plain import replicated
from sharders.tensor_parallel.structure.claimed_width import whole_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def share_inputs(linears: Iterable[tuple[nn.Module, bool]], holders: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Let colwise Linears that are called with one tensor share one DTensor, see [Note: shared inputs].

    Forward: nothing; all-gather along dim 1 for one that is called with a chunk. Backward: one all-reduce
    (reduce-scatter) of the summed gradient, where each Linear would have its own.

    Args:
        linears: whose inputs are converted, and whether it is a chunk of the sequence that each is called with; before
            torch's own hooks are put on.
        holders: modules after whose forward the tensor is let go of.
        mesh: the tensor axis.
    """
    from torch.distributed.tensor import DTensor

    held: list[tuple[torch.Tensor, tuple[Any, ...], DTensor]] = []

    def whole(x: torch.Tensor, is_chunk: bool) -> DTensor:
        if x.is_nested:
            raise InputError(
                f"a Linear whose weight is split over mesh axis {mesh.mesh_dim_names} was called with a nested tensor, "
                f"of {x.size(0)} samples, which it cannot take: call it with a padded one (x.to_padded_tensor(0.0))"
            )
        return _gathered(x, mesh) if is_chunk else replicated(x, mesh)

    def take(is_chunk: bool) -> Callable[..., tuple[Any, ...] | None]:
        def convert(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not args or not isinstance(args[0], torch.Tensor) or isinstance(args[0], DTensor):
                return None
            x, *rest = args
            # Nothing that outlives the call can be compiled; and a tensor of inference mode has no version that tells
            # whether it was written to since.
            if torch.compiler.is_compiling() or x.is_inference():
                return (whole(x, is_chunk), *rest)
            state = (x._version, torch.is_grad_enabled(), is_chunk)
            if not (held and held[0][0] is x and held[0][1] == state):
                held[:] = [(x, state, whole(x, is_chunk))]
            return (held[0][2], *rest)

        return convert

    for linear, is_chunk in linears:
        linear.register_forward_pre_hook(take(is_chunk))
    for holder in holders:
        holder.register_forward_hook(lambda *_: held.clear(), always_call=True)


def pad_nested(layers: Iterable[nn.Module]) -> None:
    """Have each layer compute a nested input in its padded form, see [Note: nested input].

    Args:
        layers: `nn.TransformerEncoderLayer`s, whose samples have one length or are nested: (B, T, D), batch first.
    """
    for layer in layers:
        lengths: list[list[int] | None] = []  # of the calls under way
        layer.register_forward_pre_hook(functools.partial(_pad, lengths), with_kwargs=True)
        layer.register_forward_hook(functools.partial(_nest, lengths), always_call=True)


def _pad(
    lengths: list[list[int] | None], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    is_masked = len(args) > 2 or kwargs.get("src_key_padding_mask") is not None
    if is_masked or not args or not isinstance(args[0], torch.Tensor) or not args[0].is_nested:
        lengths.append(None)
        return None
    nested, *rest = args
    lengths.append([sample.shape[0] for sample in nested.unbind()])
    x_BTD = nested.to_padded_tensor(0.0)
    ends_B1 = torch.tensor(lengths[-1], device=x_BTD.device)[:, None]
    mask_BT = torch.arange(x_BTD.shape[1], device=x_BTD.device) >= ends_B1
    return (x_BTD, *rest), {**kwargs, "src_key_padding_mask": mask_BT}


def _nest(lengths: list[list[int] | None], _: nn.Module, args: Any, output: Any) -> Any:
    were = lengths.pop()
    if were is None or output is None:  # the latter where forward has raised
        return None
    return torch.nested.as_nested_tensor([sample[:n] for sample, n in zip(output, were, strict=True)])


def _gathered(chunk: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    held = chunk if isinstance(chunk, DTensor) else DTensor.from_local(chunk, mesh, [Shard(1)], run_check=False)
    return held.redistribute(placements=[Replicate()])


def gather_input(module: nn.Module, mesh: DeviceMesh, path: str, width: int) -> None:
    """The module's hidden state, a chunk when it comes, is whole inside, as the DTensor that colwise Linears take.

    Forward: all-gather along dim 1. Backward: reduce-scatter.
    """
    change_hidden_state(module, path, width, lambda x: _gathered(x, mesh))


def split_sequence(module: nn.Module, mesh: DeviceMesh, path: str, width: int) -> None:
    """The module's hidden state comes whole, and is this rank's chunk inside.

    Forward: nothing. Backward: all-gather along dim 1.

    A call raises `InputError` for a sequence that does not divide over the ranks.
    """
    from torch.distributed.tensor import Shard

    (axis,) = mesh.mesh_dim_names or ("tensor",)

    def split(x: torch.Tensor) -> torch.Tensor:
        length, size = x.shape[1], mesh.size()
        if length % size:
            raise InputError(
                f"sequences of length {length} do not divide over the {size} ranks of mesh axis {axis!r}, which "
                f"sequence parallelism needs; pad them to {-(-length // size) * size} positions, or pass "
                "sequence_parallel=False"
            )
        return replicated(x, mesh).redistribute(placements=[Shard(1)]).to_local()

    change_hidden_state(module, path, width, split)


def gather_sequence(module: nn.Module, mesh: DeviceMesh) -> None:
    """The module's output, a chunk, comes out whole.

    Forward: all-gather along dim 1. Backward: this rank's chunk of the gradient, which is whole and equal on all ranks,
    because whatever is split after it sums the gradient of its input.
    """

    def gather(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (gather(_, args, output[0]), *output[1:])
        return _gathered(output, mesh).to_local()

    module.register_forward_hook(gather)


def change_hidden_state(module: nn.Module, path: str, width: int, change: Callable[[torch.Tensor], Any]) -> None:
    """Have `change` called on the hidden state that the module is called with.

    That is its first argument, positional ones before those by keyword, that is floating and (B, T, width). A dry run
    finds it by this same rule. A call without one raises `InputError`.

    Args:
        path: of the module, for the error that a call without a hidden state raises.
    """

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for i, value in enumerate(map(whole_of, args)):
            if is_hidden_state(value, width):
                return (*args[:i], change(value), *args[i + 1 :]), kwargs
        for name, value in zip(kwargs, map(whole_of, kwargs.values()), strict=True):
            if is_hidden_state(value, width):
                return args, {**kwargs, name: change(value)}
        raise InputError(
            f"module {path!r} was called without a hidden state of shape (batch, sequence, {width}), which sequence "
            "parallelism splits; leave the module out of it"
        )

    module.register_forward_pre_hook(enter, with_kwargs=True)


def is_hidden_state(value: Any, width: int) -> bool:
    """Whether it is floating, and (B, T, width)."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[2:] == (width,)
