"""`Study`: what all meshes share of a module, and what one mesh makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import torch
from torch import nn

from dmp import Found, Layout, ModelSharder, ModuleSharder, PlanError, ShardingEnv, dense_parameters, shown_bytes
from planner.arguments import finite
from planner.candidates.constraints import Constraint, constraints_of
from planner.costs.protocol import CostProtocol
from planner.costs.topology import Topology
from planner.dense.asked import Asked, asked_of_dense
from planner.dense.block import TENSOR
from planner.dense.decide import Dense, decide, vocabularies
from planner.dense.fitting import fits_with_activations
from planner.dense.model import DenseModel
from planner.meshes.proposal import MeshProposal
from planner.meshes.shapes import Shape
from planner.planner import ShardingPlanner
from planner.torchrec_parts import constraints_of_torchrec

_SAMPLES, _TOKENS = 512, 2048  # for each device, where nobody says


@dataclass(frozen=True)
class PlannerOptions:
    """Arguments of `ShardingPlanner`, as there."""

    constraints: Mapping[str, Constraint] | None
    cost_model: CostProtocol | None
    sequence_length: int | None
    compute_dtype: torch.dtype | None


@dataclass(frozen=True)
class Part:
    """The dense part on one mesh.

    Args:
        shape: the mesh.
        tables: how many parameters are tables there.
        dense: what dense weights take; None where they do not fit.
        recomputes: that is with activations recomputed.
        objection: why the mesh will not do; empty where it may.
        copies: of the tables.
    """

    shape: Shape
    tables: int
    dense: Dense | None
    recomputes: bool
    objection: str
    copies: int

    @property
    def promise(self) -> tuple[float, bool, bool, int]:
        """Small where it is worth to place the tables: few dense seconds; stages inside hosts; copies by fours."""
        seconds = sum(self.dense.seconds.values()) if self.dense is not None else 0.0
        by_fours = self.copies == 2 or self.copies.bit_length() % 2 == 1
        return float(f"{seconds:.1e}"), not by_fours, "local" not in self.shape.names, self.copies


@dataclass(frozen=True, eq=False)
class Study:
    """One question, for all meshes.

    Args:
        machine: with link figures for any mesh.
        batch_size: samples of a step, of all devices.
        model: the dense part, without what is a table on most meshes.
        splits: for each size of a tensor axis what the sharders take.
        refused: sizes of a tensor axis that will not do -> why.
        has_tables: whether there are tables beside a vocabulary.
    """

    module: nn.Module
    sharders: Sequence[ModuleSharder | ModelSharder]
    machine: Topology
    device_type: str
    num_devices: int
    options: PlannerOptions
    batch_size: float
    splits: Mapping[int, Found]
    refused: Mapping[int, str]
    has_tables: bool
    models: dict[frozenset[str], DenseModel] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        sharders: Sequence[ModuleSharder | ModelSharder],
        machine: Topology,
        device_type: str,
        num_devices: int,
        options: PlannerOptions,
        batch_size: float | None,
    ) -> Study:
        """Ask the sharders, once for each size of a tensor axis."""
        splits, refused = _splits(module, sharders, machine, device_type, num_devices)
        study = cls(
            module, sharders, machine, device_type, num_devices, options, batch_size or 0, splits, refused, False
        )
        env = ShardingEnv.abstract((max(2, num_devices),), ("shard",), device_type)
        model, _, tables, _ = study.dense_model(splits[1], env)
        if batch_size is None:
            each = _SAMPLES if model.tokens == 1 else _TOKENS / model.tokens
            batch_size = max(1.0, each * num_devices)
        finite("batch_size", batch_size)
        return replace(study, batch_size=float(batch_size), has_tables=tables > 0)

    def dense_model(self, found: Found, env: ShardingEnv) -> tuple[DenseModel, dict[str, Layout], int, Asked]:
        """The dense part on a mesh, what a vocabulary gets there, how many tables are left, what constraints ask."""
        taken = found.sites.parameters()
        others = dense_parameters(self.module, taken.keys())
        given = constraints_of_torchrec(self.options.constraints or {}, env)
        asked, of_tables = asked_of_dense(given, self.module, taken.keys())
        constraints = constraints_of(of_tables, taken)
        vocabulary = vocabularies(taken, others, constraints, (), env)
        as_dense = {name: layout for name, layout in vocabulary.items() if layout.is_dense}
        tables = frozenset(taken.keys() - as_dense.keys())
        if tables not in self.models:
            weights = dense_parameters(self.module, tables)
            options = self.options
            self.models[tables] = DenseModel.of(self.module, weights, options.sequence_length, options.compute_dtype)
        return self.models[tables], as_dense, len(tables), asked

    def dense_part(self, shape: Shape) -> Part:
        """What dense weights take on a mesh, with activations recomputed where they do not fit otherwise."""
        env = shape.env(self.device_type)
        found = self.splits[env.tensor_size]
        copies = env.size // env.table_size
        model, as_dense, tables, asked = self.dense_model(found, env)
        samples = self.batch_size / env.data_size
        if samples < 1:
            why = f"it has {env.data_size} data ranks, more than the {self.batch_size:g} samples of a step"
            return Part(shape, tables, None, False, why, copies)
        blocks = frozenset(weight.block for weight in model.weights.values() if weight.block)
        dense, recomputes, why = None, False, ""
        for again in (False, True):
            tried = replace(model, recomputed=blocks) if again else model
            try:
                dense = decide(tried, found.placements, as_dense, env, self.machine, samples, asked)
            except PlanError as error:
                return Part(shape, tables, None, again, str(error).splitlines()[0], copies)
            if fits_with_activations(dense.blocks, self.machine):
                return Part(shape, tables, dense, again, "", copies)
            recomputes = again
        assert dense is not None
        needed = sum(dense.training_bytes.values())
        why = f"{shown_bytes(needed)} on a rank of {shown_bytes(self.machine.memory_bytes)}, activations recomputed"
        return Part(shape, tables, dense, recomputes, why, copies)

    def proposal(self, part: Part, table_seconds: float = 0.0, table_bytes: int = 0) -> MeshProposal:
        """The mesh with its dense part, and tables that take so much."""
        shape, dense = part.shape, part.dense
        seconds = dict(dense.seconds) if dense is not None else {}
        rank_bytes = sum(dense.training_bytes.values()) + table_bytes if dense is not None else None
        step = None if part.objection else table_seconds + sum(seconds.values())
        why = part.objection or _why(part, seconds, table_seconds)
        return MeshProposal(shape.sizes, shape.names, step, table_seconds, seconds, rank_bytes, part.recomputes, why)

    def planned(self, part: Part) -> MeshProposal:
        """The same with its tables placed."""
        env = part.shape.env(self.device_type)
        options = self.options
        planner = ShardingPlanner(
            self.machine,
            options.constraints,
            options.cost_model,
            ceil(self.batch_size / env.data_size),
            sequence_length=options.sequence_length,
            compute_dtype=options.compute_dtype,
        )
        found = replace(self.splits[env.tensor_size], env=env)
        try:
            report = planner.plan(self.module, self.sharders, env, found=found).report
        except PlanError as error:
            return self.proposal(replace(part, objection=str(error).splitlines()[0]))
        return self.proposal(part, report.table_seconds, max(report.rank_bytes, default=0))

    def said(self) -> tuple[str, ...]:
        """What is taken for granted, and tensor axes that will not do."""
        model = next(iter(self.models.values()))
        said = [f"{self.batch_size:g} samples of a step on all devices"]
        if model.tokens > 1:
            said.append(f"a sample is {model.tokens} tokens ({model.tokens_said})")
        return (*said, *(f"no tp={size}: {why}" for size, why in self.refused.items()))


def _splits(
    module: nn.Module,
    sharders: Sequence[ModuleSharder | ModelSharder],
    machine: Topology,
    device_type: str,
    num_devices: int,
) -> tuple[dict[int, Found], dict[int, str]]:
    """What the sharders take for each size of a tensor axis inside a host, and why others will not do."""
    of_host = min(machine.ranks_per_host or 1, num_devices)
    splits: dict[int, Found] = {}
    refused: dict[int, str] = {}
    for size in range(1, of_host + 1):
        if of_host % size or num_devices % size:
            continue
        env = ShardingEnv.abstract((2, size), ("dp", "tp"), device_type)
        try:
            found = Found.of(module, sharders, env)
        except PlanError as error:
            refused[size] = str(error).partition(";")[0]
            continue
        if size > 1 and not found.split:
            break  # nothing that a tensor axis could split
        splits[size] = found
    return splits, refused


def _why(part: Part, seconds: Mapping[str, float], table_seconds: float) -> str:
    """The figures behind a step, in words."""
    parts = [f"{what} {s * 1e3:.2f} ms" for what, s in seconds.items() if s or what != TENSOR]
    if part.tables:
        copies = f" in {part.copies} copies" if part.copies > 1 else ""
        parts.insert(0, f"tables{copies} {table_seconds * 1e3:.2f} ms")
    if part.recomputes:
        parts.append("needs FSDPWrapper(activation_checkpointing=True)")
    return ", ".join(parts)
