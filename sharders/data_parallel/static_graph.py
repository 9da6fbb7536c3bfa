"""`StaticGraphDDP`: torch's own treatment of a graph that is the same at every step, where it is asked for.

It is the way to a parameter that several reentrant checkpoints reach in one pass. torch learns the graph at the first
pass, and takes each forward for one that has a backward pass of its own behind it. Where a program does otherwise
gradients stayed each rank's own, without a word, or torch asserted; here it is told.
"""

from __future__ import annotations

from typing import Any

import torch

from dmp import ShardError
from sharders.data_parallel.sparse_rows import OwnRowsDDP
from sharders.data_parallel.unreached import with_graph

_ADVICE = "leave static_graph out: without it gradients are averaged in any order"


class StaticGraphDDP(OwnRowsDDP):
    """`DistributedDataParallel` with `static_graph`, whose other uses are errors on all ranks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_awaited = self._has_averaged = False
        self._pass = -1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward.

        Raises:
            ShardError: it is in `no_sync`, and none was averaged before it.
        """
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        if not self.require_backward_grad_sync:
            if not self._has_averaged:
                raise ShardError(f"static_graph learns the graph in the first step, which is in no_sync: {_ADVICE}")
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        output = super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._is_awaited = True
        for tensor in with_graph(output):
            tensor.register_hook(self._begin)
        return output

    def _begin(self, _: torch.Tensor) -> None:
        """A backward pass comes by an output that is to be averaged."""
        this = torch._C._current_graph_task_id()
        if this == self._pass:
            return
        if not self._is_awaited:
            raise ShardError(
                "static_graph averages one backward pass for each forward, right behind it, and this is another: "
                f"its gradients would stay each rank's own; {_ADVICE}"
            )
        self._pass, self._is_awaited, self._has_averaged = this, False, True
