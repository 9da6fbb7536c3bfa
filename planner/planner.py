"""`ShardingPlanner`: from a module's parameters to a plan and a report. Pure but for `collective_plan`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from torch import nn

from dmp import (
    Found,
    Layout,
    ModelSharder,
    ModuleSharder,
    ParameterSharding,
    PlanError,
    ShardingEnv,
    ShardingPlan,
    dense_parameters,
)
from planner.broadcast import from_first_rank
from planner.candidates.constraints import Constraint, constraints_of
from planner.candidates.dense import decide, vocabularies
from planner.candidates.offers import Offers
from planner.costs.cost_model import CostModel
from planner.costs.topology import Topology
from planner.given import is_number
from planner.report.infeasible import plan_error
from planner.report.report import PlanReport
from planner.report.summary import summarise
from planner.search.problem import Infeasible
from planner.search.solve import search
from planner.text import shown

Pinned = Mapping[str, ParameterSharding | Layout] | None


class ShardingPlanner:
    """Gives every parameter that a sharder takes one of the layouts that the sharder offers.

    The same arguments give the same plan on every machine, unless the time budget cuts the search short, which the
    report says.

    Args:
        topology: of the machine; by default `Topology.of(env)`.
        constraints: parameter name, table name or pattern -> `Constraint`.
        cost_model: what a choice costs.
        batch_size: samples per data rank.
        time_budget_s: wall time after which the search stops at the best plan so far.

    Attributes:
        report: `PlanReport` of the last plan, None before.

    Example:
        >>> planner = ShardingPlanner(batch_size=2048, constraints={"t1": Constraint(layouts=["row_wise"])})
        >>> plan = planner.plan(module, sharders, ShardingEnv.abstract((8,), ("dp",)))
    """

    def __init__(
        self,
        topology: Topology | None = None,
        constraints: Mapping[str, Constraint] | None = None,
        cost_model: CostModel | None = None,
        batch_size: int = 512,
        time_budget_s: float = 10.0,
    ) -> None:
        if not is_number(batch_size) or not is_number(time_budget_s):
            raise ValueError(
                f"batch_size and time_budget_s must be positive; got batch_size={shown(batch_size)}, "
                f"time_budget_s={shown(time_budget_s)}"
            )
        if constraints is not None and not isinstance(constraints, Mapping):
            raise ValueError(f"constraints must be a dict of parameter name -> Constraint; got {shown(constraints)}")
        self.topology = topology
        self.constraints = dict(constraints) if constraints is not None else {}
        self.cost_model = cost_model if cost_model is not None else CostModel()
        self.batch_size = batch_size
        self.time_budget_s = time_budget_s
        self.report: PlanReport | None = None

    def plan(
        self,
        module: nn.Module,
        sharders: Iterable[ModuleSharder | ModelSharder],
        env: ShardingEnv,
        pinned: Pinned = None,
        *,
        found: Found | None = None,
    ) -> ShardingPlan:
        """A plan for `module`, real or on meta, on a mesh that need not be here; communicates with nobody.

        Args:
            pinned: entries to keep as they are; their load and memory count.
            found: what these sharders are known to take of the module on this mesh.

        Returns:
            The plan of every parameter that a sharder takes, with its report as `plan.report`. Dense weights that it
            does not name are split or copied as the mesh's axes say.

        Raises:
            PlanError: no plan fits (with `.table`, `.rank`, `.bytes_short`), or a constraint or pinned entry is wrong.
        """
        begin = time.monotonic()
        topology = self.topology if self.topology is not None else Topology.of(env)
        given, pinned = _dense_part(pinned)
        found = Found.of(module, sharders, env, given, found)
        parameters = found.parameters(frozenset(pinned if isinstance(pinned, Mapping) else ()))
        constraints = constraints_of(self.constraints, parameters)
        kept = _by_first_name(pinned, module, [name for name in parameters if name not in given])
        weights = dense_parameters(module, parameters.keys() - given.keys())
        given |= vocabularies(parameters, weights, constraints, {**kept, **given}, env)
        parameters = {name: of for name, of in parameters.items() if name not in given}
        weights = dense_parameters(module, parameters.keys())
        dense = decide(weights, found.placements, given, env, topology)
        offers = Offers.of(parameters, constraints, kept, self.cost_model, env, topology, self.batch_size)
        problem = offers.problem(env, topology, self.cost_model, dense.training_bytes)
        try:
            solution = search(problem, lambda: time.monotonic() - begin > self.time_budget_s)
        except Infeasible as error:
            raise plan_error(error, offers, problem, topology) from None
        layouts = offers.layouts(solution.choices, env)
        plan = ShardingPlan({**layouts, **dense.layouts})
        if kept or given:
            plan.validate(module, env, found.sharders, found=found)
        self.report = summarise(offers, layouts, problem, solution, dense, time.monotonic() - begin)
        plan.report = self.report
        return plan

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Iterable[ModuleSharder | ModelSharder],
        env: ShardingEnv,
        pinned: Pinned = None,
        *,
        found: Found | None = None,
    ) -> ShardingPlan:
        """`plan` on rank 0 of the env, given to all its ranks; every rank must call it.

        Raises:
            PlanError: on every rank, what rank 0's planning raised; or a rank read another plan than rank 0 sent.
        """

        def planned() -> tuple[ShardingPlan, PlanReport]:
            options = {} if found is None else {"found": found}
            plan = self.plan(module, sharders, env, pinned, **options)
            assert self.report is not None
            return plan, self.report

        plan, self.report = from_first_rank(planned, env)
        plan.report = self.report
        return plan


def _dense_part(pinned: Pinned) -> tuple[dict[str, Layout], Pinned]:
    """Pinned layouts of dense weights, and the others."""
    if not isinstance(pinned, Mapping):
        return {}, pinned
    plan = ShardingPlan(pinned)
    dense = {name: entry.layout for name, entry in plan.items() if entry.layout.is_dense}
    return dense, {name: entry for name, entry in plan.items() if name not in dense}


def _by_first_name(pinned: Pinned, module: nn.Module, names: list[str]) -> dict[str, Layout]:
    """Pinned layouts under the names that the plan uses: a shared module's first."""
    if pinned is None:
        return {}
    if not isinstance(pinned, Mapping):
        raise PlanError(f"expected pinned to be a plan or a dict of name -> layout; got {type(pinned).__name__}")
    known = dict(module.named_parameters(remove_duplicate=False))
    first = {id(known[name]): name for name in reversed(names)}
    kept: dict[str, Layout] = {}
    for alias, entry in ShardingPlan(pinned).items():
        name = alias if alias in names else first.get(id(known.get(alias)))
        if name is None:
            close = get_close_matches(alias, names, n=3, cutoff=0.5) or names[:5]
            raise PlanError(f"pinned names {alias!r}, which no sharder takes; parameters to plan: {close}", table=alias)
        if kept.get(name, entry.layout) != entry.layout:
            raise PlanError(f"pinned gives {name!r} both {kept[name]} and {entry.layout}", table=name)
        kept[name] = entry.layout
    return kept
