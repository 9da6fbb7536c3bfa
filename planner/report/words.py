"""Numbers, ranks and layouts as a person reads them, short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmp import Layout

_RUNS_SHOWN = 3


def milliseconds(seconds: float) -> str:
    """`1.362 ms`; three decimals below ten, fewer above; `8.41 us` for what has no three digits then."""
    ms = seconds * 1e3
    if ms < 0.01:
        return f"{ms * 1e3:.2f} us" if ms > 0 else "0 ms"
    return f"{ms:,.{3 if ms < 10 else 2 if ms < 100 else 1 if ms < 1000 else 0}f} ms"


def count(number: float) -> str:
    """`26`, `2,048`, `1.23 M`, `70.6 B`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g} {letter}" if number < 1000 * size else f"{number / size:,.0f} {letter}"
    return f"{number:,.0f}"


def size(number: float) -> str:
    """Bytes to three digits: `80 GB`, `2.5 TB`; for what is known no better, as a machine's figures."""
    for unit, letter in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if number >= unit:
            return f"{number / unit:,.3g} {letter}" if number < 1000 * unit else f"{number / unit:,.0f} {letter}"
    return f"{number:.0f} bytes"


def times(ratio: float) -> str:
    """`1.4x`, `38x`, `12,000x`."""
    return f"{ratio:,.2g}x" if ratio < 10 else f"{ratio:,.0f}x"


def shape(sizes: Sequence[int]) -> str:
    """`40,000,000 x 128`."""
    return " x ".join(f"{n:,}" for n in sizes) or "scalar"


def span(low: str, high: str) -> str:
    """`2.1-3.4 GB`, or one of them where they are equal."""
    number, _, unit = low.partition(" ")
    return high if low == high else f"{number if high.endswith(' ' + unit) else low}-{high}"


def plural(number: int, one: str, many: str = "") -> str:
    """`1 table`, `2 tables`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def ranks(numbers: Sequence[int] | NDArray[Any], shown: int = _RUNS_SHOWN) -> str:
    """`0-7, 16, 24-31, +480`: the first runs, and how many ranks more."""
    ordered = np.unique(np.asarray(numbers, dtype=np.int64))
    cuts = np.flatnonzero(np.diff(ordered) != 1) + 1
    parts = np.split(ordered, cuts) if len(ordered) else []
    texts = [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts[:shown]]
    more = sum(len(part) for part in parts[shown:])
    return ", ".join(texts) + (f", +{more:,}" if more else "")


def layout(of: Layout, width: int = 40) -> str:
    """A layout in a line: as it prints where that fits, else with its ranks counted: `row_wise(8 ranks: 0-7)`."""
    text = str(of)
    if len(text) <= width:
        return text
    args = dict(of.args)
    named = args.get("ranks", args.get("host"))
    if not isinstance(named, tuple | list):
        return text[: width - 4] + " ..."
    flat = [n for part in named for n in (part if isinstance(part, tuple | list) else (part,))]
    what = "hosts" if "host" in args else "ranks"
    cut = f"{len(named)} x {len(named[0])}, " if named and isinstance(named[0], tuple | list) else ""
    for shown in (3, 2, 1):
        text = f"{of.name}({cut}{len(set(flat)):,} {what}: {ranks(flat, shown)})"
        if len(text) <= width:
            break
    return text if len(text) <= width else text[: width - 4] + " ..."


def apart(names: Sequence[str], width: int) -> tuple[list[str], str]:
    """Names that may be longer than `width` without the words at both ends that all have, and what is left of these.

    `a.bags.t1.weight` and `a.bags.t2.weight` are `t1` and `t2` of `a.bags.*.weight`; short names stay as they are.
    """
    words = [name.split(".") for name in names]
    most = min(map(len, words), default=1) - 1
    if len(names) < 2 or not most or max(map(len, names)) <= width:
        return list(names), ""
    last = next((i for i in range(most) if len({of[-1 - i] for of in words}) > 1), most)
    first = next((i for i in range(most - last) if len({of[i] for of in words}) > 1), most - last)
    pattern = ".".join([*words[0][:first], "*", *words[0][len(words[0]) - last :]])
    return [".".join(of[first : len(of) - last]) for of in words], pattern if first or last else ""


def shortened(text: str, width: int) -> str:
    """The text, with its middle left out where it is longer."""
    if len(text) <= width:
        return text
    head = (width - 3) // 3
    return text[:head] + "..." + text[len(text) - (width - 3 - head) :]
