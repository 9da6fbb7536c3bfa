"""What users do with the parameters of tables that a module hands out, past its lookup: terms of a loss, new values."""

from __future__ import annotations

import weakref
from typing import Any

from dmp import join_name
from sharders.embedding.weights.among import Among
from sharders.embedding.weights.drawn_later import place
from sharders.embedding.weights.loss_terms import watch


def hand_out(engine: Any) -> None:
    """Have what is done with an engine's parameters be that of the whole tables, or refused.

    Tables that are updated in the backward pass get no gradient by a loss, and are not looked at for terms.

    Args:
        engine: an `Engine`, which imports this.
    """
    of = weakref.ref(engine)
    for index, table in enumerate(engine.tables):
        is_whole, shards = engine.store.is_whole(index), engine.placement.shards[index]
        parameter, size = engine.store.parameters[index], (table.rows, table.dim)
        place(parameter, [s for s in shards if s.rank == engine.env.table_rank and not is_whole], size)
        if table.trainable and table.optimizer is None and not (is_whole and engine.peers.exchange.size == 1):
            watch(parameter, shards, size, is_whole, lambda i=index: _path(of(), i), lambda: _among(of()))  # type: ignore[misc]


def _among(engine: Any) -> Among:
    assert engine is not None, "a pass has come by its lookup, or by its parameter"
    return Among(engine.peers.exchange, engine.handshake, engine.device)


def _path(engine: Any, table: int) -> str:
    """A table's parameter in the model."""
    return "" if engine is None else join_name(engine.name, engine.tables[table].parameter)
