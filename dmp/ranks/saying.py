"""What a process tells its user once, in the log, however often it comes by."""

from __future__ import annotations

import logging
from functools import cache

import torch.distributed as dist


@cache
def say_once(text: str, level: int = logging.WARNING, *, by_first: bool = False) -> None:
    """Log it, the first time in this process.

    Args:
        by_first: all ranks have it to say, and the first alone does.
    """
    if not by_first or not dist.is_initialized() or dist.get_rank() == 0:
        logging.getLogger("dmp").log(level, "%s", text)
