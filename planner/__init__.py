"""Chooses a layout for every parameter that a sharder takes: the sharders' options, a model's costs, a search."""

from __future__ import annotations

from planner.candidates.constraints import Constraint
from planner.costs.cost_model import CostModel
from planner.costs.topology import Topology
from planner.planner import ShardingPlanner
from planner.report.report import PlanReport

__all__ = ["Constraint", "CostModel", "PlanReport", "ShardingPlanner", "Topology"]
