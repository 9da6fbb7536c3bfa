"""Initial values of parameters that are still on meta: they depend on (name, seed) alone.

[Note: initial values]
A table is filled in blocks of a fixed number of rows, each from a generator state made of (seed, name, block), so a
rank makes only the blocks that it holds and every plan gives the same table; so are the weights of `nn.Linear`,
`nn.Embedding` and `nn.EmbeddingBag`, whose initial values do not depend on the number of rows. Any other dense module
is reset as a whole on the CPU from (seed, path). torch's DTensor random numbers are not used: on the CPU they repeat on
every rank. The device's own random state is not touched. The values themselves are those of each module's
`reset_parameters()`, then of the model's `_init_weights(module)` where it has one (as Hugging Face's models do).
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.chunked import ChunkedTensor, as_chunks, copy_overlap, overlap_numel
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
    values = dict(_reset_copy(original, path, seed, _reset_of(original, path)).named_parameters())
    for name, target in targets.items():
        target.fill_from(values[name].detach())


def fill_own(targets: Mapping[str, ChunkedTensor], owner: nn.Module, path: str, seed: int, root: nn.Module) -> None:
    """Fill chunks of what a module itself owns, as `materialise` would."""
    _fill(owner, path, targets, seed, _reset_of(owner, path, root), ())


def materialise(
    module: nn.Module,
    device: torch.device,
    seed: int,
    skip: Iterable[nn.Module] = (),
    original: nn.Module | None = None,
) -> None:
    """Allocate and fill every parameter and buffer that is on meta, tied ones once; modules in `skip` are left alone.

    Of a DTensor only the local part is allocated. Beyond that at most one module's tensors are held, or one block.

    Args:
        original: of the same structure, to copy modules from that are to be reset, where `module`'s cannot be copied.

    Raises:
        ShardError: a module that owns such a tensor has no `reset_parameters`.
    """
    skip = list(skip)
    made: dict[int, torch.Tensor] = {}
    for path, owner in list(_owners_on_meta(module, skip)):
        reset = _reset_of(owner, path, module)
        on_meta = {name: t for name, t in _own(owner).items() if _on_meta(t)}
        new = {name: made.get(id(t)) for name, t in on_meta.items()}
        missing = [name for name, value in new.items() if value is None]
        for name in missing:
            new[name] = made[id(on_meta[name])] = _like(on_meta[name], device)
        source = owner if original is None else original.get_submodule(path)
        _fill(source, path, {name: as_chunks(new[name]) for name in missing}, seed, reset, skip)  # type: ignore[arg-type]
        for name, value in new.items():
            (owner._parameters if name in owner._parameters else owner._buffers)[name] = value  # type: ignore[assignment]


def check_can_materialise(module: nn.Module, skip: Iterable[nn.Module] = ()) -> None:
    """Raise what `materialise` would, before anything is changed."""
    for path, owner in _owners_on_meta(module, skip):
        _reset_of(owner, path, module)


def _fill(
    owner: nn.Module,
    path: str,
    targets: Mapping[str, ChunkedTensor],
    seed: int,
    reset: Callable[[nn.Module], Any],
    elsewhere: Iterable[nn.Module],
) -> None:
    """Fill chunks of the tensors that a module itself owns."""
    by_rows = _BY_ROWS.get(next((k for k in _BY_ROWS if isinstance(owner, k)), nn.Module))
    is_plain = by_rows is not None and _is_row_by_row(owner, reset)
    for name in [n for n in targets if is_plain and targets[n].dim()]:
        assert by_rows is not None
        fill_chunks(targets[name], by_rows(owner, name, reset), f"{path}.{name}" if path else name, seed)
    rest = {n: t for n, t in targets.items() if not (is_plain and t.dim())}
    if rest:  # on ranks that hold nothing of it too, so that all raise where nothing gives it values
        values = _own(_reset_copy(owner, path, seed, reset, elsewhere))
        for name, target in rest.items():
            target.fill_from(values[name].detach())


def _rows_of_linear(owner: Any, name: str, reset: Callable[[nn.Module], Any]) -> Callable[[torch.Tensor], Any]:
    def fill(values: torch.Tensor) -> None:
        rows = values.shape[0]
        small = nn.Linear(owner.in_features, rows, bias=owner.bias is not None, device="meta", dtype=values.dtype)
        # The other of the two is drawn too, and dropped: one row of it is enough.
        small.weight = nn.Parameter(values if name == "weight" else values.new_empty(1, owner.in_features))
        if owner.bias is not None:
            small.bias = nn.Parameter(values if name == "bias" else values.new_empty(1))
        reset(small)

    return fill


def _rows_of_embedding(owner: Any, name: str, reset: Callable[[nn.Module], Any]) -> Callable[[torch.Tensor], Any]:
    def fill(values: torch.Tensor) -> None:
        kind = nn.EmbeddingBag if isinstance(owner, nn.EmbeddingBag) else nn.Embedding
        small = kind(values.shape[0], owner.embedding_dim, device="meta", dtype=values.dtype)
        small.weight = nn.Parameter(values)
        reset(small)

    return fill


# Modules whose weights can be filled row by row: a function of (module, parameter, reset) that fills a block of rows.
_BY_ROWS: dict[type[nn.Module], Callable[[Any, str, Callable[[nn.Module], Any]], Callable[[torch.Tensor], Any]]] = {
    nn.Linear: _rows_of_linear,
    nn.Embedding: _rows_of_embedding,
    nn.EmbeddingBag: _rows_of_embedding,
}


def _is_row_by_row(owner: Any, reset: Callable[[nn.Module], Any]) -> bool:
    """Torch's own initial values; a subclass's may depend on the number of rows, and a padding row is zero."""
    kind: Any = next(k for k in _BY_ROWS if isinstance(owner, k))
    has_own = type(owner).reset_parameters is not kind.reset_parameters
    return not has_own and getattr(owner, "padding_idx", None) is None


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


def _like(old: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Room on the device for what `old` stands for on meta."""
    value = torch.empty_like(old.detach(), device=device)
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


