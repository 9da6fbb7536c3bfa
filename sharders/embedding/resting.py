"""Tables that are frozen, and rest: stored apart from those that are trained, so that updates pass them by. They keep
their parameters, and the state of their optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dmp import data_parallel, rectangles
from sharders.embedding.data_path.engine import Engine
from sharders.embedding.exchange.placement import Table
from sharders.embedding.weights.handed_out import hand_out


def at_first(parameter: torch.Tensor) -> tuple[bool, bool]:
    """Whether a table that is being sharded is trainable, and whether it rests; see `Table`."""
    if parameter.requires_grad:
        return True, False
    rests = not getattr(parameter, "_in_backward_optimizers", ())
    return rests, rests


def resting(engine: Engine) -> list[bool] | None:
    """For each table whether it rests in a forward now; None where the engine is made for that.

    One that was sharded without the state of its optimizer is left to `Engine.begin`, which refuses it.
    """
    wants_grad = [p.requires_grad for p in engine.store.parameters]
    if wants_grad == engine.trains or not torch.is_grad_enabled() or not any(wants_grad):
        return None
    rest = [t.trainable and not wants for t, wants in zip(engine.tables, wants_grad, strict=True)]
    return rest if rest != [t.rests for t in engine.tables] else None


def apart(engine: Engine, rest: Sequence[bool], options: Mapping[str, Any]) -> Engine:
    """Another with the same parameters, for what rests now. Local: ranks where others rest differ in their headers.

    Args:
        engine: what ran the tables; it has them no more.
        rest: for each table.
        options: with which it was made.
    """
    engine.check_parameters()
    tables = [replace(table, rests=rests) for table, rests in zip(as_they_are(engine), rest, strict=True)]
    of_tables = zip(engine.placement.shards, engine.placement.is_local, strict=True)
    layouts = [data_parallel() if is_local else rectangles(shards) for shards, is_local in of_tables]
    new = Engine(tables, layouts, engine.env, engine.device, options=engine.store.options, **options)
    new.store.take(engine.store)
    new.store.keep(engine.store.parameters)
    hand_out(new)
    return new


def as_they_are(engine: Engine) -> list[Table]:
    """Its tables, in the dtypes and param groups that they have by now."""
    options = engine.store.options
    groups = [next(i for i, other in enumerate(options) if other is own) for own in options]
    of_tables = enumerate(zip(engine.tables, groups, strict=True))
    return [replace(table, dtype=engine.dtype_of(i), group=group) for i, (table, group) in of_tables]
