"""Global steps: every data rank's batch together with the number of rows in all, and one rank's error raised on all.

Ranks hold slightly different numbers of rows of a global batch, so a mean over the ranks' mean losses would weigh rows
by their rank. A loss is rather the sum over the rank's rows, times `Step.weight`: the mean over ranks of that is the
mean over the rows of the global batch, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from criteo import Batch
from logs import ClickLogs
from resume import Stopped


@dataclass(frozen=True)
class Step:
    batch: Batch
    num_rows: int
    """Rows of the global batch, over all data ranks."""
    weight: float
    """What to multiply a sum over this rank's rows with, so that its mean over ranks is a mean over `num_rows`."""


def global_steps(
    reader: ClickLogs,
    group: dist.ProcessGroup | None,
    device: torch.device,
    stop_asked: Callable[[], bool] = lambda: False,
) -> Iterator[Step]:
    """The reader's batches as steps that all ranks of `group` take together; one small all-reduce each.

    Raises:
        Stopped: on every rank, when one was asked to stop.
        ValueError, OSError: on every rank, when one rank's reader raises (the lowest such rank's), or the files differ.
    """
    num_ranks = 1 if group is None else dist.get_world_size(group)
    batches = iter(reader)
    while True:
        failure = None
        batch = None
        try:
            batch = next(batches, None)
        except (ValueError, OSError) as error:
            failure = error
        rows = 0 if batch is None else len(batch.labels)
        counts = torch.tensor([rows, batch is not None, failure is not None, stop_asked()], device=device)
        if group is not None:
            dist.all_reduce(counts, group=group)
        num_rows, num_batches, num_failures, num_stopped = counts.tolist()
        if num_stopped:
            raise Stopped
        if num_failures:
            raise _first_failure(failure, group)
        if num_batches == 0:
            return
        if num_batches < num_ranks:
            raise ValueError(
                f"{reader.path} ends earlier on some ranks than on others: is it the same file on every host?"
            )
        assert batch is not None
        yield Step(batch.to(device), num_rows, num_ranks / max(num_rows, 1))


def num_skipped(reader: ClickLogs, group: dist.ProcessGroup | None, device: torch.device) -> int:
    """Malformed lines that all ranks skipped in their last pass."""
    count = torch.tensor([reader.skipped], device=device)
    if group is not None:
        dist.all_reduce(count, group=group)
    return int(count)


def _first_failure(own: Exception | None, group: dist.ProcessGroup | None) -> Exception:
    if group is None:
        assert own is not None
        return own
    failures: list[Exception | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, own, group=group)
    return next(failure for failure in failures if failure is not None)
