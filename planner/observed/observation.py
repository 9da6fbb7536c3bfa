"""`Observation`: what sample batches have told of features, as plain data that is saved and read by people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from dmp import ParameterInfo, shown
from planner.observed.distinct_rows import equally_likely
from planner.observed.row_curve import RowCurve

FORMAT, VERSION = "dmp observation", 1
_SHOWN = 30
T = TypeVar("T")


@dataclass(frozen=True)
class ObservedFeature:
    """What was seen of one feature.

    Args:
        pooling_factor: mean ids of a sample.
        distinct: distinct ids of a batch as a share of its ids.
        curve: which rows its ids name; None where too few were seen.
        growth: n batches together have n ** growth as many distinct ids as one.
    """

    pooling_factor: float
    distinct: float
    curve: RowCurve | None = None
    growth: float = 1.0


@dataclass(frozen=True)
class Observation:
    """What sample batches have told; `str()` is a table. `ShardingPlanner(observed=...)` takes it.

    Args:
        batches: read.
        batch_size: mean samples of one.
        features: by name.
    """

    batches: int
    batch_size: float
    features: Mapping[str, ObservedFeature]

    def names_of_table(self, name: str, info: ParameterInfo) -> tuple[str, ...]:
        """The features that read a table, in its order; empty where one of them was not seen.

        A table whose sharder names no features is read by one that is called as its module or by its whole name.

        Args:
            name: of the parameter.
        """
        words = name.split(".")
        aliases = (*words[-2:-1], ".".join(words[:-1]), name)
        names = info.features or next(((alias,) for alias in aliases if alias in self.features), ())
        return tuple(names) if all(each in self.features for each in names) else ()

    def of_table(self, name: str, info: ParameterInfo) -> tuple[ObservedFeature, ...]:
        """What was seen of each of them."""
        return tuple(self.features[each] for each in self.names_of_table(name, info))

    def gaps(self, parameters: Mapping[str, tuple[Any, ParameterInfo]]) -> tuple[str, ...]:
        """A note on the tables of which nothing is known, as one of their features was not seen; empty if there are
        none."""
        tables = {name: info for name, (_, info) in parameters.items() if info.kind == "table"}
        names = [name for name, info in tables.items() if not self.names_of_table(name, info)]
        return (
            f"no ids were observed for {len(names)} tables, {shown(names)}: they are planned as without samples",
        ) * bool(names)

    def told_of(self, parameters: Mapping[str, tuple[T, ParameterInfo]]) -> dict[str, tuple[T, ParameterInfo]]:
        """Parameters with the pooling factors that were seen, in the place of what their sharders know."""
        return {
            name: (sharder, replace(info, pooling_factor=tuple(each.pooling_factor for each in seen)) if seen else info)
            for name, (sharder, info) in parameters.items()
            for seen in [self.of_table(name, info)]
        }

    def curve_of(self, name: str, info: ParameterInfo) -> RowCurve | None:
        """Which rows of a table its ids name, all its features together; None where that is not known."""
        seen = self.of_table(name, info)
        curves = [each.curve for each in seen if each.curve is not None]
        weights = [each.pooling_factor for each in seen if each.curve is not None]
        return RowCurve.mixed(curves, weights) if curves and len(curves) == len(seen) else None

    def named_rows(self, name: str, info: ParameterInfo, samples: float) -> float:
        """Equally likely rows that as many ids would name, of so many samples, as were seen; 0 where nothing was.

        Features that read one table are taken to name different rows of it.
        """
        seen, batches = self.of_table(name, info), samples / max(self.batch_size, 1e-9)
        ids = [each.pooling_factor * samples for each in seen]
        of_each = [each.distinct * n * batches ** (each.growth - 1) for each, n in zip(seen, ids, strict=True)]
        return equally_likely(sum(map(min, of_each, ids)), sum(ids)) if batches > 0 else 0.0

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for `load`."""
        text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Observation:
        """Read what `save` wrote.

        Raises:
            ValueError: another kind of file, another version, or figures that are none.
        """
        try:
            data = json.loads(Path(path).read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is no JSON: {error!s:.200}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT or type(data.get("version")) is not int:
            raise ValueError(f"{path} is no observation: expected what Observation.save wrote; got {shown(data)}")
        if data["version"] != VERSION:
            raise ValueError(f"{path} has version {data['version']}; this version of dmp reads {VERSION}")
        try:
            features = {str(name): _feature(fields) for name, fields in data["features"].items()}
            return cls(_number(data["batches"]), _number(data["batch_size"]), features)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is no observation: {type(error).__name__}: {error!s:.200}") from error

    def __str__(self) -> str:
        width = max([len("feature"), *(len(name) for name in self.features)])
        lines = [
            f"{self.batches} batches of {self.batch_size:,.4g} samples",
            f"{'feature':<{width}}{'ids a sample':>14}{'distinct':>10}  most named rows",
        ]
        by_ids = sorted(self.features, key=lambda name: (-self.features[name].pooling_factor, name))
        for name in by_ids[:_SHOWN]:
            seen = self.features[name]
            lines.append(
                f"{name:<{width}}{seen.pooling_factor:>14.4g}{seen.distinct:>10.0%}  {_hottest(seen.curve)}".rstrip()
            )
        return "\n".join(lines + [f"and {len(by_ids) - _SHOWN} more"] * (len(by_ids) > _SHOWN))


def _hottest(curve: RowCurve | None) -> str:
    """The tenth of the named rows that has most of the ids."""
    if curve is None:
        return "(too few ids)"
    first, last = curve.rows[0], curve.rows[-1]
    step = max(1, (last - first) // 10)
    share, start = max((curve.share(row, row + step), -row) for row in range(first, last, step))
    return f"{share:.0%} of the ids in rows {-start:,} to {-start + step - 1:,} of {last:,}"


def _feature(fields: Any) -> ObservedFeature:
    curve = fields["curve"]
    if curve is not None:
        rows, shares = tuple(map(_number, curve["rows"])), tuple(map(_number, curve["shares"]))
        if len(rows) != len(shares) or len(rows) < 2 or any(b <= a for a, b in pairwise(rows)):
            raise ValueError(f"a curve needs as many rows, ascending, as shares; got {shown(curve)}")
        curve = RowCurve(rows, shares)
    growth = min(1.0, _number(fields.get("growth", 1.0)))
    return ObservedFeature(_number(fields["pooling_factor"]), _number(fields["distinct"]), curve, growth)


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or value < 0:
        raise ValueError(f"expected a number >= 0; got {shown(value)}")
    return value
