"""Checkpoints beside `cp` of the same bytes: time, memory, what is read, and a save beside training."""

from __future__ import annotations

from tests.bench import state_background, state_memory, state_speed
from tests.bench.report import Result
from tests.bench.state_workload import written

PARTS = (state_speed, state_memory, state_background)


def run(quick: bool) -> list[Result]:
    """Every part; `quick` runs few rounds."""
    with written() as folder:
        return [result for part in PARTS for result in part.run(quick, folder)]
