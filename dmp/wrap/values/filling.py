"""What a sharder has made, checked; and its parameters that were on meta, filled whatever their form."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.chunked import ChunkedTensor, as_chunks
from dmp.contracts import ShardedModule, hook
from dmp.env import ShardingEnv
from dmp.errors import ShardError
from dmp.layouts.layout import Layout, ParameterSharding
from dmp.names import join_name
from dmp.plans.find import Site
from dmp.plans.kept_places import kept_on_meta
from dmp.wrap.values.initial_rules import Rules, warn_of_constructors
from dmp.wrap.values.initial_values import check_can_materialise, fill_chunks, fill_own, own_random_numbers
from dmp.wrap.values.skeleton import all_tensors

_SHOWN = 4
_log = logging.getLogger("dmp")


def _fills_itself(site: Site) -> bool:
    """Whether every parameter of the site has an `init_fn`; else the module's own reset is needed."""
    own = {name for name, _ in site.module.named_parameters()}
    return own == set(site.infos) and all(info.init_fn is not None for info in site.infos.values())


def check_made(
    site: Site, new: nn.Module, plan: Mapping[str, ParameterSharding], env: ShardingEnv, is_filled: bool
) -> Mapping[str, torch.Tensor]:
    """What `shard` owes: a module, all names, chunks where the plan has this rank's, room for what was on meta, wholes
    of what `parameters` does not name.

    Args:
        plan: what it was asked for, by names relative to the site.
        is_filled: what is on meta is to get values.

    Returns:
        Every tensor of the sharded module by its name, by its chunks where it has them.

    Raises:
        ShardError: naming sharder and parameter.
    """
    sharder = type(site.sharder).__name__
    if not isinstance(new, nn.Module):
        raise ShardError(f"{sharder}.shard gave {new!r} for {_where(site)}; expected a module that takes its place")
    if new is site.module and env.data_size > 1:
        raise ShardError(
            f"{sharder}.shard gave {_where(site)} back as it was; expected a module in its place, which averages the "
            f"gradients of what parameters() names over {env.data_size} ranks. What is to stay as it is, parameters() "
            "leaves out, and it is data-parallel"
        )
    before, made = _named(site.module), _named(new)
    _check_same_names(site, before, made)
    local = {name: tensor for of_kind in made.values() for name, tensor in of_kind.items()}
    state = {**local, **_chunks(site, new)}
    for name, old in (named for of_kind in before.values() for named in of_kind.items()):
        if is_lazy(old):
            continue
        held = state[name]
        if tuple(held.shape) != tuple(old.shape):
            named = name in site.infos
            expected = "its chunks, by chunked_state()" if named else "it whole, since parameters() does not name it"
            raise ShardError(
                f"{sharder}.shard made {join_name(site.path, name)!r} of shape {tuple(held.shape)} for one of "
                f"{tuple(old.shape)}; expected {expected}"
            )
        if isinstance(held, ChunkedTensor) and name in plan:
            _check_rectangles(site, name, held, plan[name].layout, env)
        if is_filled and local[name].is_meta:
            raise ShardError(
                f"{sharder}.shard left {join_name(site.path, name)!r} on meta: shard() allocates what is on meta (for "
                "instance torch.empty_like(chunk, device=device)), the wrapper fills it"
            )
    return state


def _check_rectangles(site: Site, name: str, held: ChunkedTensor, layout: Layout, env: ShardingEnv) -> None:
    """Where every rank holds what the plan says, all of them hold the whole, once: plans have no holes, no overlaps."""
    shards = [(s.offsets, s.sizes) for s in layout.shards(held.shape, env) if s.rank == env.table_rank]
    planned, got = (sorted(box for box in boxes if all(box[1])) for boxes in (shards, held.rectangles))
    if got != planned:
        raise ShardError(
            f"chunked_state() of what {type(site.sharder).__name__}.shard made of {_where(site)} gives "
            f"{join_name(site.path, name)!r} on rank {env.table_rank} as {_shown(got)}; its plan, {layout}, says "
            f"{_shown(planned)} of {tuple(held.shape)}"
        )


