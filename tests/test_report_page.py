"""The report as a page: whole by itself, well formed, readable in both themes, small at thousands of tables."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import nn

from dmp import ShardingEnv
from planner import PlanReport, ShardingPlanner
from planner.report.mesh_picture import Grid
from tests.planner_bags import BagSharder, bags, hosts, mlperf_on_four_hosts, one_axis

_VOID = {"meta", "link", "br", "hr", "img", "input", "rect", "path"}


class Outline(HTMLParser):
    """Which elements a page has; whatever is not closed, or closed and not open, is an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.feed(page)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.ids += [value for name, value in attributes if name == "id" and value]
        assert len({name for name, _ in attributes}) == len(attributes), (tag, attributes)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag, (tag, self.getpos())


def planned(module: nn.Module, env: ShardingEnv) -> PlanReport:
    planner = ShardingPlanner(batch_size=2048)
    planner.plan(module, [BagSharder()], env)
    assert planner.report is not None
    return planner.report


def page_of(report: PlanReport, folder: Path) -> str:
    report.save_html(folder / "plan.html")
    return (folder / "plan.html").read_text()


def check(page: str) -> Outline:
    """What holds for every page."""
    assert page.startswith("<!doctype html>")
    for outside in ("http", "src=", "url(", "@import", "<link", "xmlns"):
        assert outside not in page
    outline = Outline(page)
    assert max(Counter(outline.ids).values()) == 1
    script = page.rpartition("<script>")[2]
    used = set(re.findall(r'\$\("(\w+)"\)', script)) - {"mesh", "heat", "tables", "filter", "kind", "shown"}
    assert used <= set(outline.ids)
    json.loads(re.findall(r'id="data">(.*?)</script>', page, re.S)[0])
    colours = set(re.findall(r"\.(\w+) \{ fill", page))
    for picture in re.findall(r"<svg.*?</svg>", page, re.S):
        drawn = ElementTree.fromstring(picture)
        _, _, width, height = map(float, drawn.attrib["viewBox"].split())
        for shape in drawn.iter():
            assert "nan" not in str(shape.attrib)
            style = shape.get("class", "").split()
            assert shape.tag not in ("rect", "path") or colours.intersection(style) or {"pointed", "mark"} & {*style}, (
                style
            )
            if shape.tag in ("rect", "text"):
                assert 0 <= float(shape.get("x", 0)) <= width and 0 <= float(shape.get("y", 0)) <= height
    return outline


@pytest.fixture(scope="module")
def mlperf() -> PlanReport:
    report = mlperf_on_four_hosts().report
    assert isinstance(report, PlanReport)
    return report


def test_page(mlperf: PlanReport, tmp_path: Path) -> None:
    page = page_of(mlperf, tmp_path)
    outline = check(page)
    assert {"mesh", "heat", "tables", "filter", "theme"} <= set(outline.ids)
    assert outline.tags["svg"] == 5
    for said in ("Above the bound", "Samples a second", "4 x 8 (host, local)", "40,000,000 x 128", "ModuleDict"):
        assert said in page
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page, re.S)[0])
    assert len(data["ranks"]) == 32 and len(data["of"]) == 26 and len(data["heat"]["rows"]) == 26
    assert any("longer than all tables" in row[-1] for option in data["options"] for row in option["rows"])


def test_names_are_text_on_the_page(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({"</script><b>&": nn.EmbeddingBag(10, 8, mode="sum")})
    report = replace(planned(module, one_axis(1)), notes=("<i>advice</i>",))
    page = page_of(report, tmp_path)
    check(page)
    assert "</script><b>" not in page and "<i>advice" not in page


def test_without_tables(tmp_path: Path) -> None:
    with torch.device("meta"):
        layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 3)
    report = planned(layers, ShardingEnv.abstract((16, 8), ("dp_shard", "tp")))
    page = page_of(report, tmp_path)
    outline = check(page)
    assert "The dense part" in page and "heat" not in outline.ids
    assert max(map(len, str(report).splitlines())) <= 100 and "0 tables" not in str(report)
    assert page_of(PlanReport.from_json(report.to_json()), tmp_path) == page
    check(page_of(planned(nn.Identity(), one_axis(2)), tmp_path))


