"""`calibrate`: this machine's `Topology`, measured, with how well the figures fit.

[Note: fitting] The model is linear in its figures. So what a figure counts for in a measurement is what the model says
with it at one and all others at zero, and figures come from least squares: first exchanges, then the lookup
kernels by themselves, then what is left of whole steps.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from math import log2
from typing import Any

import numpy as np
import torch

from dmp import ParameterInfo, ShardingEnv
from planner.costs import cost_model as phases
from planner.costs.cost_model import CostModel
from planner.costs.fit import fit
from planner.costs.local_ranks import on_ranks
from planner.costs.measure import OPTIMIZERS, Measured, Probes, ProbeShape, lookup_probes, measure, step_probes
from planner.costs.protocol import Array
from planner.costs.speeds import Rate, Speeds
from planner.costs.step import Placed, Step
from planner.costs.topology import Topology, host_memory_bytes

_PARTS = (
    (phases.INPUT,),
    (phases.FORWARD, phases.OUTPUT, phases.OUTPUT_OUTER),
    (phases.GRADIENT_OUTER, phases.GRADIENT, phases.BACKWARD, phases.SYNC),
)
"""Phases of each part of a step that is timed by itself."""
_STATE_BYTES = {"sgd": (0.0, 0.0), "rowwise_adagrad": (0.0, 4.0), "adagrad": (4.0, 0.0)}
_IN_STEPS = (
    *("send_slot", "send_id", "send_bag", "split_id", "receive_slot", "receive_id", "receive_bag"),
    *("place", "place_bag", "place_part", "pack", "pack_bag", "pack_part", "take", "fetch"),
    *("update_slot", "gradient", "touched_row", "whole_row", "whole_id", "step", "step_results", "step_gradients"),
    *(f"{kind}{part}" for kind in ("group", "split", "copies", "width") for part in ("", "_results", "_gradients")),
    "copies_width",
)


@dataclass(frozen=True)
class Fit:
    """One measurement beside what the fitted figures say."""

    name: str
    measured: float
    fitted: float

    def __str__(self) -> str:
        ratio = self.fitted / self.measured
        return f"{self.name:64} {self.measured * 1e3:10.3f} ms {self.fitted * 1e3:10.3f} ms {ratio:7.2f}"


@dataclass(frozen=True)
class Calibration:
    """A machine's topology, and how every measurement fits it."""

    topology: Topology
    fits: tuple[Fit, ...]
    means: str
    """The kernel and the channel that were measured: with others the figures are others."""

    def __str__(self) -> str:
        lines = [f"{'':64} {'measured':>13} {'fitted':>13} {'ratio':>7}", *map(str, self.fits)]
        lines.append(f"measured: {self.means}")
        errors = np.array([abs(f.fitted / f.measured - 1) for f in self.fits])
        lines.append(
            f"{len(errors)} measurements: off by {np.median(errors):.0%} in the median, {errors.max():.0%} at most"
        )
        return "\n".join(lines)


def calibrate(probes: Sequence[Any], ranks: int = 2, device_type: str = "cpu", rounds: int = 40) -> Calibration:
    """Measure this machine with `ranks` processes.

    Args:
        probes: members of `Probes`, of `sharders.embedding.probe`.
        rounds: how often each step is run.

    Raises:
        ValueError: fewer devices than ranks.
        RuntimeError: a process failed.
    """
    found = ranks if device_type == "cpu" else torch.get_device_module(device_type).device_count()
    if found < ranks:
        raise ValueError(f"{ranks} ranks need a {device_type} device each; this machine has {found}")
    measured = on_ranks(ranks, device_type, measure, device_type, rounds, Probes(*probes))
    return fitted(measured, ranks, device_type)


def fitted(measured: Measured, ranks: int, device_type: str) -> Calibration:
    """The figures nearest to what was measured."""
    links, fits = _links(measured, ranks)
    memory, name = _device(device_type, ranks)
    base = Topology(memory, 1 / measured.copy, 1 / measured.product, **links, speeds=Speeds(), name=name)
    speeds, of_kernels = _kernels(measured, base)
    topology = replace(base, speeds=speeds)
    topology, of_steps = _steps(measured, ranks, topology)
    told = f"measured by calibrate on {date.today()}, {ranks} ranks, torch {torch.__version__}, {measured.means}"
    figures = ("memory_bandwidth", "flops", *links, "speeds")
    fits = [*fits, *of_kernels, *of_steps]
    return Calibration(replace(topology, sources=dict.fromkeys(figures, told)), tuple(fits), measured.means)


