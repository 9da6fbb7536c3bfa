"""Copies of a model on meta, for dry runs and samples.

[Note: meta copies]
A copy shares nothing with the model and holds no values. Blocks of a structure that the copy already has are stood in
for by its last output, so eighty equal blocks cost as much as one. A function that a module has for an attribute may be
made around others of its modules, as minGPT's MLPs are: copies have one that is made around theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import cached_property
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from dmp import attribute_of, deep_copy, map_nested, places_of
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

_OF_COPIES = {"use_cache": False, "_experts_implementation": "batched_mm"}
"""Of Hugging Face's configurations: a cache would grow where one block stands for many, and of the ways to run experts,
which compute the same, this one does not ask which of them have tokens: on meta nobody knows."""


class MetaCopies:
    """Makes copies, see [Note: meta copies]; they share meta parameters, and nothing with the model."""

    def __init__(self, model: nn.Module, transformer: Transformer) -> None:
        self.model = model
        self.transformer = transformer

    def make(self) -> tuple[nn.Module, dict[int, Any]]:
        """A new copy, and where the last outputs of blocks that others repeat are kept."""
        memo: dict[int, Any] = dict(self._tensors)
        last: dict[int, Any] = {}
        stand_ins = {path: _Repeat(last) for path in self.repeats}
        memo.update((id(self.model.get_submodule(path)), stand_in) for path, stand_in in stand_ins.items())
        memo.update((id(vars(module)[name]), OrderedDict()) for module in self.kept.values() for name in _HOOKS)
        copied = deep_copy(self.model, memo).eval()
        _rebind(copied, memo)
        for path, stand_in in stand_ins.items():
            stand_in.like.append(copied.get_submodule(self.repeats[path]))
        for module in copied.modules():
            config = vars(module).get("config")
            for name, value in _OF_COPIES.items():
                if isinstance(attribute_of(config, name), type(value)):
                    setattr(config, name, value)
        return copied, last

    @cached_property
    def kept(self) -> dict[str, nn.Module]:
        """The model's modules, without blocks that repeat another."""
        return dict(self.model.named_modules(memo=set(map(self.model.get_submodule, self.repeats))))

    @cached_property
    def repeats(self) -> dict[str, str]:
        """Path of a block -> that of the one which it repeats: the first of its structure."""
        firsts = {block.structure: block.path for block in self.transformer.representatives()}
        return {b.path: firsts[b.structure] for b in self.transformer.blocks if firsts[b.structure] != b.path}

    def original(self, path: str, name: str) -> torch.Tensor | None:
        """The model's own tensor of this name in a module of a copy."""
        module = self.model.get_submodule(path)
        for store in (module._parameters, module._buffers, vars(module)):
            if isinstance(store.get(name), torch.Tensor):
                return store[name]
        return None

    @cached_property
    def _tensors(self) -> dict[int, torch.Tensor]:
        """What copies hold in the place of each of the model's own, by its id."""
        found: dict[int, torch.Tensor] = {}
        for place in places_of(self.kept.items(), attributes=True):
            empty = torch.empty(place.tensor.shape, dtype=place.tensor.dtype, device="meta")
            is_parameter = isinstance(place.tensor, nn.Parameter)
            found[id(place.tensor)] = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
        return found


def _rebind(copied: nn.Module, memo: Mapping[int, Any]) -> None:
    """Have functions that modules hold work on copies of what they are made around, by the ids of what was copied."""
    for module in copied.modules():
        for name, value in vars(module).items():
            cells = value.__closure__ or () if isinstance(value, FunctionType) else ()
            if any(isinstance(_held(cell), nn.Module) for cell in cells):
                vars(module)[name] = _around(value, cells, memo)


def _held(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _around(function: FunctionType, cells: Iterable[CellType], memo: Mapping[int, Any]) -> FunctionType:
    new = tuple(CellType(memo[id(_held(cell))]) if id(_held(cell)) in memo else cell for cell in cells)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, new)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _without_graph(value: Any, _: str) -> Any:
    """Of an output of a reentrant checkpoint, which would be given that of the next, and lead to itself."""
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value


class _Repeat(nn.Module):
    """Stands for a block like one that has run: the same output again."""

    def __init__(self, last: dict[int, Any]) -> None:
        super().__init__()
        self.last = last
        self.like: list[Any] = []  # in a list: not a child

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        like = self.like[0]
        # Private in torch, whether a backward pass runs: a reentrant checkpoint computes it again there, for its graph.
        if id(like) not in self.last or torch._C._current_graph_task_id() != -1:
            return like(*args, **kwargs)
        last = self.last[id(like)]
        return last if torch.is_grad_enabled() else map_nested(last, _without_graph)

    def __getitem__(self, key: Any) -> Any:
        return self.like[0][key]

    def __getattr__(self, name: str) -> Any:
        # What the model asks its blocks, as Hugging Face's does for a kind of mask.
        return getattr(self.__dict__["like"][0], name)
