"""`PassEnd`: what a backward pass runs at its end, and whether a pass has raised before it came there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

from torch.autograd import Variable


class PassEnd:
    """The end of one backward pass at a time, from `queue` to `clear`.

    Autograd alone holds what is queued, and lets go of it when the pass raises: so that it is known at once, in a
    forward, in the next pass, and inside a pass within the pass, as of a reentrant checkpoint.
    """

    def __init__(self) -> None:
        self._queued: weakref.ref[Callable[[], None]] | None = None

    @property
    def is_queued(self) -> bool:
        """Whether the pass under way has it."""
        return self._queued is not None and self._queued() is not None

    @property
    def has_raised(self) -> bool:
        """Whether a pass (no memory, an interrupt, a hook's error) has ended without."""
        return self._queued is not None and self._queued() is None

    def queue(self, run: Callable[[], None]) -> None:
        """Have `run` called at the end of the pass under way: the innermost of them. It calls `clear`."""
        held = partial(run)
        self._queued = weakref.ref(held)
        Variable._execution_engine.queue_callback(held)

    def clear(self) -> None:
        """It has done what it was for."""
        self._queued = None
