"""Integer attributes of modules, or of a configuration that a module holds (`config.num_attention_heads`), or sizes
that it holds by name, as einops' `Rearrange("b n (h d) -> b h n d", h=4)` does; and what a module reads of its input as
if it were one (`x.shape[-1]`)."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import nn

from dmp import attribute_of
from sharders.tensor_parallel.structure.claimed_width import claim_width, is_width
from sharders.tensor_parallel.structure.linears import features_of


def number_of(module: nn.Module, name: str) -> int | None:
    """The value; None where it is no integer, or not there: a stand-in has none. Of an input's width, what the first
    Linear inside takes.
    """
    if is_width(name):
        return next((found.in_features for found in map(features_of, module.modules()) if found is not None), None)
    holder, _, inner = name.rpartition(".")
    held = vars(module).get(holder) if holder else None
    value: Any = attribute_of(by_name(held) or held, inner) if holder else vars(module).get(inner)
    return value if type(value) is int else None


def by_name(held: Any) -> dict[str, Any]:
    """What a dict holds, or a tuple of names with what is theirs; empty for all else."""
    if isinstance(held, dict):
        return held
    is_pairs = isinstance(held, tuple) and all(type(x) is tuple and len(x) == 2 and type(x[0]) is str for x in held)
    return dict(held) if is_pairs else {}


def set_number(module: nn.Module, name: str, value: int) -> None:
    """Have the module read another value. Of a configuration it gets one of its own, for others hold it too; a deep
    copy of that is one of the original: copies of a model are made to be split anew, or not at all.
    """
    holder, _, inner = name.rpartition(".")
    if is_width(name):
        claim_width(module, name, value)
    elif holder and (sizes := by_name(vars(module)[holder])):
        sizes = {**sizes, inner: value}
        setattr(module, holder, sizes if isinstance(vars(module)[holder], dict) else tuple(sizes.items()))
    elif holder:
        original = vars(module)[holder]
        held = copy.copy(original)
        setattr(held, inner, value)
        vars(held)["__deepcopy__"] = partial(copy.deepcopy, original)
        setattr(module, holder, held)
    else:
        setattr(module, inner, value)