def _links(measured: Measured, ranks: int) -> tuple[dict[str, Any], list[Fit]]:
    """Latency, bandwidth, and how much of an exchange goes by what all have."""
    if ranks == 1:  # nothing is exchanged: figures that cost nothing
        return {"link_bandwidth": 1e15, "link_latency": 0.0}, []
    seconds: dict[str, tuple[float, float]] = {}
    fits = []
    for kind in ("even", "one"):
        of_kind = [(size * (ranks - 1), s) for k, size, s in measured.exchanged if k == kind]
        sizes, times = np.array(of_kind).T
        terms = np.stack([np.ones_like(sizes), sizes], 1)
        latency, byte = fit(terms, times, times)
        seconds[kind] = latency, byte
        what = "all send" if kind == "even" else "one sends"
        fits += [Fit(f"exchange, {what}: {size:.0f} bytes", s, latency + size * byte) for size, s in of_kind]
    (latency, byte), (_, alone) = seconds["even"], seconds["one"]
    byte = max(byte, measured.copy / 1000)  # what is read where it lies may cost nothing before it is read
    each, whole = _collectives(measured.summed, ranks)
    fits += [Fit(f"sum of {size} bytes", s, each * log2(ranks) + size * whole) for size, s in measured.summed]
    shared = float(np.clip((1 - alone / byte) / (1 - 1 / ranks), 0, 1))
    return {
        "link_bandwidth": float(1 / byte),
        "link_latency": float(latency / log2(ranks)),
        "collective_bandwidth": 2 * (1 - 1 / ranks) / whole,
        "collective_latency": each,
        "shared_links": shared,
    }, fits


def _collectives(summed: Sequence[tuple[int, float]], ranks: int) -> tuple[float, float]:
    """Seconds of an all-reduce, for each doubling of the ranks and for each byte."""
    sizes, times = np.array(summed).T
    latency, byte = fit(np.stack([np.full_like(sizes, log2(ranks)), sizes], 1), times, times)
    return float(latency), float(max(byte, 1e-15))


def _kernels(measured: Measured, base: Topology) -> tuple[Speeds, list[Fit]]:
    """Speeds of lookups and updates, from the kernels by themselves."""
    env = ShardingEnv.abstract((1,), ("dp",))
    probes = [probe for optimizer in measured.lookups for probe in lookup_probes(optimizer)]
    times = np.array([seconds for of_kind in measured.lookups.values() for seconds in of_kind])
    speeds, fits = Speeds(), []
    updates = [f"{kind}_{what}" for kind in OPTIMIZERS for what in ("row", "id")]
    lookups = ["lookup_row", "lookup_id", "lookup_bag", "lookup_first"]
    of_kernel = (
        ("lookup", [*lookups, "receive_slot", "step_results"], phases.FORWARD),
        ("update", [*updates, "update_bag", "update_slot", "step_gradients"], phases.BACKWARD),
    )
    for (what, names, phase), seconds in zip(of_kernel, times.T, strict=True):
        terms = _terms(names, probes, env, base, ((phase,),))
        values = fit(terms, seconds, seconds)
        speeds = _with(speeds, names, values)
        named = [f"{what}, {probe.optimizer}: {_text(probe)}" for probe in probes]
        fits += [Fit(*of) for of in zip(named, seconds.tolist(), (terms @ values).tolist(), strict=True)]
    return speeds, fits


