"""What torch draws in or like a DTensor on a CPU: other values in each part, alike where parts are, by one number.

torch draws on each rank in its part with the rank's own generator. Ranks that were seeded alike, as they must be for
what they hold together, then have the same values in every part: noise on gradients or weights is the first part's over
and over, and parts of unequal size leave the generators apart. On devices torch keeps count of where each part's
numbers begin; of a CPU's generator it says that support may not be complete. Here a call takes one number of the
generator on every rank, and draws by that and the part's place, as it does in parts of tables.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_IN_PLACE = ("exponential_", "cauchy_", "log_normal_", "geometric_", "random_")
"""Operations that draw in their tensor, of which torch does not know that they draw."""


class ByPlace:
    """Stands where torch has what counts numbers on devices."""

    distribute_region_enabled = True

    @contextmanager
    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        """What is drawn within is for one part.

        Args:
            spec: of the DTensor.
            generator: that a program has given; None for torch's own.
        """
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:  # there are no values
            yield
            return
        place = _place(spec)
        before = torch.get_rng_state()
        try:
            if place:
                number = int(torch.randint(2**62, (), generator=generator))
                before = torch.get_rng_state()
                torch.default_generator.manual_seed(number ^ zlib.crc32(repr(place).encode()))
            elif generator is not None:
                torch.set_rng_state(generator.get_state())
            yield
            if generator is not None and not place:
                generator.set_state(torch.get_rng_state())
        finally:
            if place or generator is not None:
                torch.set_rng_state(before)


def draw_parts_apart(tensors: Any) -> None:
    """From now on, in a process without devices."""
    if torch.accelerator.is_available() or tensors._random._rng_tracker is not None:
        return
    tensors._random._rng_tracker = ByPlace()
    for operation in (getattr(torch.ops.aten, name) for name in _IN_PLACE):
        for form in operation.overloads():
            tensors.DTensor._op_dispatcher._custom_op_handlers[getattr(operation, form)] = _draw_in


def _draw_in(operation: Any, args: Any, kwargs: Any) -> Any:
    tensor, *others = args
    options = dict(kwargs)
    with ByPlace()._distribute_region(tensor._spec, options.pop("generator", None)):
        operation(tensor._local_tensor, *others, **options)
    return tensor


def _place(spec: Any) -> list[tuple[str, int, int]]:
    """Of this rank's part: which it is along each mesh axis that splits the whole. Nothing where none does."""
    axes = zip(spec.placements, spec.mesh.shape, spec.mesh.get_coordinate() or (), strict=False)
    return [(str(placement), size, at) for placement, size, at in axes if size > 1 and not placement.is_replicate()]
