"""`python -m dmp calibrate`: from measurements to figures, and the measuring itself."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from dmp import ShardingEnv
from dmp.__main__ import main
from planner import Topology
from planner.costs import calibrate
from planner.costs.cost_model import BACKWARD, FORWARD
from planner.costs.fit import fit
from planner.costs.local_ranks import on_ranks
from planner.costs.measure import EXCHANGED_BYTES, OPTIMIZERS, SUMMED_BYTES, Measured, lookup_probes, step_probes
from tests.bench.predicted import CASES, RANKS
from tests.planner_bags import MEASURED as TRUE


def made_up(noise: float) -> Measured:
    """What a machine that is as the model says would measure, some of it spoilt by others."""
    rng = np.random.default_rng(1)

    def spoilt(seconds: float) -> float:
        return seconds * (1 + noise * rng.exponential() * (rng.random() < 0.2))

    env, alone = ShardingEnv.abstract((2,), ("dp",)), ShardingEnv.abstract((1,), ("dp",))
    one = TRUE.shared_links / 2 + (1 - TRUE.shared_links)
    exchanged = [
        (kind, size, spoilt(1e-4 + size / 3e9 * share))
        for kind, share in (("even", 1.0), ("one", one))
        for size in EXCHANGED_BYTES
    ]
    assert TRUE.speeds is not None
    no_step = {
        f"{part}{of}": 0.0 for part in ("step", "group", "split", "copies") for of in ("", "_results", "_gradients")
    }
    kernels = replace(TRUE, speeds=replace(TRUE.speeds, **no_step))  # type: ignore[arg-type]
    lookups = {
        optimizer: [
            tuple(spoilt(s) for s in calibrate._parts(probe, alone, kernels, ((FORWARD,), (BACKWARD,))))
            for probe in lookup_probes(optimizer)
        ]
        for optimizer in OPTIMIZERS.values()
    }
    steps = [tuple(spoilt(s) for s in calibrate._parts(probe, env, TRUE)) for probe in step_probes(2)]
    summed = [(size, spoilt(2e-4 + size / 5e8)) for size in SUMMED_BYTES]
    return Measured("the made-up kernel", exchanged, summed, lookups, steps, 1e-10, 1e-11)  # type: ignore[arg-type]


@pytest.mark.parametrize(("noise", "off"), [(0.0, 0.01), pytest.param(1.0, 0.1, marks=pytest.mark.slow)])
def test_figures_come_back(noise: float, off: float) -> None:
    found = calibrate.fitted(made_up(noise), 2, "cpu")
    link = found.topology.links(ShardingEnv.abstract((2,), ("dp",)))["dp"]
    assert (link.bandwidth, link.latency) == pytest.approx((3e9, 1e-4), rel=off)
    of_dense = found.topology.of_collectives.links(ShardingEnv.abstract((2,), ("dp",)))["dp"]
    assert (of_dense.bandwidth, of_dense.latency) == pytest.approx((5e8, 2e-4), rel=off)
    assert found.topology.shared_links == pytest.approx(0.5, abs=2 * off)
    clean = calibrate.fitted(made_up(0.0), 2, "cpu") if noise else found
    pairs = zip(found.fits, clean.fits, strict=True)
    errors = [abs(of.fitted / true.measured - 1) for of, true in pairs]
    assert np.median(errors) < off
    assert noise or max(errors) < 0.05
    assert "measurements: off by" in str(found) and "measured: the made-up kernel" in str(found)
    assert found.topology.sources["speeds"].endswith("the made-up kernel")


def test_few_bad_measurements_are_outvoted() -> None:
    rng = np.random.default_rng(0)
    terms = rng.uniform(0, 1, (40, 3))
    wanted = terms @ [1.0, 0.0, 3.0]
    spoilt = wanted.copy()
    spoilt[::8] *= 4
    assert fit(terms, spoilt, spoilt) == pytest.approx([1, 0, 3], abs=0.05)
    assert fit(terms, -wanted, wanted) == pytest.approx([0, 0, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks takes a number, at least 1; got 0"),
        (["--rounds", "1"], "--rounds takes a number, at least 2; got 1"),
        (["--out", "nowhere/t.json"], "there is no folder"),
        (["--out", "."], "expected a file to write; it is a folder"),
        (["--device", "cuda", "--ranks", "99"], "99 ranks need a cuda device each; this machine has"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *arguments]) in (1, 2)
    assert message in capsys.readouterr().err


def fails_on_one() -> int:
    if dist.get_rank() == 1:
        raise KeyError("no such thing")
    return os.getpid()


@pytest.mark.slow
def test_a_rank_that_fails() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 failed: KeyError: 'no such thing'\nTraceback"):
        on_ranks(2, "cpu", fails_on_one)


@pytest.mark.slow
def test_calibrate_from_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.json"
    assert main(["calibrate", "--ranks", "2", "--rounds", "3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "exchange, all send: 65536 bytes" in printed
    assert "update, sgd: table_wise" in printed
    assert "step: data_parallel" in printed
    assert "kernel, exchanges through " in printed
    topology = Topology.load(out)
    assert topology.speeds is not None
    assert topology.speeds.step > 0
    assert topology.sources["speeds"].startswith("measured by calibrate")
    assert main(["calibrate", "--ranks", "1", "--rounds", "2", "--out", str(out)]) == 0
    assert Topology.load(out).shared_links == 0


def test_no_probe_is_a_plan_of_the_benchmark() -> None:
    """What `BENCH=predicted` holds the figures against is not what they come from."""
    probes = {(p.tables, p.layouts, p.batch_size) for p in step_probes(RANKS)}
    assert len(probes) == len(step_probes(RANKS))
    assert all((c.tables, tuple(map(c.layout, range(len(c.tables)))), c.batch_size) not in probes for c in CASES)
