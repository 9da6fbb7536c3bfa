"""Attention weights of all heads, where a model gives them out: (B, heads, T, S) for T queries and S keys.

A split attention has a rank's heads alone, and returns its weights beside its output: a loss of them, as where
attention is distilled, was of a share on each rank, and trained each otherwise in silence. Most calls drop them, which
is why they are marked where they are made, and brought together where they leave the model: the whole of it, or a part
that is called alone, as `generate` calls an encoder. Keys and values for a cache come out of attentions as well, and
stay a rank's own: they go back in. Weights are told from them by what a softmax leaves: numbers from 0 on that sum
to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dmp import ranks
from sharders.tensor_parallel.split.plain import plain
from sharders.tensor_parallel.split.styles import Style, family
from sharders.tensor_parallel.structure.attentions import attentions_in
from sharders.tensor_parallel.structure.linears import is_joint_attention
from sharders.tensor_parallel.structure.transformer import Branch, outward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MARK = "_dmp_own_heads"
_ROUNDING = 1e-2


def gather_attention_weights(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, Style]) -> None:
    """Have the model, and each part of it that is called alone, return attention weights of all heads.

    Forward: of each such tensor that is returned an exchange of a number, then an all-gather. Backward: nothing.

    Args:
        model: before it is split.
        mesh: the tensor axis.
        styles: by which it will be.
    """
    modules = dict(model.named_modules())
    found = [b for b in attentions_in(modules).values() if isinstance(b, Branch)]
    split = [b for b in found if all(family(styles.get(path, "")) == "colwise" for path in b.up)]
    # torch's own, which brings its weights together itself, is what computes by all of its weights at once.
    split = [b for b in split if not any(is_joint_attention(modules[path]) for path in (b.path, *b.up))]
    makers = {path for b in split for path in (b.path, b.up[0].rpartition(".")[0])}
    for maker in makers:
        modules[maker].register_forward_hook(_mark)
    running: list[nn.Module] = []

    def begin(module: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            running.append(module)

    def end(module: nn.Module, _: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        if running and running[-1] is module:
            running.pop()
        # In a backward pass, private in torch, a part is computed again, and gives what it gave.
        return None if running or torch._C._current_graph_task_id() >= 0 else _whole(output, module, mesh)

    for path in sorted({outer for maker in makers for outer in outward(maker)}):
        modules[path].register_forward_pre_hook(begin)
        modules[path].register_forward_hook(end, always_call=True)
    if makers:
        model.register_forward_hook(lambda module, _, output: _whole(output, module, mesh))


def _mark(_: nn.Module, __: Any, output: Any) -> None:
    for each in output[1:] if isinstance(output, tuple | list) else ():
        if isinstance(each, torch.Tensor) and each.dim() == 4 and each.is_floating_point():
            setattr(each, _MARK, True)


def _whole(given: Any, model: nn.Module, mesh: DeviceMesh) -> Any:
    """The same, in its own mappings, with weights of all heads."""
    if isinstance(given, torch.Tensor):
        is_own = getattr(given, _MARK, False) and not given.is_meta
        return _gathered(given, mesh) if is_own and _are_of_softmax(given.detach(), model, mesh) else given
    if isinstance(given, dict):
        for key, each in list(given.items()):
            new = _whole(each, model, mesh)
            if new is not each:
                given[key] = new
    elif isinstance(given, tuple | list):
        items = [_whole(each, model, mesh) for each in given]
        if any(new is not each for new, each in zip(items, given, strict=True)):
            kind: Any = type(given)
            return kind(*items) if hasattr(given, "_fields") else kind(items)
    return given


def _are_of_softmax(weights: torch.Tensor, model: nn.Module, mesh: DeviceMesh) -> bool:
    """Whether those of all ranks are: by its own numbers one rank alone might bring them together, and wait."""
    is_one = (weights >= 0).all()
    if not model.training:  # where dropout makes what it leaves larger
        is_one &= (weights.sum(-1) <= 1 + _ROUNDING).all()
    told = ranks.gather_words("attention weights that a split model gives out", [int(is_one), 0], mesh.get_group())
    return all(of_rank[0] for of_rank in told)


def _gathered(weights: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placed = DTensor.from_local(weights, mesh, [Shard(1)], run_check=False)
    return plain(placed.redistribute(placements=[Replicate()]))
