"""Attention weights of all heads, where a model gives them out: (B, heads, T, S) for T queries, S keys, or means.

A split attention has a rank's heads alone, and returns its weights beside its output: a loss of them, as where
attention is distilled, was of a share on each rank, and trained each otherwise in silence. They are marked where they
are made (`own_heads`), which the model's own code may compute of, and are plain where they leave the model: the whole
of it, or a part that is called alone, as `generate` calls an encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_map

from dmp import ranks
from sharders.tensor_parallel.split.own_heads import Of, OwnHeads, mark, own, whole
from sharders.tensor_parallel.split.own_parts import is_compiled, kind_of
from sharders.tensor_parallel.split.styles import Style, family
from sharders.tensor_parallel.structure.attentions import attentions_in
from sharders.tensor_parallel.structure.linears import is_joint_attention
from sharders.tensor_parallel.structure.transformer import Branch, Heads, outward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def gather_attention_weights(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, Style]) -> None:
    """Have the model, and each part of it that is called alone, return attention weights of all heads.

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
    makers = {path: b for b in split for path in (b.path, b.up[0].rpartition(".")[0])}
    for path, of in makers.items():
        maker = _Maker(path, mesh, of.heads)
        modules[path].register_forward_pre_hook(_back_in, with_kwargs=True)
        modules[path].register_forward_hook(maker)
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
        return None if running or torch._C._current_graph_task_id() >= 0 else _plain(output)

    for path in sorted({outer for maker in makers for outer in outward(maker)}):
        modules[path].register_forward_pre_hook(begin)
        modules[path].register_forward_hook(end, always_call=True)
    if makers:
        model.register_forward_hook(lambda _, __, output: _plain(output))


class _Maker:
    """A hook of an attention: marks what it gives out beside its output, and what it keeps to be looked at.

    Args:
        path: of the attention.
        heads: that all ranks have.
    """

    def __init__(self, path: str, mesh: DeviceMesh, heads: Heads | None) -> None:
        self.path, self.mesh, self.heads = path, mesh, heads.query // mesh.size() if heads else 0
        self.size = heads.size if heads else 0
        self.is_told = False
        self.are_first: bool | None = None
        """Whether its weights are (heads, B, T, S), where a batch has told heads from samples."""

    def __call__(self, module: nn.Module, _: Any, output: Any) -> Any:
        compiled = is_compiled()
        out = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(out, torch.Tensor) and not compiled:
            for each in vars(module).values():
                if type(each) is torch.Tensor and self._is_kept(each, out):
                    mark(each, Of(self.mesh, 1, module.training, other=self._other(each)))
        if out is output or len(output) < 2:
            return None
        kept = {id(buffer) for buffer in module.buffers()}
        items = list(output)
        for number, each in enumerate(items):
            if number and type(each) is torch.Tensor and each.is_floating_point() and id(each) not in kept:
                of = self._of(each, out, module.training)
                if of is not None and compiled:
                    items[number] = _at_once(each, of)
                elif of is not None:
                    mark(each, of)
        return _like(output, items) if compiled else None

    def _is_kept(self, given: torch.Tensor, out: torch.Tensor) -> bool:
        """Whether it may be weights (B, heads, T, S) that an attention keeps to be looked at; out is (B, T, C)."""
        is_one = given.dim() == 4 and given.is_floating_point() and out.dim() == 3
        return is_one and given.shape[:3] == (out.shape[0], self.heads, out.shape[1])

    def _of(self, given: torch.Tensor, out: Any, is_scaled: bool) -> Of | None:
        """What weights (B, heads, T, S), or with heads first, or their means over heads, would be of."""
        steps = out.shape[:2] if isinstance(out, torch.Tensor) and out.dim() == 3 else ()
        if given.dim() == 3 and given.shape[:2] in (steps, steps[::-1]):
            return Of(self.mesh, None, is_scaled)
        may_be = [dim for dim in (1, 0) if given.dim() == 4 and given.shape[dim] == self.heads]
        other = self._other(given)
        if len(may_be) == 1:
            return Of(self.mesh, may_be[0], is_scaled, lambda: setattr(self, "are_first", may_be[0] == 0), other)
        is_by_time = len({*steps}) == 2 and steps == given.shape[2:0:-1]  # (T, B, C)
        are_first = is_by_time if self.are_first is None else self.are_first
        return Of(self.mesh, 0 if are_first else 1, is_scaled, other=other) if may_be else None

    def _other(self, given: torch.Tensor) -> Callable[[], None]:
        """What is called of what is no weights, but may be scores; keys and values, as wide as a head, go back in."""
        shape = tuple(given.shape)

        def tell() -> None:
            if shape[-1] != self.size and not self.is_told:
                self.is_told = True  # the next may have another shape
                (axis,) = self.mesh.mesh_dim_names or ("tensor",)
                ranks.say_once(
                    f"attention {kind_of(self.path)!r}, whose heads are split over axis {axis!r} ({self.mesh.size()} "
                    f"ranks), gives out or keeps a tensor {shape} beside its output, which something is computed of, "
                    "or the model returns: it is of this rank's heads. Weights after a softmax would be brought "
                    "together"
                )

        return tell


@_disable_dynamo
def _at_once(given: torch.Tensor, of: Of) -> torch.Tensor:
    """Of all heads, in code that is compiled, where a class of tensors that exchanges something is not to be had."""
    mark(given, of)
    return whole(given)  # type: ignore[arg-type]


def _back_in(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """An attention goes on with its own heads of what the one before gave it, as with biases of positions."""
    if not any(isinstance(each, OwnHeads) for each in (*args, *kwargs.values())):
        return None
    changed: tuple[Any, Any] = tree_map(lambda each: own(each) if isinstance(each, OwnHeads) else each, (args, kwargs))
    return changed


def _plain(given: Any) -> Any:
    """The same, in its own mappings, with weights of all heads."""
    if isinstance(given, OwnHeads):
        return whole(given)
    if isinstance(given, dict):
        for key, each in list(given.items()):
            new = _plain(each)
            if new is not each:
                given[key] = new
    elif isinstance(given, tuple | list):
        return _like(given, [_plain(each) for each in given])
    return given


def _like(given: Any, items: list[Any]) -> Any:
    """A tuple or list of the same kind with these items; the same where they are its own."""
    if all(new is each for new, each in zip(items, given, strict=True)):
        return given
    kind: Any = type(given)
    return kind(*items) if hasattr(given, "_fields") else kind(items)
