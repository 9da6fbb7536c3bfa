"""FSDP2's exchanges, each begun by all ranks together: ranks that run different units, or reach different ones in the
backward pass, would take each other's weights and gradients for their own; see [Note: turns] in dmp/ranks/turns.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dmp import ranks
from sharders.data_parallel.fsdp_units import units_of

_ADVICE = (
    "Where each rank runs modules of its own choice, or its loss reaches others, they are gathered with the rest: "
    "FSDPWrapper(units=[]), or those alone that every rank runs"
)


def keep_order(modules: Mapping[str, nn.Module], everyone: dist.ProcessGroup | None) -> None:
    """Have ranks that begin different exchanges of these be told, before anything is exchanged.

    Args:
        modules: path -> what is gathered at once, after `fully_shard`.
        everyone: all ranks of the model, over which gradients are averaged; weights come from those that share them.
    """
    if everyone is None or everyone.size() == 1:
        return
    gathers, reduces = _kinds()
    number = ranks.calls_so_far(everyone)
    for path, module in modules.items():
        which = f"of {path!r}" if path else "outside of units"
        of = f"the weights {which}, of the model that was wrapped at call {number}"
        for unit in units_of([module]):
            unit._all_gather_comm = gathers(unit, f"gathering {of}")
            is_whole = getattr(unit.mesh_info, "shard_mesh_size", 1) == 1
            what = f"backward: averaging gradients of {of}"
            unit._reduce_scatter_comm = reduces(what, everyone, not path, is_whole)


@cache
def _kinds() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Subclasses of what torch exchanges with, which `set_custom_all_gather` and its like take."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    class GatherInTurn(DefaultAllGather):
        def __init__(self, unit: Any, what: str) -> None:
            self._unit, self._what = unit, what

        def __call__(self, *args: Any, **options: Any) -> Any:
            # In which pass, which tells what follows, so that nobody has to meet where a loop has several kinds.
            is_backward = self._unit._training_state.name == "PRE_BACKWARD"
            kind = f"{'backward' if is_backward else 'forward'}{'' if self._unit.reduce_grads else ', under no_sync'}"
            with ranks.take_turn(f"{kind}: {self._what}", self._unit._all_gather_process_group, advice=_ADVICE):
                return super().__call__(*args, **options)

    class ReduceInTurn(DefaultReduceScatter):
        def __init__(self, what: str, everyone: dist.ProcessGroup, is_root: bool, is_whole: bool) -> None:
            self._turn = partial(ranks.take_turn, what, everyone, ends_pass=is_root, advice=_ADVICE)
            self._is_whole = is_whole

        def allocate(self, *size: Any, **options: Any) -> torch.Tensor:
            if self._is_whole:  # torch's own exchange follows, which nobody is asked for
                with self._turn():
                    pass
            return super().allocate(*size, **options)

        def __call__(self, *args: Any, **options: Any) -> Any:
            with self._turn():
                return super().__call__(*args, **options)

    return GatherInTurn, ReduceInTurn
