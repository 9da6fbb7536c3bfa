"""Copies of a model on meta, for dry runs and samples.

[Note: meta copies]
A copy shares nothing with the model and holds no values. Blocks of a structure that the copy already has are stood in
for by its last output, so eighty equal blocks cost as much as one.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from dmp import places_of
from sharders.tensor_parallel.structure.transformer import Transformer

Shape = tuple[int, ...]

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class MetaCopies:
    """Makes copies, see [Note: meta copies]; they share meta parameters, and nothing with the model."""

    def __init__(self, model: nn.Module, transformer: Transformer) -> None:
        self.model = model
        self.transformer = transformer
        self._paths: dict[str, nn.Module] = {}
        self._kept: list[nn.Module] = []
        self._repeats: dict[str, tuple[nn.Module, str]] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self.known: dict[Any, tuple[Shape, Shape, torch.dtype]] = {}
        """What operations on meta made of what, by `_Sums`."""

    def make(self) -> tuple[nn.Module, dict[int, Any]]:
        """A new copy, and where the last outputs of blocks that others repeat are kept."""
        self._prepare()
        memo: dict[int, Any] = dict(self._tensors)
        last: dict[int, Any] = {}
        repeats = self._repeats.values()
        stand_ins = [(_Repeat(last), path) for _, path in repeats]
        memo.update((id(block), stand_in) for (block, _), (stand_in, _) in zip(repeats, stand_ins, strict=True))
        memo.update((id(vars(module)[name]), OrderedDict()) for module in self._kept for name in _HOOKS)
        copied = copy.deepcopy(self.model, memo).eval()
        for stand_in, path in stand_ins:
            stand_in.like.append(copied.get_submodule(path))
        for module in copied.modules():
            config = vars(module).get("config")
            if getattr(config, "use_cache", False) is True:
                setattr(config, "use_cache", False)  # noqa: B010  # a cache would grow where one block stands for many
        return copied, last

    def kept(self) -> dict[str, nn.Module]:
        """The model's modules, without blocks that repeat another."""
        self._prepare()
        return self._paths

    def repeats(self) -> dict[str, str]:
        """Path of a block -> that of the one which it repeats."""
        self._prepare()
        return {path: like for path, (_, like) in self._repeats.items()}

    def original(self, path: str, name: str) -> torch.Tensor | None:
        """The model's own tensor of this name in a module of a copy."""
        module = self.model.get_submodule(path)
        for store in (module._parameters, module._buffers, vars(module)):
            if isinstance(store.get(name), torch.Tensor):
                return store[name]
        return None

    def _prepare(self) -> None:
        """What no copy may hold: other blocks than the first of each structure, values, hooks."""
        if self._kept:
            return
        firsts = {block.structure: block.path for block in self.transformer.representatives()}
        paths = [(b.path, firsts[b.structure]) for b in self.transformer.blocks if firsts[b.structure] != b.path]
        self._repeats = {path: (self.model.get_submodule(path), like) for path, like in paths}
        self._paths = dict(self.model.named_modules(memo={block for block, _ in self._repeats.values()}))
        self._kept = list(self._paths.values())
        for place in places_of(self._paths.items(), attributes=True):
            empty = torch.empty(place.tensor.shape, dtype=place.tensor.dtype, device="meta")
            is_parameter = isinstance(place.tensor, nn.Parameter)
            self._tensors[id(place.tensor)] = nn.Parameter(empty, requires_grad=False) if is_parameter else empty


class _Repeat(nn.Module):
    """Stands for a block like one that has run: the same output again."""

    def __init__(self, last: dict[int, Any]) -> None:
        super().__init__()
        self.last = last
        self.like: list[Any] = []  # in a list: not a child

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        like = self.like[0]
        return self.last[id(like)] if id(like) in self.last else like(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.like[0][key]

    def __getattr__(self, name: str) -> Any:
        # What the model asks its blocks, as Hugging Face's does for a kind of mask.
        return getattr(self.__dict__["like"][0], name)
