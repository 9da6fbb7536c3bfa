"""`Question`: what a planner is asked, read and checked; nothing is decided in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from dmp import (
    Found,
    Layout,
    ModelSharder,
    ModuleSharder,
    ParameterInfo,
    ShardingEnv,
    ShardingPlan,
    dense_parameters,
    is_torchrecs,
)
from planner.candidates.constraints import Constraint, constraints_of
from planner.costs.topology import Topology
from planner.dense.asked import asked_of_dense
from planner.dense.decide import vocabularies
from planner.frozen_copies import with_copies
from planner.observed.observation import Observation
from planner.pinned import Pinned, by_first_name, split_pinned, with_colocated, with_kernels
from planner.torchrec_parts import constraints_of_torchrec


@dataclass(frozen=True, eq=False)
class Question:
    """A module to plan on a mesh, and what the plan must keep.

    Args:
        topology: of the machine.
        found: what the sharders take.
        tables: parameters to place, by name.
        constraints: of each of them.
        kept: their layouts that are given.
        as_dense: layouts of dense weights that are given, vocabularies among them.
        choices: layouts allowed of dense weights that a constraint speaks of.
        weights: all dense ones.
        copied: tables that are copied to every rank because that costs little.
        alike: what is said of tables that are placed as others are.
        gaps: what sample batches did not show.
    """

    module: nn.Module
    env: ShardingEnv
    topology: Topology
    found: Found
    tables: Mapping[str, tuple[ModuleSharder, ParameterInfo]]
    constraints: Mapping[str, Constraint]
    kept: Mapping[str, Layout]
    as_dense: Mapping[str, Layout]
    choices: Mapping[str, frozenset[str]]
    weights: Mapping[str, ParameterInfo]
    copied: frozenset[str] = frozenset()
    alike: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()

    @property
    def is_eased(self) -> bool:
        """Whether it asks for more than it must, so that a plan may be found without."""
        return bool(self.copied or self.alike)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        sharders: Iterable[ModuleSharder | ModelSharder],
        env: ShardingEnv,
        pinned: Pinned,
        found: Found | None,
        topology: Topology,
        constraints: Mapping[str, Constraint],
        observed: Observation | None,
        *,
        eases: bool,
    ) -> Question:
        """What these arguments of `ShardingPlanner.plan` ask.

        Args:
            constraints: ours or TorchRec's.
            eases: tables may be copied, or placed as others are, where that is likely to be best.

        Raises:
            PlanError: a constraint or a pinned entry is wrong.
        """
        if is_torchrecs(pinned, "ShardingPlan", "EmbeddingModuleShardingPlan"):
            pinned = ShardingPlan.from_torchrec(pinned, module, env)
        pinned_tables, pinned_dense = split_pinned(pinned)
        found = Found.of(module, sharders, env, pinned_dense, found)
        taken = found.sites.parameters(frozenset(pinned_tables))
        choices, of_tables = asked_of_dense(constraints_of_torchrec(constraints, env), module, taken.keys())
        asked = constraints_of(of_tables, taken)
        entries = by_first_name(pinned_tables, module, [name for name in taken if name not in pinned_dense])
        entries = with_colocated(entries, asked)
        asked = with_kernels(asked, entries)
        kept = {name: entry.layout for name, entry in entries.items()}
        others = dense_parameters(module, taken.keys() - pinned_dense.keys())
        vocabulary = vocabularies(taken, others, asked, {**kept, **pinned_dense}, env)
        as_dense = pinned_dense | {name: layout for name, layout in vocabulary.items() if layout.is_dense}
        tables = {name: of for name, of in taken.items() if name not in as_dense}
        copied, alike = frozenset[str](), list[str]()
        if eases:
            copied = frozenset(vocabulary.keys() - as_dense.keys())
            asked = {**asked, **{name: Constraint(layouts=(vocabulary[name].name,)) for name in copied}}
            asked, alike = with_copies(asked, found, tables.keys() - kept.keys() - copied)
        gaps: tuple[str, ...] = ()
        if observed is not None:
            tables, gaps = observed.told_of(tables), observed.gaps(tables)
        weights = dense_parameters(module, tables.keys())
        return cls(
            *(module, env, topology, found, tables, asked, kept, as_dense, choices, weights, copied),
            tuple(alike),
            gaps,
        )