def _reset_copy(
    module: nn.Module, path: str, seed: int, reset: Callable[[nn.Module], Any], elsewhere: Iterable[nn.Module] = ()
) -> nn.Module:
    """A whole copy on the CPU, reset; nothing is copied but structure."""
    memo: dict[int, Any] = {id(m): _Elsewhere() for m in elsewhere}
    for t in [*module.parameters(), *module.buffers()]:
        if id(t) not in memo:
            empty = torch.empty(t.shape, dtype=t.dtype, device="cpu")
            memo[id(t)] = nn.Parameter(empty, requires_grad=False) if isinstance(t, nn.Parameter) else empty
    made: nn.Module = copy.deepcopy(module, memo)
    floats = {name: t for name, t in _own(made).items() if t.is_floating_point()}
    with seeded(seed, path), torch.no_grad():
        for t in floats.values():
            t.fill_(torch.nan)
        reset(made)
    left = [name for name in floats if bool(_own(made)[name].isnan().any())]
    if left:
        raise ShardError(
            f"module {path!r} ({type(module).__name__}) is on meta, and nothing gave {left} values: neither a "
            "reset_parameters() of its own nor the model's _init_weights(module); give it one of the two"
        )
    return made


def _reset_of(module: nn.Module, path: str, root: nn.Module | None = None) -> Callable[[nn.Module], Any]:
    """How to reset a module: a function, for a copy of it."""
    by_model = model_init(root)
    # torch's MultiheadAttention and Transformer have only the second.
    name = next((n for n in ("reset_parameters", "_reset_parameters") if callable(getattr(module, n, None))), None)
    if name is None and by_model is None:
        on_meta = [n for n, t in _own(module).items() if t.is_meta]
        raise ShardError(
            f"module {path!r} ({type(module).__name__}) has {on_meta or 'parameters'} on meta and no "
            "reset_parameters() to fill them; give it one, or build it on a real device, or pass "
            "init_parameters=False and load values"
        )

    def reset(made: nn.Module) -> None:
        if name is not None:
            getattr(made, name)()
        if by_model is not None:
            by_model(made)

    return reset


def model_init(root: nn.Module | None) -> Callable[[nn.Module], Any] | None:
    """The model's `_init_weights`, where it is one that takes a module."""
    found = getattr(root, "_init_weights", None)
    if not callable(found):
        return None
    try:
        inspect.signature(found).bind(root)
    except (TypeError, ValueError):
        return None
    return found  # type: ignore[no-any-return]
