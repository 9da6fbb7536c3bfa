"""Norms over all features that the Linears of a branch give together, before an attention cuts them into heads.

[Note: wide norms] OLMo 2 and Wan normalise query and key over all heads at once, BitNet what it gives its last Linear.
A rank of the tensor axis has a part of such features, of the norm's weights the same, and the mean of squares is that
of all ranks' features. By shape such a norm is any that is as wide as the heads together, and so may be one of the
hidden state; a dry run shows which are called between the branch's first Linear and its last. Where there is none, the
name has to say query or key. That it is a norm of these features is proved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from dmp import join_name
from sharders.tensor_parallel.structure.linears import features_of
from sharders.tensor_parallel.structure.transformer import Block, Branch

COLWISE_NORM = "colwise_norm"
"""The style of such norms."""

_OF_QUERY_OR_KEY = re.compile(r"(.*_)?(q|k|query|key)(_.*)?|(q|k)(norm|ln)")


def wide_norms(model: nn.Module, block: Block, branch: Branch, order: Sequence[str]) -> Iterator[str]:
    """Their paths in the block; see [Note: wide norms].

    Args:
        order: paths of the model's modules as they returned in a dry run; empty where there was none.
    """
    widths = {branch.hidden}
    if branch.heads is not None:
        widths = (
            set() if branch.widths else {n * branch.heads.size for n in (branch.heads.query, branch.heads.key_value)}
        )
    first = min((order.index(p) for n in branch.up if (p := join_name(block.path, n)) in order), default=-1)
    last = join_name(block.path, branch.down)
    end = order.index(last) if last in order else -1
    for name, module in model.get_submodule(join_name(block.path, branch.path)).named_modules():
        path = join_name(branch.path, name)
        if width_of_norm(module) not in widths:
            continue
        called = order.index(p) if (p := join_name(block.path, path)) in order else -1
        is_named = branch.heads is not None and _OF_QUERY_OR_KEY.fullmatch(path.rpartition(".")[2].lower())
        if first < called < end if first >= 0 <= end else is_named:
            yield path


def width_of_norm(module: nn.Module) -> int | None:
    """How many features a module has a weight, a bias, or both for, and nothing else; None of others."""
    own = list(module.parameters(recurse=False))
    if not own or any(map(is_lazy, own)) or features_of(module) is not None or "forward" in vars(module):
        return None
    if any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return None
    shapes = {tuple(p.shape) for p in own}
    return own[0].numel() if len(shapes) == 1 and own[0].dim() == 1 and own[0].numel() > 1 else None
