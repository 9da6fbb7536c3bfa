"""From a plain module to a wrapped model, step by step; it knows sharders and plans, and no tables.

The order: plan -> check plan and agreement of the ranks -> rank 0's values -> tables -> tensor parallel -> ties put
back -> data parallel on what remains -> fill what is on meta. Nothing of the module is changed before everything is
checked.

[Note: in place] Tensor parallelism and some data-parallel wrappers (FSDP2) change dense modules in place, by hooks that
belong to these very modules, so that they cannot be copied or turned back. A *skeleton* made just before, the same
structure on meta around the same sharded tables, is what copies and plain modules are built from.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.calls import Calls
from dmp.chunked import CHUNKS_ONLY
from dmp.contracts import ShardedModule, hook, set_hook, takes_found
from dmp.errors import RanksError
from dmp.plans.check import Resolved, check_plan
from dmp.plans.find import Found, Site, with_the_rest
from dmp.plans.kept_places import rebind
from dmp.plans.plan import ShardingPlan, as_plan
from dmp.plans.remarks import remark
from dmp.plans.torchrec_plan import Setting, entries_of_torchrec, is_torchrec_plan, named_as_in_torchrec
from dmp.registry import default_planner
from dmp.wrap.making.agreement import check_agreement, on_all_ranks, sync_from_first_rank
from dmp.wrap.making.arguments import Arguments
from dmp.wrap.making.assembly import Assembly, Owned, fused_of
from dmp.wrap.making.data_parallel import check_beforehand, left_whole, start, start_later
from dmp.wrap.values.filling import check_made, fill_from_meta, rules_of, warn_of_kept
from dmp.wrap.values.initial_rules import Rules
from dmp.wrap.values.initial_values import materialise, shared_seed
from dmp.wrap.values.skeleton import skeleton_of
from dmp.wrap.values.state_hooks import carry_state_hooks, register_state_hooks

_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"),
)


@dataclass(frozen=True)
class _Checked:
    """All that is known before anything of the module is changed.

    Args:
        given: the wrapper's arguments.
        asked: the plan as given, or as planned.
        resolved: that plan, checked.
        rules: what gives values to what is on meta; None where nothing is, or nobody wants it filled.
    """

    given: Arguments
    asked: ShardingPlan
    resolved: Resolved
    rules: Rules | None

    @classmethod
    def of(cls, given: Arguments, plan: Any, known: Found | None) -> _Checked:
        """Check a plan against model and mesh, as far as one rank can."""
        is_theirs = is_torchrec_plan(plan)
        if is_theirs:
            known = Found.of(given.module, given.sharders, given.env, None, known)
            plan = with_the_rest(entries_of_torchrec(plan, given.module, given.env), known)
        asked = as_plan(plan)
        with named_as_in_torchrec() if is_theirs else nullcontext():
            resolved = check_plan(asked, given.module, given.sharders, given.env, known)
        if given.init_data_parallel:
            check_beforehand(given.wrapper, resolved)
        rules = rules_of(given.module, resolved.sites, given.env.rank) if given.init_parameters else None
        return cls(given, asked, resolved, rules)

    def plan(self) -> ShardingPlan:
        """The plan in force."""
        plan = ShardingPlan(self.resolved.plan, report=self.asked.report)
        infos = {name: site.infos[own] for site in self.resolved.sites for own, name in site.names().items()}
        fused = frozenset(name for name, info in infos.items() if info.optimizer is not None)
        plan.setting = Setting(self.given.env, {name: info.shape for name, info in infos.items()}, fused)
        return plan

    def facts(self) -> dict[str, str]:
        """What all ranks must share of it: name -> text."""
        return {
            "plan": self.asked.to_json(),
            "sharded modules": "\n".join(f"{s.path}: {type(s.module).__name__}" for s in self.resolved.sites),
            "plan with what sharders chose": "\n".join(f"{name}: {e}" for name, e in self.resolved.plan.items()),
        }


def build(given: Arguments, calls: Calls) -> Assembly:
    """Wrap the module; all ranks, whose arguments are the same.

    Raises:
        PlanError: a plan that does not fit, ranks that disagree, or a model that fits no plan.
        ShardError: a module that its sharder cannot run.
    """
    plan, known = (given.plan, None) if given.plan is not None else _planned(given)
    checked = on_all_ranks(lambda: _Checked.of(given, plan, known), given.env)
    check_agreement(checked.facts(), given.env)
    resolved = checked.resolved
    remark(resolved)
    copies = resolved.found.frozen_copies(resolved.tables) if given.env.size > 1 and given.env.rank == 0 else {}
    sync_from_first_rank(given.module, given.env)
    seed = shared_seed(given.env) if given.init_parameters else 0
    module, owned = _with_tables(checked, seed, calls)
    made = Assembly(
        env=given.env,
        device=given.device,
        plan=checked.plan(),
        wrapper=given.wrapper,
        placements=resolved.found.placements,
        module=module,
        owned=owned,
        fused=fused_of(module, owned, given.env),
        running=module,
        sharders=tuple(given.sharders),
        copies=copies,
    )
    return _with_dense(made, checked, seed)


def mark_chunks(made: Assembly) -> None:
    """Mark the parameters that hold chunks, for optimizers that are wrong on those; DTensors show it themselves."""
    for sharded in made.sharded:
        is_cut = isinstance(sharded, ShardedModule) and made.env.table_size > 1
        chunks = sharded.chunked_state() if is_cut else ()  # type: ignore[operator]
        for name, parameter in sharded.named_parameters():
            if name in chunks:
                parameter._dmp_sharded = CHUNKS_ONLY  # type: ignore[attr-defined]


def _planned(given: Arguments) -> tuple[Any, Found | None]:
    """The planner's plan, and what the sharders take where the planner goes by that.

    A planner that raises on one rank alone has left the others in an exchange of its own.
    """
    planner = given.planner if given.planner is not None else default_planner()
    asked = (given.module, given.sharders, given.env)
    known = on_all_ranks(lambda: Found.of(*asked), given.env) if takes_found(planner) else None
    options = {} if known is None else {"found": known}
    plan, failure = None, None
    try:
        plan = planner.collective_plan(*asked, **options)
    except RanksError:
        raise
    except Exception as error:
        failure = error
    why = "" if failure is None else f", where the planner raised {type(failure).__name__}: {failure}"
    try:
        check_agreement({}, given.env, f"after planning{why}")
    except RanksError as error:
        raise (failure or error) from error
    if failure is not None:
        raise failure
    return plan, known


def _with_tables(checked: _Checked, seed: int, calls: Calls) -> tuple[nn.Module, tuple[Owned, ...]]:
    """The root with the module of each site replaced at all its paths, once all are made; and what was put in."""
    given, resolved, rules = checked.given, checked.resolved, checked.rules

    def make(site: Site) -> nn.Module:
        entries = {relative: resolved.plan[name] for relative, name in site.names().items()}
        new = site.sharder.shard(site.module, entries, given.env, given.device)
        state = check_made(site, new, entries, given.env, rules is not None)
        if rules is not None:
            fill_from_meta(site, new, state, seed, rules)
        return new

    module = given.module
    for sharder in {id(site.sharder): site.sharder for site in resolved.sites}.values():
        connect = hook(sharder, "connect")
        if connect is not None:
            connect(given.env)
    modules = on_all_ranks(lambda: [make(site) for site in resolved.sites], given.env)
    for site, new in zip(resolved.sites, modules, strict=True):
        if new is not site.module:
            carry_over(site.module, new)
        if isinstance(new, ShardedModule):
            register_state_hooks(new, given.env)
        set_hook(new, "module_path", site.path)
        set_hook(new, "calls", calls)
        for path in site.aliases:
            if path:
                module.set_submodule(path, new)
            else:
                module = new
        stand_for = hook(new, "stand_for") if "" not in site.aliases else None  # a root may be wrapped again
        if stand_for is not None:
            stand_for(site.module)
    rebind(module, {s.module: new for s, new in zip(resolved.sites, modules, strict=True) if new is not s.module})
    sites = zip(resolved.sites, modules, strict=True)
    return module, tuple(Owned(s.path, s.aliases, s.sharder, s.infos, type(new)) for s, new in sites)


def _with_dense(made: Assembly, checked: _Checked, seed: int) -> Assembly:
    """Dense weights split in place, filled where they are on meta, and averaged."""
    starts, rules = checked.given.init_data_parallel, checked.rules
    sharded = made.sharded
    if any(p.layouts for p in made.placements):
        made = replace(made, skeleton=skeleton_of(made.module, sharded))
        _move(made.module, made.device, sharded)
    made.split_dense()
    takes_meta = starts and made.shards_in_place
    if takes_meta:
        if rules is not None and (whole := left_whole(made, True, made.sharded_names())):
            on_all_ranks(lambda: materialise(made.module, made.device, seed, rules, sharded, whole), made.env)
        made = start(made)
    if rules is not None:
        on_all_ranks(lambda: materialise(made.module, made.device, seed, rules, sharded), made.env)
        if made.device.type != "meta" and made.env.rank == 0:
            warn_of_kept(made.module, sharded)
    _move(made.module, made.device, sharded)
    if made.split_watch is not None:
        made.split_watch.know_data()
    if not starts or takes_meta:
        return made
    return start(made) if rules is None else start_later(made)  # a rule may draw from a generator of its own


def carry_over(old: nn.Module, new: nn.Module) -> None:
    """Training mode and the hooks that users put on the module, in the very dicts from which their handles remove."""
    new.train(old.training)
    new._is_full_backward_hook = old._is_full_backward_hook
    for kind in _HOOKS:
        if own := getattr(new, kind):
            own.update(getattr(old, kind))
        else:
            vars(new)[kind] = getattr(old, kind)
    carry_state_hooks(old, new)


def _move(module: nn.Module, device: torch.device, skip: list[nn.Module]) -> None:
    """Bring what no sharder owns to the device, unless that is meta, which holds no values; lazy tensors stay."""
    if device.type == "meta":
        return
    owned = {id(t) for s in skip for t in [*s.parameters(), *s.buffers()]}
    for t in [*module.parameters(), *module.buffers()]:
        if id(t) not in owned and not is_lazy(t) and not t.is_meta and t.device != device:
            t.data = t.data.to(device)
