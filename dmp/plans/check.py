"""Whether a plan fits a model and a mesh, in both directions: read only, nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn

from dmp.contracts import AnySharder, ModuleSharder, ParameterInfo, hook
from dmp.env import ShardingEnv
from dmp.errors import PlanError, ShardError
from dmp.layouts.layout import Layout, ParameterSharding
from dmp.plans.find import Found, Site
from dmp.plans.oddities import oddity
from dmp.plans.private_state import refuse_private_state
from dmp.plans.weight_readers import Reader
from dmp.read_values import some


@dataclass(frozen=True)
class Resolved:
    """A plan that has been checked against a model and a mesh.

    Args:
        plan: every entry under its parameter's first name, with those that model sharders chose themselves.
        found: what the sharders take.
        sites: modules to be replaced.
    """

    plan: Mapping[str, ParameterSharding]
    found: Found
    sites: tuple[Site, ...]

    @property
    def tables(self) -> frozenset[str]:
        """Names of the parameters in those modules that their sharders take."""
        return frozenset(name for site in self.sites for name in site.names().values())


def check_plan(
    plan: Mapping[str, ParameterSharding],
    module: nn.Module,
    sharders: Iterable[AnySharder],
    env: ShardingEnv,
    known: Found | None = None,
) -> Resolved:
    """The plan under the parameters' first names, checked in both directions, and who runs it.

    Args:
        known: what these sharders are known to take.

    Raises:
        PlanError: a name that the model lacks or that no sharder takes, a parameter that the plan lacks, a layout that
            does not fit the mesh or that the sharder cannot run.
        ShardError: a module that each rank would teach something else.
    """
    dense = _dense_entries(plan, module, env)
    found = Found.of(module, sharders, env, dense, known)
    sites = found.sites.taken({n for n, e in plan.items() if not (e.layout.is_dense or e.layout.is_copied)})
    refuse_private_state(module, env, [s.module for s in sites])
    tables = _table_entries(plan, found, sites)
    missing = [name for site in sites for name in site.names().values() if name not in tables and name not in dense]
    if missing:
        raise PlanError(
            f"the plan has no entry for {some(missing, 5)}; every parameter that a sharder takes needs a layout "
            "(data_parallel() keeps a copy on every rank), or plan the rest with planner.plan(..., pinned=plan)",
            table=missing[0],
        )
    for site in sites:
        for relative, name in site.names().items():
            entry = tables.get(name) or ParameterSharding(dense[name])
            check_layout(name, entry.layout, site.sharder, site.infos[relative], env)
        names = [name for name in site.names().values() if name not in dense]
        if 0 < len(names) < len(site.infos):
            raise PlanError(f"plan gives some weights of {site.path!r} dense layouts, but not {some(names, 5)}")
    entries = {name: ParameterSharding(layout) for name, layout in {**dense, **found.split}.items()}
    replaced = tuple(site for site in sites if dense.keys().isdisjoint(site.names().values()))
    return Resolved({**tables, **entries}, found, replaced)


def _table_entries(
    plan: Mapping[str, ParameterSharding], found: Found, sites: Iterable[Site]
) -> dict[str, ParameterSharding]:
    """The plan's entries of tables under their parameters' first names."""
    first = {alias: name for site in sites for alias, name in site.every_name().items()}
    read = found.sites.read
    tables: dict[str, ParameterSharding] = {}
    for name, entry in plan.items():
        if entry.layout.is_dense:
            continue
        if name in read and name not in first and entry.layout.is_copied:
            continue  # a copy on every rank, as asked for: that is what the data-parallel part makes of it
        if name not in first:
            raise PlanError(_unknown_name(name, found.module, list(first), found.split, read), table=name)
        known = tables.setdefault(first[name], entry)
        if known != entry:
            raise PlanError(f"plan gives {name!r} {entry}, but {known} under another of its names", table=name)
    return tables


def _dense_entries(plan: Mapping[str, ParameterSharding], module: nn.Module, env: ShardingEnv) -> dict[str, Layout]:
    """The plan's dense layouts under their parameters' first names, each checked against shape and mesh."""
    named = [name for name, entry in plan.items() if entry.layout.is_dense]
    if not named:
        return {}
    known = dict(module.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in module.named_parameters()}
    dense: dict[str, Layout] = {}
    for name in named:
        layout = plan[name].layout
        if name not in known:
            raise PlanError(_unknown_name(name, module, list(known), {}, {}), table=name)
        if dense.setdefault(first[id(known[name])], layout) != layout:
            other = dense[first[id(known[name])]]
            raise PlanError(f"plan gives {name!r} {layout}, but {other} under another of its names", table=name)
        _check_shape(name, layout, known[name].shape, env)
    return dense


def _check_shape(name: str, layout: Layout, shape: tuple[int, ...], env: ShardingEnv) -> None:
    try:
        layout.check(shape, env)
    except ShardError as error:
        raise PlanError(f"plan entry {name!r} = {layout}: {error}", table=name) from error


def check_layout(name: str, layout: Layout, sharder: ModuleSharder, info: ParameterInfo, env: ShardingEnv) -> None:
    """Whether a sharder runs a layout for a parameter on a mesh.

    Raises:
        PlanError: it does not, or the layout does not fit.
    """
    _check_shape(name, layout, info.shape, env)
    if layout.is_dense and layout.is_copied and info.optimizer is None:
        return  # an ordinary dense weight then, which no sharder runs
    accepts = None if layout.is_dense else hook(sharder, "accepts")
    offered = list(dict.fromkeys(o.name for o in sharder.layouts(info, env)))
    if not (accepts(info, layout, env) if accepts else layout.name in offered):
        why_not = None if layout.is_dense else hook(sharder, "why_not")
        reason = why_not(info, layout, env) if why_not else ""
        raise PlanError(
            f"plan entry {name!r} = {layout}: {type(sharder).__name__} cannot run it for shape {info.shape} on this "
            f"mesh{reason and ': '}{reason}; it offers {', '.join(offered)}",
            table=name,
        )


def _unknown_name(
    name: str, module: nn.Module, shardable: list[str], placed: Mapping[str, Layout], read: Mapping[str, Reader]
) -> str:
    if name in read:
        return (
            f"plan makes {name!r} a table, but {read[name].text}: leave the entry out, or give it replicate(). "
            f"{read[name].way_out}"
        )
    if name in placed:
        return f"plan gives {name!r} the layout of a table, but tensor parallelism splits it as {placed[name]}"
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if name in parameters:
        owner = module.get_submodule(name.rpartition(".")[0])
        tied = next((n for n, p in parameters.items() if n != name and p is parameters[name]), None)
        odd = oddity(owner) if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) else None
        why = f"tied to {tied!r}" if tied else odd or "no sharder for its module"
        return (
            f"plan names {name!r}, which no sharder takes ({why}): it belongs to the data-parallel "
            "part and needs no entry, or that of a dense weight (replicate(), fully_sharded()). "
            f"Parameters to plan: {some(shardable, 5) or 'none'}"
        )
    close = get_close_matches(name, shardable, n=3, cutoff=0.5)
    hint = f"did you mean {some(close)}?" if close else f"parameters to plan: {some(shardable, 5) or 'none'}"
    return f"plan names {name!r}, which the model does not have; {hint}"
