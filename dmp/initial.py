"""Initial values of parameters that are still on meta: they depend on (name, seed) alone.

[Note: initial values]
A parameter is filled in blocks, rectangles by a fixed rule of its shape, each from a generator state made of (seed,
name, block), so a rank makes only the blocks that it holds and every plan gives the same values. How it is cut:
- A table: blocks of whole rows, for that is what an `init_fn` is promised.
- `nn.Linear`, `nn.Embedding` and `nn.EmbeddingBag` with torch's own initial values, where each element is drawn from
  one distribution: small tiles, so that ranks which hold columns, or few rows, do not draw what others hold.
- The same with a model's `_init_weights(module)`, which may look at a row: blocks of whole rows.
- Any other dense module is reset as a whole on the CPU from (seed, path).
The values are those of each module's `reset_parameters()`, then of the model's `_init_weights(module)` where it has one
(as Hugging Face's models do). torch's DTensor random numbers are not used: on the CPU they repeat on every rank. The
device's own random state is not touched.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.chunked import ChunkedTensor, as_chunks, copy_overlap
from dmp.env import ShardingEnv
from dmp.errors import ShardError

BLOCK_ELEMENTS = 1 << 20  # of whole rows: an init_fn costs some 50 us each time
# Of a tile. Smaller ones cost more for seeding (5 us) and copying, larger ones more for elements that others hold.
TILE_ROWS, TILE_COLUMNS = 32, 1024


@dataclass(frozen=True)
class _Reset:
    """Gives a module its initial values: by a method of its own, then by the model's `_init_weights`."""

    by_module: str | None
    by_model: Callable[[nn.Module], Any] | None

    def __call__(self, module: nn.Module) -> None:
        if self.by_module is not None:
            getattr(module, self.by_module)()
        if self.by_model is not None:
            self.by_model(module)


def shared_seed(env: ShardingEnv) -> int:
    """Rank 0's `torch.initial_seed()`, the same on every rank."""
    seed = torch.tensor([torch.initial_seed() & ((1 << 62) - 1)], dtype=torch.int64, device=env.device)
    if env.size > 1 and env.group() is not None:
        dist.broadcast(seed, group=env.group(), group_src=0)
    return int(seed)


@contextmanager
def seeded(seed: int, *names: Any) -> Iterator[None]:
    """CPU random numbers from (seed, names) inside; the state before is put back."""
    with torch.random.fork_rng(devices=[]):
        _set_seed(seed, *names)
        yield


def _set_seed(seed: int, *names: Any) -> None:
    digest = hashlib.sha256(repr((seed, *names)).encode()).digest()
    # The CPU's generator alone: torch.manual_seed would set those of the devices too.
    torch.default_generator.manual_seed(int.from_bytes(digest[:7], "big"))


