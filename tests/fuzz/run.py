"""`python -m tests.fuzz.run --seed 1`: every probe, as a table of outcomes."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.fuzz import divergent, inputs, keyed_programs, meshes, misuse, plans, programs, sources
from tests.fuzz.outcome import ERROR, LIMIT_S, RIGHT, Outcome, merged
from tests.ranks import RankError, run_apart, run_ranks

CATEGORIES = {
    "inputs": (inputs, 2, 240),
    "plans": (plans, 2, 200),
    "meshes": (meshes, 4, 80),
    "sources": (sources, 0, 250),
    "misuse": (misuse, 2, 210),
    "divergent": (divergent, 2, 60),
    "programs": (programs, 4, 60),
    "keyed programs": (keyed_programs, 4, 60),
}
"""Name -> module, ranks (0: in this process), how many probes a whole run has."""

_SHOWN = 16


def run(name: str, seed: int, count: int | None = None) -> list[Outcome]:
    """The outcomes of one category's probes."""
    module, ranks, whole = CATEGORIES[name]
    if module is divergent:
        return [apart(probe) for probe in divergent.probes(seed, count or whole)]
    if not ranks:
        return [module.run(probe) for probe in module.probes(seed, count or whole)]
    limit_s: float = getattr(module, "LIMIT_S", LIMIT_S)
    return [on_ranks(module.run, probe, ranks, limit_s) for probe in module.probes(seed, count or whole)]


def on_ranks(fn: Callable[[Any], Outcome], probe: object, ranks: int, limit_s: float) -> Outcome:
    """One probe on the pool of so many ranks, which stays for the next unless the probe hangs or kills it."""
    try:
        return merged(run_ranks(ranks, fn, probe, timeout=2 * limit_s))
    except RankError as error:
        return Outcome(str(probe), "ranks hang, die or raise", str(error), 2 * limit_s)


def apart(probe: divergent.Probe) -> Outcome:
    """One probe on ranks of its own, of which one may die: what the others say."""
    ends = run_apart(2, divergent.run, probe, timeout=3 * LIMIT_S)
    dead = [rank for rank, what in enumerate(probe) if what in divergent.DEATHS]
    living = [
        end
        if isinstance(end, Outcome)
        else Outcome(str(probe), "no answer" if end is None else "died or raised", end or "")
        for rank, end in enumerate(ends)
        if rank not in dead
    ]
    return merged(living)


def table(found: dict[str, list[Outcome]]) -> str:
    """A row for each category, then what is wrong."""
    lines = [f"{'category':<12}{'probes':>8}{ERROR:>14}{RIGHT:>16}{'wrong':>8}{'slowest':>10}"]
    for name, outcomes in found.items():
        ends = Counter(o.end if o.is_good else "wrong" for o in outcomes)
        slowest = max((o.seconds for o in outcomes), default=0.0)
        lines.append(
            f"{name:<12}{len(outcomes):>8}{ends[ERROR]:>14}{ends[RIGHT]:>16}{ends['wrong']:>8}{slowest:>8.1f} s"
        )
    for outcomes in found.values():
        lines += [f"\n{o.probe}\n  {o.end}\n  {_short(o.text)}" for o in outcomes if not o.is_good]
    return "\n".join(lines)


def _short(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip(" ^")]
    return "\n  ".join(lines if len(lines) <= _SHOWN else [*lines[: _SHOWN // 2], "...", *lines[-_SHOWN // 2 :]])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=sorted(CATEGORIES), action="append", help="these categories alone")
    parser.add_argument("--count", type=int, help="probes of each category")
    args = parser.parse_args()
    found = {name: run(name, args.seed, args.count) for name in args.only or CATEGORIES}
    print(table(found))
    return 1 if any(not o.is_good for outcomes in found.values() for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
