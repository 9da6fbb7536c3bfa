"""Chooses a layout for every parameter that a sharder takes: the sharders' options, a model's costs, a search."""

from __future__ import annotations

from planner.constraints import Constraint
from planner.cost import CostModel
from planner.planner import ShardingPlanner
from planner.report import PlanReport
from planner.topology import Topology

__all__ = ["Constraint", "CostModel", "PlanReport", "ShardingPlanner", "Topology"]
