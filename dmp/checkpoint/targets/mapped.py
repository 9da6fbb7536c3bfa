"""Tensors on files of their own, for what is larger than memory.

[Note: larger than memory]
Tensors are read a piece at a time into mapped files beside the target, and written from there: the disk takes the
checkpoint's size (for safetensors, one file's) once more while it runs, the memory a few MB.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch

from dmp.checkpoint.sources.source import Shapes, Source
from dmp.chunked import as_chunks


def mapped(shapes: Shapes, folder: Path) -> dict[str, torch.Tensor]:
    """Tensors on files of their own; nobody else sees the files, and they go with them.

    Args:
        shapes: name -> size and dtype.
        folder: where there is room.

    Raises:
        OSError: the disk is full, which is asked before: a write into a mapping without room would end the process.
    """
    tensors = {}
    for name, (size, dtype) in shapes.items():
        num_bytes = prod(size) * dtype.itemsize
        if not num_bytes:
            tensors[name] = torch.empty(size, dtype=dtype)
            continue
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".") as file:
            if hasattr(os, "posix_fallocate"):  # macOS has none
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            data = torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
        tensors[name] = data.view(dtype).view(size)
    return tensors


def read_mapped(source: Source, keys: Iterable[str], folder: Path) -> dict[str, torch.Tensor]:
    """Some tensors of a source on files in `folder`; see [Note: larger than memory].

    Raises:
        CheckpointError: as `Source.read`.
        OSError: as `mapped`.
    """
    tensors = mapped({key: source.shapes[key] for key in keys}, folder)
    source.read({key: as_chunks(tensor) for key, tensor in tensors.items() if tensor.numel()})
    return tensors
