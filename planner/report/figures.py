"""`Figures`: everything that a report says, as numbers; small enough to be sent to every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dmp import ShardingEnv
from planner.dense.block import DenseBlock
from planner.report.offers import Offers
from planner.report.planned import Planned
from planner.report.setting import Setting
from planner.report.traffic import Reads


@dataclass(frozen=True, eq=False)
class Figures:
    """Modelled figures of a plan. Ranks are table ranks; seconds and bytes are the cost model's.

    Args:
        setting: what was planned, and for what.
        planned: what each parameter got.
        offers: what it could have got.
        rank_seconds: (ranks, phases) without latencies.
        rank_bytes: (ranks,) memory of tables and their buffers.
        usable_bytes: memory that a rank has for them.
        phase_seconds: slowest rank of each phase, latencies included; their sum is the tables' part of a step.
        setup_seconds: the latencies in them.
        lower_bound: seconds that no choice goes below.
        is_cut_short: the time budget ended the search before its work was done.
        planning_seconds: wall time of planning.
        phases: their names.
        dense: dense weights, by block.
        notes: what sharders say of their choice for dense weights, what is taken for granted of them, and advice.
        dense_seconds: of a step on every rank, by what they go to (`planner.dense.block.SECONDS`), besides the phases.
        dense_bytes: on every rank, by part (`planner.dense.block.PARTS`), besides `rank_bytes`.
        reads: what batches read of parameters; None where the cost model is not `CostModel`.
        largest_batch: samples per data rank that this plan has room for, as far as was looked; 0 where nothing was
            found, or looked for: of plans of very many tables on very many ranks.
    """

    setting: Setting
    planned: Planned
    offers: Offers
    rank_seconds: NDArray[np.float64]
    rank_bytes: NDArray[np.int64]
    usable_bytes: int
    phase_seconds: tuple[float, ...]
    setup_seconds: tuple[float, ...]
    lower_bound: float
    is_cut_short: bool
    planning_seconds: float
    phases: tuple[str, ...]
    dense: tuple[DenseBlock, ...] = ()
    notes: tuple[str, ...] = ()
    dense_seconds: Mapping[str, float] = field(default_factory=dict)
    dense_bytes: Mapping[str, int] = field(default_factory=dict)
    reads: Reads | None = None
    largest_batch: int = 0

    def sent_bytes(self, env: ShardingEnv) -> NDArray[np.float64] | None:
        """(ranks, phases) that each rank of the mesh sends to others in a step; None where nobody knows.

        Headers are not among them, nor what tensor axes gather, which is the same for every plan.
        """
        return None if self.reads is None else self.reads.sent_bytes(self.planned, env, self.setting.batch_size)

    @property
    def step_seconds(self) -> float:
        """Modelled time of a step: tables' phases and the dense part, after each other."""
        return self.table_seconds + sum(self.dense_seconds.values())

    @property
    def table_seconds(self) -> float:
        """Modelled time of the tables' phases."""
        return float(sum(self.phase_seconds))

    @property
    def gap(self) -> float:
        """How far the tables' seconds are above their lower bound, as a share of it; the best is at most so far off."""
        return self.table_seconds / self.lower_bound - 1 if self.lower_bound > 0 else 0.0

    @property
    def samples_per_second(self) -> float:
        """On all ranks; 0 where a step takes no time."""
        return self.setting.samples / self.step_seconds if self.step_seconds > 0 else 0.0

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Weights on the fullest rank: `tables` (with buffers and optimizer state), and dense ones by kind."""
        found = {"tables": int(self.rank_bytes.max(initial=0))}
        for block in self.dense:
            for kind, size in block.rank_bytes.items():
                found[kind] = found.get(kind, 0) + size
        return found

    @property
    def imbalance(self) -> tuple[float, ...]:
        """Slowest rank over mean of all, latencies included, for each phase; 1 where nobody works."""
        pairs = zip(self.phase_seconds, self.mean_phase_seconds(), strict=True)
        return tuple(slowest / mean if mean > 0 else 1.0 for slowest, mean in pairs)

    def mean_phase_seconds(self) -> tuple[float, ...]:
        """Each phase as it would be if all ranks had the same work, latencies included."""
        mean = self.rank_seconds.mean(0) if len(self.rank_seconds) else np.zeros(len(self.phases))
        return tuple(float(m + s) for m, s in zip(mean, self.setup_seconds, strict=True))

    def total_bytes(self, index: int) -> float:
        """Memory that a parameter takes on all ranks together."""
        return float(self.planned.mean[index, -1]) * len(self.rank_bytes)
