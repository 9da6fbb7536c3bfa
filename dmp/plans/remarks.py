"""Remarks: what cannot be seen from a step's numbers is said once, to the logger "dmp", by rank 0.

That is: weights of a kind that is sharded which are no tables, with their bytes and why; a tensor axis on which nothing
was split, whose ranks all do the same work; which share of the weights is whole on each of its ranks, and why; where
gradients are scaled by counts that each rank has of its own samples. How to tell, and say, that frozen copies are cut
otherwise than what they may follow is here, too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn
from torch.nn.parameter import is_lazy

from dmp.contracts import hook
from dmp.env import ShardingEnv
from dmp.layouts.layout import Layout
from dmp.layouts.shard import Shard
from dmp.plans.check import Resolved
from dmp.plans.oddities import why_no_table
from dmp.registry import by_module_type, sharder_for

LARGE_BYTES = 64 << 20  # what a warning is worth: copies on every rank
_log = logging.getLogger("dmp")
_NUM_SHOWN = 8


def remark(resolved: Resolved) -> None:
    """Say what of a checked plan's model is not sharded; nothing where there is but one rank."""
    if resolved.found.env.size > 1 and resolved.found.env.rank == 0:
        say_what_is_read(resolved)
        _say_what_is_whole(resolved)
        _say_what_is_left(resolved)
        _say_whose_ids_count(resolved)
        _say_whose_gradients_are_sparse(resolved)


def say_what_is_read(resolved: Resolved) -> None:
    """Which tables are left to the data-parallel part because other code reads them."""
    known = dict(resolved.found.module.named_parameters(remove_duplicate=False))
    placed = resolved.tables | resolved.plan.keys()
    for name, reader in resolved.found.sites.read.items():
        if name not in placed:
            _say_no_table(
                *(name, known[name], known[name].nbytes >= LARGE_BYTES),
                f": {reader.text}. {reader.way_out}",
            )


def _say_no_table(name: str, parameter: nn.Parameter, is_large: bool, why: str) -> None:
    level = logging.WARNING if is_large else logging.INFO
    text = "%r (%s bytes) is no table but part of the data-parallel weights%s"
    _log.log(level, text, name, f"{parameter.nbytes:,}", why)


def _say_what_is_whole(resolved: Resolved) -> None:
    """What the tensor axis does not split, and why; a warning where that is most, and no table is split."""
    module, env, tables = resolved.found.module, resolved.found.env, resolved.tables
    if env.tensor_size == 1:
        return
    axis = ", ".join(f"{name} ({env.shape[env.names.index(name)]})" for name in env.axes("tensor"))
    split = {name for name, e in resolved.plan.items() if e.layout.tensor_dim(2) is not None}
    sizes = {n: p.nbytes for n, p in module.named_parameters() if not is_lazy(p)}
    dense = {name: size for name, size in sizes.items() if name not in tables}
    total, whole = sum(dense.values()), sum(size for name, size in dense.items() if name not in split)
    is_cut = any(not resolved.plan[name].layout.is_copied for name in tables)
    reasons = _reasons(resolved)
    if not is_cut and whole == total:
        _log.warning(
            "axis %s: nothing is split, because %s. Its ranks all hold the same %s and do the same work; leave the "
            "axis out of the mesh, or name what is to be split: TensorParallelSharder({module path: style})",
            axis,
            "; ".join(reasons) or "the plan splits nothing",
            shown_bytes(sum(sizes.values())),
        )
    elif whole:
        level = logging.WARNING if whole > total / 2 and not is_cut else logging.INFO
        text = "axis %s: %.0f %% of the dense weights (%s of %s) are whole on each of its ranks: %s"
        why = "; ".join(reasons) or "the plan does not name them"
        _log.log(level, text, axis, 100 * whole / total, shown_bytes(whole), shown_bytes(total), why)


