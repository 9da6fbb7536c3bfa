"""`Reads`: what batches read of each planned parameter, and what ranks send each other for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dmp import ShardingEnv
from planner.candidates.candidates import Candidates
from planner.costs.cost_model import GRADIENT, GRADIENT_OUTER, INPUT, CostModel
from planner.costs.protocol import BYTES, Array, ShardInfo
from planner.costs.speeds import Speeds
from planner.costs.step import Cut, Step, whole
from planner.costs.topology import Topology
from planner.observed.row_curve import RowCurve
from planner.report.merged import Merged
from planner.report.planned import Planned


@dataclass(frozen=True, eq=False)
class Reads:
    """What costs depend on of parameters, beside their layouts; kept for whoever asks what is sent.

    Args:
        known: (parameters, fields of `ShardInfo`) each as one shard, in the order of the names.
        curves: parameter -> which of its rows ids name, where sample batches told.
        id_bytes: the cost model's.
    """

    known: Array
    curves: Mapping[str, RowCurve]
    id_bytes: int

    @classmethod
    def of(cls, candidates: Candidates, names: tuple[str, ...]) -> Reads | None:
        """None of a cost model that is not ours: nobody knows what it takes for sent."""
        model = candidates.setting.model
        if type(model) is not CostModel:
            return None
        known = [whole(candidates.infos[name], candidates.ids_of(name)) for name in names]
        table = np.array(known, dtype=np.float64).reshape(len(names), len(ShardInfo._fields))
        return cls(table, candidates.curves, model.id_bytes)

    @lru_cache(maxsize=4)  # noqa: B019  # few live at once, and whoever watches a training asks at every step
    def sent_bytes(self, planned: Planned, env: ShardingEnv, batch_size: float) -> Array:
        """(table ranks, names of phases) that each rank sends to others in a step."""
        model, cuts = CostModel(self.id_bytes), []
        for row, name, layout, shape in zip(self.known, planned.names, planned.layouts, planned.shapes, strict=True):
            curve = self.curves.get(name)
            known, below = ShardInfo(*row.tolist()), None if curve is None else curve.below
            cuts.append(Cut(known, layout.shards(shape, env), shape, below))
        # Links of a byte a second, on one host, between ranks that take no time: seconds are bytes.
        links = Topology(1.0, 1.0, 1.0, 1.0, 0.0, ranks_per_host=env.size, speeds=Speeds())
        sent = Step.of_cuts(cuts, env).loads(model, env, links, batch_size)[:, :BYTES]
        from_samples = [INPUT, GRADIENT_OUTER, GRADIENT]  # counted where they come, sent by all alike
        sent[:, from_samples] = sent[:, from_samples].mean(0)
        return Merged.of(model.phases).phases(sent)
