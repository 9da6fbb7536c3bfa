"""From a plain module to a wrapped model, step by step; it knows sharders and plans, and no tables.

The order: plan -> check plan and agreement of the ranks -> rank 0's values -> tables -> tensor parallel -> ties put
back -> data parallel on what remains -> fill what is on meta. Nothing of the module is changed before everything is
checked.

[Note: in place] Tensor parallelism and some data-parallel wrappers (FSDP2) change dense modules in place, by hooks that
belong to these very modules, so that they cannot be copied or turned back. A *skeleton* made just before, the same
structure on meta around the same sharded tables, is what copies and plain modules are built from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.calls import Calls
from dmp.chunked import PIECE
from dmp.contracts import ShardedModule, set_hook, takes_found
from dmp.errors import RanksError
from dmp.plans.check import Resolved, check_plan
from dmp.plans.find import Found, Site
from dmp.plans.plan import ShardingPlan, as_plan
from dmp.plans.remarks import remark
from dmp.registry import default_planner
from dmp.wrap.agreement import check_agreement, on_all_ranks, sync_from_first_rank
from dmp.wrap.arguments import Arguments
from dmp.wrap.assembly import Assembly, Owned, fused_of
from dmp.wrap.data_parallel import check_beforehand, start
from dmp.wrap.filling import check_made, fill_from_meta, rules_of
from dmp.wrap.initial_rules import Rules
from dmp.wrap.initial_values import materialise, shared_seed
from dmp.wrap.skeleton import skeleton_of
from dmp.wrap.state_hooks import register_state_hooks


@dataclass(frozen=True)
class _Initial:
    """Where values of what is on meta come from; rules are None where nothing is, or nobody wants it filled."""

    rules: Rules | None
    seed: int


def build(given: Arguments, calls: Calls) -> Assembly:
    """Wrap the module; all ranks, whose arguments are the same.

    Raises:
        PlanError: a plan that does not fit, ranks that disagree, or a model that fits no plan.
        ShardError: a module that its sharder cannot run.
    """
    resolved, plan = _resolved(given)
    if given.init_data_parallel:
        check_beforehand(given.wrapper, resolved)
    remark(resolved)
    initial = _initial(resolved, given)
    module, owned = _with_tables(resolved, plan, given, initial, calls)
    made = Assembly(
        env=given.env,
        device=given.device,
        plan=plan,
        wrapper=given.wrapper,
        placements=resolved.found.placements,
        module=module,
        owned=owned,
        fused=fused_of(module, owned),
        running=module,
    )
    return _with_dense(made, given, initial)


def mark_chunks(made: Assembly) -> None:
    """Mark the parameters that hold chunks, for optimizers that are wrong on those; DTensors show it themselves."""
    for sharded in made.sharded:
        is_cut = isinstance(sharded, ShardedModule) and made.env.table_size > 1
        chunks = sharded.chunked_state() if is_cut else ()  # type: ignore[operator]
        for name, parameter in sharded.named_parameters():
            if name in chunks:
                parameter._dmp_sharded = PIECE  # type: ignore[attr-defined]


def _resolved(given: Arguments) -> tuple[Resolved, ShardingPlan]:
    """The plan against model and mesh, on all ranks before anyone goes on."""
    plan, known = (given.plan, None) if given.plan is not None else _planned(given)

    def check() -> tuple[ShardingPlan, Resolved]:
        asked = as_plan(plan)
        return asked, check_plan(asked, given.module, given.sharders, given.env, known)

    def facts(made: tuple[ShardingPlan, Resolved]) -> dict[str, str]:
        asked, resolved = made
        return {
            "plan": asked.to_json(),
            "sharded modules": "\n".join(f"{s.path}: {type(s.module).__name__}" for s in resolved.sites),
            "plan with what sharders chose": "\n".join(f"{name}: {e}" for name, e in resolved.plan.items()),
        }

    asked, resolved = on_all_ranks(check, given.env, facts=facts)
    return resolved, ShardingPlan(resolved.plan, report=asked.report)


def _planned(given: Arguments) -> tuple[Any, Found | None]:
    """The planner's plan, and what the sharders take where the planner goes by that.

    A planner that raises on one rank alone has left the others in an exchange of its own.
    """
    planner = given.planner if given.planner is not None else default_planner()
    asked = (given.module, given.sharders, given.env)
    known = on_all_ranks(lambda: Found.of(*asked), given.env) if takes_found(planner) else None
    options = {} if known is None else {"found": known}
    plan, failure = _attempt(lambda: planner.collective_plan(*asked, **options))
    if isinstance(failure, RanksError):
        raise failure
    why = "" if failure is None else f", where the planner raised {type(failure).__name__}: {failure}"
    try:
        check_agreement({}, given.env, f"after planning{why}")
    except RanksError as error:
        raise (failure or error) from error
    if failure is not None:
        raise failure
    return plan, known


def _attempt(make: Any) -> tuple[Any, Exception | None]:
    """Result and error of a local step."""
    try:
        return make(), None
    except Exception as error:
        return None, error


def _initial(resolved: Resolved, given: Arguments) -> _Initial:
    """Rank 0's values everywhere, and what gives values to the rest."""
    rules = rules_of(given.module, resolved.sites, given.env.rank) if given.init_parameters else None
    sync_from_first_rank(given.module, given.env)
    return _Initial(rules, shared_seed(given.env) if given.init_parameters else 0)


