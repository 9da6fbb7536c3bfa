"""Latent attentions, as DeepSeek's: keys and values of all heads come of one short vector for each position.

[Note: latent attention] A Linear gives the latent vector and, behind it, the part of the key that all heads share,
which is rotated by position. A norm follows, and a Linear up to what each head has for itself: a part of its key, and
its value. Queries come of a Linear of their own, or of two likewise. Up and query are split by heads; what leads to the
latent vectors is whole, and so are these. The shared part of the key is used by the heads of each rank alone, so that
its gradients are parts of a sum; those of the latent vector were summed where it was taken up.

Names decide nothing: the sizes must fit each other in every way, which they do by no chance.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from sharders.tensor_parallel.structure.linears import Features, features_of
from sharders.tensor_parallel.structure.transformer import HEADS, Heads


class Latent(NamedTuple):
    """What is found of such an attention.

    Args:
        names: of Linears: the last of what leads to queries; what gives the latent vector, then what all heads share of
            the key; from the latent vector up; down to the hidden size.
        heads: how many, and the size of a query.
        widths: of features that are split: queries, up, values.
    """

    names: tuple[str, str, str, str]
    heads: Heads
    widths: tuple[int, int, int]


def latent_attention(module: nn.Module, linears: Mapping[str, Features], heads: int | None) -> Latent | None:
    """None where it is none, or in more than one way.

    Args:
        linears: right inside the module.
        heads: how many it says to have.
    """
    if heads is None or not 4 <= len(linears) <= 5:
        return None
    found = list(_matches(linears, heads, _norms(module)))
    return found[0] if len(found) == 1 else None


def latent_rank(around: nn.Module, shared: Features) -> int | None:
    """The length of the latent vector that begins what a Linear gives, by the norm and the Linear that take it.

    Args:
        around: the attention that the Linear is right inside of.
    """
    linears = {name: f for name, child in around.named_children() if (f := features_of(child)) is not None}
    norms = _norms(around)
    found = {f.in_features for f in linears.values() if f.in_features in norms and f.in_features < shared.out_features}
    if len(found) > 1:  # queries may come of one likewise
        heads = next((n for name in HEADS if type(n := vars(around).get(name)) is int), 0)
        found = {linears[way.names[2]].in_features for way in _matches(linears, heads, norms)} if heads else set()
    return found.pop() if len(found) == 1 else None


def _norms(module: nn.Module) -> set[int]:
    """Sizes of what norms right inside a module work on."""
    norms = (child for child in module.children() if features_of(child) is None)
    return {p.shape[0] for child in norms for p in child.parameters(recurse=False) if p.dim() == 1}


def _matches(linears: Mapping[str, Features], heads: int, norms: set[int]) -> Iterator[Latent]:
    for query, shared, up, down in itertools.permutations(linears, 4):
        q, s, u, d = (linears[name] for name in (query, shared, up, down))
        width, rank, rest = d.out_features, u.in_features, [n for n in linears if n not in (query, shared, up, down)]
        sizes = q.out_features, u.out_features, d.in_features
        if (
            s.in_features != width
            or not 0 < rank < s.out_features
            or rank not in norms
            or any(n % heads for n in sizes)
        ):
            continue
        key, both, value = (n // heads for n in sizes)
        first = linears[rest[0]] if rest else None
        from_hidden = q.in_features == width
        if first is not None:
            from_hidden = (first.in_features, first.out_features) == (width, q.in_features)
        if from_hidden and both > value and key == both - value + s.out_features - rank:
            yield Latent((query, shared, up, down), Heads(heads, heads, key), sizes)
