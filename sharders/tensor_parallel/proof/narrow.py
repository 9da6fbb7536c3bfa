"""Makes a copy of a transformer narrower: the same operations on fewer features, for a proof of a model that is large.

[Note: narrow] Every size that the model is made of (hidden size, widths of MLPs and attentions, vocabulary) is replaced
by a smaller one wherever it stands: in shapes of weights, in integer attributes, in configurations. The sizes of heads
stay, and so do the numbers of query heads for each key, and sizes of images; so a rank has the shapes of one rank, of
fewer heads. That the narrower copy is one is seen by running it: it must do the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from dmp import Place, join_name, places_of, replace_tensors
from sharders.tensor_parallel.structure.dry_run import Feed
from sharders.tensor_parallel.structure.of_heads import OF_HEADS
from sharders.tensor_parallel.structure.transformer import (
    CONFIGS,
    HEADS,
    IMAGE_SIZES,
    KV_HEADS,
    LOCAL_HEADS,
    Transformer,
)

_LEAST = 48
"""Smaller numbers may mean anything."""
_MANY_ROWS = 1024


@dataclass(frozen=True)
class Numbers:
    """What is replaced by what."""

    sizes: Mapping[int, int]
    """Of dimensions, and of integer attributes of any name."""

    query_heads: Mapping[int, int]
    key_value_heads: Mapping[int, int]
    """Of attributes that are called so."""

    values: Mapping[str, int] = field(default_factory=dict)
    """Modules whose own parameters are values for each head -> the dim of them that the query heads lie along."""

    ranks: int = 0
    """How many ranks the tensor axis has then; 0 for as many as it had."""

    def resized(self, x: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """An empty tensor of the narrower shape, on meta; the same where it does not change.

        Args:
            heads: the dim that query heads lie along.
        """
        shape = [(self.query_heads if dim == heads else self.sizes).get(n, n) for dim, n in enumerate(x.shape)]
        return x if shape == list(x.shape) else torch.empty(shape, dtype=x.dtype, device="meta")

    def fed(self, feed: Feed) -> Feed:
        """What the narrower module takes."""
        if feed.of_data or not self.sizes:
            return feed
        kwargs = {name: self.resized(x) for name, x in feed.kwargs.items()}
        return replace(feed, args=tuple(map(self.resized, feed.args)), kwargs=kwargs)


AS_IT_IS = Numbers({}, {}, {})


def narrow(modules: Mapping[str, nn.Module], numbers: Numbers) -> None:
    """Change a copy on meta in place, its modules by path: tensors, integer attributes, configurations."""
    if not numbers.sizes:
        return
    on_meta = [p for p in places_of(modules.items(), attributes=True) if p.tensor.is_meta]
    replace_tensors(on_meta, lambda place: _resized(place, numbers))
    for values in attributes_of(modules.values()):
        values.update({n: _replaced(n, v, numbers) for n, v in values.items() if type(v) in (int, tuple, list)})


def attributes_of(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Of the modules and of their configurations, each once."""
    owners: dict[int, Any] = {id(m): m for m in modules}
    configs = [vars(m)[name] for m in owners.values() for name in CONFIGS if name in vars(m)]
    owners |= {id(config): config for config in configs if hasattr(config, "__dict__")}
    return list(map(vars, owners.values()))


def narrowings(model: nn.Module, transformer: Transformer, size: int) -> Iterator[Numbers]:
    """Replacements worth a try, that which changes least first.

    Args:
        size: ranks on the tensor axis, which divides all that is split.
    """
    yield _Replacements(model, transformer, size, size).widths()
    yield _Replacements(model, transformer, size, min(size, 2)).heads().widths()


class _Replacements:
    """Replacements as they are found; later ones keep clear of the sizes that are there."""

    def __init__(self, model: nn.Module, transformer: Transformer, size: int, ranks: int) -> None:
        self.model, self.transformer, self.size, self.ranks = model, transformer, size, ranks
        blocks = transformer.representatives()
        self.values = {
            join_name(block.path, path): OF_HEADS[style]
            for block in blocks
            for branch in block.branches
            for path, style in branch.adapters
            if style in OF_HEADS
        }
        self.branches = [branch for block in blocks for branch in block.branches]
        self.hidden = [branch.hidden for branch in self.branches if branch.heads is None]
        ways = [way for block in blocks for _, every in block.experts for way in every.values()]
        self.hidden += [way.inner for way in ways if way.width == transformer.width]
        self.sizes: dict[int, int] = {}
        self.query_heads: dict[int, int] = {}
        self.key_value_heads: dict[int, int] = {}
        self.fits = True

    def heads(self) -> _Replacements:
        """Fewer heads of the same size, and the hidden size with them."""
        for branch in self.branches:
            if branch.heads is None:
                continue
            query, key_value, size = branch.heads.query, branch.heads.key_value, branch.heads.size
            kept = self.ranks * min(key_value // self.size, 2)
            self._replace(self.query_heads, query, kept * (query // key_value))
            self._replace(self.key_value_heads, key_value, kept)
            self._replace(self.sizes, query * size, kept * (query // key_value) * size)
            self._replace(self.sizes, key_value * size, kept * size)
            for width in branch.widths:
                self._replace(self.sizes, width, kept * (width // query))
        if self.transformer.width not in self.sizes:
            self._replace(self.sizes, self.transformer.width, self._free(32))
        width = self.transformer.width
        for times in (2, 3, 4, 5, 6, 9):
            self.sizes.setdefault(times * width, times * self.sizes[width])
        return self

    def widths(self) -> Numbers:
        """Narrower MLPs, fewer rows of embeddings and heads: the last replacements; none at all where some conflict."""
        for hidden in self.hidden:
            if hidden not in self.sizes:
                self._replace(self.sizes, hidden, self._free(8 * self.ranks))
                self.sizes.setdefault(2 * hidden, 2 * self.sizes[hidden])
        for module in self.model.modules():
            rows = module.num_embeddings if isinstance(module, nn.Embedding) else 0
            if rows >= _MANY_ROWS and rows not in self.sizes:
                self._replace(self.sizes, rows, self._free(8 * self.ranks))
        if not self.fits:
            return AS_IT_IS
        ranks = self.ranks if self.ranks != self.size else 0
        return Numbers(self.sizes, self.query_heads, self.key_value_heads, self.values, ranks)

    def _free(self, multiple: int) -> int:
        """A size that means nothing else."""
        taken = {self.transformer.width, *self.sizes, *self.sizes.values()}
        number = multiple * -(-_LEAST // multiple)
        while number in taken:
            number += multiple
        return number

    def _replace(self, numbers: dict[int, int], old: int, new: int) -> None:
        is_size = numbers is self.sizes
        if numbers.setdefault(old, new) != new or (is_size and old < _LEAST):
            self.fits = False


def _resized(place: Place, numbers: Numbers) -> torch.Tensor:
    old, is_own = place.tensor, place.store is place.owner._parameters
    new = numbers.resized(old, numbers.values.get(place.path) if is_own else None)
    return nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) and new is not old else new


def _replaced(name: str, value: Any, numbers: Numbers) -> Any:
    if name in IMAGE_SIZES:
        return value
    if type(value) is int:
        if name in HEADS:
            return numbers.query_heads.get(value, value)
        if name in KV_HEADS:
            return numbers.key_value_heads.get(value, value)
        if name in LOCAL_HEADS:
            return numbers.query_heads.get(value, numbers.key_value_heads.get(value, value))
        return numbers.sizes.get(value, value)
    if value and all(type(v) is int for v in value):
        return type(value)(numbers.sizes.get(v, v) for v in value)
    return value
