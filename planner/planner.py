"""`ShardingPlanner`: from a module's parameters to a plan and a report. Pure but for `collective_plan`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch
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
    shown,
    without_collection,
)
from planner.arguments import check_constraints, check_env, check_module, finite, positive, yes_no_or_none
from planner.broadcast import from_first_rank
from planner.candidates.constraints import Constraint
from planner.candidates.costed import CostSetting
from planner.candidates.request import Answer, NoPlan, Request, answer
from planner.costs.cost_model import CostModel
from planner.costs.protocol import CostProtocol, checked
from planner.costs.topology import Topology
from planner.dense.decide import Dense, decide, said_of_copied, split_as
from planner.dense.model import DenseModel
from planner.dense.modules import said_of_lazy
from planner.in_backward import in_backward_advice, said_of_frozen
from planner.largest_batch import MOST_PARAMETERS, MOST_PIECES, largest_batch, room_for
from planner.observed.observation import Observation
from planner.observed.observe import observe
from planner.one_thread import on_one_thread
from planner.pinned import Pinned
from planner.question import Question
from planner.replica_groups import group_advice, worth_asking
from planner.report.infeasible import plan_error
from planner.report.progress import Progress
from planner.report.report import PlanReport
from planner.report.setting import Setting
from planner.report.summary import summarise
from planner.torchrec_parts import topology_of


class ShardingPlanner:
    """Gives every parameter that a sharder takes one of the layouts that the sharder offers.

    The same arguments give the same plan on every machine, unless the time budget cuts the search short, which the
    report says.

    Args:
        topology: of the machine; by default `Topology.of(env)`. TorchRec's is taken too.
        constraints: parameter name, table name or pattern -> `Constraint`, or `ParameterConstraints` of TorchRec's.
            Dense weights are split as the mesh's axes say; one whose `layouts` or `forbid` name layouts of theirs
            (`"replicate"`, `"fully_sharded"`, `"colwise"`, ...) leaves the choice among these to cost and memory.
        cost_model: what a choice costs; `CostModel()` by default, or an object of your own that has its members.
        batch_size: samples per data rank; by default that of the observed batches, else 512.
        time_budget_s: wall time after which the search stops at the best plan so far; with more effort as many times
            later.
        sequence_length: tokens of a sample that dense weights see; by default what the module's configuration says
            (at most 4,096), 1 where nothing in it attends; the report says which.
        compute_dtype: of dense products, where a policy of mixed precision sets another than the weights'.
        effort: of the search for tables' places, to which it gives so many times the work, and to their bound where it
            is above 1: a plan on many hosts that is made once may be worth ten seconds.
        advises: also plan the same ranks in replica groups, and say in the report's notes where that saves much; None:
            for one number of groups, where there are few tables, and many ranks that wait for each other.
        observed: what `planner.observe` has seen of sample batches: pooling factors, where no constraint gives them,
            and which rows ids name. `observe` sets it.
        progress: whether a line on the terminal says how far planning is; None: once it has taken a second. It goes
            to standard error where that is a terminal, and never into a file.

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
        cost_model: CostProtocol | None = None,
        batch_size: int | None = None,
        time_budget_s: float = 10.0,
        *,
        sequence_length: int | None = None,
        compute_dtype: torch.dtype | None = None,
        effort: float = 1.0,
        advises: bool | None = None,
        observed: Observation | None = None,
        progress: bool | None = None,
    ) -> None:
        if batch_size is not None:
            finite("batch_size", batch_size)
        if sequence_length is not None:
            finite("sequence_length", sequence_length)
        if compute_dtype is not None and not isinstance(compute_dtype, torch.dtype):
            raise ValueError(f"compute_dtype must be a torch.dtype; got {shown(compute_dtype)}")
        positive("time_budget_s", time_budget_s)
        finite("effort", effort)
        yes_no_or_none("advises", advises)
        yes_no_or_none("progress", progress)
        check_constraints(constraints)
        self.topology = topology
        self.constraints = dict(constraints or {})
        self.cost_model = CostModel() if cost_model is None else checked(cost_model)
        if observed is not None and not isinstance(observed, Observation):
            raise ValueError(f"observed must be what planner.observe returns; got {shown(observed)}")
        self.observed = observed
        self._given_samples = batch_size
        self.time_budget_s = time_budget_s
        self.effort = effort
        self.sequence_length = sequence_length
        self.compute_dtype = compute_dtype
        self.advises = advises
        self.progress = progress
        self.report: PlanReport | None = None
        self.reservation: Any = None  # TorchRec's, of a topology of its

    @property
    def batch_size(self) -> int:
        """Samples per data rank."""
        if self._given_samples is not None:
            return self._given_samples
        return 512 if self.observed is None else max(1, round(self.observed.batch_size))

    def observe(self, loader: Iterable[Any], *, batches: int = 100, module: nn.Module | None = None) -> Observation:
        """See `planner.observe`; plans are made with what it sees from now on."""
        self.observed = observe(loader, batches=batches, module=module)
        return self.observed

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
            pinned: entries to keep as they are; their load and memory count. What a constraint colocates with them is
                placed as they are.
            found: what these sharders are known to take of the module on this mesh.

        Returns:
            The plan of every parameter that a sharder takes, with its report as `plan.report`. Dense weights that it
            does not name are split or copied as the mesh's axes say.

        Raises:
            ValueError, ShardError: a module, an env, a topology or a sharder that is none.
            PlanError: no plan fits (with `.table`, `.rank`, `.bytes_short`), or a constraint or pinned entry is wrong.
        """
        check_env(env)
        check_module(module)
        progress = Progress(self.progress)
        try:
            with without_collection(), on_one_thread():
                return self._planned(module, sharders, env, pinned, found, progress, begin=time.monotonic())
        finally:
            progress.end()

    def _planned(
        self,
        module: nn.Module,
        sharders: Iterable[ModuleSharder | ModelSharder],
        env: ShardingEnv,
        pinned: Pinned,
        found: Found | None,
        progress: Progress,
        *,
        begin: float,
        eases: bool = True,
    ) -> ShardingPlan:
        def out_of_time() -> bool:
            progress.tick()
            return time.monotonic() - begin > self.time_budget_s * max(1.0, self.effort)

        progress.stage("what the model has")
        given = self.topology if self.topology is not None else Topology.of(env)
        topology = topology_of(given, env, self.reservation)
        given_by_user = self.constraints, self.observed
        asked = Question.of(module, sharders, env, pinned, found, topology, *given_by_user, eases=eases)
        costs = CostSetting(self.cost_model, env, topology, self.batch_size, self.observed)
        model = DenseModel.of(module, asked.weights, self.sequence_length, self.compute_dtype)
        try:
            placements, fixed = asked.found.placements, asked.as_dense
            dense = decide(model, placements, fixed, env, topology, self.batch_size, asked.choices)
            asked = replace(asked, found=split_as(dense, asked.found))
            request = Request(asked.tables, asked.constraints, asked.kept, costs, dense.taken_bytes, self.effort)
            progress.stage("search")
            tables = answer(request, out_of_time, progress.told, gives_up=not asked.is_eased)
        except (NoPlan, PlanError) as error:
            if asked.is_eased:  # in pieces, and apart, they may fit
                again = module, sharders, env, pinned, found, progress
                return self._planned(*again, begin=begin, eases=False)
            if isinstance(error, PlanError):
                raise
            raise plan_error(error, out_of_time) from None
        layouts = tables.candidates.placed(tables.solution.choices)
        kernels = {name: ParameterSharding(of, asked.constraints[name].kernel) for name, of in layouts.items()}
        plan = ShardingPlan({**kernels, **dense.layouts})
        if asked.kept or asked.as_dense or asked.choices:
            plan.validate(module, env, asked.found.sharders, found=asked.found)
        report = self._reported(asked, model, dense, request, tables, layouts, took=time.monotonic() - begin)
        progress.stage("replica groups")
        if not pinned and (worth_asking(report, env) if self.advises is None else self.advises):
            report = replace(report, notes=(*report.notes, *self._advice(module, report, topology, asked.found)))
        self.report = plan.report = report
        return plan

    def _reported(
        self,
        asked: Question,
        model: DenseModel,
        dense: Dense,
        request: Request,
        tables: Answer,
        layouts: Mapping[str, Layout],
        *,
        took: float,
    ) -> PlanReport:
        """What is said of a plan.

        Args:
            layouts: of the tables, in their places.
            took: seconds.
        """
        env, topology = asked.env, asked.topology
        frozen = said_of_frozen(info for _, info in asked.tables.values())
        notes = (*said_of_lazy(asked.module), *dense.notes, *said_of_copied(sorted(asked.copied)), *tables.notes)
        report = summarise(
            Setting.of(asked.module, asked.weights, env, topology, self.batch_size),
            {name: info.shape for name, (_, info) in asked.tables.items()},
            tables.candidates,
            layouts,
            tables.problem,
            tables.solution,
            replace(dense, notes=(*notes, *asked.alike, *frozen, *asked.gaps)),
            tuple(self.cost_model.phases),
            took,
        )
        if len(layouts) > MOST_PARAMETERS or len(layouts) * env.table_size > MOST_PIECES:
            return report
        given = {**asked.as_dense, **dense.layouts}

        def dense_for(batch_size: int) -> Dense:
            return decide(model, asked.found.placements, given, env, topology, batch_size)

        room = room_for(request, layouts, tables.leeway, topology, dense_for)
        gains = in_backward_advice(request, layouts, tables.leeway, report)
        return replace(report, largest_batch=largest_batch(room, self.batch_size), notes=(*report.notes, *gains))

    def _advice(self, module: nn.Module, report: PlanReport, topology: Topology, found: Found) -> tuple[str, ...]:
        """What the same ranks would do in replica groups."""

        def on_mesh(other: ShardingEnv, figures: Topology) -> PlanReport:
            planner = copy(self)
            planner.topology, planner.reservation, planner.advises = figures, None, False
            planner.progress = False
            planner.plan(module, found.sharders, other, found=replace(found, env=other))
            assert planner.report is not None
            return planner.report

        return group_advice(report, found.env, topology, on_mesh, thorough=bool(self.advises))

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

        What rank 0 was told counts: constraints, topology, batch size. A rank that was told otherwise logs it.

        Raises:
            PlanError: on every rank, what rank 0's planning raised; or a rank read another plan than rank 0 sent.
        """

        check_env(env)

        def planned() -> tuple[ShardingPlan, PlanReport]:
            options = {} if found is None else {"found": found}
            plan = self.plan(module, sharders, env, pinned, **options)
            assert self.report is not None
            return plan, self.report

        asked = {
            "constraints": dict(sorted(self.constraints.items(), key=lambda of: str(of[0]))),
            "topology": self.topology,
            "batch_size": self._given_samples,
            "sequence_length": self.sequence_length,
            "compute_dtype": self.compute_dtype,
            "pinned entries": pinned,
        }
        plan, self.report = from_first_rank(planned, env, asked)
        plan.report = self.report
        return plan
