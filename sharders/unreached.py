"""`AnyReachDDP`: copies whose gradients are averaged whichever parameters the loss reaches, on whichever rank.

[Note: unreached] DDP averages a bucket when every parameter in it has a gradient. One that the loss does not reach (a
branch not taken, a dummy) keeps its bucket local, without a word in the first step. torch's two answers do not fit all
models: `static_graph` takes the first step's branch for every step's, `find_unused_parameters` walks the graph and
exchanges a bitmap at every step, and does not see through reentrant checkpoints. So at the end of the backward pass,
when it is known what was reached, a gradient of -0.0 is accumulated for the rest. Numbers are the same with it, for
x + -0.0 is x to the bit; and where the mean comes back as -0.0 everywhere, no rank has reached the parameter, and its
gradient is None again, as in one process. When all are reached, the cost is a hook on the output and an append for each
parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


class AnyReachDDP(DistributedDataParallel):
    """`DistributedDataParallel` that needs no word on unused parameters, see [Note: unreached].

    A forward outside `no_sync` is averaged in its own backward: two forwards may be followed by two backwards.
    Parameters may be frozen later. `torch.autograd.grad` through the output averages nothing.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._trained = [p for p in self._module_parameters if p.requires_grad]
        self._nodes = [get_gradient_edge(p).node for p in self._trained]
        self._reached: list[torch.Tensor] = []
        self._is_queued = self._is_awaited = False
        reached = self._reached.append  # no frame of Python's for each parameter
        handles = [p.register_post_accumulate_grad_hook(reached) for p in self._trained]
        weakref.finalize(self, _remove, handles)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; its backward averages gradients, unless inside `no_sync`."""
        output = super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled():
            self._is_queued = False  # a backward that raised has left it so
            self._reached.clear()
            if self.require_backward_grad_sync:
                self._is_awaited = True
                for tensor in _with_graph(output):
                    tensor.register_hook(self._begin)
        return output

    def _begin(self, _: torch.Tensor) -> None:
        """A backward pass comes by the output: have `_complete` run at its end."""
        if self._is_queued or not self._accumulates():
            return
        self._is_queued = True
        if not self._is_awaited:  # averaged since the forward: two forwards, then two backwards
            self._reached.clear()
            self.reducer._rebuild_buckets()  # as each forward does; it wants to once, after the first
            self.reducer.prepare_for_backward([])
            self._is_awaited = True
        Variable._execution_engine.queue_callback(self._complete)

    def _accumulates(self) -> bool:
        """Whether this backward pass gives any parameter a gradient; `torch.autograd.grad` does not."""
        # Private: nothing public tells the two apart.
        executes = torch._C._will_engine_execute_node
        if any(map(executes, self._nodes)):
            return True
        others = [p for p in self.module.parameters() if p.requires_grad]  # tables alone, on this rank
        return any(executes(get_gradient_edge(p).node) for p in others)

    def _complete(self) -> None:
        """At the end of the backward pass: gradients for what it did not reach, with which DDP finishes."""
        self._is_queued = self._is_awaited = False
        if len(self._reached) < len(self._trained):
            ids = {id(p) for p in self._reached}
            _accumulate_nothing([p for p in self._trained if id(p) not in ids])
        self._reached.clear()


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _with_graph(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of an output that a backward pass may begin at, whatever holds them."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            # An in-place operation on a view takes the view's hooks out of the graph, not its base's.
            base = value._base
            yield value if base is None or not base.requires_grad else base
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _with_graph(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _with_graph(item)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)):
        yield from _with_graph(vars(value))


def _accumulate_nothing(unreached: Sequence[torch.Tensor]) -> None:
    """A gradient of -0.0 for each; None again, once averaged, where no rank had one."""
    frozen = [p for p in unreached if not p.requires_grad]  # since DDP was made: it waits for them all the same
    without = [p for p in unreached if p.grad is None]
    for p in frozen:
        p.requires_grad_(True)
    torch.autograd.backward(unreached, [_nothing(p) for p in unreached])
    for p in frozen:
        p.requires_grad_(False)
    for p in without:
        if p.grad is not None and _is_nothing(p.grad):
            p.grad = None


def _nothing(p: torch.Tensor) -> torch.Tensor:
    return torch.full_like(p, -0.0)


def _is_nothing(gradient: torch.Tensor) -> bool:
    return bool((torch.signbit(gradient) & (gradient == 0)).all())