def _shown(boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str:
    some = ", ".join(f"{tuple(size)} at offset {tuple(offset)}" for offset, size in boxes[:_SHOWN])
    return (some or "nothing") + (f" and {len(boxes) - _SHOWN} more" if len(boxes) > _SHOWN else "")


def _named(module: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    return {kind: dict(getattr(module, kind)()) for kind in ("named_parameters", "named_buffers")}


def _check_same_names(site: Site, old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]) -> None:
    """One owner and unchanged names: the sharder kept every parameter's and buffer's name and added none."""
    for kind, after in new.items():
        before = old[kind].keys()
        if before != after.keys():
            raise ShardError(
                f"{type(site.sharder).__name__}.shard changed {kind} of {site.path!r}: missing "
                f"{sorted(before - after.keys())}, new {sorted(after.keys() - before)}; a sharded module keeps "
                "the names"
            )


def rules_of(module: nn.Module, sites: Sequence[Site], rank: int) -> Rules | None:
    """What gives the model's tensors on meta their values; None when there are none.

    Raises:
        ShardError: nothing would.
    """
    if not any(t.is_meta and not is_lazy(t) for _, t in all_tensors(module)):
        return None
    filled = [site for site in sites if _fills_itself(site)]
    rules = Rules(module, [site.path for site in filled])
    check_can_materialise(module, rules, [site.module for site in filled])
    if rank == 0:
        warn_of_constructors(module, _log)
    return rules


def fill_from_meta(site: Site, new: nn.Module, state: Mapping[str, torch.Tensor], seed: int, rules: Rules) -> None:
    """Fill what a sharder has allocated for the site's tensors on meta: chunks, DTensors, wholes.

    Args:
        state: what `check_made` gives.
    """
    on_meta = [name for name, t in all_tensors(site.module, remove_duplicate=True) if t.is_meta and not is_lazy(t)]
    filled = hook(new, "filled")
    known = filled() if filled is not None and on_meta else ()
    # One that is a table here may be a dense weight on another mesh, where it is filled so.
    may_be_dense = isinstance(site.module, nn.Embedding | nn.EmbeddingBag)
    with own_random_numbers():
        for name in [name for name in on_meta if name not in known]:
            relative, _, own_name = name.rpartition(".")
            path, target = join_name(site.path, relative), as_chunks(state[name])
            init_fn = site.infos[name].init_fn if name in site.infos else None
            if init_fn is None or may_be_dense or rules.reach_into(site.path, path):
                fill_own(site.module.get_submodule(relative), path, own_name, target, seed, rules)
            else:
                fill_chunks(target, init_fn, join_name(site.path, name), seed)


def warn_of_kept(module: nn.Module, sharded: Iterable[nn.Module]) -> None:
    """Say which tensors stay on meta, where torch's products of them and real ones are numbers of no meaning."""
    where = kept_on_meta(module, sharded)
    if where:
        _log.warning(
            "%s on meta, which nothing fills: neither a parameter nor a buffer. register_buffer makes it one",
            ", ".join(where[:_SHOWN]) + (" stay" if len(where) > 1 else " stays"),
        )


def _chunks(site: Site, new: nn.Module) -> Mapping[str, torch.Tensor]:
    """Of the tensors of a sharded module that have them."""
    chunks = new.chunked_state() if isinstance(new, ShardedModule) else {}
    if not (isinstance(chunks, Mapping) and all(isinstance(value, torch.Tensor) for value in chunks.values())):
        raise ShardError(
            f"chunked_state() of what {type(site.sharder).__name__}.shard made of {_where(site)} gives {chunks!r}; "
            "expected a dict of ChunkedTensors by the parameters' names"
        )
    return chunks


def _where(site: Site) -> str:
    return f"{type(site.module).__name__} at {site.path!r}"
