"""A running model in another plan: its tables' values and state moved from rank to rank, and nothing else touched.

The order: what all ranks are asked for is the same, and fits -> room for what is new, on all ranks -> who has what, and
will have -> values move, by the intersection of old and new rectangles -> every rank has all -> the new tables take the
old ones' places. Until that last step, which is local, the model is as it was; so is it where an error comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from dmp.calls import Calls
from dmp.contracts import Resharded, ShardedModule, set_hook
from dmp.errors import PlanError, ShardError
from dmp.names import join_name
from dmp.plans.plan import ShardingPlan
from dmp.ranks import fail_together, gather_words, results_of_all
from dmp.wrap.earlier.earlier_optimizers import follow
from dmp.wrap.making.agreement import check_agreement
from dmp.wrap.making.assembly import Assembly, Owned, fused_parameters
from dmp.wrap.optimizers.given_optimizers import follow_parts, layers_of, with_state
from dmp.wrap.replan.beside import Beside
from dmp.wrap.replan.carried import Carried, Parameter, fused_state, parameters_of
from dmp.wrap.replan.move_values import MovedBytes, move_values
from dmp.wrap.replan.next_plan import changed_names, changed_sites, next_plan
from dmp.wrap.replan.remade import resharded
from dmp.wrap.values.state_hooks import register_state_hooks

WHAT = "model.reshard"


@dataclass(frozen=True)
class Resharding:
    """What `model.reshard` has done.

    Args:
        plan: in force now.
        moved: names of the parameters whose layouts have changed.
        sent_bytes: of each rank, to other ranks: weights, gradients and optimizer state.
        kept_bytes: of each rank: what it needed and had.
    """

    plan: ShardingPlan
    moved: tuple[str, ...]
    sent_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...]


@dataclass
class _Ready:
    """Everything that is known and allocated before values move.

    Args:
        sites: of the modules whose tables change, with these.
        parameters: in both forms.
        carried: every tensor to be moved.
        then: local steps that put what was moved in place.
    """

    sites: list[tuple[Owned, nn.Module, Resharded]] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    carried: list[Carried] = field(default_factory=list)
    then: list[Callable[[], Any]] = field(default_factory=list)


def reshard(made: Assembly, given: Any, path: str | None, optimizer: Any, calls: Calls) -> tuple[Assembly, Resharding]:
    """The model in the plan that `given` leads to; errors as of `DistributedModelParallel.reshard`.

    Args:
        path: see `next_plan`.
        optimizer: those that the user passes.
        calls: of the model.
    """
    env = made.env

    plan, layers = _together(made, lambda: (next_plan(made, given, path), layers_of(optimizer)))
    held = ", ".join(f"{type(layer).__name__} of {len(layer.param_groups)} groups" for layer in layers)
    facts = {"plan": plan.to_json(), "optimizers": held}
    check_agreement(facts, env, WHAT, "every rank must call model.reshard in the same way")
    changed = changed_names(made, plan)
    told = results_of_all(lambda: _beside(made, layers), env.everyone, WHAT)
    ready = _together(made, lambda: _prepare(made, plan, layers, Beside.of_all(told, env.rank)))
    moved = move_values(ready.carried, env, WHAT) if ready.sites else MovedBytes(0, 0)
    counts = gather_words(WHAT, [moved.sent, moved.kept], env.everyone)  # every rank has all by now
    made = _put(made, ready, layers, plan, calls)
    sent, kept = ([row[i] for row in counts] for i in (0, 1))
    return made, Resharding(plan, changed, tuple(sent), tuple(kept))


def _together(made: Assembly, step: Callable[[], Any]) -> Any:
    return fail_together(step, made.env.everyone, WHAT, kind=PlanError, as_it_is=True)


def _beside(made: Assembly, layers: Sequence[Optimizer]) -> Beside:
    """What lies beside this rank's tables."""
    optimizers = with_state(layers)
    for optimizer in optimizers:
        follow(optimizer)
    tables = {join_name(owned.path, name) for owned in made.owned for name in owned.infos}
    return Beside.of({name: p for name, p in made.module.named_parameters() if name in tables}, optimizers)


def _prepare(made: Assembly, plan: ShardingPlan, layers: Sequence[Optimizer], beside: Beside) -> _Ready:
    """Room for what is new, and all that is to be moved there; local, nothing of the model is changed.

    Raises:
        ShardError: a module that cannot, or values without storage.
    """
    ready = _Ready()
    staying = plan.keys() - {*changed_names(made, plan)}
    for owned in changed_sites(made, plan):
        module = made.module.get_submodule(owned.path)
        entries = {name: plan[join_name(owned.path, name)] for name in owned.infos}
        new = resharded(made, owned, entries)
        parameters = parameters_of(owned.path, module, new, staying)
        for p in parameters:
            if p.old.is_meta:
                raise ShardError(f"{p.name!r} is on meta: it has no values to move; load some first, or wrap it anew")
        ready.sites.append((owned, module, new))
        ready.parameters += parameters
        ready.carried += [p.value() for p in parameters]
        ready.carried += fused_state(owned.path, module, new)
        ready.carried += beside.moved_gradients(parameters, ready.then)
        ready.carried += beside.moved_state(with_state(layers), parameters, ready.then)
        beside.check_held(parameters)
    for carried in ready.carried:
        carried.check()
    return ready


def _put(made: Assembly, ready: _Ready, layers: Sequence[Optimizer], plan: ShardingPlan, calls: Calls) -> Assembly:
    """The new tables in the old ones' places; local."""
    for p in ready.parameters:
        p.take_over()
    for step in ready.then:
        step()
    for owned, module, new in ready.sites:
        taken = new.take_place()
        if taken is not module:
            if isinstance(taken, ShardedModule):
                register_state_hooks(taken, made.env)
            set_hook(taken, "module_path", owned.path)
            set_hook(taken, "calls", calls)
    made = replace(made, plan=plan)
    made.fused.follow(fused_parameters(made.module, made.owned, made.env))
    for p in ready.parameters:
        p.leave()
    follow_parts(layers, {id(p.old): p.new for p in ready.parameters})
    return made
