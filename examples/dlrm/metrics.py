"""AUC and log loss of click predictions, over all ranks: the same whatever the number of ranks and the order of rows.

The AUC is the exact rank sum in float64 (ties count half). The integral of a float32 curve, as torchmetrics has it, is
right to about six digits, and six digits are what the example shows to be equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Metrics:
    auc: float
    log_loss: float
    num_rows: int

    def __str__(self) -> str:
        return f"AUC {self.auc:.6f}, log loss {self.log_loss:.6f} on {self.num_rows:,} held-out lines"


def compute_metrics(logits: Tensor, labels: Tensor) -> Metrics:
    """Metrics of logits (B,) and labels (B,); the AUC is nan unless both labels occur.

    Example:
        >>> compute_metrics(torch.tensor([-1.0, 0.5, 2.0]), torch.tensor([0.0, 1.0, 1.0])).auc
        1.0
    """
    logits, labels = logits.double(), labels.double()
    _, tie, num_tied = torch.unique(logits, return_inverse=True, return_counts=True)
    rank = num_tied.cumsum(0) - (num_tied - 1) / 2  # mean rank, from 1, of each group of equal logits
    num_clicks = labels.sum()
    pairs = num_clicks * (len(labels) - num_clicks)
    wins = (rank.double()[tie] * labels).sum() - num_clicks * (num_clicks + 1) / 2
    log_loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    return Metrics((wins / pairs).item(), log_loss.item(), len(labels))


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All ranks' rows, in rank order, on every rank; the ranks may hold different numbers of rows."""
    if group is None:
        return rows
    num_ranks = dist.get_world_size(group)
    count = torch.tensor([len(rows)], device=rows.device)
    counts = [torch.empty_like(count) for _ in range(num_ranks)]
    dist.all_gather(counts, count, group=group)
    longest = max(int(c) for c in counts)
    padded = torch.cat([rows, rows.new_zeros((longest - len(rows), *rows.shape[1:]))])
    parts = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[: int(c)] for part, c in zip(parts, counts, strict=True)])
