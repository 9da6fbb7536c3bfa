"""Transformers' `Trainer`, whose first rank writes what it has of a model and its optimizer: what is split is gathered.

All ranks come to the methods that write, but the first alone asks for state dicts there. `Trainer` loads on all ranks,
by `load_state_dict`, which takes whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from dmp.chunked import ChunkedTensor
from dmp.places import is_dtensor
from dmp.ranks import say_once
from dmp.state.find_wrapped import env_of, in_force
from dmp.state.gather import full_state_dict
from dmp.wrap.values.whole import gather


def _has_parts(model: Any) -> bool:
    values = model.state_dict().values() if isinstance(model, nn.Module) else ()
    return any(isinstance(value, ChunkedTensor) or is_dtensor(value) for value in values)


def save_model(own: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> Any:
    """`Trainer.save_model`, in which what writes is given whole weights."""
    if not _has_parts(trainer.model):
        return own(trainer, *args, **options)
    whole = full_state_dict(trainer.model, rank0_only=not trainer.args.save_on_each_node)
    trainer._save = partial(trainer._save, state_dict=whole)
    try:
        return own(trainer, *args, **options)
    finally:
        del trainer._save


def _say_of_updated(model: Any) -> None:
    """Once, of state that `Trainer` does not know."""
    wrapped = in_force(model).values() if isinstance(model, nn.Module) else ()
    if any(state for m in wrapped for state in m.fused_optimizer.state.values()):
        say_once(
            "Trainer's checkpoints have the weights of tables that are updated in the backward pass, and not the state "
            "of their optimizers, which begins anew where such a run is resumed: dmp.save_checkpoint has both",
            by_first=True,
        )


def save_state(own: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> Any:
    """`Trainer._save_optimizer_and_scheduler`, in which the optimizer's state dict is whole."""
    optimizer = trainer.optimizer
    _say_of_updated(trainer.model)
    if not _has_parts(trainer.model):
        return own(trainer, *args, **options)
    given = optimizer.state_dict()
    state = {f"{i}.{name}": value for i, of in given["state"].items() for name, value in of.items()}
    first_alone = not trainer.args.save_on_each_node
    whole = gather(state, env_of(trainer.model), rank0_only=first_alone, what="Trainer's save of the optimizer")
    if whole:
        given = {**given, "state": {i: {n: whole[f"{i}.{n}"] for n in of} for i, of in given["state"].items()}}
    optimizer.state_dict = lambda: given
    try:
        return own(trainer, *args, **options)
    finally:
        del optimizer.state_dict
