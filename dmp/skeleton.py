"""Skeletons: the structure of a module on meta, from which a module that was sharded in place can be copied."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dmp.chunked import as_chunks


def skeleton_of(module: nn.Module, sharded: list[nn.Module]) -> nn.Module:
    """The same structure on meta; modules in `sharded` are not copied."""
    memo: dict[int, Any] = {id(m): m for m in sharded}
    owned = {id(t) for m in sharded for t in [*m.parameters(), *m.buffers()]}
    for _, tensor in all_tensors(module):
        if id(tensor) in memo or id(tensor) in owned:
            continue
        empty = torch.empty_like(tensor.detach(), device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    made: nn.Module = copy.deepcopy(module, memo)
    return made


def copy_values(old: nn.Module, new: nn.Module, device: torch.device) -> None:
    """Values, flags and modes of `old` into a copy of its structure that is still on meta."""
    made: dict[int, torch.Tensor] = {}
    for name, module in new.named_modules():
        source = old.get_submodule(name)
        module.training = source.training
        for kind in ("_parameters", "_buffers"):
            own = getattr(module, kind)
            for key in [key for key, tensor in own.items() if tensor is not None and tensor.is_meta]:
                meta, live = own[key], getattr(source, kind)[key]
                if id(meta) not in made:
                    value = torch.empty_like(meta.detach(), device=device)
                    as_chunks(value).fill_from(as_chunks(live))
                    is_parameter = isinstance(meta, nn.Parameter)
                    made[id(meta)] = nn.Parameter(value, requires_grad=live.requires_grad) if is_parameter else value
                own[key] = made[id(meta)]


def reshard(module: nn.Module) -> None:
    """Put pieces back where whole weights are left from a forward without a backward: an optimizer must not meet those.

    FSDP2 keeps the root's weights gathered after a forward; an optimizer made after an evaluation would train copies.
    """
    for each in module.modules():
        if hasattr(type(each), "reshard"):
            each.reshard()  # type: ignore[operator]


def all_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers under every name they have."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
