"""Whole tensors out of pieces: full state dicts, and a plain module with the weights in place.

[Note: pieces and copies]
Every tensor of a model is seen as a `ChunkedTensor`: a table's chunks, a DTensor's local shard, or a plain tensor as
one chunk that every rank holds. What all table ranks hold is copied locally; the rest is sent by the first rank that
holds it. Replicas of the tables are not asked: they hold the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dmp.calls import alone
from dmp.chunked import ChunkedTensor, as_chunks, is_dtensor
from dmp.contracts import ShardedModule
from dmp.env import ShardingEnv, default_env
from dmp.errors import ShardError
from dmp.plans.discovery import join
from dmp.ranks.collective import entry, meet, tell, together
from dmp.state.find_wrapped import env_inside, wrapped_in
from dmp.wrap.wrapper import DistributedModelParallel

_ALIGN_BYTES = 16
_BUFFER_BYTES = 4 << 20
_Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # offset, size


@alone("full_state_dict")
def full_state_dict(model: nn.Module, *, rank0_only: bool = False, cpu: bool = True) -> dict[str, Any]:
    """The state dict of the unsharded model, as plain tensors that share nothing with the model.

    Collective over `model.env` (for a plain module with DTensors: over the default group). Each rank holds its result
    and pieces of a few MB; with `rank0_only` the others hold pieces alone.

    Args:
        model: a `DistributedModelParallel`, or any module.
        rank0_only: only rank 0 receives; the others return `{}`.
        cpu: the result is on the CPU; else each tensor is where the model has its own.

    Raises:
        CheckpointError: on every rank, with what failed where.

    Example:
        >>> full_state_dict(DistributedModelParallel(nn.Linear(2, 1))).keys()
        dict_keys(['weight', 'bias'])
    """
    return gather(model.state_dict(), env_of(model), rank0_only=rank0_only, cpu=cpu, what="full_state_dict")


@alone("to_unsharded")
def to_unsharded(model: nn.Module) -> nn.Module:
    """A plain module on the CPU with the model's weights: for serving, export, or a look.

    Collective over `model.env`; complete on every rank. Sharded modules give an empty plain module of their kind
    (`unsharded()`, parameters possibly on meta); everything else is copied.

    Raises:
        ShardError: a sharded module without `unsharded()`, or one that leaves a tensor on meta.
    """
    if not isinstance(model, DistributedModelParallel) and wrapped_in(model):
        return _parent_unsharded(model)
    live = model.module if isinstance(model, DistributedModelParallel) else model
    root = model.skeleton or live if isinstance(model, DistributedModelParallel) else live
    memo: dict[int, Any] = {}
    for path, module in root.named_modules():
        make = getattr(module, "unsharded", None)
        if callable(make):
            memo[id(module)] = make().train(module.training)
        elif isinstance(module, ShardedModule):
            raise ShardError(
                f"module {path!r} ({type(module).__name__}) has no unsharded(), which gives an empty plain module of "
                "the same names; full_state_dict(model) has the values without it"
            )
    for parameter in root.parameters():
        if is_dtensor(parameter):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    plain: nn.Module = copy.deepcopy(root, memo)
    if root is not live:
        _take_buffers(live, plain)
    _allocate(plain)
    trained = {name: p.requires_grad for name, p in live.named_parameters()}
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(trained[name])
    targets = {name: t for name, t in plain.state_dict().items() if isinstance(t, torch.Tensor)}
    gather(model.state_dict(), env_of(model), out=targets, what="to_unsharded")
    return plain


def _parent_unsharded(parent: nn.Module) -> nn.Module:
    """A copy with plain modules in place of the wrapped models; inside another wrapper, as DDP, what that holds."""
    if isinstance(parent, nn.parallel.DistributedDataParallel):
        return to_unsharded(parent.module)
    memo: dict[int, Any] = {id(m): to_unsharded(m) for m in wrapped_in(parent).values()}
    return copy.deepcopy(parent, memo).cpu()


def _take_buffers(live: nn.Module, plain: nn.Module) -> None:
    """Buffers and modes, which a skeleton does not have; a state dict lacks some of the buffers."""
    modules = dict(live.named_modules())
    for path, module in plain.named_modules():
        if path not in modules:
            continue  # inside a plain module that stands for a sharded one
        module.training = modules[path].training
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = modules[path]._buffers[name].detach().clone()


def env_of(model: nn.Module) -> ShardingEnv:
    """Of the wrapped models; for a plain module the default one where it has DTensors, else this process alone."""
    inside = env_inside(model)
    if inside is not None:
        return inside
    return default_env() if any(is_dtensor(p) for p in model.parameters()) else ShardingEnv.single()


def sharded_parameters(model: nn.Module) -> dict[str, tuple[nn.Parameter, ChunkedTensor]]:
    """Fully-qualified name -> (local parameter, its pieces), for every parameter that a sharded module holds."""
    root = model.module if isinstance(model, DistributedModelParallel) else model
    local = dict(root.named_parameters(remove_duplicate=False))
    found: dict[str, tuple[nn.Parameter, ChunkedTensor]] = {}
    for path, module in root.named_modules():
        if isinstance(module, ShardedModule):
            for name, chunked in module.chunked_state().items():
                if join(path, name) in local:
                    found[join(path, name)] = (local[join(path, name)], chunked)
    return found


def chunk_views(tensor: torch.Tensor, parameter: torch.Tensor, chunked: ChunkedTensor) -> ChunkedTensor:
    """A tensor shaped as the local parameter, such as its gradient, cut as the parameter is; chunks are views.

    Args:
        tensor: of the local parameter's shape, any dtype.
        parameter: the local parameter.
        chunked: its pieces, views of its storage: their storage offsets say where each lies.

    Raises:
        ShardError: another shape, or pieces that are not in the parameter's storage.
    """
    if tensor.shape != parameter.shape or not (tensor.is_contiguous() and parameter.is_contiguous()):
        raise ShardError(
            f"expected a contiguous tensor of the local parameter's shape {tuple(parameter.shape)}; "
            f"got {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    views = []
    for chunk, offset in zip(chunked.chunks, chunked.offsets, strict=True):
        at = chunk.storage_offset() - parameter.storage_offset()
        last = at + sum((n - 1) * s for n, s in zip(chunk.shape, chunk.stride(), strict=True))
        same = chunk.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        if chunk.numel() and not (same and at >= 0 and last < parameter.numel()):
            raise ShardError(f"the chunk at {offset} is not a view of its local parameter of {tuple(parameter.shape)}")
        views.append(
            tensor.detach().as_strided(chunk.shape, chunk.stride(), tensor.storage_offset() + at)
            if chunk.numel()
            else tensor.new_empty(chunk.shape)
        )
    return ChunkedTensor(chunked.size(), views, chunked.offsets, tensor.dtype, tensor.device)


def gather(
    state: Mapping[str, Any],
    env: ShardingEnv,
    *,
    rank0_only: bool = False,
    cpu: bool = True,
    out: Mapping[str, torch.Tensor] | None = None,
    what: str = "gathering whole tensors",
) -> dict[str, Any]:
    """Every tensor whole. Names that only some table ranks have are complete on all of them.

    One exchange tells that all ranks are here, one who holds what, one whether every rank is ready to receive; then
    pieces travel in buffers of a few MB.

    Args:
        state: name -> tensor, or any other object, which is copied.
        env: whose table ranks hold the pieces.
        rank0_only: the others return `{}`.
        cpu: the result is on the CPU; else each tensor is where this rank holds its part, or on the env's device.
        out: where to put the values, by name, instead of new tensors.
        what: the call, for messages.

    Raises:
        RanksError: ranks are in other calls.
        CheckpointError: on every rank of `env`: pieces that do not cover a tensor, or no memory for the result.
    """
    with entry(what, env.group() if env.size > 1 else None):
        return _gather(state, env, rank0_only, cpu, out, what)


def _gather(
    state: Mapping[str, Any],
    env: ShardingEnv,
    rank0_only: bool,
    cpu: bool,
    out: Mapping[str, torch.Tensor] | None,
    what: str,
) -> dict[str, Any]:
    mine: dict[str, ChunkedTensor] = {}
    everywhere = env.group() if env.size > 1 else None
    problem: Exception | None = None
    try:
        mine = {name: as_chunks(t) for name, t in state.items() if isinstance(t, torch.Tensor)}
    except ShardError as error:  # the others wait in the exchange
        problem = error
    takes_part = not rank0_only or env.replica_of(env.rank) == 0
    keep = not rank0_only or env.rank == 0
    group = env.table_group if env.table_size > 1 else None
    listing = {
        name: (tuple(t.size()), t.dtype, [(offset, tuple(piece.shape)) for offset, piece in t.pieces(_BUFFER_BYTES)])
        for name, t in mine.items()
    }
    meet(what, [0, 0], everywhere)
    everyone = tell(what, listing, group) if takes_part else []

    def receiver(name: str) -> torch.Tensor:
        if out is not None and name in out:
            return out[name]
        size, dtype, _ = next(known[name] for known in everyone if name in known)
        where = torch.device("cpu") if cpu else mine[name].device if name in mine else env.device
        return torch.empty(size, dtype=dtype, device=where)

    def ready() -> tuple[dict[int | None, list[tuple[str, _Rectangle]]], dict[str, Any]]:
        if problem is not None:
            raise problem
        names = dict.fromkeys([*state, *(name for known in everyone for name in known)]) if keep else ()
        return _who_sends(everyone), {
            name: copy.deepcopy(state[name]) if name in state and name not in mine else receiver(name) for name in names
        }

    sends, result = together(ready, everywhere, what)
    local = {(name, offset): piece for name, t in mine.items() for offset, piece in t.pieces(_BUFFER_BYTES)}
    buffer = torch.empty(0, dtype=torch.uint8, device=env.device)  # one for all: the allocator would keep several
    for owner, pieces in sends.items():
        if keep and owner in (None, env.table_rank):
            for name, (offset, _) in pieces:
                _place(result[name], offset, local[name, offset])
        for batch in _batches(pieces, everyone[owner]) if owner is not None else ():
            assert owner is not None
            if rank0_only and (owner == 0 or env.table_rank not in (0, owner)):
                continue
            num_bytes = batch[-1][2] + batch[-1][3]
            if buffer.numel() < num_bytes:
                buffer = buffer.new_empty(num_bytes)
            _transfer(batch, buffer[:num_bytes], owner, local, result, everyone[owner], env, group, rank0_only)
    return result


def _who_sends(everyone: list[dict[str, Any]]) -> dict[int | None, list[tuple[str, _Rectangle]]]:
    """Pieces by the rank that sends them; under None those that every rank holds already."""
    holders: dict[tuple[str, _Rectangle], list[int]] = {}
    for rank, known in enumerate(everyone):
        for name, (_, _, pieces) in known.items():
            for piece in pieces:
                holders.setdefault((name, piece), []).append(rank)
    covered: dict[str, int] = {}
    sends: dict[int | None, list[tuple[str, _Rectangle]]] = {}
    for (name, piece), ranks in holders.items():
        covered[name] = covered.get(name, 0) + prod(piece[1])
        sends.setdefault(None if len(ranks) == len(everyone) else ranks[0], []).append((name, piece))
    for name, (size, _, _) in {n: known[n] for known in everyone for n in known}.items():
        if covered.get(name, 0) != prod(size):
            raise ShardError(f"the ranks' pieces of {name!r} hold {covered.get(name, 0)} of {prod(size)} elements")
    return sends


def _batches(
    pieces: list[tuple[str, _Rectangle]], known: dict[str, Any]
) -> Iterator[list[tuple[str, _Rectangle, int, int]]]:
    """(name, rectangle, first byte, bytes) in groups of at most a few MB, or of one piece."""
    batch: list[tuple[str, _Rectangle, int, int]] = []
    at = 0
    for name, rectangle in pieces:
        num_bytes = prod(rectangle[1]) * known[name][1].itemsize
        if batch and at + num_bytes > _BUFFER_BYTES:
            yield batch
            batch, at = [], 0
        batch.append((name, rectangle, at, num_bytes))
        at += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    if batch:
        yield batch


def _transfer(
    batch: list[tuple[str, _Rectangle, int, int]],
    buffer: torch.Tensor,
    owner: int,
    local: Mapping[tuple[str, tuple[int, ...]], torch.Tensor],
    result: Mapping[str, torch.Tensor],
    known: Mapping[str, Any],
    env: ShardingEnv,
    group: dist.ProcessGroup | None,
    rank0_only: bool,
) -> None:
    """Send one buffer from its owner to every rank, or to rank 0, and place what came."""
    is_owner = owner == env.table_rank
    if is_owner:
        for name, (offset, _), at, num_bytes in batch:
            buffer[at : at + num_bytes].copy_(local[name, offset].contiguous().reshape(-1).view(torch.uint8))
    if not rank0_only:
        dist.broadcast(buffer, group=group, group_src=owner)
    elif is_owner:
        dist.send(buffer, group=group, group_dst=0)
    else:
        dist.recv(buffer, group=group, group_src=owner)
    if not is_owner:
        for name, (offset, size), at, num_bytes in batch:
            _place(result[name], offset, buffer[at : at + num_bytes].view(known[name][1]).view(size))


def _place(target: torch.Tensor, offset: tuple[int, ...], values: torch.Tensor) -> None:
    with torch.no_grad():
        target[tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))].copy_(values)


def _allocate(module: nn.Module) -> None:
    """Give parameters and persistent buffers on meta a place on the CPU, ties kept, and move the rest there."""
    made: dict[int, torch.Tensor] = {}
    for path, owner in module.named_modules():
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is None:
                continue
            if tensor.is_meta and name in owner._non_persistent_buffers_set:
                raise ShardError(
                    f"unsharded() left buffer {join(path, name)!r} on meta, and a state dict does not hold it; "
                    "give it its values there"
                )
            if tensor.is_meta and id(tensor) not in made:
                new = torch.empty_like(tensor, device="cpu")
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
            if tensor.is_meta:
                (owner._parameters if name in owner._parameters else owner._buffers)[name] = made[id(tensor)]
    module.cpu()
