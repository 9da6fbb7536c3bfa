"""What holds for every test: one thread, every warning every time, GPU tests where there is a GPU."""

from __future__ import annotations

import pytest
import torch


def pytest_configure() -> None:
    torch.set_num_threads(1)
    torch.set_warn_always(True)  # else the first test to meet a warning hides it from the others


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if item not in gpu]
    config.hook.pytest_deselected(items=gpu)
