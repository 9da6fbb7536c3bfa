"""Where a checkpoint lies: a path on a file system that every rank sees."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from dmp.env import ShardingEnv
from dmp.errors import CheckpointError
from dmp.foreign import type_name
from dmp.ranks import raise_on_all

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""With one slash, which is what `Path` leaves of two; a drive of Windows has one letter."""


def place_of(given: Any, call: str) -> Path:
    """Absolute, `~` the home folder, as shells have it.

    Args:
        call: what was called, for the error. `torch.save` takes the path last, these functions first.

    Raises:
        CheckpointError: no path, or a URL: as a path it would be a folder of such a name beside the program, which is
            lost with the machine that a run on rented ones was to outlive.
    """
    if not isinstance(given, str | os.PathLike):
        raise CheckpointError(f"{call}: expected a path first; got {type_name(given)}")
    if url := next(filter(_URL.match, (str(given), str(os.fspath(given)))), None):
        raise CheckpointError(
            f"{call}: expected a folder or file that every rank sees; got the URL {url!r}. Mount the store and give "
            f"the path there, or copy what save_checkpoint has written. A folder of that name is './{url}'"
        )
    path = Path(given)
    return path.expanduser().absolute() if path.parts[:1] == ("~",) else path.absolute()


def place_on_all(given: Any, call: str, model: Any, find_env: Callable[[Any], ShardingEnv]) -> Path:
    """`place_of`, in a call that all ranks make: where one alone has no path, as where `latest` finds none on a host
    that does not see the folder, the others hear of it instead of waiting.

    Args:
        find_env: that of the call, for its model; asked for where an error is to be told.
    """
    try:
        return place_of(given, call)
    except CheckpointError as error:
        if not isinstance(model, nn.Module):  # they come in another order, as `torch.save` has them: on all ranks
            raise
        raise_on_all(error, find_env(model).everyone, call)
