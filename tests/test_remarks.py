"""What a step's numbers do not show is said once, by rank 0: what the tensor axis leaves whole, and why."""

from __future__ import annotations

import logging

import pytest
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv, data_parallel, row_wise
from dmp.plans.remarks import shown_bytes
from sharders import EmbeddingBagSharder, TensorParallelSharder
from tests.ranks import mesh, run_ranks
from tests.strangers import MinGPT

Said = list[tuple[str, str]]


def bags(layout: str) -> tuple[nn.Module, dict[str, object]]:
    model = nn.Sequential(nn.EmbeddingBag(100, 8, mode="sum"), nn.Linear(8, 2))
    return model, {"plan": {"0.weight": row_wise() if layout == "row_wise" else data_parallel()}}


def said_of(shape: tuple[int, ...], names: tuple[str, ...]) -> dict[str, Said]:
    env, said = ShardingEnv.from_mesh(mesh(shape, names)), []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append((record.levelname, record.getMessage()))

    log, keep = logging.getLogger("dmp"), Keep()
    log.addHandler(keep)
    level = log.level
    log.setLevel(logging.INFO)
    cases: dict[str, tuple[nn.Module, dict[str, object]]] = {
        "tower": (nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 10)), {}),
        "min": (MinGPT(), {}),
        "empty plan": (MinGPT(), {"sharders": [TensorParallelSharder({})]}),
        "no sharder": (MinGPT(), {"sharders": []}),
        "part": (MinGPT(), {"sharders": [TensorParallelSharder({"head": "colwise"})]}),
        "tables": bags("row_wise"),
        "copies": bags("data_parallel"),
        "other sharder": (bags("row_wise")[0], {"sharders": [EmbeddingBagSharder()]}),
    }
    found: dict[str, Said] = {}
    try:
        for case, (module, options) in cases.items():
            model = DistributedModelParallel(module, env=env, **options)  # type: ignore[arg-type]
            model.copy()
            found[case] = [(kind, text) for kind, text in said if text.startswith("axis")]
            said.clear()
    finally:
        log.removeHandler(keep)
        log.setLevel(level)
    return found


def test_what_the_tensor_axis_leaves_whole() -> None:
    said, other = run_ranks(2, said_of, (2,), ("tp",))
    assert not any(other.values())  # rank 0 alone says it
    for case, why in {
        "tower": "no transformer blocks",
        "empty plan": "the plan splits nothing",
        "no sharder": "no sharder that splits dense weights was passed (TensorParallelSharder does)",
        "copies": "no transformer blocks",
    }.items():
        ((level, text),) = said[case]
        assert level == "WARNING" and text.startswith("axis tp (2): nothing is split, because ") and why in text, text
        assert "leave the axis out of the mesh" in text
    assert said["min"][0][0] == "INFO" and said["part"][0][0] == "WARNING"
    for case in ("min", "part", "tables"):
        ((_, text),) = said[case]
        assert " % of the dense weights (" in text and " are whole on each of its ranks: " in text, text
    ((_, text),) = said["tables"]
    assert said["tables"][0][0] == "INFO" and text.startswith(
        "axis tp (2): 100 % of the dense weights (72 bytes of 72 bytes)"
    ), text


def test_other_axes_are_silent() -> None:
    assert not any(any(said.values()) for said in run_ranks(2, said_of, (2,), ("dp",)))


def test_sizes() -> None:
    sizes = (0, 999, 1000, 999_999, 4_500_000, 1_234_567_890, 2 * 10**12)
    texts = ["0 bytes", "999 bytes", "1.00 KB", "1000.00 KB", "4.50 MB", "1.23 GB", "2.00 TB"]
    assert [shown_bytes(size) for size in sizes] == texts


@pytest.mark.parametrize("name", ["pp", "cp", "ep"])
def test_axes_that_are_not_supported_yet(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"mesh axis '{name}'.* \(pp\), .* \(cp\) .* \(ep\) .* not supported yet; make"
    ):
        ShardingEnv.abstract((2, 2), (name, "dp"))
