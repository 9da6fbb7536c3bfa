"""Initial values of parameters that are still on meta: they depend on (name, seed) alone.

[Note: initial values]
A parameter is filled in blocks, rectangles by a fixed rule of its shape, each from a generator state made of (seed,
name, block), so a rank makes only the blocks that it holds and every plan gives the same values. How it is cut:
- A table: blocks of whole rows, for that is what an `init_fn` is promised; of few columns where it is one of torch's
  that draw each element from one distribution, as TorchRec's default is, so that who holds columns draws these alone.
- `nn.Linear`, `nn.Embedding` and `nn.EmbeddingBag` with torch's own initial values, where each element is drawn from
  one distribution: small tiles, so that ranks which hold columns, or few rows, do not draw what others hold.
- The same with a model's `_init_weights(module)`, which may look at a row: blocks of whole rows.
- Any other module is filled as a whole on the CPU, with those that a parent's rule reaches too (see `initial_rules`);
  a table that is too large for that by blocks of whole rows.
torch's DTensor random numbers are not used: on the CPU they repeat on every rank. The device's own random state is not
touched.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.chunked import ChunkedTensor, as_chunks, copy_overlap
from dmp.env import ShardingEnv
from dmp.errors import ShardError
from dmp.names import join_name
from dmp.places import Place, places_of, replace_tensors, room_for
from dmp.plans.kept_places import kept_beside
from dmp.ranks import gather_words
from dmp.wrap.values.initial_rules import TOGETHER_ELEMENTS, Rules, set_seed

BLOCK_ELEMENTS = 1 << 20  # of a table: an init_fn costs some 50 us each time
BLOCK_COLUMNS = 64  # or all, as an init_fn takes them; rows of fewer are made as quickly as they were
# Of a tile. Smaller ones cost more for seeding (5 us) and copying, larger ones more for elements that others hold.
TILE_ROWS, TILE_COLUMNS = 32, 1024


def shared_seed(env: ShardingEnv) -> int:
    """Rank 0's `torch.initial_seed()`, the same on every rank."""
    own = torch.initial_seed() & ((1 << 62) - 1)
    return gather_words("wrapping: the seed", [own, 0], env.everyone)[0][0]


def own_random_numbers() -> AbstractContextManager[None]:
    """In which tensors are filled, by generator states of their own: the program's is as it was, afterwards."""
    return torch.random.fork_rng(devices=[])


