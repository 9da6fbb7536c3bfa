"""Which modules and weights of a model the sharders take: found once in a wrap, read only, nothing is changed.

[Note: who owns what]
Dense weights that a model sharder places (tensor parallel), and those that a plan gives a dense layout, are no tables:
the module of such a weight is not a site, even where a sharder would take it (an `nn.Embedding` of a vocabulary).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.contracts import AnySharder, ModelPlacement, ModelSharder, ModuleSharder, ParameterInfo
from dmp.env import ShardingEnv
from dmp.errors import PlanError, ShardError
from dmp.layouts.layout import Layout, ParameterSharding
from dmp.layouts.tables import data_parallel
from dmp.names import join_name
from dmp.places import tied_places
from dmp.plans.kept_places import kept_beside
from dmp.plans.weight_readers import Reader, find_readers
from dmp.registry import adopted, by_module_type, check_sharder_protocol, sharder_for, with_optimizer_facts


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
        return {name: join_name(self.path, name) for name in self.infos}

    def every_name(self) -> dict[str, str]:
        """Fully-qualified name, under every alias -> the first one."""
        return {join_name(alias, name): join_name(self.path, name) for alias in self.aliases for name in self.infos}


@dataclass(frozen=True)
class Sites:
    """The modules that module sharders may take, in the order of their paths in the model.

    Args:
        candidates: all of them.
        readers: path of each whose weights code besides its own forward may read -> what code.
    """

    candidates: tuple[Site, ...]
    readers: Mapping[str, Reader]

    @property
    def read(self) -> dict[str, Reader]:
        """Parameters that would be tables, were they only looked up -> who else reads them."""
        read = [(site, self.readers[site.path]) for site in self.candidates if site.path in self.readers]
        return {name: reader for site, reader in read for name in site.names().values()}

    def taken(self, keep: Set[str] = frozenset()) -> tuple[Site, ...]:
        """Those that are sharded: without those that other code may read.

        Args:
            keep: parameters whose module is taken all the same, unless somebody keeps the module itself elsewhere.
        """
        return tuple(site for site in self.candidates if self._is_taken(site, keep))

    def parameters(self, keep: Set[str] = frozenset()) -> dict[str, tuple[ModuleSharder, ParameterInfo]]:
        """Fully-qualified name of every parameter that a plan must place -> who runs it and what is known of it.

        Args:
            keep: names that are placed as tables although code besides their module's forward may read them.
        """
        sites = self.taken(keep)
        return {name: (s.sharder, s.infos[relative]) for s in sites for relative, name in s.names().items()}

    def _is_taken(self, site: Site, keep: Set[str]) -> bool:
        reader = self.readers.get(site.path)
        return reader is None or not (reader.is_keeper or keep.isdisjoint(site.every_name()))


@dataclass(frozen=True, eq=False)
class Found:
    """What the sharders take of one model on one mesh; planner, check and wrapper read the same.

    Args:
        module: the model, which must not change as long as this is used.
        sharders: who was asked.
        env: the mesh.
        asked: the tensor-parallel layouts that the model sharders were asked for; empty where they chose.
        placements: what they split.
        sites: what the module sharders may take.
    """

    module: nn.Module
    sharders: tuple[AnySharder, ...]
    env: ShardingEnv
    asked: Mapping[str, Layout]
    placements: tuple[ModelPlacement, ...]
    sites: Sites

    @classmethod
    def of(
        cls,
        module: nn.Module,
        sharders: Iterable[AnySharder],
        env: ShardingEnv,
        given: Mapping[str, Layout] | None = None,
        known: Found | None = None,
    ) -> Found:
        """Ask the sharders, or take what is known already.

        Args:
            sharders: TorchRec's among them stand for ours.
            given: a plan's dense layouts; without tensor-parallel ones the model sharders choose themselves.
            known: what these sharders said before; asked again only if `given` wants something else.

        Raises:
            PlanError: what `place_dense` raises.
            ShardError: what is no sharder, or one that names parameters which its module lacks.
        """
        given = given or {}
        asked = {name: layout for name, layout in given.items() if layout.is_tensor_parallel}
        if known is not None and known.module is module and known.env == env and asked in (known.asked, known.split):
            _check_placements(known.sharders, known.placements, given)
            return known
        sharders = tuple(adopted(sharders))
        for sharder in sharders:
            check_sharder_protocol(sharder)
        placements = place_dense(module, sharders, env, given)
        split = {name for p in placements for name in p.layouts}
        _check_not_kept(module, split)
        sites = _find_sites(module, sharders, split)
        _check_offers(sites.candidates, env)
        return cls(module, sharders, env, asked, placements, sites)

    @property
    def split(self) -> dict[str, Layout]:
        """Every parameter that a model sharder splits -> how."""
        return {name: layout for p in self.placements for name, layout in p.layouts.items()}

    def frozen_copies(self, names: Set[str]) -> dict[str, str]:
        """Frozen tables of these names that have the values of a trained one -> that one, as a teacher's has.

        What holds one value throughout is nobody's copy.
        """
        own = {name: p for name, p in self.module.named_parameters() if name in names and not p.is_meta}
        trained: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
        for name, p in own.items():
            if p.requires_grad:
                trained.setdefault((p.shape, p.dtype), []).append(name)
        alike = {name: trained.get((p.shape, p.dtype), []) for name, p in own.items() if not p.requires_grad}
        first = {n: next((of for of in those if _has_values_of(own[n], own[of])), None) for n, those in alike.items()}
        return {name: of for name, of in first.items() if of is not None}


def _has_values_of(p: torch.Tensor, of: torch.Tensor) -> bool:
    if not p.numel() or not torch.equal(p[:_FIRST_ROWS], of[:_FIRST_ROWS]) or bool((p == p.flatten()[0]).all()):
        return False
    return torch.equal(p, of)


_FIRST_ROWS = 64
"""Compared before all others, which may be many."""


def with_the_rest(entries: Mapping[str, ParameterSharding], found: Found) -> dict[str, ParameterSharding]:
    """A plan's entries and, for the tables of modules that it does not name at all, copies on every rank."""
    copied = ParameterSharding(data_parallel(), "dense")
    rest: dict[str, ParameterSharding] = {}
    for site in found.sites.taken(entries.keys()):
        if entries.keys().isdisjoint(site.every_name()):
            rest |= dict.fromkeys(site.names().values(), copied)
    return {**rest, **entries}


