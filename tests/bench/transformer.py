"""Transformers beside hand-written FSDP2 and tensor parallelism: counts, step, wrap, memory, a thousand ranks."""

from __future__ import annotations

from tests.bench import (
    transformer_collectives,
    transformer_memory,
    transformer_step,
    transformer_thousand,
    transformer_wrap,
)
from tests.bench.report import Result

PARTS = (transformer_collectives, transformer_step, transformer_wrap, transformer_memory, transformer_thousand)


def run(quick: bool) -> list[Result]:
    """Every part; `quick` runs few rounds."""
    return [result for part in PARTS for result in part.run(quick)]