def _with_tables(
    resolved: Resolved, plan: ShardingPlan, given: Arguments, initial: _Initial, calls: Calls
) -> tuple[nn.Module, tuple[Owned, ...]]:
    """The root with the module of each site replaced at all its paths, once all are made; and what was put in."""

    def make(site: Site) -> nn.Module:
        entries = {relative: plan[name] for relative, name in site.names().items()}
        new = site.sharder.shard(site.module, entries, given.env, given.device)
        check_made(site, new, initial.rules is not None)
        return new

    module = given.module
    modules = on_all_ranks(lambda: [make(site) for site in resolved.sites], given.env)
    for site, new in zip(resolved.sites, modules, strict=True):
        if new is not site.module:
            _carry_over(site.module, new)
        if isinstance(new, ShardedModule):
            register_state_hooks(new)
        set_hook(new, "module_path", site.path)
        set_hook(new, "calls", calls)
        if initial.rules is not None:
            fill_from_meta(site, new, initial.seed, initial.rules)
        for path in site.aliases:
            module = _with_submodule(module, path, new)
    return module, tuple(Owned(site.path, site.aliases, frozenset(site.infos)) for site in resolved.sites)


def _with_dense(made: Assembly, given: Arguments, initial: _Initial) -> Assembly:
    """Dense weights split in place, filled where they are on meta, and averaged."""
    sharded = made.sharded
    if any(p.layouts for p in made.placements):
        made = replace(made, skeleton=skeleton_of(made.module, sharded))
        _move(made.module, made.device, sharded)
    made.split_dense()
    takes_meta = given.init_data_parallel and made.shards_in_place
    if takes_meta:
        made = start(made)
    if initial.rules is not None:
        materialise(made.module, made.device, initial.seed, initial.rules, sharded)
    _move(made.module, made.device, sharded)
    return start(made) if given.init_data_parallel and not takes_meta else made


def _carry_over(old: nn.Module, new: nn.Module) -> None:
    """Training mode and the hooks that users put on the module."""
    new.train(old.training)
    for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(new, kind).update(getattr(old, kind))
    new._is_full_backward_hook = old._is_full_backward_hook
    for kind in ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"):
        getattr(new, kind).update(getattr(old, kind))


def _with_submodule(root: nn.Module, path: str, new: nn.Module) -> nn.Module:
    """The root after `new` was put at `path`: `new` itself where that is the root's."""
    if not path:
        return new
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, new)
    return root


def _move(module: nn.Module, device: torch.device, skip: list[nn.Module]) -> None:
    """Bring what no sharder owns to the device; lazy and meta tensors stay."""
    owned = {id(t) for s in skip for t in [*s.parameters(), *s.buffers()]}
    for t in [*module.parameters(), *module.buffers()]:
        if id(t) not in owned and not is_lazy(t) and not t.is_meta and t.device != device:
            t.data = t.data.to(device)
