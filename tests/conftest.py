"""What holds for every test: one thread, every warning every time, GPU tests where there is a GPU, long files first."""

from __future__ import annotations

import pytest
import torch

LONGEST = (
    *("test_dlrm_example", "test_transformer_example", "test_elastic", "test_generative_recommender"),
    *("test_check_sharder", "test_equality", "test_planner_properties", "test_fuzz", "test_survival"),
    *("test_custom_sharder", "test_formats", "test_readme", "test_hf_llama", "test_dense_state", "test_partials"),
    *("test_tensor_parallel", "test_thousand_ranks", "test_transformers", "test_architecture", "test_mixed"),
)
"""Files that take more than ten seconds of the quick suite: where two run at a time, none should begin last."""


def pytest_configure() -> None:
    torch.set_num_threads(1)
    torch.set_warn_always(True)  # else the first test to meet a warning hides it from the others


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if item not in gpu]
    config.hook.pytest_deselected(items=gpu)
