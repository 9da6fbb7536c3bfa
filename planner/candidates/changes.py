"""What would make tables fit that do not: changes that are tried, the smallest of each kind, before they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil, isqrt

from dmp import PlanError, ShardError, ShardingEnv, shown_bytes
from planner.candidates.constraints import Constraint
from planner.candidates.in_place import ranks_held
from planner.candidates.request import NoPlan, Request
from planner.candidates.shortage import Shortage, ranks_for
from planner.candidates.trials import Trials, is_dear

_MOST_PINS = 4
_MOST_TIMES = 64
_MOST_RANKS = 1 << 14
_ROOMY = (0.8, 0.8, 0.5)  # parts of the ranks' bytes to be taken
_PARTS = (1.0, 0.9, 0.8, 0.6, 0.4, 0.2, 0.1)
_STEPS = 6  # of halving what is between too little and enough
_FAR = 64


def changes(found: NoPlan, out_of_time: Callable[[], bool]) -> list[str]:
    """Changes each of which is enough, in words.

    Args:
        out_of_time: asked before each trial; what is not tried by then is not told.
    """
    kinds = (_of_pins, _of_constraints, _of_hosts, _of_batch, _of_memory)
    is_total = isinstance(found.cause, Shortage) and found.cause.is_total
    searches = not (is_total and is_dear(found.problem))
    told: list[str] = []
    for kind in kinds:
        try:
            told += kind(found, Trials(out_of_time, searches))
        except (PlanError, ShardError, ValueError):  # that a change makes of a constraint, a pin or a topology
            continue
    return told


def _of_pins(found: NoPlan, trials: Trials) -> Iterator[str]:
    """One pinned entry less, of those that are where it is short; or all of them."""
    request, candidates, rank = found.request, found.candidates, found.cause.rank
    if not request.pinned:
        return
    costed, num_ranks = candidates.costed, request.costs.env.table_size
    rows = candidates.pinned_rows
    there = [
        name
        for name, of in candidates.pinned.items()
        if rank is None or ranks_held(of, costed, rows[name], num_ranks)[rank]
    ]
    for name in sorted(there, key=lambda name: (-costed.fixed[rows[name], -1], name))[:_MOST_PINS]:
        if trials.fits(_without_pins(request, name)):
            yield f"no pin on {name!r}, now {request.pinned[name]}"
            return
    if len(request.pinned) > 1 and trials.fits(_without_pins(request, *request.pinned)):
        yield f"none of the {len(request.pinned)} pins"


def _without_pins(request: Request, *names: str) -> Request:
    return replace(request, pinned={n: layout for n, layout in request.pinned.items() if n not in names})


def _of_constraints(found: NoPlan, trials: Trials) -> Iterator[str]:
    """A layout that is ruled out, or a constraint less, for what does not fit; or no constraint at all."""
    request, names = found.request, found.names
    told = 0
    is_all = isinstance(found.cause, Shortage) and found.cause.is_total
    for text, changed in () if is_all else _freer(found):
        if trials.fits(_with_constraints(request, dict.fromkeys(names, changed))):
            yield text
            told += 1
        if told == 2:
            return
    free = {n: Constraint(pooling_factor=c.pooling_factor) for n, c in request.constraints.items()}
    if not told and free != dict(request.constraints) and trials.fits(_with_constraints(request, free)):
        yield "no constraints but pooling factors"


def _freer(found: NoPlan) -> Iterator[tuple[str, Constraint]]:
    """The constraint of what does not fit, with one thing less each, and words for that."""
    name = found.names[0]
    constraint, whom = found.request.constraints[name], f"on {name!r}"
    if name in found.candidates.class_of and len(found.names) == 1:
        offers = [found.candidates.costed.offers[row] for row in found.candidates.offers_of(name)]
        kinds = list(dict.fromkeys(offer.family.name for offer in offers if not offer.objection))
        for offer in offers:
            if offer.objection:
                asked = (*(constraint.layouts or kinds), offer.family.name)
                banned = tuple(kind for kind in constraint.forbid or () if kind != offer.family.name)
                text = f"layout {offer.family.name} for {name!r}, now ruled out ({offer.objection})"
                yield text, replace(constraint, layouts=asked, forbid=banned or None)
    for what in ("ranks", "spread", "colocate", "min_columns"):
        value = getattr(constraint, what)
        if value is not None:
            shown = list(value) if isinstance(value, tuple) else value
            yield f"no constraint {what}={shown!r} {whom}", replace(constraint, **{what: None})


def _with_constraints(request: Request, changed: dict[str, Constraint]) -> Request:
    return replace(request, constraints={**request.constraints, **changed})


def _of_hosts(found: NoPlan, trials: Trials) -> Iterator[str]:
    """A longer outer axis."""
    request = found.request
    env = request.costs.env
    if not env.axes("shard"):
        return
    axis = env.axes("shard")[0]
    size = env.shape[env.names.index(axis)]
    most = min(size * _MOST_TIMES, _MOST_RANKS * size // env.size - size)

    def on_more(count: int) -> Request:
        return replace(request, costs=replace(request.costs, env=_longer(env, axis, size + count)))

    more = _more_hosts(found, size, most, trials, on_more)
    if more is not None and axis == "host":
        yield f"{more} more hosts, {size + more} in all" if more > 1 else f"one more host, {size + more} in all"
    elif more is not None:
        yield f"{size + more} ranks along {axis!r} (now {size})"


def _more_hosts(found: NoPlan, size: int, most: int, trials: Trials, on_more: Callable[[int], Request]) -> int | None:
    """How many more than `size` are enough, from what the bytes ask for; None where none up to `most` is found."""
    low, high, of, per_host = 0, 0, found.problem, len(found.problem.capacity) / size
    for part in _ROOMY if is_dear(of) else _PARTS:
        asked = min(ranks_for(of, part) / per_host, size + most)
        high = min(most, max(low + 1, ceil(asked) - size))
        if trials.fits(on_more(high)):
            break
        low, of = high, trials.problem or of
        if high == most:
            return None
    else:
        return None
    while high - low > 1 and not is_dear(found.problem):
        middle = (low + high) // 2
        low, high = (low, middle) if trials.fits(on_more(middle)) else (middle, high)
    return high


def _longer(env: ShardingEnv, axis: str, size: int) -> ShardingEnv:
    shape = [size if name == axis else n for name, n in zip(env.names, env.shape, strict=True)]
    roles = {role: env.axes(role) for role in ("replicate", "shard", "tensor") if env.axes(role)}
    return ShardingEnv.abstract(shape, env.names, env.device_type, **roles)


def _of_batch(found: NoPlan, trials: Trials) -> Iterator[str]:
    """Fewer samples, where their buffers are what is too much."""
    request = found.request
    batch = int(request.costs.batch_size)

    def with_batch(size: int) -> Request:
        return replace(request, costs=replace(request.costs, batch_size=size))

    if batch < 2 or not trials.fits(with_batch(1)):
        return
    low, high = 1, batch
    for _ in range(_STEPS):
        if high - low < 2:
            break
        far = high > _FAR * low  # of magnitudes then: what fits may be a thousandth
        middle = isqrt(low * high) if far else (low + high) // 2
        low, high = (middle, high) if trials.fits(with_batch(middle)) else (low, middle)
    yield f"batch_size of {low} (now {batch})"


def _of_memory(found: NoPlan, trials: Trials) -> Iterator[str]:
    """More memory."""
    topology = found.request.costs.topology
    now, usable = topology.memory_bytes, 1 - topology.reserved_fraction
    if found.cause.rank is None:
        return

    def holds(size: float) -> bool:
        return trials.holds(replace(found.problem, capacity=found.problem.capacity + (size - now) * usable))

    short = found.cause.bytes_short / usable
    if isinstance(found.cause, Shortage) and found.cause.is_total:
        short /= len(found.problem.capacity)
    low, high = now, float(ceil(now + max(short, now / 64)))
    while not holds(high):
        low, high = high, float(ceil(high + max(high - now, high) / 8))
        if high > now * _MOST_TIMES:
            return
    for _ in range(_STEPS):
        middle = float(ceil((low + high) / 2))
        low, high = (low, middle) if holds(middle) else (middle, high)
    yield f"memory_bytes of {high:.0f} per rank ({shown_bytes(high)}; now {shown_bytes(now)})"
