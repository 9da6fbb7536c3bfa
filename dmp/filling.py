"""What a sharder has made, checked; and its parameters that were on meta, filled whatever their form."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.chunked import ChunkedTensor, as_chunks
from dmp.contracts import ShardedModule
from dmp.discovery import Site, join
from dmp.errors import ShardError
from dmp.initial import fill_chunks, fill_from_reset, fill_own, model_init


def fills_itself(site: Site) -> bool:
    """Whether every parameter of the site has an `init_fn`; else the module's own reset is needed."""
    own = {name for name, _ in site.module.named_parameters()}
    return own == set(site.infos) and all(info.init_fn is not None for info in site.infos.values())


def check_made(site: Site, new: nn.Module, is_filled: bool) -> None:
    """What `shard` owes beside the names: room for what was on meta, and wholes of what `parameters` does not name.

    Args:
        is_filled: what is on meta is to get values.

    Raises:
        ShardError: naming sharder and parameter.
    """
    sharder, local, state = type(site.sharder).__name__, _tensors(new), _state(new)
    for name, old in _tensors(site.module).items():
        if is_lazy(old):
            continue
        if tuple(state[name].shape) != tuple(old.shape):
            named = name in site.infos
            expected = "its pieces, by chunked_state()" if named else "it whole, since parameters() does not name it"
            raise ShardError(
                f"{sharder}.shard made {join(site.path, name)!r} of shape {tuple(state[name].shape)} for one of "
                f"{tuple(old.shape)}; expected {expected}"
            )
        if is_filled and local[name].is_meta:
            raise ShardError(
                f"{sharder}.shard left {join(site.path, name)!r} on meta: shard() allocates what is on meta (for "
                "instance torch.empty_like(pieces, device=device)), the wrapper fills it"
            )


def fill_from_meta(site: Site, new: nn.Module, seed: int, root: nn.Module) -> None:
    """Fill what a sharder has allocated for the site's tensors on meta: pieces, DTensors, wholes."""
    on_meta = [name for name, t in _tensors(site.module).items() if t.is_meta and not is_lazy(t)]
    if not on_meta:
        return
    state = _state(new)
    targets = {name: as_chunks(state[name]) for name in on_meta}
    if model_init(root) is not None and isinstance(site.module, nn.Embedding | nn.EmbeddingBag):
        fill_own(targets, site.module, site.path, seed, root)
        return
    rest: dict[str, ChunkedTensor] = {}
    for name, target in targets.items():
        init_fn = site.infos[name].init_fn if name in site.infos else None
        if init_fn is not None:
            fill_chunks(target, init_fn, join(site.path, name), seed)
        else:
            rest[name] = target
    own = {name: target for name, target in rest.items() if "." not in name}
    if own:
        fill_own(own, site.module, site.path, seed, root)
    if len(own) < len(rest):
        below = {name: target for name, target in rest.items() if name not in own}
        fill_from_reset(below, site.module, site.path, seed)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of a sharded module, by its pieces where it has them."""
    return {**_tensors(module), **(module.chunked_state() if isinstance(module, ShardedModule) else {})}