def plan_parameters(
    module: nn.Module, sharders: Iterable[AnySharder], without: Set[str] = frozenset(), keep: Set[str] = frozenset()
) -> dict[str, tuple[ModuleSharder, ParameterInfo]]:
    """Fully-qualified name of every parameter that a plan must place -> who runs it and what is known of it.

    Args:
        without: names of parameters that are placed already, such as `place_dense`'s.
        keep: names that are placed as tables although code besides their module's forward may read them.
    """
    return _find_sites(module, sharders, without).parameters(keep)


def dense_parameters(module: nn.Module, without: Set[str] = frozenset()) -> dict[str, ParameterInfo]:
    """Every parameter, by its first name, that is no table.

    Args:
        without: the tables' names.
    """
    tables = _ids(module, without)
    return {
        name: ParameterInfo(tuple(p.shape), p.dtype, "dense", trained=p.requires_grad)
        for name, p in module.named_parameters()
        if id(p) not in tables and not is_lazy(p)
    }


def place_dense(
    module: nn.Module, sharders: Iterable[AnySharder], env: ShardingEnv, given: Mapping[str, Layout] | None = None
) -> tuple[ModelPlacement, ...]:
    """What the model sharders among `sharders` split, in their order; nothing is changed.

    Args:
        given: a plan's dense layouts; without tensor-parallel ones the sharders choose themselves.

    Raises:
        PlanError: two sharders that claim one parameter, a given layout that nobody runs, or what `place` raises.
    """
    given, sharders = given or {}, tuple(sharders)
    placements = tuple(sharder.place(module, given, env) for sharder in sharders if isinstance(sharder, ModelSharder))
    _check_placements(sharders, placements, given)
    return placements


def _check_placements(
    sharders: Iterable[AnySharder], placements: tuple[ModelPlacement, ...], given: Mapping[str, Layout]
) -> None:
    """One owner for each parameter that is split, and as it is given."""
    owner: dict[str, str] = {}
    names = [type(sharder).__name__ for sharder in sharders if isinstance(sharder, ModelSharder)]
    for who, placement in zip(names, placements, strict=True):
        for name, layout in placement.layouts.items():
            if name in owner:
                raise PlanError(f"{owner[name]} and {who} both split {name!r}; pass one of them", table=name)
            if given.get(name, layout) != layout:
                raise PlanError(
                    f"plan entry {name!r} = {given[name]}, but {who} splits it as {layout}; leave "
                    f"it out of the plan, or out of what that splits: sharders=[{who}(...), ...]",
                    table=name,
                )
            owner[name] = who
    for name, layout in given.items():
        if layout.is_tensor_parallel and name not in owner:
            raise PlanError(
                f"plan entry {name!r} = {layout}: no sharder runs it; pass TensorParallelSharder among the sharders",
                table=name,
            )