def test_heat_map_says_where_tables_are(mlperf: PlanReport, tmp_path: Path) -> None:
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page_of(mlperf, tmp_path), re.S)[0])
    held = np.array(data["heat"]["mb"])
    assert held.shape == (26, 32)
    for row, title in zip(held, data["heat"]["rows"], strict=True):
        index = mlperf.planned.names.index(title.rpartition(", ")[0])
        weights = 4 * np.prod(mlperf.planned.shapes[index]) / 1e6
        assert weights < row.sum() * 1.001 < mlperf.total_bytes(index) / 1e6 * 1.01


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (1, 64), (1, 1000), (2, 8), (8, 16), (3, 100), (64, 8), (512, 8)])
def test_every_rank_has_its_cell(shape: tuple[int, int]) -> None:
    grid = Grid.of(*shape)
    cells = set(zip(*(each.tolist() for each in grid.places()), strict=True))
    assert len(cells) == shape[0] * shape[1]
    rows, columns = grid.rows(), grid.columns()
    assert len(rows) > max(r for r, _ in cells) and len(columns) > max(c for _, c in cells)
    assert columns[-1] + grid.wide <= 1060 and (rows[-1] + grid.high <= 500)


_OF_ROWS = ("label_of", "busiest", "mean", "by_width", "by_piece", "units", "most_pieces")


def many(tables: int, num_hosts: int, local: int) -> PlanReport:
    """A report as large as they come, grown from a planned one: tables and ranks repeated."""
    small = planned(bags(*((1000 * (i + 1), 64) for i in range(20))), hosts(2, 8))
    times, ranks = tables // 20, num_hosts * local
    p, pieces = small.planned, small.planned.pieces
    step = np.repeat(np.arange(times), len(pieces.owner))
    copies = replace(
        pieces,
        owner=(np.tile(pieces.owner, times) + 20 * step).astype(np.int32),
        first=((np.tile(pieces.first, times) + 16 * step) % (ranks - 15)).astype(np.int32),
        **{name: np.tile(getattr(pieces, name), times) for name in ("size", "seconds", "bytes")},
    )
    repeated = {name: np.concatenate([getattr(p, name)] * times) for name in ("is_pinned", "busiest", "mean", "cut")}
    rows = len(small.offers.label_of)
    classes = len(small.offers.starts) - 1
    offers = replace(
        small.offers,
        starts=np.append(np.concatenate([small.offers.starts[:-1] + i * rows for i in range(times)]), rows * times),
        **{name: np.concatenate([getattr(small.offers, name)] * times) for name in _OF_ROWS},
    )
    axes = (("host", num_hosts, "shard"), ("local", local, "shard"))
    spread = np.random.default_rng(0).uniform(0.8, 1.0, (ranks, 1))
    return replace(
        small,
        setting=replace(small.setting, axes=axes, table_shape=(num_hosts, local)),
        planned=replace(
            p,
            names=tuple(f"sparse.embedding_bags.t{i}.weight" for i in range(tables)),
            layouts=p.layouts * times,
            shapes=p.shapes * times,
            class_of=np.concatenate([p.class_of + i * classes for i in range(times)]),
            chosen=np.concatenate([p.chosen + i * rows for i in range(times)]),
            pieces=copies,
            **repeated,
        ),
        offers=offers,
        rank_seconds=small.rank_seconds.max(0) * spread,
        rank_bytes=(small.rank_bytes.max() * spread[:, 0]).astype(np.int64),
    )  # fmt: skip


def test_thousands_of_tables_and_ranks(tmp_path: Path) -> None:
    report = many(2000, 512, 8)
    lines = str(report).splitlines()
    assert len(lines) <= 42 and max(map(len, lines)) <= 100
    page = page_of(report, tmp_path)
    assert len(page) < 3e6
    check(page)


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours `#rrggbb`."""

    def light(colour: str) -> float:
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_both_themes_are_readable(mlperf: PlanReport, tmp_path: Path) -> None:
    page = page_of(mlperf, tmp_path)
    themes = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r"\{([^{}]*--page:[^{}]*)\}", page)]
    assert len(themes) == 3 and themes[1] == themes[2]
    for theme in themes:
        assert set(theme) == set(themes[0])
        for ground in ("page", "panel", "rail"):
            assert contrast(theme["ink"], theme[ground]) > 7
            assert contrast(theme["quiet"], theme[ground]) > 4.5
        assert all(contrast(theme[name], theme["panel"]) > 2 for name in theme if re.fullmatch(r"[pdk]\w", name))
        assert all(contrast(theme[f"l{i}"], theme["panel"]) > 3 for i in range(5, 9))
        assert all(contrast(theme[f"l{i}"], theme["ink"]) > 4 for i in range(3))


def test_save_html_without_jinja(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mlperf: PlanReport) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError, match="pip install jinja2"):
        mlperf.save_html(tmp_path / "plan.html")
