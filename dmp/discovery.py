"""Which modules of a model the sharders take, and whether a plan fits them: read only, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn

from dmp.contracts import ModuleSharder, ParameterInfo
from dmp.env import ShardingEnv
from dmp.errors import PlanError, ShardError
from dmp.layout import Layout, ParameterSharding
from dmp.registry import sharder_for


@dataclass(frozen=True)
class Site:
    """A module that a sharder takes.

    Args:
        path: its first path in the model (`""` for the model itself).
        aliases: every path, the first included; more than one for a shared module.
        module: the module.
        sharder: who takes it.
        infos: its parameters by their names relative to it.
    """

    path: str
    aliases: tuple[str, ...]
    module: nn.Module
    sharder: ModuleSharder
    infos: Mapping[str, ParameterInfo]

    def names(self) -> dict[str, str]:
        """Relative parameter name -> fully-qualified name."""
        return {name: join(self.path, name) for name in self.infos}


def join(path: str, name: str) -> str:
    """A dotted path."""
    return f"{path}.{name}" if path and name else path or name


def find_sites(module: nn.Module, sharders: Iterable[ModuleSharder]) -> list[Site]:
    """Modules that a sharder takes, in the order of their paths in the model.

    A module whose parameters are tied to another module's stays with the data-parallel part, for a sharded copy could
    not stay tied.
    """
    sharders = list(sharders)
    owners = _owners(module)
    found: dict[int, Site] = {}
    for path, candidate in _walk(module, "", lambda m: sharder_for(m, sharders) is not None):
        if id(candidate) in found:
            site = found[id(candidate)]
            found[id(candidate)] = Site(site.path, (*site.aliases, path), candidate, site.sharder, site.infos)
            continue
        sharder = sharder_for(candidate, sharders)
        assert sharder is not None
        infos = dict(sharder.parameters(candidate))
        if not infos or _is_tied(candidate, owners):
            continue
        _check_names(candidate, path, sharder, infos)
        found[id(candidate)] = Site(path, (path,), candidate, sharder, infos)
    return list(found.values())


def plan_parameters(
    module: nn.Module, sharders: Iterable[ModuleSharder]
) -> dict[str, tuple[ModuleSharder, ParameterInfo]]:
    """Fully-qualified name of every parameter that a plan must place -> who runs it and what is known of it."""
    return {
        name: (site.sharder, site.infos[relative])
        for site in find_sites(module, sharders)
        for relative, name in site.names().items()
    }


def check_plan(
    plan: Mapping[str, ParameterSharding], module: nn.Module, sites: Iterable[Site], env: ShardingEnv
) -> dict[str, ParameterSharding]:
    """The plan under the parameters' first names, checked in both directions.

    Raises:
        PlanError: a name that the model lacks or that no sharder takes, a parameter that the plan lacks, a layout that
            does not fit the mesh or that the sharder cannot run.
    """
    sites = list(sites)
    infos = {name: (s, s.infos[rel]) for s in sites for rel, name in s.names().items()}
    first = {join(alias, rel): join(s.path, rel) for s in sites for alias in s.aliases for rel in s.infos}
    resolved: dict[str, ParameterSharding] = {}
    for name, entry in plan.items():
        if name not in first:
            raise PlanError(_unknown_name(name, module, list(first)), table=name)
        known = resolved.get(first[name])
        if known is not None and known != entry:
            raise PlanError(f"plan gives {name!r} {entry}, but {known} under another of its names", table=name)
        resolved[first[name]] = entry
    missing = [name for name in infos if name not in resolved]
    if missing:
        raise PlanError(
            f"the plan has no entry for {_some(missing)}; every parameter that a sharder takes needs a layout "
            "(data_parallel() keeps a copy on every rank), or plan the rest with planner.plan(..., pinned=plan)",
            table=missing[0],
        )
    for name, entry in resolved.items():
        site, info = infos[name]
        _check_layout(name, entry.layout, site.sharder, info, env)
    return resolved


def _check_layout(name: str, layout: Layout, sharder: ModuleSharder, info: ParameterInfo, env: ShardingEnv) -> None:
    try:
        layout.shards(info.shape, env)
    except ShardError as error:
        raise PlanError(f"plan entry {name!r} = {layout}: {error}", table=name) from error
    accepts = getattr(sharder, "accepts", None)
    offered = list(dict.fromkeys(o.name for o in sharder.layouts(info, env)))
    if not (accepts(info, layout, env) if accepts else layout.name in offered):
        raise PlanError(
            f"plan entry {name!r} = {layout}: {type(sharder).__name__} cannot run it for shape {info.shape} on this "
            f"mesh; it offers {', '.join(offered)}",
            table=name,
        )


def _walk(module: nn.Module, path: str, stop_at: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of the outermost modules for which `stop_at(module)`, every path of a shared one."""
    if stop_at(module):
        yield path, module
        return
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, join(path, name), stop_at)


def _owners(module: nn.Module) -> dict[int, set[tuple[int, str]]]:
    """id(parameter) -> the (id(module), attribute) places that hold it."""
    owners: dict[int, set[tuple[int, str]]] = {}
    for holder in module.modules():
        for name, parameter in holder._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add((id(holder), name))
    return owners


def _is_tied(module: nn.Module, owners: dict[int, set[tuple[int, str]]]) -> bool:
    return any(len(owners[id(parameter)]) > 1 for parameter in module.parameters())


def _check_names(module: nn.Module, path: str, sharder: ModuleSharder, infos: Mapping[str, ParameterInfo]) -> None:
    actual = {name: tuple(p.shape) for name, p in module.named_parameters()}
    for name, info in infos.items():
        if actual.get(name) != tuple(info.shape):
            raise ShardError(
                f"{type(sharder).__name__}.parameters names {name!r} of shape {tuple(info.shape)} in module {path!r}, "
                f"which has {actual}"
            )


def _unknown_name(name: str, module: nn.Module, shardable: list[str]) -> str:
    if name in dict(module.named_parameters(remove_duplicate=False)):
        return (
            f"plan names {name!r}, which no sharder takes (no sharder for its module, or it is tied to a parameter of "
            f"another module): it belongs to the data-parallel part and must not be in the plan. "
            f"Parameters to plan: {_some(shardable)}"
        )
    close = get_close_matches(name, shardable, n=3, cutoff=0.5)
    hint = f"did you mean {_some(close)}?" if close else f"parameters to plan: {_some(shardable)}"
    return f"plan names {name!r}, which the model does not have; {hint}"


def _some(names: list[str], count: int = 5) -> str:
    shown = ", ".join(repr(n) for n in names[:count])
    return (shown or "none") + (f" and {len(names) - count} more" if len(names) > count else "")
