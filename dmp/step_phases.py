"""`step_phases`: what the last step's phases have taken on this rank, beside what the plan's report says of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from dmp.contracts import hook
from dmp.env import ShardingEnv
from dmp.plans.remarks import shown_bytes
from dmp.state.find_wrapped import in_force

_ORDER = ("input a2a", "lookup fwd", "output a2a", "tensor gather", "grad a2a", "replica sync", "lookup bwd")


@dataclass(frozen=True)
class Phase:
    """One phase of one step.

    Args:
        seconds: by this rank's clock, waits for other ranks too; on a device, until its work was given to it.
        sent_bytes: by this rank to others.
        modelled_seconds: of the slowest rank, as the plan's report has them; None without a report.
        modelled_bytes: that this rank sends, by the report's cost model and its batch size; None where nobody knows.
    """

    seconds: float
    sent_bytes: int
    modelled_seconds: float | None = None
    modelled_bytes: float | None = None


class StepPhases(dict[str, Phase]):
    """Phases by the names that the planner's report uses, in the order of a step. `str()` is a table."""

    def __str__(self) -> str:
        lines = [f"{'phase':<16}{'sent':>12}{'modelled':>12}{'ms':>10}{'modelled ms':>14}"]
        for name, of in self.items():
            seconds = "" if of.modelled_seconds is None else f"{of.modelled_seconds * 1e3:.3f}"
            sent = "" if of.modelled_bytes is None else shown_bytes(of.modelled_bytes)
            line = f"{name:<16}{shown_bytes(of.sent_bytes):>12}{sent:>12}{of.seconds * 1e3:>10.3f}{seconds:>14}"
            lines.append(line.rstrip())
        return "\n".join(lines)


def step_phases(model: nn.Module) -> StepPhases:
    """What the phases of the last step took on this rank: seconds, and bytes sent to other ranks. Local.

    Of the tables: input dist, lookups, output dist, gradients, updates; the profiler shows them under the same names. A
    step is one forward of the model with its backward; before that has run, what has been so far. All-reduces of dense
    gradients are torch's, and not counted.

    Args:
        model: wrapped, or with wrapped models in it.

    Example:
        >>> from dmp import DistributedModelParallel
        >>> model = DistributedModelParallel(nn.EmbeddingBag(4, 2, mode="sum"))
        >>> _ = model(torch.tensor([[0, 1], [2, 3]]))
        >>> list(step_phases(model))
        ['input a2a', 'lookup fwd', 'output a2a']
    """
    wrapped = list(in_force(model).values())
    modelled: dict[str, tuple[float, float | None]] = {}
    for each in wrapped:
        for name, seconds, sent in _modelled(each.plan.report, each.env):
            before = modelled.get(name, (0.0, 0.0))
            modelled[name] = before[0] + seconds, None if sent is None or before[1] is None else before[1] + sent
    taken: dict[str, tuple[float, int]] = {}
    for module in (module for each in wrapped for module in each.sharded_modules.values()):
        phases = hook(module, "phases")
        for name, (seconds, sent) in (phases() if phases else {}).items():
            before = taken.get(name, (0.0, 0))
            taken[name] = before[0] + seconds, before[1] + sent
    names = sorted(taken, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    return StepPhases({name: Phase(*taken[name], *modelled.get(name, (None, None))) for name in names})


def _modelled(report: Any, env: ShardingEnv) -> Iterable[tuple[str, float, float | None]]:
    """Phase, seconds, and bytes that this rank sends, of a planner's report where there is one."""
    names = getattr(report, "phases", ())
    found = report.sent_bytes(env) if hasattr(report, "sent_bytes") else None
    sent = [None] * len(names) if found is None else found[env.table_rank].tolist()
    return zip(names, getattr(report, "phase_seconds", ()), sent, strict=True)
