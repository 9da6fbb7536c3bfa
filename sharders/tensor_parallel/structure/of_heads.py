"""Values that an attention has for each of its heads, beside the weights of its Linears.

[Note: values of heads] Sinks (H,), scales (H, 1, 1), biases of relative positions (positions, H), a Linear that gives
one value for each head, or as many as all heads have, to weigh what they give: a rank has those of its heads. Shapes
tell which they are, where a dim is as long as there are heads; that it means the heads is proved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import nn
from torch.nn.parameter import is_lazy

from dmp import is_inside, join_name
from sharders.tensor_parallel.structure.adapters import in_place
from sharders.tensor_parallel.structure.linears import features_of, is_joint_attention
from sharders.tensor_parallel.structure.transformer import Branch, Heads, Transformer

OF_HEADS = {"heads_0": 0, "heads_1": 1}
"""Styles of modules whose own parameters are values for each head, and the dim of them that the heads lie along."""


def values_of_heads(module: nn.Module, heads: Heads, beside: Collection[str]) -> dict[str, str]:
    """Modules inside an attention that hold values for each head, by their names in it -> style.

    Args:
        beside: names of the attention's Linears: query, key, value and output.
    """
    found: dict[str, str] = {}
    gates: dict[str, int] = {}
    if heads.query < 2 or is_joint_attention(module):
        return found
    for name, inner in in_place(module):
        features = features_of(inner)
        if features is not None:
            if name not in beside and features.out_dim == 0 and features.in_features != heads.size:  # of single heads
                gates[name] = features.out_features
            continue
        own = list(inner.parameters(recurse=False))
        if not own or any(map(is_lazy, own)) or _is_norm(inner, heads):
            continue
        for style, dim in OF_HEADS.items():
            if all(p.dim() > dim and p.shape[dim] == heads.query for p in own):
                found[name] = style
                break
    if len(gates) == 1:  # as one of two has which attends to two sequences at once, of query, key and value for each
        found |= {n: "colwise" for n, out in gates.items() if out in (heads.query, heads.query * heads.size)}
    return found


def biases_outside(
    model: nn.Module, heads: Heads, outside: Mapping[str, str], transformer: Transformer
) -> Iterator[str]:
    """What may be added for each of an attention's heads and lies in no block, by path: tables, as T5's of relative
    positions, or matrices by which something else than the hidden state is multiplied, as LayoutLMv3's distances.

    Args:
        outside: styles of what has values for each head there.
    """
    for path in (path for path, style in outside.items() if style == "heads_1"):
        if all(p.dim() == 2 for p in model.get_submodule(path).parameters(recurse=False)):
            yield path
    for path, module in model.named_modules() if heads.query > 1 else ():
        of = features_of(module)
        if of is None or getattr(module, "bias", None) is not None or of.in_features == transformer.width:
            continue
        if of.out_features == heads.query and not any(is_inside(path, block.path) for block in transformer.blocks):
            yield path


def norms_of_heads(block: nn.Module, branch: Branch) -> Iterator[str]:
    """Modules in an attention, by their path in the block, whose parameters are as long as a head."""
    if branch.heads is not None and not branch.widths:
        for name, module in block.get_submodule(branch.path).named_modules():
            if _is_norm(module, branch.heads) and features_of(module) is None:
                yield join_name(branch.path, name)


def may_have_values(module: nn.Module) -> bool:
    """Whether its own parameters may be values for each head, or stacks of experts' matrices: all are split as one."""
    if features_of(module) is not None or isinstance(module, nn.Embedding) or is_joint_attention(module):
        return False
    own = [p for p in module.parameters(recurse=False) if not is_lazy(p)]
    return bool(own) and (any(True for _ in module.children()) or any(p.dim() > 1 for p in own))


def _is_norm(module: nn.Module, heads: Heads) -> bool:
    """Of single heads: there may be as many heads as a head has features."""
    is_leaf = not any(True for _ in module.children())
    return is_leaf and {tuple(p.shape) for p in module.parameters(recurse=False)} == {(heads.size,)}
