"""A report as JSON and back: for a command that explains a plan later, elsewhere, without its model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from dmp import DmpError, Layout, PlanError
from planner.dense.block import DenseBlock
from planner.observed.row_curve import RowCurve
from planner.report.figures import Figures
from planner.report.offers import Offers
from planner.report.planned import Pieces, Planned
from planner.report.setting import Setting
from planner.report.traffic import Reads

VERSION = 1
_OFFERS = ("starts", "label_of", "busiest", "mean", "by_width", "by_piece", "units", "most_pieces")
_DTYPES = {"f": np.float32, "d": np.float64, "i": np.int32, "l": np.int64, "?": np.bool_}


def to_json(figures: Figures) -> str:
    """A report as text, with a format version."""
    return json.dumps({"version": VERSION, "report": _plain(figures)})


def figures_from_json(text: str) -> dict[str, Any]:
    """The fields of the report that `to_json` wrote.

    Raises:
        PlanError: not a report, or one of another version.
    """
    try:
        data = json.loads(text)
        version, given = data["version"], data["report"]
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f'not a report: expected {{"version": .., "report": {{..}}}}, as PlanReport.save writes; {error!r:.300}'
        ) from error
    if version != VERSION:
        raise PlanError(f"this report has format version {version!r}; this version reads version {VERSION}")
    try:
        return _read(given)
    except (DmpError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise PlanError(f"a plan's report that is damaged: {type(error).__name__}: {error!s:.300}") from error


def _plain(value: Any) -> Any:
    """A value of a report as JSON has it: an array by its type, shape and numbers."""
    if isinstance(value, np.ndarray):
        digits = 9 if value.dtype == np.float32 else 17
        flat = value.ravel().tolist()
        numbers = [float(f"{x:.{digits}g}") for x in flat] if value.dtype.kind == "f" else flat
        return {"type": value.dtype.char, "shape": list(value.shape), "numbers": numbers}
    if isinstance(value, Layout):
        return value.to_json()
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def _read(given: dict[str, Any]) -> dict[str, Any]:
    planned, offers, setting = dict(given["planned"]), given["offers"], given["setting"]
    pieces = Pieces(**{name: _array(of) for name, of in planned.pop("pieces").items()})
    readers: dict[str, Callable[[Any], Any]] = {
        "names": tuple,
        "layouts": lambda layouts: tuple(map(Layout.from_json, layouts)),
        "shapes": lambda shapes: tuple(map(tuple, shapes)),
    }
    known, reads = {field.name for field in fields(Figures)}, given.get("reads")
    return {
        **{name: tuple(of) if isinstance(of, list) else of for name, of in given.items() if name in known},
        "setting": Setting(
            **{
                **setting,
                "axes": tuple(map(tuple, setting["axes"])),
                "table_shape": tuple(setting["table_shape"]),
                "links": {axis: tuple(link) for axis, link in setting["links"].items()},
            }
        ),
        "planned": Planned(pieces=pieces, **{name: readers.get(name, _array)(of) for name, of in planned.items()}),
        "offers": Offers(
            labels=tuple(offers["labels"]),
            objections={int(row): why for row, why in offers["objections"].items()},
            **{name: _array(offers[name]) for name in _OFFERS},
        ),
        "reads": None if reads is None else _reads(reads),
        "rank_seconds": _array(given["rank_seconds"]),
        "rank_bytes": _array(given["rank_bytes"]),
        "dense": tuple(DenseBlock(**block) for block in given["dense"]),
    }


def _reads(given: dict[str, Any]) -> Reads:
    curves = {name: RowCurve(tuple(of["rows"]), tuple(of["shares"])) for name, of in given["curves"].items()}
    return Reads(_array(given["known"]), curves, int(given["id_bytes"]))


def _array(given: Any) -> Any:
    return np.array(given["numbers"], dtype=_DTYPES[given["type"]]).reshape(given["shape"])
