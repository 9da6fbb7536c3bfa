"""Integer attributes of modules, or of a configuration that a module holds (`config.num_attention_heads`); and what
a module reads of its input as if it were one (`x.shape[-1]`)."""

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
    value: Any = attribute_of(held, inner) if holder else vars(module).get(inner)
    return value if type(value) is int else None


def set_number(module: nn.Module, name: str, value: int) -> None:
    """Have the module read another value. Of a configuration it gets one of its own, for others hold it too; a deep
    copy of that is one of the original: copies of a model are made to be split anew, or not at all.
    """
    holder, _, inner = name.rpartition(".")
    if is_width(name):
        claim_width(module, name, value)
    elif holder:
        original = vars(module)[holder]
        held = copy.copy(original)
        setattr(held, inner, value)
        vars(held)["__deepcopy__"] = partial(copy.deepcopy, original)
        setattr(module, holder, held)
    else:
        setattr(module, inner, value)
