"""Backward passes through backward passes (`create_graph=True`: penalties on gradients, Hessians) of split weights.

FSDP2 frees a unit's weights, and averages their gradients, when a pass comes out of the unit at its inputs. A pass
through another comes by each unit again behind that, for what the first one computed: it found freed memory. So from a
pass that keeps a graph of itself until weights are next written, passes that come by the model have all units' weights
gathered while they run, and gradients are averaged once, when they have ended. Others, as of another model, leave it
alone: ranks run those of their own choice, and forget a model that they are done with at times of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch

from sharders.data_parallel.fsdp_units import states, units, weights

_kept: WeakSet[Any] = WeakSet()


def forget_graphs(root: Any) -> None:
    """Weights of `root` have been written: nobody goes through an earlier pass any more."""
    _kept.discard(root)


def keeps_graph(root: Any) -> bool:
    """Whether a pass that came by `root` has kept a graph of itself, since its weights were last written."""
    return root in _kept


@contextmanager
def backward_pass(outputs: Iterable[Any], roots: Iterable[Any], keeps_graph: bool) -> Iterator[None]:
    """Around one backward pass; collective where an earlier one by the same model has kept a graph of itself.

    Args:
        outputs: what it begins at, tensors or edges of the graph.
        roots: models that FSDP2 has split.
        keeps_graph: this one keeps a graph of itself, which another may go through.
    """
    if torch._C._current_graph_task_id() >= 0 or not (keeps_graph or _kept):  # the former: a pass within a pass
        yield
        return
    found = list(roots)
    with ExitStack() as stack:
        for root in found if keeps_graph else ():
            stack.enter_context(_noticing(root))
        kept = [root for root in found if root in _kept]
        kept = _come_by(outputs, kept) if kept else kept
        with ExitStack() as waiting:
            for root in kept:
                waiting.enter_context(_gathered(root))
            yield
        for root in kept:
            root._get_fsdp_state()._root_post_backward_final_callback()  # now that averages wait no longer


# Private: nothing public tells when a pass comes by.


def _come_by(outputs: Iterable[Any], roots: Sequence[Any]) -> list[Any]:
    """Those whose weights, or units' inputs, are in the graph."""
    marks = {id(unit): root for root in roots for unit in units(root)}
    marks |= {id(w._unsharded_param): root for root in roots for w in weights(root) if hasattr(w, "_unsharded_param")}
    stack: list[Any] = [out.grad_fn if isinstance(out, torch.Tensor) else out.node for out in outputs]
    known: set[Any] = {None}
    found: set[int] = set()
    while stack:
        node = stack.pop()
        if node in known:
            continue
        known.add(node)
        found |= {id(getattr(node, "variable", None)), id(getattr(node, "param_group", None))} & marks.keys()
        stack += [following for following, _ in node.next_functions]
    return [root for root in roots if any(marks[mark] is root for mark in found)]


@contextmanager
def _noticing(root: Any) -> Iterator[None]:
    """Whether the pass comes by the model."""
    found = states(root)

    def noticed(own: Callable[[], None]) -> Callable[[], None]:
        def notice() -> None:
            _kept.add(root)
            own()

        return notice

    for state in found:
        state._register_root_post_backward_final_callback = noticed(state._register_root_post_backward_final_callback)
    try:
        yield
    finally:
        for state in found:
            del state._register_root_post_backward_final_callback


@contextmanager
def _gathered(root: Any) -> Iterator[None]:
    """All units' weights gathered; no averages."""
    found = list(units(root))
    frees = [unit.reshard_after_backward for unit in found]
    for unit in found:
        unit.unshard()
        unit.wait_for_unshard()
        unit.reshard_after_backward = False
        unit.post_backward = _later
    try:
        yield
    finally:
        for unit, was in zip(found, frees, strict=True):
            unit.reshard_after_backward = was
            del unit.post_backward


def _later(*_: Any) -> None:
    """In place of a unit's averages."""
