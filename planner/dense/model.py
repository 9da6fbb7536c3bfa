"""`DenseModel`: what of a module the cost of its dense part depends on, whatever the mesh. Read once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from dmp import ParameterInfo, is_inside, join_name
from planner.dense.modules import attention_widths, features_of, is_lookup, recomputed
from planner.dense.sequences import active_share, tokens_per_sample


class DenseWeight(NamedTuple):
    """A dense weight.

    Args:
        block: `layers.*` for a weight of `layers.3`; empty for one in no repeated block.
        place: of the block among its like: 3, as text, or empty.
        owner: path of the module that holds it.
        shape: unsharded.
        item_bytes: of an element.
        inputs, outputs: features that a token has before and after the product with it; 0 where there is no product.
        looked_up: features of a row, where rows are looked up; else 0.
        normed: features of a norm that keeps its input; else 0.
        share: part of the tokens that meet it (an expert's).
        trained: whether it gets a gradient.
    """

    block: str
    place: str
    owner: str
    shape: tuple[int, ...]
    item_bytes: int
    inputs: int
    outputs: int
    looked_up: int
    normed: int
    share: float
    trained: bool

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class DenseModel:
    """The dense part of a module.

    Args:
        weights: by name.
        attention: for each block the summed width of its attentions' heads, over all its repetitions.
        recomputed: blocks whose activations are recomputed in the backward pass.
        tokens: of a sample.
        tokens_said: whose word that is.
        compute_dtype: of products, where a mixed-precision policy sets another than the weights'.
    """

    weights: Mapping[str, DenseWeight]
    attention: Mapping[str, int]
    recomputed: frozenset[str]
    tokens: int
    tokens_said: str
    compute_dtype: torch.dtype | None = None

    @classmethod
    def of(
        cls,
        module: nn.Module,
        infos: Mapping[str, ParameterInfo],
        sequence_length: int | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> DenseModel:
        """What is known of the dense weights `infos` of a module, real or on meta.

        Args:
            sequence_length: tokens of a sample; by default as the module's configuration says.
        """
        widths = list(attention_widths(module))
        attention: dict[str, int] = {}
        for path, width in widths:
            block, _ = block_of(f"{path}.")
            attention[block] = attention.get(block, 0) + width
        tokens, said = tokens_per_sample(module, sequence_length, bool(widths))
        paths = recomputed(module)
        again = {b for name in infos if (b := block_of(name)[0]) and any(is_inside(name, path) for path in paths)}
        return cls(_weights(module, infos), attention, frozenset(again), tokens, said, compute_dtype)


def block_of(name: str) -> tuple[str, str]:
    """`layers.*` and its index 3 for a weight of `layers.3`; both empty for one of no repeated block."""
    found = re.match(r"(?:(.*?)\.)?(\d+)\.", name)
    return (join_name(found[1] or "", "*"), found[2]) if found else ("", "")


def _weights(module: nn.Module, infos: Mapping[str, ParameterInfo]) -> dict[str, DenseWeight]:
    # A tied weight is a product's where any of its modules multiplies by it.
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, m in module.named_modules():
        for p in m._parameters.values():
            if p is not None:
                owners.setdefault(id(p), []).append((path, m))
    found = {}
    active = active_share(module)
    for name, p in module.named_parameters():
        if name not in infos:
            continue
        info = infos[name]
        path, owner = next((o for o in owners[id(p)] if not is_lookup(o[1])), owners[id(p)][0])
        block, index = block_of(name)
        is_product = len(info.shape) > 1 and not is_lookup(owner)
        is_norm = len(info.shape) == 1 and name.endswith("weight")
        into, out = features_of(owner, info.shape) if is_product else (0, 0)
        looked_up = info.shape[1] if len(info.shape) > 1 and any(is_lookup(m) for _, m in owners[id(p)]) else 0
        share = active if "expert" in name else 1.0
        found[name] = DenseWeight(
            block,
            index,
            path,
            tuple(info.shape),
            info.dtype.itemsize,
            into,
            out,
            looked_up,
            info.shape[0] if is_norm else 0,
            share,
            p.requires_grad,
        )
    return found
