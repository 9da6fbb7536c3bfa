"""Text that every machine has: the sources of Python's standard library, as bytes.

Which bytes are in a batch depends on (seed, step) alone. Each data rank takes its rows of it, so runs on different
meshes see the same batches in the same order, and one that goes on from a checkpoint sees what it would have seen.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from dmp import ShardingEnv

MAX_BYTES = 4 << 20  # of the text to train on
HELD_OUT_EVERY = 10  # files
VALIDATION_BATCHES = 4


class Text(NamedTuple):
    """Bytes as uint8 tensors (N,)."""

    train: torch.Tensor
    held_out: torch.Tensor


class Rows(NamedTuple):
    """Which rows of the global batch are this rank's: those of a data rank, the same for its tensor-parallel ranks."""

    batch_size: int
    start: int
    stop: int


def read_text() -> Text:
    """Rank 0's text, on every rank: hosts may have different versions of Python."""
    text = [_read() if not dist.is_initialized() or dist.get_rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(text)
    assert text[0] is not None
    return Text(*(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in text[0]))


def rows_of(batch_size: int, env: ShardingEnv) -> Rows:
    """This rank's rows of a batch of `batch_size` over all data ranks.

    Raises:
        ValueError: a batch that does not divide.
    """
    if batch_size % env.data_size:
        raise ValueError(f"--batch-size {batch_size} does not divide among the {env.data_size} data ranks of {env}")
    group = env.group("replicate", "shard")
    size = batch_size // env.data_size
    rank = 0 if group is None else group.rank()
    return Rows(batch_size, rank * size, (rank + 1) * size)


def training_batch(text: Text, rows: Rows, length: int, seed: int, step: int, device: torch.device) -> torch.Tensor:
    """This rank's rows (b, T + 1) of the batch of a step."""
    random = torch.Generator().manual_seed(1_000_003 * seed + step)
    starts = torch.randint(len(text.train) - length, (rows.batch_size,), generator=random)
    return _windows(text.train, starts[rows.start : rows.stop], length).to(device)


def validation_batches(text: Text, rows: Rows, length: int, device: torch.device) -> list[torch.Tensor]:
    """This rank's rows (b, T + 1) of a few batches spread evenly over the held-out text."""
    num = VALIDATION_BATCHES * rows.batch_size
    starts = torch.arange(num) * (len(text.held_out) - length) // num
    return [
        _windows(text.held_out, batch[rows.start : rows.stop], length).to(device)
        for batch in starts.split(rows.batch_size)
    ]


def _windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(length + 1)].long()


def _read() -> tuple[bytes, bytes]:
    """(train, held out): whole files in order of their names."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    files = [path.read_bytes() for path in paths]
    held_out = b"".join(files[::HELD_OUT_EVERY])
    train = b"".join(file for i, file in enumerate(files) if i % HELD_OUT_EVERY)
    return train[:MAX_BYTES], held_out[: MAX_BYTES // HELD_OUT_EVERY]
