"""The transformer example as a user runs it, and on other meshes: one loss curve, one checkpoint, wherever it runs."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dmp import ShardingEnv
from tests.programs import run_program
from tests.ranks import mesh as mesh_of
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "transformer"
TRAIN = str(FOLDER / "train.py")
STEPS, HALF = 8, 4
SMALL = f"--dim 32 --layers 2 --length 32 --batch-size 4 --lr 0.02 --steps {STEPS} --sample 0".split()
TOLERANCE = 1e-4  # bits per byte


def command(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program([TRAIN, *arguments], processes)


@cache
def example() -> Any:
    """`train.py` as a module. Other examples have files of the same names, so these are forgotten once it is loaded."""
    names = {path.stem for path in FOLDER.glob("*.py")}
    others = {name: sys.modules.pop(name) for name in names & set(sys.modules)}
    path = list(sys.path)
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
    try:
        return importlib.import_module("train")
    finally:
        sys.path[:] = path
        for name in names & set(sys.modules):
            del sys.modules[name]
        sys.modules.update(others)


def train(shape: tuple[int, ...], names: tuple[str, ...], *arguments: str) -> tuple[list[float], float, float]:
    args = example().parse_arguments([*SMALL, *arguments])
    env = ShardingEnv.from_mesh(mesh_of(shape, names)) if shape else ShardingEnv.single()
    return tuple(example().train(args, env))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], float, float]:
    """Checkpoints of a tensor-parallel run by torchrun, and what its lines say of the losses."""
    folder = tmp_path_factory.mktemp("transformer")
    result = command(2, *SMALL, "--axes", "tp", "--checkpoint", str(folder), "--checkpoint-every", str(HALF))
    assert result.returncode == 0, result.stdout + result.stderr
    losses = [float(x) for x in re.findall(r"^step \d+: ([0-9.]+) bits per byte$", result.stdout, re.M)]
    before, after = re.findall(r"^held-out text: ([0-9.]+) bits per byte (?:before|after)$", result.stdout, re.M)
    assert re.search(r"layers\.\*\.attention\.wq\.weight +colwise", result.stdout)  # the plan
    assert re.search(r"^weights: ([0-9,]+); on each rank: ([0-9,]+) \2$", result.stdout, re.M)
    assert "bytes/s" in result.stderr
    return folder, losses, float(before), float(after)


def test_the_loss_falls(saved: tuple[Path, list[float], float, float]) -> None:
    _, losses, before, after = saved
    assert len(losses) == STEPS
    assert before > 8  # 256 bytes, one as likely as the other
    assert after < before - 1


@pytest.mark.parametrize(
    ("shape", "names"), [((2,), ("shard",)), ((2,), ("dp",)), ((), ())], ids=lambda x: "x".join(map(str, x))
)
@pytest.mark.sampled(4)
def test_goes_on_anywhere(
    shape: tuple[int, ...], names: tuple[str, ...], saved: tuple[Path, list[float], float, float]
) -> None:
    """From the middle of the run, as if it had not been interrupted; and from its end."""
    folder, losses, _, after = saved
    for rest, before, end in on_ranks(shape, names, "--resume", str(folder / f"step-{HALF}")):
        assert rest == pytest.approx(losses[HALF:], abs=TOLERANCE)
        assert before > end == pytest.approx(after, abs=TOLERANCE)
    for rest, before, end in on_ranks(shape, names, "--resume", str(folder / f"step-{STEPS}")):
        assert rest == []
        assert before == end == pytest.approx(after, abs=TOLERANCE)


def on_ranks(shape: tuple[int, ...], names: tuple[str, ...], *arguments: str) -> list[Any]:
    return run_ranks(shape[0], train, shape, names, *arguments) if shape else [train(shape, names, *arguments)]


@pytest.mark.parametrize(
    ("shape", "names", "options"),
    [
        pytest.param(
            (2, 2), ("shard", "tp"), ["--sequence-parallel", "--loss-parallel"], marks=pytest.mark.slow, id="simpler"
        ),
        pytest.param(
            (2, 2),
            ("shard", "tp"),
            ["--sequence-parallel", "--loss-parallel", "--activation-checkpointing"],
            marks=pytest.mark.slow,
        ),
        ((2, 2), ("replicate", "tp"), []),
        ((2, 2), ("replicate", "shard"), ["--activation-checkpointing"]),
    ],
    ids=lambda x: "x".join(x) if isinstance(x, tuple) and isinstance(x[0], str) else None,
)
@pytest.mark.sampled(2)
def test_one_curve_on_every_mesh(
    shape: tuple[int, ...], names: tuple[str, ...], options: list[str], saved: tuple[Path, list[float], float, float]
) -> None:
    _, losses, before, after = saved
    for got in run_ranks(4, train, shape, names, *options):
        assert got[0] == pytest.approx(losses, abs=TOLERANCE)
        assert got[1:] == pytest.approx((before, after), abs=TOLERANCE)


def sampled(names: tuple[str, ...], temperature: float, options: list[str]) -> str:
    module = example()
    args = module.parse_arguments([*SMALL, *options])
    model = module.make_model(args, ShardingEnv.from_mesh(mesh_of((2,), names)))
    return module.sample(model, 24, args.length, temperature, seed=1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.sampled(2)
def test_sample_is_the_same_on_every_rank_and_mesh(temperature: float) -> None:
    """Longer with the prompt than what the model sees."""
    texts = run_ranks(2, sampled, ("shard",), temperature, [])
    texts += run_ranks(2, sampled, ("tp",), temperature, ["--sequence-parallel", "--loss-parallel"])
    assert len(set(texts)) == 1
    assert texts[0].startswith(example().PROMPT.decode())


def test_help_explains_itself() -> None:
    result = command(1, "--help")
    assert result.returncode == 0, result.stderr
    for word in ("examples:", "torchrun --nproc_per_node=4", "--axes shard,tp", "--resume", "--sequence-parallel"):
        assert word in result.stdout


def test_wrong_mesh_is_one_line() -> None:
    result = command(1, "--mesh", "2x2", "--axes", "shard,tp")
    assert result.returncode == 2
    assert result.stderr == "error: --mesh 2x2 takes 4 processes, this run has 1 (see torchrun)\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "0"], "argument --batch-size: expected at least 1, got 0 (see --help)"),
        (["--mesh", "2by2"], "argument --mesh: invalid mesh shape value: '2by2' (see --help)"),
        (["--checkpoint-every", "5"], "--checkpoint-every needs --checkpoint (see --help)"),
    ],
)
def test_mistaken_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        example().parse_arguments(arguments)
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_what_does_not_fit_the_mesh_or_the_checkpoint() -> None:
    single = ShardingEnv.single()
    cases = [
        (["--sequence-parallel"], single, "need a tp axis; the axes are dp"),
        (["--batch-size", "5"], ShardingEnv.abstract((2,), ("shard",)), "--batch-size 5 does not divide among the 2"),
        (["--heads", "3"], single, "expected dim to be a multiple of twice the heads, got 32 and 3 heads"),
        (["--kv-heads", "3"], single, "expected heads to be a multiple of kv_heads, got 4 and 3"),
    ]
    for arguments, env, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            example().train(example().parse_arguments([*SMALL, *arguments]), env)


def test_checkpoint_of_another_model(saved: tuple[Path, list[float], float, float]) -> None:
    """Of the same shapes, so that only the heads differ."""
    path = str(saved[0] / f"step-{HALF}")
    with pytest.raises(
        ValueError, match=r"is of another model: .*'heads': 8, 'kv_heads': 4.*'heads': 4, 'kv_heads': 2"
    ):
        train((), (), "--resume", path, "--heads", "8", "--kv-heads", "4")
