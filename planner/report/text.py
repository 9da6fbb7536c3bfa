"""A report as text: one screen, at eight ranks and at four thousand, with two tables and with two thousand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from textwrap import wrap

from dmp import shown_bytes
from planner.report.figures import Figures
from planner.report.rank_groups import rank_groups
from planner.report.words import apart, count, layout, milliseconds, plural, ranks, shape, shortened, span

_WIDTH = 100
_NAME = 30
_GROUPS_SHOWN = 5
_LAYOUTS_SHOWN = 6
_PARAMETERS_SHOWN = 10
_BLOCKS_SHOWN = 5
_NOTES_SHOWN = 4
_BAR = 20


def report_text(figures: Figures) -> str:
    """`str(report)`."""
    parts = (_headline, _phases, _ranks, _layouts, _most_work, _dense, _notes)
    return "\n".join(line.rstrip() for part in parts for line in part(figures))


def _headline(f: Figures) -> list[str]:
    s, p = f.setting, f.planned
    speed = f", {count(f.samples_per_second)} samples/s" if f.samples_per_second else ""
    cut = ", cut short by the time budget" if f.is_cut_short else ""
    parts = [f"{plural(len(p.names), 'table')} of {count(p.elements)} elements"] * bool(p.names)
    parts += [f"{count(s.dense_parameters)} dense parameters"] * bool(s.dense_parameters)
    bound = f"lower bound {milliseconds(f.lower_bound)}, gap {f.gap:.1%}"
    step = f"step {milliseconds(f.step_seconds)}"
    if f.dense_seconds:
        bound = f"tables {milliseconds(f.table_seconds)}, {bound}" if p.names else "no tables"
    step += f" ({bound})" if f.dense_seconds else f", {bound}"
    return [
        f"{step}{speed}",
        f"planned in {f.planning_seconds:.2f} s{cut}; all figures are the cost model's",
        f"{s.model}: {', '.join(parts) or 'no parameters'}",
        f"mesh {s.mesh_text()}; batch {s.batch_text()}",
        *([f"a batch of up to {f.largest_batch:,} on each rank fits"] if f.largest_batch else []),
        f"a rank: {s.machine_text()}"[:_WIDTH],
    ]


def _phases(f: Figures) -> list[str]:
    if f.table_seconds <= 0:
        return []
    lines = ["", f"{'phase':<14}{'slowest':>12}{'mean':>12}{'imbalance':>11}  share of the step"]
    mean = f.mean_phase_seconds()
    for name, slowest, average, ratio in zip(f.phases, f.phase_seconds, mean, f.imbalance, strict=True):
        if slowest > 0:
            bar = "#" * round(_BAR * slowest / f.step_seconds)
            share = f"{slowest / f.step_seconds:>5.0%}  {bar}"
            lines.append(f"{name:<14}{milliseconds(slowest):>12}{milliseconds(average):>12}{ratio:>10.2f}x  {share}")
    return lines


def _ranks(f: Figures) -> list[str]:
    used = f.rank_bytes
    if not len(used) or not used.any():
        return []
    share = used.max() / max(1, f.usable_bytes)
    lines = [
        "",
        f"memory of tables: fullest rank {shown_bytes(int(used.max()))} (rank {int(used.argmax())}, {share:.0%} of "
        f"{shown_bytes(f.usable_bytes)} usable), mean {shown_bytes(float(used.mean()))}",
        f"{'ranks':>7}  {'step time':>16}  {'memory':>21}  which",
    ]
    for group in rank_groups(f, _GROUPS_SHOWN):
        time = span(milliseconds(group.least), milliseconds(group.most))
        size = span(shown_bytes(group.least_bytes), shown_bytes(group.most_bytes))
        lines.append(f"{len(group.ranks):>7,}  {time:>16}  {size:>21}  {ranks(group.ranks, 6)}")
    return lines


def _layouts(f: Figures) -> list[str]:
    p = f.planned
    if not p.names:
        return []
    kinds: dict[str, list[int]] = defaultdict(list)
    for index, chosen in enumerate(p.layouts):
        kinds[chosen.name].append(index)
    work = p.work
    total = float(work.sum())
    ordered = sorted(kinds.items(), key=lambda kind: -float(work[kind[1]].sum()))
    lines = ["", f"{'layout':<18}{'tables':>7}{'memory':>12}{'mean':>12}{'of the work':>13}"]
    for name, members in ordered[:_LAYOUTS_SHOWN]:
        size = shown_bytes(sum(f.total_bytes(i) for i in members))
        seconds = float(work[members].sum())
        part = seconds / total if total > 0 else 0.0
        lines.append(f"{name:<18}{len(members):>7,}{size:>12}{milliseconds(seconds):>12}{part:>13.0%}")
    return lines


def _most_work(f: Figures) -> list[str]:
    p = f.planned
    indices = p.by_work()[:_PARAMETERS_SHOWN]
    if not indices:
        return []
    lines = ["", *parameter_lines(f, indices, "most work")]
    if len(p.names) > len(indices):
        lines.append(f"and {len(p.names) - len(indices):,} more; report.explain(name): what each did not get, and why")
    return lines


def parameter_lines(f: Figures, indices: Sequence[int], title: str = "parameter") -> list[str]:
    """A table of parameters: shape, memory on all ranks, milliseconds on the rank that each loads most, layout."""
    p = f.planned
    shapes = {i: shape(p.shapes[i]) for i in indices}
    names, pattern = apart(p.names, _NAME)
    width = min(_NAME, max(len(title), *(len(names[i]) for i in indices)))
    sizes = max(5, *(len(text) for text in shapes.values()))
    lines = [f"{title:<{width}}  {'shape':>{sizes}}  {'memory':>9}  {'busiest':>9}  layout"]
    room = _WIDTH - width - sizes - 26
    for i in indices:
        busiest = milliseconds(float(p.busiest[i, :-1].sum()))
        chosen = layout(p.layouts[i], room - 9 * bool(p.is_pinned[i])) + " (pinned)" * bool(p.is_pinned[i])
        name, memory = shortened(names[i], width), shown_bytes(f.total_bytes(i))
        lines.append(f"{name:<{width}}  {shapes[i]:>{sizes}}  {memory:>9}  {busiest:>9}  {chosen}")
    return [*lines, *([f"names: {pattern}"] if pattern else [])]


def _dense(f: Figures) -> list[str]:
    if not f.dense:
        return []
    more = {"tables": " with buffers and optimizer state"}
    kinds = ", ".join(f"{k} {shown_bytes(size)}{more.get(k, '')}" for k, size in f.bytes_by_kind.items() if size)
    lines = [""]
    if f.dense_seconds:
        taken = ", ".join(f"{what} {milliseconds(s)}" for what, s in f.dense_seconds.items() if s > 0)
        lines += _wrapped(f"dense part of the step: {taken or 'nothing'}")
    if f.dense_bytes:
        parts = ", ".join(f"{part} {shown_bytes(size)}" for part, size in f.dense_bytes.items() if size)
        lines += _wrapped(f"its memory on a rank: {parts}")
    lines += _wrapped(f"weights on a rank: {kinds or 'nothing'}")
    for block in f.dense[:_BLOCKS_SHOWN]:
        kept = ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in block.rank_bytes.items())
        name = f"{block.count} x {block.name}" if block.name else "the rest"
        took = f"; {milliseconds(sum(block.seconds.values()))}" if block.seconds else ""
        lines += _wrapped(f"{name}: {count(block.num_parameters)} parameters, on a rank {kept or 'nothing'}{took}")
    return lines + [f"and {len(f.dense) - _BLOCKS_SHOWN} more blocks"] * (len(f.dense) > _BLOCKS_SHOWN)


def _wrapped(text: str) -> list[str]:
    return wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _notes(f: Figures) -> list[str]:
    lines = [line for note in f.notes[:_NOTES_SHOWN] for line in _wrapped(f"note: {note}")]
    return lines + [f"and {len(f.notes) - _NOTES_SHOWN} more notes: report.notes"] * (len(f.notes) > _NOTES_SHOWN)