def _steps(measured: Measured, ranks: int, base: Topology) -> tuple[Topology, list[Fit]]:
    """Speeds of everything else, from what whole steps take beyond exchanges and kernels."""
    env, probes = ShardingEnv.abstract((ranks,), ("dp",)), step_probes(ranks)
    seconds = np.array(measured.steps)
    known = np.array([_parts(probe, env, base) for probe in probes])
    terms = _terms(_IN_STEPS, probes, env, replace(base, speeds=Speeds())).reshape(len(probes), 3, -1)
    values = fit(terms.reshape(3 * len(probes), -1), (seconds - known).ravel(), np.repeat(seconds.sum(1), 3))
    topology = replace(base, speeds=_with(base.speeds_of_parts, _IN_STEPS, values))
    predicted = [sum(_parts(probe, env, topology)) for probe in probes]
    named = [f"step: {_text(probe)}" for probe in probes]
    return topology, [Fit(*of) for of in zip(named, seconds.sum(1).tolist(), predicted, strict=True)]


def _figures(names: Sequence[str]) -> list[tuple[str, int]]:
    """Each figure of these speeds: two of a rate."""
    return [(name, i) for name in names for i in range(2 if isinstance(getattr(Speeds(), name), Rate) else 1)]


def _with(speeds: Speeds, names: Sequence[str], values: Sequence[float] | Array) -> Speeds:
    """These speeds with more for the figures of some."""
    changed: dict[str, Any] = {name: getattr(speeds, name) for name in names}
    for (name, index), value in zip(_figures(names), values, strict=False):
        now, more = changed[name], float(value)
        rate = isinstance(now, Rate)
        changed[name] = Rate(*(v + more * (i == index) for i, v in enumerate(now))) if rate else now + more
    return replace(speeds, **changed)


def _terms(
    names: Sequence[str],
    probes: Sequence[ProbeShape],
    env: ShardingEnv,
    nothing: Topology,
    parts: Sequence[tuple[int, ...]] = _PARTS,
) -> Array:
    """(probes * parts, figures): what each figure counts for, see [Note: fitting]."""
    made = [_step(probe, env) for probe in probes]

    def seconds(topology: Topology) -> Array:
        """(probes * parts,)"""
        of_probes = zip(probes, made, strict=True)
        return np.concatenate([_in_parts(step, probe, env, topology, parts) for probe, step in of_probes])

    before, columns = seconds(nothing), []
    for name, index in _figures(names):
        unit = Rate(*np.eye(2)[index].tolist()) if isinstance(getattr(Speeds(), name), Rate) else 1.0
        one: dict[str, Any] = {name: unit}
        columns.append(seconds(replace(nothing, speeds=Speeds(**one))) - before)
    return np.stack(columns, 1)


def _parts(
    probe: ProbeShape, env: ShardingEnv, topology: Topology, parts: Sequence[tuple[int, ...]] = _PARTS
) -> list[float]:
    """What the model says of a probe, part by part."""
    return _in_parts(_step(probe, env), probe, env, topology, parts)


def _in_parts(
    step: Step, probe: ProbeShape, env: ShardingEnv, topology: Topology, parts: Sequence[tuple[int, ...]]
) -> list[float]:
    seconds = step.seconds(CostModel(), env, topology, probe.batch_size)
    return [float(seconds[list(part)].sum()) for part in parts]


def _step(probe: ProbeShape, env: ShardingEnv) -> Step:
    state, named = _STATE_BYTES[probe.optimizer], (float(probe.named),) * 2
    return Step.of(
        [
            Placed(ParameterInfo(of, torch.float32, "table", probe.optimizer, state_bytes=state), layout, bag, named)
            for of, layout, bag in zip(probe.tables, probe.layouts, [float(probe.bag)] * len(probe.tables), strict=True)
        ],
        env,
    )


def _text(probe: ProbeShape) -> str:
    kinds, (rows, _) = dict.fromkeys(layout.name for layout in probe.layouts), probe.tables[0]
    named = f" of {probe.named} rows" if probe.named else ""
    dims = "~".join(map(str, sorted({dim for _, dim in probe.tables})))
    return f"{' and '.join(kinds)}, {len(probe.tables)} x {rows} x {dims}, B {probe.batch_size}, {probe.bag} ids{named}"


def _device(device_type: str, ranks: int) -> tuple[float, str]:
    """Bytes of a rank, and what the machine is called."""
    if device_type != "cpu":
        properties = torch.get_device_module(device_type).get_device_properties(0)
        return float(properties.total_memory), str(properties.name)
    return host_memory_bytes() / ranks, f"{platform.machine()}, {os.cpu_count()} cores"
