"""Initial values of parameters that are still on meta: they depend on (name, seed) alone.

[Note: initial values]
A table is filled in blocks of a fixed number of rows, each from a generator state made of (seed, name, block), so a
rank makes only the blocks that it holds and every plan gives the same table. A dense module is reset as a whole on the
CPU from (seed, path). The device's own random state is not touched.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.chunked import ChunkedTensor, copy_overlap, overlap_numel
from dmp.env import ShardingEnv
from dmp.errors import ShardError

BLOCK_ELEMENTS = 1 << 20


def shared_seed(env: ShardingEnv) -> int:
    """Rank 0's `torch.initial_seed()`, the same on every rank."""
    seed = torch.tensor([torch.initial_seed() & ((1 << 62) - 1)], dtype=torch.int64, device=env.device)
    if env.size > 1 and env.group() is not None:
        dist.broadcast(seed, group=env.group(), group_src=0)
    return int(seed)


@contextmanager
def seeded(seed: int, *names: Any) -> Iterator[None]:
    """CPU random numbers from (seed, names) inside; the state before is put back."""
    digest = hashlib.sha256(repr((seed, *names)).encode()).digest()
    with torch.random.fork_rng(devices=[]):
        # The CPU's generator alone: torch.manual_seed would set those of the devices too.
        torch.default_generator.manual_seed(int.from_bytes(digest[:7], "big"))
        yield


def fill_chunks(target: ChunkedTensor, init_fn: Callable[[torch.Tensor], Any], name: str, seed: int) -> None:
    """Fill the local chunks of a table by `init_fn` on blocks of whole rows; holds one block at a time."""
    shape = tuple(target.size())
    row = target.numel() // max(1, shape[0])
    rows = max(1, BLOCK_ELEMENTS // max(1, row))
    # One buffer for all blocks: a new one for each, while the last is alive, scatters the heap.
    buffer = torch.empty((min(rows, shape[0]), *shape[1:]), dtype=target.dtype)
    for block, start in enumerate(range(0, shape[0], rows)):
        size, at = (min(rows, shape[0] - start), *shape[1:]), (start, *(0 for _ in shape[1:]))
        held = list(zip(target.chunks, target.offsets, strict=True))
        if not any(overlap_numel(c.shape, o, size, at) for c, o in held):
            continue
        values = buffer[: size[0]]
        with seeded(seed, name, block), torch.no_grad():
            init_fn(values)
        for chunk, offset in held:
            copy_overlap(chunk, offset, values, at)


def fill_from_reset(targets: Mapping[str, ChunkedTensor], original: nn.Module, path: str, seed: int) -> None:
    """Fill chunks of a module's parameters from a whole copy that its own `reset_parameters` made."""
    values = dict(_reset_copy(original, path, seed).named_parameters())
    for name, target in targets.items():
        target.fill_from(values[name].detach())


def materialise(module: nn.Module, device: torch.device, seed: int, skip: Iterable[nn.Module] = ()) -> None:
    """Allocate and fill every parameter and buffer that is on meta, tied ones once; modules in `skip` are left alone.

    Raises:
        ShardError: a module that owns such a tensor has no `reset_parameters`.
    """
    skip = list(skip)
    made: dict[int, torch.Tensor] = {}
    for path, owner in list(_owners_on_meta(module, skip)):
        values = _own(_reset_copy(owner, path, seed, skip))
        for name, tensor in _own(owner).items():
            if not _on_meta(tensor):
                continue
            value = made.get(id(tensor))
            if value is None:
                value = made[id(tensor)] = _like(tensor, values[name].detach().to(device))
            setattr(owner, name, value)


def check_can_materialise(module: nn.Module, skip: Iterable[nn.Module] = ()) -> None:
    """Raise what `materialise` would, before anything is changed."""
    for path, owner in _owners_on_meta(module, skip):
        _reset_name(owner, path)


class _Elsewhere(nn.Module):
    """In a copy, stands for a sharded child: it is filled elsewhere, so a parent's reset passes over it."""

    def reset_parameters(self) -> None:
        """Nothing."""

    _reset_parameters = reset_parameters


def _owners_on_meta(module: nn.Module, skip: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    skipped = {id(m) for s in skip for m in s.modules()}
    for path, owner in module.named_modules():
        if id(owner) not in skipped and any(_on_meta(t) for t in _own(owner).values()):
            yield path, owner


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    both = [*module._parameters.items(), *module._buffers.items()]
    return {name: tensor for name, tensor in both if tensor is not None}


def _on_meta(tensor: torch.Tensor) -> bool:
    return tensor.is_meta and not is_lazy(tensor)


def _like(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(old, nn.Parameter):
        return value
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    attached = list(zip(getattr(old, "_optimizer_classes", ()), getattr(old, "_optimizer_kwargs", ()), strict=True))
    if attached:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own import uses torch.jit
            from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
        for optimizer, kwargs in attached:
            _apply_optimizer_in_backward(optimizer, [new], kwargs)
    return new


def _reset_copy(module: nn.Module, path: str, seed: int, elsewhere: Iterable[nn.Module] = ()) -> nn.Module:
    name = _reset_name(module, path)
    made = copy.deepcopy(module, {id(m): _Elsewhere() for m in elsewhere}).to_empty(device="cpu")
    with seeded(seed, path), torch.no_grad():
        getattr(made, name)()
    return made


def _reset_name(module: nn.Module, path: str) -> str:
    # torch's MultiheadAttention and Transformer have only the second.
    name = next((n for n in ("reset_parameters", "_reset_parameters") if callable(getattr(module, n, None))), None)
    if name is None:
        on_meta = [n for n, t in _own(module).items() if t.is_meta]
        raise ShardError(
            f"module {path!r} ({type(module).__name__}) has {on_meta or 'parameters'} on meta and no "
            "reset_parameters() to fill them; give it one, or build it on a real device, or pass "
            "init_parameters=False and load values"
        )
    return name
