"""What holds for every test: one thread, every warning every time, GPU tests where there is a GPU, long files first, a
sample of what has many cases."""

from __future__ import annotations

import gc
import importlib
import random
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LONGEST = (
    *("test_transformers", "test_tensor_parallel", "test_pipeline_changes", "test_planner_properties"),
    *("test_check_sharder", "test_numba_kernel", "test_loss_terms", "test_planner", "test_compiled_blocks"),
    *("test_no_extra_cost", "test_dlrm_example", "test_parting", "test_readme", "test_hf_llama", "test_planner_bound"),
    *("test_equality_kernels", "test_equality", "test_model_copies", "test_plugin_parameters", "test_thousand_ranks"),
    *(
        "test_values_of_heads",
        "test_fully_shard",
        "test_transformer_example",
        "test_experts",
        "test_elastic",
        "test_fuzz",
    ),
    *("test_half_precision", "test_planned_layouts", "test_survival", "test_architecture", "test_formats"),
)
"""Files that take more than twelve seconds of the quick suite: where two run at a time, none should begin last."""


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return  # its workers run the tests; torch takes seconds to import
    import torch

    gc.disable()  # until all is there: a third of what importing three hundred files takes
    torch.set_num_threads(1)
    torch.set_warn_always(True)  # else the first test to meet a warning hides it from the others


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Workers begin with different files: of what is not compiled yet each reads what another has compiled."""
    of_worker = getattr(session.config, "workerinput", None)
    if of_worker is None or session.config.args != ["tests"]:
        return
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    first = int(of_worker["workerid"].removeprefix("gw")) * len(paths) // of_worker["workercount"]
    for path in paths[first:] + paths[:first]:
        with suppress(ImportError, SyntaxError):  # told when it is collected
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_a_sample(items)
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type != "mps":  # for which torch has no collectives
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if item not in gpu]
    config.hook.pytest_deselected(items=gpu)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()  # what was imported stays: no collection need look at it


def _leave_a_sample(items: list[pytest.Item]) -> None:
    """Of the quick cases of a test marked `sampled`, one of so many stays: drawn by its name, always the same."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, found in cases.items():
        (one_of,) = next(found[0].iter_markers("sampled")).args
        stays = random.Random(name).sample(range(len(found)), -(-len(found) // one_of))
        for left_out in (item for i, item in enumerate(found) if i not in stays):
            left_out.add_marker(pytest.mark.slow)
