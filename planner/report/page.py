"""The report as a page of HTML."""

from __future__ import annotations

from typing import Any

from dmp import shown_bytes

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Sharding plan</title><style>
body { font: 14px/1.4 sans-serif; margin: 2em; max-width: 75em } table { border-collapse: collapse; margin: 1em 0 }
th, td { padding: .2em .7em; text-align: right; border-bottom: 1px solid #ddd } .name, .why { text-align: left }
.bar { display: inline-block; height: .8em; background: #47a; vertical-align: middle } summary { cursor: pointer }
.why { color: #555 }
</style></head><body>
<h1>Sharding plan</h1>
<p>Step {{ "%.3f" | format(r.step_seconds * 1e3) }} ms; lower bound {{ "%.3f" | format(r.lower_bound * 1e3) }} ms;
gap {{ "%.1f" | format(r.gap * 100) }} %; planned in {{ "%.2f" | format(r.planning_seconds) }} s
{%- if r.is_cut_short %}, <b>cut short by the time budget</b>{% endif %}. All figures are the cost model's.</p>
<h2>Ranks</h2>
<table><tr><th>rank</th>{% for p in r.phases %}<th>{{ p }}, ms</th>{% endfor %}<th>memory</th><th class="name">of
{{ shown_bytes(r.usable_bytes) }}</th></tr>
<tr><th>step</th>{% for s in r.phase_seconds %}<th>{{ "%.3f" | format(s * 1e3) }}</th>{% endfor %}
<th></th><th></th></tr>
{% for seconds in r.rank_seconds %}{% set size = r.rank_bytes[loop.index0] %}
<tr><td>{{ loop.index0 }}</td>{% for s in seconds %}<td>{{ "%.3f" | format(s * 1e3) }}</td>{% endfor %}
<td>{{ shown_bytes(size) }}</td>
<td class="name"><span class="bar"
style="width: {{ [100 * size // ([r.usable_bytes, 1] | max), 100] | min }}px"></span></td></tr>
{% endfor %}</table>
<h2>Parameters</h2>
<table><tr><th class="name">parameter</th><th class="name">layout</th><th>busiest rank, &micro;s</th>
<th>mean, &micro;s</th><th>largest piece</th><th class="name">not chosen</th></tr>
{% for p in work %}<tr><td class="name">{{ p.name }}</td>
<td class="name">{{ p.layout }}{% if p.is_pinned %} (pinned){% endif %}</td>
<td>{{ "%.1f" | format(p.busiest_seconds * 1e6) }}</td><td>{{ "%.1f" | format(p.mean_seconds * 1e6) }}</td>
<td>{{ shown_bytes(p.rank_bytes) }}</td>
<td class="why"><details><summary>{{ p.alternatives | length }}</summary>
{% for a in p.alternatives %}<div>{{ a.label }}: {{ a.reason }}
(busiest {{ "%.1f" | format(a.busiest_seconds * 1e6) }} &micro;s, mean
{{ "%.1f" | format(a.mean_seconds * 1e6) }} &micro;s, {{ shown_bytes(a.rank_bytes) }})</div>{% endfor %}
</details></td></tr>
{% endfor %}</table>
</body></html>
"""


def render(report: Any) -> str:
    """The page's text for a `PlanReport`.

    Raises:
        ModuleNotFoundError: Jinja2 is not installed.
    """
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "PlanReport.save_html needs Jinja2: pip install jinja2; str(report) needs nothing"
        ) from error
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_PAGE)
    return str(page.render(r=report, shown_bytes=shown_bytes, work=report.by_work()))