def fill_chunks(target: ChunkedTensor, init_fn: Callable[[torch.Tensor], Any], name: str, seed: int) -> None:
    """Fill the local chunks of a table by `init_fn` on blocks of whole rows; holds one block at a time."""
    rows, *rest = target.shape
    row = target.numel() // max(1, rows)
    _fill_blocks(target, (max(1, BLOCK_ELEMENTS // max(1, row)), *rest), init_fn, name, seed)


def _fill_tiles(target: ChunkedTensor, draw: Callable[[torch.Tensor], Any], name: str, seed: int) -> None:
    """Fill the local chunks by `draw`, which draws every element from one distribution, on small tiles."""
    *first, last = target.shape
    columns = min(TILE_COLUMNS, last)
    rows = TILE_ROWS * TILE_COLUMNS // max(1, columns)
    _fill_blocks(target, (rows, columns) if first else (TILE_ROWS * TILE_COLUMNS,), draw, name, seed)


def _fill_blocks(
    target: ChunkedTensor, block: tuple[int, ...], fill: Callable[[torch.Tensor], Any], name: str, seed: int
) -> None:
    """Fill the local chunks by `fill` on those blocks of a grid that they touch; holds one at a time."""
    shape = tuple(target.shape)
    touching: dict[tuple[int, ...], list[tuple[torch.Tensor, tuple[int, ...]]]] = {}
    for chunk, offset in zip(target.chunks, target.offsets, strict=True):
        if chunk.numel():
            spans = zip(offset, chunk.shape, block, strict=True)
            for index in product(*(range(o // step, (o + n - 1) // step + 1) for o, n, step in spans)):
                touching.setdefault(index, []).append((chunk, offset))
    if not touching:
        return
    # One buffer for all blocks: a new one for each, while the last is alive, scatters the heap.
    room = prod(min(step, size) for step, size in zip(block, shape, strict=True))
    buffer = torch.empty(room, dtype=target.dtype, device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for index, chunks in touching.items():
            at = tuple(i * step for i, step in zip(index, block, strict=True))
            size = tuple(min(step, n - o) for step, n, o in zip(block, shape, at, strict=True))
            values = buffer[: prod(size)].view(size)
            _set_seed(seed, name, *index)
            fill(values)
            for chunk, offset in chunks:
                copy_overlap(chunk, offset, values, at)


def fill_from_reset(targets: Mapping[str, ChunkedTensor], original: nn.Module, path: str, seed: int) -> None:
    """Fill chunks of a module's parameters from a whole copy that its own `reset_parameters` made."""
    made = _reset_copy(original, path, seed, _reset_of(original, path))
    values = {**dict(made.named_parameters()), **dict(made.named_buffers())}
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
    reset: _Reset,
    elsewhere: Iterable[nn.Module],
) -> None:
    """Fill chunks of the tensors that a module itself owns."""
    kind = next((k for k in _BY_BLOCKS if isinstance(owner, k)), None)
    in_blocks = {n: t for n, t in targets.items() if kind is not None and t.dim() and _is_torchs_own(owner, kind)}
    for name, target in in_blocks.items():
        assert kind is not None
        draw, by_rows = _BY_BLOCKS[kind]
        full_name = f"{path}.{name}" if path else name
        if reset.by_model is None:
            _fill_tiles(target, draw(owner), full_name, seed)
        else:
            fill_chunks(target, by_rows(owner, name, reset), full_name, seed)
    rest = {n: t for n, t in targets.items() if n not in in_blocks}
    if rest:  # on ranks that hold nothing of it too, so that all raise where nothing gives it values
        values = _own(_reset_copy(owner, path, seed, reset, elsewhere))
        for name, target in rest.items():
            target.fill_from(values[name].detach())


def _uniform(owner: Any) -> Callable[[torch.Tensor], Any]:
    """What `nn.Linear.reset_parameters` draws weight and bias from."""
    bound = owner.in_features**-0.5 if owner.in_features else 0.0
    return lambda values: values.uniform_(-bound, bound)


def _normal(owner: Any) -> Callable[[torch.Tensor], Any]:
    """What `nn.Embedding.reset_parameters` draws the weight from."""
    return torch.Tensor.normal_


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


_Fill = Callable[[torch.Tensor], Any]
# Modules whose weights can be filled block by block: what each element is drawn from, by torch's own reset; and for a
# model's reset a function of (module, parameter, reset) that fills a block of rows.
_BY_BLOCKS: dict[type[nn.Module], tuple[Callable[[Any], _Fill], Callable[[Any, str, _Reset], _Fill]]] = {
    nn.Linear: (_uniform, _rows_of_linear),
    nn.Embedding: (_normal, _rows_of_embedding),
    nn.EmbeddingBag: (_normal, _rows_of_embedding),
}


def _is_torchs_own(owner: Any, kind: Any) -> bool:
    """A subclass's reset may look at the number of rows, and a padding row is zero."""
    return type(owner).reset_parameters is kind.reset_parameters and getattr(owner, "padding_idx", None) is None


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


def _reset_of(module: nn.Module, path: str, root: nn.Module | None = None) -> _Reset:
    """How to reset a module, or a copy of it."""
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
    return _Reset(name, by_model)


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