def fill_chunks(target: ChunkedTensor, init_fn: Callable[[torch.Tensor], Any], name: str, seed: int) -> None:
    """Fill the local chunks of a table by `init_fn` on blocks; holds one at a time."""
    rest = list(target.shape[1:])
    draws = init_fn.func if isinstance(init_fn, partial) else init_fn
    if len(rest) == 1 and any(draws is each for each in _OF_ELEMENTS):
        rest = [min(rest[0], BLOCK_COLUMNS)]
    _fill_blocks(target, (max(1, BLOCK_ELEMENTS // max(1, prod(rest))), *rest), init_fn, name, seed)


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
    with torch.no_grad():
        for index, chunks in touching.items():
            at = tuple(i * step for i, step in zip(index, block, strict=True))
            size = tuple(min(step, n - o) for step, n, o in zip(block, shape, at, strict=True))
            values = buffer[: prod(size)].view(size)
            set_seed(seed, name, *index)
            fill(values)
            for chunk, offset in chunks:
                copy_overlap(chunk, offset, values, at)


def materialise(
    module: nn.Module,
    device: torch.device,
    seed: int,
    rules: Rules,
    skip: Iterable[nn.Module] = (),
    only: Container[str] | None = None,
) -> None:
    """Allocate and fill every parameter and buffer that is on meta, tied ones once; modules in `skip` are left alone.

    Of a DTensor only the local part is allocated. Beyond that no more is held than one module's tensors, or one block,
    or what `Rules` fills together.

    Args:
        rules: of the model before it was sharded.
        only: names of those that are filled; None: all.

    Raises:
        ShardError: nothing gives such a tensor values.
    """

    def filled(place: Place) -> torch.Tensor:
        new = _with_optimizers(room_for(place.tensor, device), place.tensor)
        fill_own(place.owner, place.path, place.name, as_chunks(new), seed, rules)
        return new

    wanted = [place for place in _on_meta(module, skip) if only is None or place.full_name in only]
    with own_random_numbers():
        replace_tensors(wanted, filled, kept_beside(module) if wanted else None)


def check_can_materialise(module: nn.Module, rules: Rules, skip: Iterable[nn.Module] = ()) -> None:
    """Raise where no rule could give a tensor values, before anything is changed."""
    for path, owner, *_ in _on_meta(module, skip):
        if not rules.of(path):
            on_meta = [place.name for place in places_of([(path, owner)]) if place.tensor.is_meta]
            raise ShardError(
                f"module {path!r} ({type(owner).__name__}) has {on_meta} on meta and no "
                "reset_parameters() to fill them; give it one, or build it on a real device, or pass "
                "init_parameters=False and load values"
            )


def fill_own(owner: nn.Module, path: str, name: str, target: ChunkedTensor, seed: int, rules: Rules) -> None:
    """Fill chunks of a tensor that a module itself owns."""
    of, from_above = rules.of(path), rules.from_above(path)
    is_torchs = name in ("weight", "bias")  # and not what a subclass, or a pruning, has added
    kind = next((k for k in _BY_BLOCKS if is_torchs and isinstance(owner, k) and _is_torchs_own(owner, k)), None)
    full_name = join_name(path, name)
    is_large = isinstance(owner, _TABLES) and target.numel() > TOGETHER_ELEMENTS
    if kind is not None and target.dim() and not from_above and all(rule.is_own for rule in of):
        _fill_tiles(target, _BY_BLOCKS[kind](owner), full_name, seed)
    elif target.dim() and (is_large if from_above else kind is not None):
        fill_chunks(target, partial(rules.fill, path, name), full_name, seed)
    else:  # on ranks that hold nothing of it too, so that all raise where nothing gives it values
        target.fill_from(rules.value(path, name, seed))


def _uniform(owner: Any) -> Callable[[torch.Tensor], Any]:
    """What `nn.Linear.reset_parameters` draws weight and bias from."""
    bound = owner.in_features**-0.5 if owner.in_features else 0.0
    return lambda values: values.uniform_(-bound, bound)


_TABLES = (nn.Embedding, nn.EmbeddingBag)
# Modules whose weights can be filled block by block, and what each element is drawn from by torch's own reset.
_BY_BLOCKS: dict[type[nn.Module], Callable[[Any], Callable[[torch.Tensor], Any]]] = {
    nn.Linear: _uniform,
    **dict.fromkeys(_TABLES, lambda owner: torch.Tensor.normal_),
}
_OF_ELEMENTS = {
    nn.init.uniform_,
    nn.init.normal_,
    nn.init.trunc_normal_,
    nn.init.constant_,
    nn.init.zeros_,
    nn.init.ones_,
}


def _is_torchs_own(owner: Any, kind: Any) -> bool:
    """A subclass's reset may look at the number of rows, and a padding row is zero."""
    return type(owner).reset_parameters is kind.reset_parameters and getattr(owner, "padding_idx", None) is None


def _on_meta(module: nn.Module, skip: Iterable[nn.Module]) -> Iterator[Place]:
    skipped = {id(m) for s in skip for m in s.modules()}
    for place in places_of(module.named_modules()):
        if id(place.owner) not in skipped and place.tensor.is_meta and not is_lazy(place.tensor):
            yield place


def _with_optimizers(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """`new` with what torch's `_apply_optimizer_in_backward` has attached to `old`."""
    attached = list(zip(getattr(old, "_optimizer_classes", ()), getattr(old, "_optimizer_kwargs", ()), strict=True))
    if attached:
        from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]

        for optimizer, kwargs in attached:
            _apply_optimizer_in_backward(optimizer, [new], kwargs)
    return new
