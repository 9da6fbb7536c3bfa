"""The report as one page of HTML without outside references; made only when it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dmp import shown_bytes
from planner.dense.block import ACTIVATIONS
from planner.report.bars import Bar, bars, legend
from planner.report.explained import best_of_families, label_of
from planner.report.figures import Figures
from planner.report.heat_map import HeatMap, heat_map
from planner.report.mesh_picture import Grid, mesh_picture
from planner.report.offers import Options
from planner.report.profile import profile
from planner.report.rank_groups import rank_groups
from planner.report.reasons import reasons
from planner.report.svg import LEVELS
from planner.report.words import count, layout, milliseconds, plural, ranks, shape, span

_GROUPS = 24
_COLOURS = ["kt", *(f"p{i}" for i in range(8)), *(f"d{i}" for i in range(3)), *(f"k{i}" for i in range(5))]
_COLOURS += [f"l{i}" for i in range(LEVELS + 1)]
_GRID = ("hosts", "local", "across", "blocks", "wide", "high", "gap", "left", "top")
_OPTIONS = 8_000
"""Rejected options on a page, over all classes of tables."""


def render(f: Figures) -> str:
    """The page's text.

    Raises:
        ModuleNotFoundError: Jinja2 is not installed.
    """
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "PlanReport.save_html needs Jinja2: pip install jinja2; str(report) needs nothing"
        ) from error
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=jinja2.FileSystemLoader(folder), trim_blocks=True
    )
    styles = {phase: f"p{index % 8}" for index, phase in enumerate(f.phases)}
    has_tables = bool(len(f.planned.names))
    heat = heat_map(f) if has_tables else None
    mesh, metrics, grid = mesh_picture(f)
    return environment.get_template("page.html.j2").render(
        f=f,
        milliseconds=milliseconds,
        plural=plural,
        count=count,
        cards=_cards(f),
        has_tables=has_tables,
        phases=_phases(f, styles),
        phase_legend=legend([(styles[name], name) for name in f.phases if f.phase_seconds[f.phases.index(name)] > 0]),
        mesh=mesh,
        metrics=metrics,
        heat=heat.picture if heat is not None else "",
        groups=_groups(f, styles) if has_tables else "",
        profile=profile(f, styles) if has_tables and len(f.rank_bytes) > 8 else "",
        dense=_dense(f) if f.dense else "",
        memory_legend=legend([("kt", "tables"), *((f"k{i}", part) for i, (part, _) in _parts(f))]) if _parts(f) else "",
        dense_legend=_dense_legend(f),
        kinds=_kinds(f),
        colours=_COLOURS,
        tables=_tables(f),
        data=json.dumps(_data(f, grid, heat), separators=(",", ":")).replace("<", "\\u003c"),
    )


def _cards(f: Figures) -> list[dict[str, Any]]:
    """Headline figures: what it is, its value, and what stands below it; `part` is the length of a bar."""
    p, s = f.planned, f.setting
    is_both = p.names and f.dense_seconds
    step = f"tables {milliseconds(f.table_seconds)}" if is_both else plural(s.samples, "sample")
    cards: list[dict[str, Any]] = [{"name": "Step", "value": milliseconds(f.step_seconds), "note": step}]
    if p.names:
        below = f"of the tables' bound, {milliseconds(f.lower_bound)}"
        cards.append({"name": "Above the bound", "value": f"{f.gap:.1%}", "note": below})
    if f.samples_per_second:
        cards.append({"name": "Samples a second", "value": count(f.samples_per_second), "note": "on all ranks"})
    dense = sum(f.dense_bytes.values())
    fullest = int(f.rank_bytes.max(initial=0)) + dense
    room = f.setting.machine.get("memory_bytes", 0.0) or f.usable_bytes + dense
    part = fullest / room if room else 0.0
    note = f"{part:.0%} of {shown_bytes(room)}"
    recomputed = sum(block.recomputed_bytes for block in f.dense)
    if part > 1 and recomputed:
        note += f"; {shown_bytes(fullest - f.dense_bytes.get(ACTIVATIONS, 0) + recomputed)} with recomputation"
    cards.append({"name": "Fullest rank", "value": shown_bytes(fullest), "note": note, "part": min(1.0, part)})
    cards[-1]["is_over"] = part > 1
    if p.names:
        size = shown_bytes(float(f.rank_bytes.sum()))
        cards.append({"name": "Tables", "value": f"{len(p.names):,}", "note": f"{size} on all ranks"})
    parameters = p.elements + s.dense_parameters
    note = f"{count(p.elements)} in tables, {count(s.dense_parameters)} dense" if p.names else "dense; no tables"
    cards.append({"name": "Parameters", "value": count(parameters), "note": note})
    cut = "cut short by the time budget" if f.is_cut_short else "the whole search"
    cards.append({"name": "Planned in", "value": f"{f.planning_seconds:.2f} s", "note": cut})
    return cards


def _phases(f: Figures, styles: dict[str, str]) -> str:
    """The step as one bar, then a bar for each phase with its mean."""
    if f.step_seconds <= 0:
        return ""
    parts = [(styles[n], s, f"{n}: {milliseconds(s)}") for n, s in zip(f.phases, f.phase_seconds, strict=True)]
    dense = [(f"d{i}", s, f"{n}: {milliseconds(s)}") for i, (n, s) in enumerate(f.dense_seconds.items())]
    rows = [("the whole step", [Bar([*parts, *dense], milliseconds(f.step_seconds))])]
    most = max([*f.phase_seconds, *f.dense_seconds.values()])
    scaled = f.step_seconds / most if most > 0 else 1.0
    for (style, seconds, _), name, mean, ratio in zip(
        parts, f.phases, f.mean_phase_seconds(), f.imbalance, strict=True
    ):
        if seconds > 0:
            words = f"{milliseconds(seconds)}, {ratio:.2f}x mean"
            rows.append((name, [Bar([(style, seconds * scaled, words)], words, mean * scaled)]))
    for (style, seconds, words), name in zip(dense, f.dense_seconds, strict=True):
        if seconds > 0:
            rows.append((name, [Bar([(style, seconds * scaled, words)], milliseconds(seconds))]))
    return bars(["slowest rank of each phase; the line is the mean of all"], rows, [f.step_seconds], "phases of a step")


def _groups(f: Figures, styles: dict[str, str]) -> str:
    """Groups of equal ranks: memory and time by phase."""
    dense = sum(f.dense_bytes.values())
    room = f.usable_bytes + dense
    groups = rank_groups(f, _GROUPS)
    slowest = max(group.most for group in groups)
    rows = []
    for group in groups:
        low, high = shown_bytes(group.least_bytes), shown_bytes(group.most_bytes)
        memory = span(low, high)
        parts = [("kt", float(group.most_bytes), f"tables: {memory}")]
        parts += [(f"k{i}", float(size), f"{part}: {shown_bytes(size)}") for i, (part, size) in _parts(f)]
        seconds = [
            (styles[name], float(s), f"{name}: {milliseconds(float(s))}")
            for name, s in zip(f.phases, group.seconds, strict=True)
        ]
        number = len(group.ranks)
        short = min(ranks(group.ranks, 1), ranks(group.ranks, 2), key=lambda words: (len(words) > 18, -len(words)))
        which = f"rank {group.ranks[0]}" if number == 1 else f"{number:,} ranks: {short}"
        rows.append((which, [Bar(parts, memory), Bar(seconds, milliseconds(group.most))]))
    titles = [f"memory, of {shown_bytes(room)} usable", "time by phase"]
    return bars(titles, rows, [float(room), slowest], "memory and time of ranks")


def _parts(f: Figures) -> list[tuple[int, tuple[str, int]]]:
    return [(i, part) for i, part in enumerate(f.dense_bytes.items()) if part[1] > 0]


def _dense(f: Figures) -> str:
    """Dense blocks: memory by part, and seconds by what they go to."""
    rows = []
    for block in f.dense:
        name = f"{block.count} x {block.name}" if block.name and block.count > 1 else block.name or "the rest"
        memory = [
            (
                f"k{i}",
                float(block.training_bytes.get(part, 0)),
                f"{part}: {shown_bytes(block.training_bytes.get(part, 0))}",
            )
            for i, part in enumerate(f.dense_bytes)
        ]
        seconds = [
            (f"d{i}", block.seconds.get(what, 0.0), f"{what}: {milliseconds(block.seconds.get(what, 0.0))}")
            for i, what in enumerate(f.dense_seconds)
        ]
        total = shown_bytes(sum(block.training_bytes.values()))
        took = milliseconds(sum(block.seconds.values()))
        rows.append((f"{name} ({count(block.num_parameters)})", [Bar(memory, total), Bar(seconds, took)]))
    most = [
        max((float(sum(block.training_bytes.values())) for block in f.dense), default=0.0),
        max((sum(block.seconds.values()) for block in f.dense), default=0.0),
    ]
    return bars(["memory on a rank", "time of a step"], rows, most, "the dense part by block")


def _dense_legend(f: Figures) -> str:
    memory = legend([(f"k{i}", part) for i, (part, _) in _parts(f)])
    seconds = legend([(f"d{i}", what) for i, (what, s) in enumerate(f.dense_seconds.items()) if s > 0])
    return (memory if f.dense_bytes else "") + (seconds if f.dense_seconds else "")


def _kinds(f: Figures) -> list[tuple[str, int, str, str, float]]:
    """Layouts: name, number of tables, their memory, their mean milliseconds, their share of the work."""
    p, work = f.planned, f.planned.work
    total = float(work.sum()) or 1.0
    members: dict[str, list[int]] = {}
    for index, chosen in enumerate(p.layouts):
        members.setdefault(chosen.name, []).append(index)
    found = []
    for kind, mine in sorted(members.items(), key=lambda each: (-len(each[1]), each[0])):
        size = float(p.mean[mine, -1].sum()) * len(f.rank_bytes)
        seconds = float(work[mine].sum())
        found.append((kind, len(mine), shown_bytes(size), milliseconds(seconds), seconds / total))
    return found


def _tables(f: Figures) -> list[dict[str, Any]]:
    """Rows of the list of tables, those with the most work first."""
    p = f.planned
    busiest = p.busiest[:, :-1].sum(1)
    most = float(busiest.max(initial=0)) or 1.0
    found = []
    for index in p.by_work():
        seconds, size = float(busiest[index]), f.total_bytes(index)
        found.append(
            {
                "index": index,
                "name": p.names[index],
                "kind": p.layouts[index].name,
                "shape": shape(p.shapes[index]),
                "elements": int(np.prod(p.shapes[index], dtype=np.int64)),
                "layout": layout(p.layouts[index], 46) + " (pinned)" * bool(p.is_pinned[index]),
                "bytes": int(size),
                "size": shown_bytes(size),
                "ns": round(seconds * 1e9),
                "ms": milliseconds(seconds),
                "mean_ns": round(float(p.work[index]) * 1e9),
                "mean": milliseconds(float(p.work[index])),
                "part": max(1, round(100 * seconds / most)),
            }
        )
    return found


def _data(f: Figures, grid: Grid, heat: HeatMap | None) -> dict[str, Any]:
    """What the page's script needs: loads of ranks, the heat map's values, and what tables did not get."""
    loads = np.column_stack([f.rank_seconds * 1e6, f.rank_bytes / 1e6])
    keys, labels, options = _options(f)
    return {
        "phases": f.phases,
        "cells": {name: getattr(grid, name) for name in _GRID},
        "outer": f.setting.hosts > 1,
        "ranks": _short(loads),
        "heat": heat
        and {
            "box": heat.box,
            "rows": heat.rows,
            "columns": heat.columns,
            "us": _short(heat.seconds * 1e6),
            "mb": _short(heat.bytes / 1e6),
        },
        "labels": labels,
        "options": options,
        "of": keys,
        "busiest": _short(f.planned.busiest[:, :-1].astype(np.float64) * 1e6),
    }


def _options(f: Figures) -> tuple[list[int], list[str], list[dict[str, Any]]]:
    """What tables did not get: the number of each one's list, the options' words, and the lists.

    Tables of one class that got the same share theirs.
    """
    p, numbers = f.planned, {}
    keys = []
    members: list[int] = []
    for index, key in enumerate(zip(p.class_of.tolist(), p.chosen.tolist(), p.cut.tolist(), strict=True)):
        if key not in numbers:
            numbers[key] = len(members)
            members.append(index)
        keys.append(numbers[key])
    each = max(4, min(24, _OPTIONS // max(1, len(members))))
    every = [best_of_families(f, index) for index in members]
    shown = [options.of(slice(each)) for options in every]
    together = Options.joined(shown) if shown else None
    owners = np.repeat(members, [len(options.row) for options in shown]).tolist()
    why = iter(reasons(f, owners, together) if together is not None else [])
    labels: dict[tuple[int, int, int], int] = {}
    words: list[str] = []
    found = []
    for options, all_of_it in zip(shown, every, strict=True):
        figures = [
            1e6 * options.busiest[:, :-1].sum(1),
            1e6 * options.mean[:, :-1].sum(1),
            options.busiest[:, -1] / 1e6,
        ]
        listed = []
        for row, pieces, *costs in zip(
            options.row.tolist(), options.pieces.tolist(), *map(_short, figures), strict=True
        ):
            key = int(f.offers.label_of[row]), pieces, int(f.offers.most_pieces[row])
            if key not in labels:
                labels[key] = len(words)
                words.append(label_of(f, row, pieces))
            listed.append([labels[key], *costs, next(why)])
        found.append({"rows": listed, "more": len(all_of_it.row) - len(listed)})
    return keys, words, found


def _short(values: Any) -> Any:
    """Numbers with four digits, for a page that stays small."""
    if values.ndim > 1:
        return [_short(row) for row in values]
    return [int(v) if v == int(v) else float(f"{v:.4g}") for v in values.tolist()]
