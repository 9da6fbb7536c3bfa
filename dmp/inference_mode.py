"""`outside_inference_mode`: for calls that an evaluation may make, and that training goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """A best checkpoint is saved, loaded or copied inside of an evaluation, which may be under `torch.inference_mode`:
    DTensors cannot be detached there, and what is made there cannot be trained. Gradients stay off, as they were."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
