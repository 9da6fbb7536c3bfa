"""Linears of a block that give one vector for each sample, such as the scales and shifts of an adaptive norm.

[Note: of samples] Such a Linear is often half as large as the block's attention and MLP together (a hidden size to
six), and what it gives is as short as one position of the hidden state: to split its output features and gather them
costs next to nothing. A dry run shows which these are: what goes in has no dim for positions, and as many rows as
there are samples.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from dmp import join_name
from sharders.tensor_parallel.structure.dry_run import Trace
from sharders.tensor_parallel.structure.linears import features_of
from sharders.tensor_parallel.structure.transformer import Block

_TIMES = 2
"""As wide as its input an output is at least; others are not worth a gather."""


def vectors_of_samples(model: nn.Module, block: Block, seen: Trace, size: int) -> Iterator[str]:
    """Their paths in the block; see [Note: of samples].

    Args:
        seen: of the unsplit model.
        size: ranks on the tensor axis, which divides what they give.
    """
    samples = {shape[0] for shape in seen.outputs.get(block.path, []) if len(shape) > 2}
    for whole in block.whole:
        path = join_name(block.path, whole.path)
        features, given = features_of(model.get_submodule(path)), seen.inputs.get(path, [])
        if features is None or features.out_features % size or features.out_features < _TIMES * features.in_features:
            continue
        if len(given) == 1 and len(given[0]) == 2 and {given[0][0]} == samples:
            yield whole.path
