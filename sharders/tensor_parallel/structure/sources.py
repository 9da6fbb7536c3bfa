"""The code of a module's class, where what it reads tells what shapes do not."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from torch import nn


@lru_cache(maxsize=1024)
def source_of(kind: Any) -> str | None:
    """Source of the methods of a class of modules and of its bases, but for `__init__`; None where it is not there."""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    methods = [m for each in own for name, m in vars(each).items() if inspect.isfunction(m) and name != "__init__"]
    try:
        return "".join(inspect.getsource(method) for method in methods)
    except (OSError, TypeError):
        return None