def _find_sites(module: nn.Module, sharders: Iterable[AnySharder], without: Set[str]) -> Sites:
    """Modules that a sharder takes.

    A module whose parameters are tied to another module's stays with the data-parallel part, for a sharded copy could
    not stay tied; so does one with a parameter named in `without` (any of its names).
    """
    by_type = by_module_type(sharders)
    tied = {id(place.tensor) for places in tied_places(module) for place in places}
    excluded = _ids(module, without)
    found: dict[int, Site] = {}
    for path, candidate, sharder in _takers(module, "", by_type):
        if id(candidate) in found:
            site = found[id(candidate)]
            found[id(candidate)] = Site(site.path, (*site.aliases, path), candidate, site.sharder, site.infos)
            continue
        infos = _named(candidate, path, sharder)
        if not infos or any(id(p) in tied or id(p) in excluded for p in candidate.parameters()):
            continue
        own = dict(candidate.named_parameters())
        _check_names(own, path, sharder, infos)
        known = {name: _with_facts(info, own[name]) for name, info in infos.items()}
        found[id(candidate)] = Site(path, (path,), candidate, sharder, known)
    readers = find_readers(module, {key: (site.module, site.infos) for key, site in found.items()})
    return Sites(tuple(found.values()), {found[key].path: reader for key, reader in readers.items()})


def _check_not_kept(module: nn.Module, split: Set[str]) -> None:
    """Whether what is split is read where it is alone.

    Raises:
        PlanError: a weight that the model would go on reading as it was.
    """
    where = kept_beside(module) if split else {}
    for name, parameter in module.named_parameters() if where else ():
        if name in split and id(parameter) in where:
            raise PlanError(
                f"tensor parallelism splits {name!r}, which {where[id(parameter)]} keeps beside its place: what is "
                "read there would stay as it is now, whole and untrained. Read it by its place (self.layer.weight), or "
                "name what is to be split without it: TensorParallelSharder({module path: style})",
                table=name,
            )


def _check_offers(sites: Iterable[Site], env: ShardingEnv) -> None:
    """Whether what each sharder offers for a parameter is layouts.

    Raises:
        ShardError: it is not.
    """
    for sharder, info in {id(site.sharder): (site.sharder, next(iter(site.infos.values()))) for site in sites}.values():
        offered: object = sharder.layouts(info, env)
        offered = [*offered] if isinstance(offered, Iterable) else offered
        if not (isinstance(offered, list) and all(isinstance(layout, Layout) for layout in offered)):
            raise ShardError(
                f"{type(sharder).__name__}.layouts gave {offered!r} for a parameter of shape {info.shape}; expected "
                "layouts, as [row_wise(), table_wise(0)]"
            )


def _takers(
    module: nn.Module, path: str, by_type: Mapping[type[nn.Module], ModuleSharder]
) -> Iterator[tuple[str, nn.Module, ModuleSharder]]:
    """(path, module, sharder) of the outermost modules that have a sharder, every path of a shared one."""
    sharder = sharder_for(module, by_type)
    if sharder is not None:
        yield path, module, sharder
        return
    for name, child in module._modules.items():
        if child is not None:
            yield from _takers(child, join_name(path, name), by_type)


def _ids(module: nn.Module, names: Set[str]) -> set[int]:
    """id of the parameters that have one of these names."""
    if not names:
        return set()
    return {id(p) for name, p in module.named_parameters(remove_duplicate=False) if name in names}


def _named(module: nn.Module, path: str, sharder: ModuleSharder) -> Mapping[str, ParameterInfo]:
    """What a sharder says of a module's parameters.

    Raises:
        ShardError: that is something else than it must be.
    """
    infos = sharder.parameters(module)
    if not (isinstance(infos, Mapping) and all(isinstance(info, ParameterInfo) for info in infos.values())):
        raise ShardError(
            f"{type(sharder).__name__}.parameters gave {infos!r} for {type(module).__name__} at {path!r}; expected a "
            "dict of ParameterInfo by the parameters' names"
        )
    return infos


def _with_facts(info: ParameterInfo, parameter: nn.Parameter) -> ParameterInfo:
    """What a sharder need not say of one of its parameters."""
    if not parameter.requires_grad and info.optimizer is None:
        info = replace(info, trained=False, state_bytes=(0, 0))
    return with_optimizer_facts(info)


def _check_names(
    own: Mapping[str, nn.Parameter], path: str, sharder: ModuleSharder, infos: Mapping[str, ParameterInfo]
) -> None:
    actual = {name: tuple(p.shape) for name, p in own.items()}
    for name, info in infos.items():
        if actual.get(name) != tuple(info.shape):
            raise ShardError(
                f"{type(sharder).__name__}.parameters names {name!r} of shape {tuple(info.shape)} in module {path!r}, "
                f"which has {actual}"
            )