def shown_bytes(size: float) -> str:
    """A size that a person reads."""
    for unit, digits in (("bytes", 0), ("KB", 3), ("MB", 6), ("GB", 9)):
        if size < 1000 ** (digits // 3 + 1):
            return f"{size / 10**digits:.{2 if digits else 0}f} {unit}"
    return f"{size / 1e12:.2f} TB"


def _say_what_is_left(resolved: Resolved) -> None:
    """Which modules of a kind that is sharded are data-parallel, and how much is whole in all."""
    module, env = resolved.found.module, resolved.found.env
    by_type = by_module_type(resolved.found.sharders)
    names: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    inside = {id(m) for site in resolved.sites for m in site.module.modules()}
    known = resolved.plan.keys() | resolved.found.sites.read.keys()
    for path, each in module.named_modules():
        if id(each) in inside or sharder_for(each, by_type) is None:
            continue
        if any(True for _ in each.children()) and not any(known & set(names[id(p)]) for p in each.parameters()):
            _say_collection(path, each, names)
            inside |= {id(m) for m in each.modules()}
            continue
        for p in each.parameters(recurse=False):
            if is_lazy(p) or known & set(names[id(p)]):
                continue
            others = [n for n in names[id(p)] if n.rpartition(".")[0] != path]
            is_large = p.nbytes >= LARGE_BYTES and not env.fully_sharded_axes
            how = "split with them" if env.fully_sharded_axes else "whole on every rank"
            why = f"tied to {others[0]!r}" if others else why_no_table(each)
            _say_no_table(names[id(p)][0], p, is_large, f", {how}: {why}")
    if not env.fully_sharded_axes:
        of_tables = {id(p) for site in resolved.sites for p in site.module.parameters()}
        dense = [p for p in module.parameters() if id(p) not in of_tables and not is_lazy(p)]
        total = sum(p.nbytes for p in dense)
        _log.info("%d dense parameters of %s bytes are whole on every data rank", len(dense), f"{total:,}")


def _say_whose_ids_count(resolved: Resolved) -> None:
    """Where gradients are scaled by counts of ids, which each rank has of its own samples, as under DDP."""
    num_ranks = resolved.found.env.data_size
    for path, each in resolved.found.module.named_modules() if num_ranks > 1 else ():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.scale_grad_by_freq and each.weight.requires_grad:
            _log.warning(
                "%s at %r has scale_grad_by_freq=True: each of the %d data ranks divides gradients by how often an id "
                "comes in its own samples, and their mean is not what one process makes of all samples",
                type(each).__name__,
                path,
                num_ranks,
            )


def _say_whose_gradients_are_sparse(resolved: Resolved) -> None:
    """Embeddings of classes of others' own, of which DDP and FSDP2 end in words on a storage or a backend."""
    for path, each in resolved.found.module.named_modules() if resolved.found.env.data_size > 1 else ():
        if getattr(each, "sparse", None) is not True or isinstance(each, nn.Embedding | nn.EmbeddingBag):
            continue
        if any(p.requires_grad for p in each.parameters(recurse=False)):
            _log.warning(
                "%s at %r has sparse=True and weights of its own: where their gradients are sparse, the backward pass "
                "ends in an error of torch's, as under DDP. Set its sparse=False before wrapping",
                type(each).__name__,
                path,
            )


def are_cut_otherwise(shape: Sequence[int], one: Layout, env: ShardingEnv, other: Layout, of_env: ShardingEnv) -> bool:
    """Whether a rank that is on both meshes has other rows or columns of two tables of a shape."""
    if env == of_env and (one == other or one.is_copied is not other.is_copied):
        return one != other
    held, of_other = _held(shape, one, env), _held(shape, other, of_env)
    return any(held[rank] != of_other[rank] for rank in held.keys() & of_other.keys())


def _held(shape: Sequence[int], layout: Layout, env: ShardingEnv) -> dict[int, list[Shard]]:
    """The program's rank -> what it has."""
    ranks = range(env.size) if env.mesh is None else env.mesh.mesh.flatten().tolist()
    places: dict[int, list[Shard]] = {}
    for shard in layout.shards(shape, env):
        places.setdefault(shard.rank, []).append(replace(shard, rank=0))
    return {rank: places.get(env.table_rank_of(i), []) for i, rank in enumerate(ranks)}


def say_what_is_cut_otherwise(name: str, cut: Layout, of: str, of_cut: Layout, way_out: str) -> None:
    """Of a frozen table, and one that it may follow."""
    _log.warning(
        "%s is frozen and %s, where %s is %s: what takes the two together, part by part, as a teacher or a target "
        "network that follows does (p.mul_(m).add_(q, alpha=1 - m), p.copy_(q)), ends in sizes that do not match, or "
        "takes other rows. %s",
        name,
        cut,
        of,
        of_cut,
        way_out,
    )


def _say_collection(path: str, module: nn.Module, names: Mapping[int, list[str]]) -> None:
    """That a module of several tables is left whole: a warning where that is for what was done to it."""
    inside = {id(p) for p in module.parameters()}
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    others = [n for i in inside for n in names[i] if n.removeprefix(f"{path}.") not in own]
    size = sum(p.nbytes for p in module.parameters() if not is_lazy(p))
    if not size:
        return
    kind = type(module)
    is_own = not others and not kind.__module__.startswith(("torch.", "torchrec."))
    advice = (
        ". A module in its place would have no forward, parameters and buffers but those of the class it derives from: "
        f"keep what it adds in a module around it, or pass a sharder whose module_type is {kind.__name__}"
    )
    _log.log(
        logging.WARNING if not others or size >= LARGE_BYTES else logging.INFO,
        "%s at %r (%s bytes in %d parameters) is not sharded but part of the data-parallel weights: %s%s",
        f"{kind.__module__}.{kind.__qualname__}",
        path,
        f"{size:,}",
        len(inside),
        f"tied to {others[0]!r}" if others else why_no_table(module),
        advice if is_own else "",
    )


def _reasons(resolved: Resolved) -> list[str]:
    """What the sharders noted of what they left whole."""
    if not resolved.found.placements:
        return ["no sharder that splits dense weights was passed (TensorParallelSharder does)"]
    notes = list(dict.fromkeys(note for p in resolved.found.placements for note in hook(p, "notes") or ()))
    said = [note for note in notes if "left whole" in note or "nothing to split" in note]
    return said[:_NUM_SHOWN] + [f"and {len(said) - _NUM_SHOWN} more"] * (len(said) > _NUM_SHOWN)
