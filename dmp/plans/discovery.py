"""Which modules and weights of a model the sharders take, and whether a plan fits them: read only, nothing is changed.

[Note: who owns what]
Dense weights that a model sharder places (tensor parallel), and those that a plan gives a dense layout, are no tables:
the module of such a weight is not a site, even where a sharder would take it (an `nn.Embedding` of a vocabulary).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn
from torch.nn.parameter import is_lazy

from dmp.contracts import ModelPlacement, ModelSharder, ModuleSharder, ParameterInfo
from dmp.env import ShardingEnv
from dmp.errors import PlanError, ShardError
from dmp.layouts.layout import Layout, ParameterSharding
from dmp.plans.private_state import refuse_private_state
from dmp.plans.weight_readers import find_readers
from dmp.registry import by_module_type, sharder_for, with_state_bytes

_log = logging.getLogger("dmp")
_LARGE_BYTES = 64 << 20  # what a warning is worth: copies on every rank


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


@dataclass(frozen=True)
class Resolved:
    """A plan that has been checked against a model and a mesh.

    Args:
        plan: every entry under its parameter's first name, with those that model sharders chose themselves.
        sites: modules to be replaced.
        placements: of the model sharders.
        read: parameters that would be tables, were they only looked up -> who else reads them.
    """

    plan: Mapping[str, ParameterSharding]
    sites: tuple[Site, ...]
    placements: tuple[ModelPlacement, ...]
    read: Mapping[str, str]


def join(path: str, name: str) -> str:
    """A dotted path."""
    return f"{path}.{name}" if path and name else path or name


def find_sites(
    module: nn.Module,
    sharders: Iterable[ModuleSharder | ModelSharder],
    without: Set[str] = frozenset(),
    keep: Set[str] = frozenset(),
) -> tuple[list[Site], dict[str, str]]:
    """Modules that a sharder takes, in the order of their paths in the model.

    A module whose parameters are tied to another module's stays with the data-parallel part, for a sharded copy could
    not stay tied; so does one with a parameter named in `without` (any of its names), and one whose parameters other
    code may read, unless `keep` names one of them and nobody keeps the module itself elsewhere.

    Returns:
        The sites; names of the parameters that other code may read (those in `keep` too) -> what code.
    """
    by_type = by_module_type(sharders)
    owners = _owners(module)
    excluded = _ids(module, without)
    found: dict[int, Site] = {}
    for path, candidate in _walk(module, "", lambda m: sharder_for(m, by_type) is not None):
        if id(candidate) in found:
            site = found[id(candidate)]
            found[id(candidate)] = Site(site.path, (*site.aliases, path), candidate, site.sharder, site.infos)
            continue
        sharder = sharder_for(candidate, by_type)
        assert sharder is not None
        infos = {name: with_state_bytes(info) for name, info in sharder.parameters(candidate).items()}
        if not infos or _is_tied(candidate, owners) or any(id(p) in excluded for p in candidate.parameters()):
            continue
        _check_names(candidate, path, sharder, infos)
        found[id(candidate)] = Site(path, (path,), candidate, sharder, infos)
    readers = find_readers(module, {key: (site.module, site.infos) for key, site in found.items()})
    kept = {k for k, reader in readers.items() if not (reader.is_keeper or keep.isdisjoint(_every_name(found[k])))}
    read = {name: reader.text for key, reader in readers.items() for name in found[key].names().values()}
    return [site for key, site in found.items() if key not in readers or key in kept], read


def plan_parameters(
    module: nn.Module,
    sharders: Iterable[ModuleSharder | ModelSharder],
    without: Set[str] = frozenset(),
    keep: Set[str] = frozenset(),
) -> dict[str, tuple[ModuleSharder, ParameterInfo]]:
    """Fully-qualified name of every parameter that a plan must place -> who runs it and what is known of it.

    Args:
        without: names of parameters that are placed already, such as `place_dense`'s.
        keep: names that are placed as tables although code besides their module's forward may read them.
    """
    return {
        name: (site.sharder, site.infos[relative])
        for site in find_sites(module, sharders, without, keep)[0]
        for relative, name in site.names().items()
    }


def dense_parameters(module: nn.Module, without: Set[str] = frozenset()) -> dict[str, ParameterInfo]:
    """Every parameter, by its first name, that is no table.

    Args:
        without: the tables' names.
    """
    tables = _ids(module, without)
    return {
        name: ParameterInfo(tuple(p.shape), p.dtype, "dense")
        for name, p in module.named_parameters()
        if id(p) not in tables and not is_lazy(p)
    }


def place_dense(
    module: nn.Module,
    sharders: Iterable[ModuleSharder | ModelSharder],
    env: ShardingEnv,
    given: Mapping[str, Layout] | None = None,
) -> tuple[ModelPlacement, ...]:
    """What the model sharders among `sharders` split, in their order; nothing is changed.

    Args:
        given: a plan's dense layouts; without tensor-parallel ones the sharders choose themselves.

    Raises:
        PlanError: two sharders that claim one parameter, a given layout that nobody runs, or what `place` raises.
    """
    given = given or {}
    placements: list[ModelPlacement] = []
    owner: dict[str, str] = {}
    for sharder in sharders:
        if not isinstance(sharder, ModelSharder):
            continue
        placement = sharder.place(module, given, env)
        for name, layout in placement.layouts.items():
            if name in owner:
                raise PlanError(
                    f"{owner[name]} and {type(sharder).__name__} both split {name!r}; pass one of them", table=name
                )
            if given.get(name, layout) != layout:
                raise PlanError(
                    f"plan entry {name!r} = {given[name]}, but {type(sharder).__name__} splits it as {layout}; leave "
                    f"it out of the plan, or out of what that splits: sharders=[{type(sharder).__name__}(...), ...]",
                    table=name,
                )
            owner[name] = type(sharder).__name__
        placements.append(placement)
    for name, layout in given.items():
        if layout.is_tensor_parallel and name not in owner:
            raise PlanError(
                f"plan entry {name!r} = {layout}: no sharder runs it; pass TensorParallelSharder among the sharders",
                table=name,
            )
    return tuple(placements)


def check_plan(
    plan: Mapping[str, ParameterSharding],
    module: nn.Module,
    sharders: Iterable[ModuleSharder | ModelSharder],
    env: ShardingEnv,
) -> Resolved:
    """The plan under the parameters' first names, checked in both directions, and who runs it.

    Raises:
        PlanError: a name that the model lacks or that no sharder takes, a parameter that the plan lacks, a layout that
            does not fit the mesh or that the sharder cannot run.
        ShardError: a module that each rank would teach something else.
    """
    sharders = list(sharders)
    dense = _dense_entries(plan, module, env)
    placements = place_dense(module, sharders, env, dense)
    placed = {name: layout for p in placements for name, layout in p.layouts.items()}
    tables = {name for name, e in plan.items() if not e.layout.is_dense and not e.layout.is_copied}
    sites, read = find_sites(module, sharders, placed.keys(), tables)
    refuse_private_state(module, env, [s.module for s in sites])
    infos = {name: (s, s.infos[rel]) for s in sites for rel, name in s.names().items()}
    first = {join(alias, rel): join(s.path, rel) for s in sites for alias in s.aliases for rel in s.infos}
    resolved: dict[str, ParameterSharding] = {}
    for name, entry in plan.items():
        if entry.layout.is_dense:
            continue
        if name in read and name not in first and entry.layout.is_copied:
            continue  # a copy on every rank, as asked for: that is what the data-parallel part makes of it
        if name not in first:
            raise PlanError(_unknown_name(name, module, list(first), placed, read), table=name)
        known = resolved.get(first[name])
        if known is not None and known != entry:
            raise PlanError(f"plan gives {name!r} {entry}, but {known} under another of its names", table=name)
        resolved[first[name]] = entry
    missing = [name for name in infos if name not in resolved and name not in dense]
    if missing:
        raise PlanError(
            f"the plan has no entry for {_some(missing)}; every parameter that a sharder takes needs a layout "
            "(data_parallel() keeps a copy on every rank), or plan the rest with planner.plan(..., pinned=plan)",
            table=missing[0],
        )
    for name in infos:
        site, info = infos[name]
        entry = resolved.get(name) or ParameterSharding(dense[name])
        _check_layout(name, entry.layout, site.sharder, info, env)
    left = [s for s in sites if not any(name in dense for name in s.names().values())]
    for site in sites:
        names = [name for name in site.names().values() if name not in dense]
        if site not in left and names:
            raise PlanError(f"plan gives some weights of {site.path!r} dense layouts, but not {_some(names)}")
    entries = {name: ParameterSharding(layout) for name, layout in {**dense, **placed}.items()}
    return Resolved({**resolved, **entries}, tuple(left), placements, read)


def say_what_is_read(resolved: Resolved, module: nn.Module) -> None:
    """Tell the logger "dmp" which tables are left to the data-parallel part because other code reads them."""
    placed = {name for site in resolved.sites for name in site.names().values()} | resolved.plan.keys()
    known = dict(module.named_parameters(remove_duplicate=False))
    for name, reader in resolved.read.items():
        if name not in placed:
            num_bytes = known[name].numel() * known[name].element_size()
            _log.log(
                logging.WARNING if num_bytes >= _LARGE_BYTES else logging.INFO,
                "%r (%s bytes) is no table but part of the data-parallel weights: %s reads it besides the forward of "
                "its own module. A plan entry such as row_wise() makes it a table all the same, and a read an error",
                name,
                f"{num_bytes:,}",
                reader,
            )


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
        try:
            layout.shards(known[name].shape, env)
        except ShardError as error:
            raise PlanError(f"plan entry {name!r} = {layout}: {error}", table=name) from error
    return dense


def _check_layout(name: str, layout: Layout, sharder: ModuleSharder, info: ParameterInfo, env: ShardingEnv) -> None:
    try:
        layout.shards(info.shape, env)
    except ShardError as error:
        raise PlanError(f"plan entry {name!r} = {layout}: {error}", table=name) from error
    if layout.is_dense and layout.is_copied and info.optimizer is None:
        return  # an ordinary dense weight then, which no sharder runs
    accepts = None if layout.is_dense else getattr(sharder, "accepts", None)
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


def _every_name(site: Site) -> set[str]:
    return {join(alias, name) for alias in site.aliases for name in site.infos}


def _owners(module: nn.Module) -> dict[int, set[tuple[int, str]]]:
    """id(parameter) -> the (id(module), attribute) places that hold it."""
    owners: dict[int, set[tuple[int, str]]] = {}
    for holder in module.modules():
        for name, parameter in holder._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add((id(holder), name))
    return owners


def _ids(module: nn.Module, names: Set[str]) -> set[int]:
    """id of the parameters that have one of these names."""
    if not names:
        return set()
    return {id(p) for name, p in module.named_parameters(remove_duplicate=False) if name in names}


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


def _unknown_name(
    name: str, module: nn.Module, shardable: list[str], placed: Mapping[str, Layout], read: Mapping[str, str]
) -> str:
    if name in read:
        return (
            f"plan makes {name!r} a table, but {read[name]} reads it besides its own module's forward, where a table's "
            "piece would be taken for the whole: leave the entry out, or give it replicate()"
        )
    if name in placed:
        return f"plan gives {name!r} the layout of a table, but tensor parallelism splits it as {placed[name]}"
    if name in dict(module.named_parameters(remove_duplicate=False)):
        return (
            f"plan names {name!r}, which no sharder takes (no sharder for its module, or it is tied to a parameter of "
            f"another module): it belongs to the data-parallel part and needs no entry, or that of a dense weight "
            f"(replicate(), fully_sharded()). "
            f"Parameters to plan: {_some(shardable)}"
        )
    close = get_close_matches(name, shardable, n=3, cutoff=0.5)
    hint = f"did you mean {_some(close)}?" if close else f"parameters to plan: {_some(shardable)}"
    return f"plan names {name!r}, which the model does not have; {hint}"


def _some(names: list[str], count: int = 5) -> str:
    shown = ", ".join(repr(n) for n in names[:count])
    return (shown or "none") + (f" and {len(names) - count} more" if len(names) > count else "")
