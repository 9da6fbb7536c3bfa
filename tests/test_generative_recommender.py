"""The generative recommender example: what is planted, the same losses on every mesh, checkpoints, a user's run."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import nn

from dmp import ShardingEnv, load_checkpoint, save_checkpoint
from tests.ranks import mesh, run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "generative_recommender"))

from recommender import SOFTMAXES, Recommender
from sequences import MAX_LENGTH, MIN_LENGTH, NUM_GROUPS, Generator

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.distributed.optim compiles on import, by what torch calls deprecated
    from training import (
        HitRate,
        Task,
        attach_table_optimizer,
        bytes_held,
        evaluate,
        make_dense_optimizer,
        train_step,
        wrap,
    )

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ROOT / "examples" / "generative_recommender" / "train.py"
ITEMS, USERS, ORDER, BATCH, STEPS = 40, 10, 0.75, 12, 5
TOLERANCE = 1e-4
MESHES = {
    "dp2": ((2,), ("dp",)),
    "tp2": ((2,), ("tp",)),
    "fsdp4": ((4,), ("shard",)),
    "fsdp2xtp2": ((2, 2), ("shard", "tp")),
    "replicate2xtp2": ((2, 2), ("replicate", "tp")),
}


# ---- what is planted ----


def test_the_order_is_planted() -> None:
    generator = Generator(ITEMS, USERS, ORDER)
    batch = generator.sequences("train", 0, 3000)
    assert set(batch.lengths.tolist()) == {*range(MIN_LENGTH, MAX_LENGTH + 1)}
    is_position = torch.arange(MAX_LENGTH) < batch.lengths.unsqueeze(1)
    group = generator.group_of_user[batch.users].unsqueeze(1)
    guess = generator.successor[group, batch.items[:, :-1]]
    is_right = (guess == batch.items[:, 1:])[is_position]
    error = 4 * math.sqrt(ORDER * (1 - ORDER) / is_right.numel())
    assert is_right.double().mean().item() == pytest.approx(generator.best_hit_rate(1), abs=error)
    assert generator.best_hit_rate(1) == pytest.approx(ORDER + (1 - ORDER) / ITEMS)
    assert generator.best_hit_rate(10) == pytest.approx(ORDER + (1 - ORDER) * 10 / ITEMS)
    assert generator.best_hit_rate(2 * ITEMS) == 1
    # What does not follow the order is every other item alike: any nine more guesses find their share.
    others = ((batch.items[:, 1:] - guess) % ITEMS)[is_position]
    found = (others < 10).double().mean().item()
    assert found == pytest.approx(generator.best_hit_rate(10), abs=error)


def test_the_user_tells_the_order() -> None:
    generator = Generator(ITEMS, USERS, ORDER)
    assert set(generator.group_of_user.tolist()) == {*range(NUM_GROUPS)}
    for successor in generator.successor:
        assert sorted(successor.tolist()) == [*range(ITEMS)]
    assert (generator.successor[0] == generator.successor[1]).sum() < 5


def test_shares_are_the_batch() -> None:
    generator = Generator(ITEMS, USERS, ORDER)
    batch = generator.sequences("train", 7, BATCH)
    shares = [batch.share(rank, 5) for rank in range(5)]
    for field in ("users", "items", "lengths"):
        assert torch.equal(torch.cat([getattr(share, field) for share in shares]), getattr(batch, field))
    assert not torch.equal(batch.items, generator.sequences("train", 8, BATCH).items)
    assert not torch.equal(batch.items, generator.sequences("held-out", 7, BATCH).items)


def test_inputs_are_jagged() -> None:
    batch = Generator(ITEMS, USERS, ORDER).sequences("train", 0, 3)
    users, items = batch.inputs(torch.tensor([5, 6]))
    assert users["user"].values().tolist() == batch.users.tolist()
    first = int(batch.lengths[0])
    assert items["history"].values()[:first].tolist() == batch.items[0, :first].tolist()
    assert items["target"].values()[:first].tolist() == batch.items[0, 1 : first + 1].tolist()
    assert items["candidates"].values().tolist() == [5, 6]
    assert items["candidates"].lengths().tolist() == [2, 0, 0]


# ---- the model ----


def make_model(softmax: str) -> Recommender:
    model = Recommender(ITEMS, USERS, 16, 2, 2, MAX_LENGTH, softmax, seed=3)
    attach_table_optimizer(model, 0.1)
    return model


def make_task(softmax: str, env: ShardingEnv) -> Task:
    return Task(Generator(ITEMS, USERS, ORDER, seed=1), BATCH, softmax, env)


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_no_score_depends_on_what_comes_after(softmax: str) -> None:
    model = make_model(softmax)
    batch = Generator(ITEMS, USERS, ORDER).sequences("train", 0, 4)
    batch.lengths.fill_(MAX_LENGTH)
    candidates = torch.arange(ITEMS) if softmax == "sampled" else None

    def scores(length: int) -> torch.Tensor:
        batch.lengths.fill_(length)
        # Of all items, in order, whatever the softmax
        return model(*batch.inputs(candidates))[0][:, -ITEMS:].view(4, length, ITEMS)

    torch.testing.assert_close(scores(5), scores(MAX_LENGTH)[:, :5])


def test_a_candidate_that_is_the_target_does_not_count() -> None:
    batch = Generator(ITEMS, USERS, ORDER).sequences("train", 0, 4)
    users, items = batch.inputs(torch.arange(ITEMS))
    scores, targets = make_model("sampled")(users, items)
    assert not targets.any()
    assert ((scores[:, 1:] == -torch.inf).nonzero()[:, 1] == items["target"].values()).all()


# ---- on meshes ----


class Outcome(NamedTuple):
    losses: list[float]
    hits: HitRate
    table_bytes: int
    dense_bytes: int


def losses_of(model: nn.Module, task: Task, first: int, last: int, path: str | None = None) -> list[float]:
    """Of steps `first` to `last`; starts from a checkpoint where `first` is not 0, else writes one at the end."""
    optimizer = make_dense_optimizer(model, 0.01)
    if path is not None and first:
        load_checkpoint(path, model, optimizer)
    losses = [train_step(model, optimizer, task, step)[0] for step in range(first, last)]
    if path is not None and not first:
        save_checkpoint(path, model, optimizer)
    return losses


def on_mesh(name: str, softmax: str, first: int, last: int, path: str | None) -> Outcome:
    env = ShardingEnv.from_mesh(mesh(*MESHES[name]))
    model, task = wrap(make_model(softmax), env, BATCH), make_task(softmax, env)
    split = [name for name, entry in model.plan.items() if name.startswith("blocks.")]
    assert len(split) == (16 if env.axes("tensor") else 0)  # of 2 blocks: 4 + 2 weights and 2 biases
    return Outcome(losses_of(model, task, first, last, path), evaluate(model, task), *bytes_held(model))


@functools.cache
def in_one_process(softmax: str) -> Outcome:
    """The plain model, without any wrapper."""
    model, task = make_model(softmax), make_task(softmax, ShardingEnv.single())
    return Outcome(losses_of(model, task, 0, STEPS), evaluate(model, task), *bytes_held(model))


@pytest.mark.parametrize(
    ("name", "softmax"), [*((name, "sampled") for name in MESHES), ("fsdp4", "full"), ("fsdp2xtp2", "full")]
)
@pytest.mark.sampled(8)
def test_losses_are_those_of_one_process(name: str, softmax: str) -> None:
    want, (shape, axes) = in_one_process(softmax), MESHES[name]
    assert want.losses[-1] < want.losses[0]
    outcomes = run_ranks(math.prod(shape), on_mesh, name, softmax, 0, STEPS, None)
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(want.losses, abs=TOLERANCE)
        assert outcome.hits == outcomes[0].hits
        assert outcome.hits.at_10 == pytest.approx(want.hits.at_10, abs=1e-3)
        assert (outcome.dense_bytes < want.dense_bytes) == (name != "dp2")
    num_copies = shape[0] if axes[0] == "replicate" else 1
    assert sum(outcome.table_bytes for outcome in outcomes) == num_copies * want.table_bytes


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("source", ["tp2", pytest.param("fsdp2xtp2", marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_elsewhere(source: str, softmax: str, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    want = in_one_process(softmax).losses
    run_ranks(math.prod(MESHES[source][0]), on_mesh, source, softmax, 0, 3, path)
    for outcome in run_ranks(2, on_mesh, "dp2", softmax, 3, STEPS, path):
        assert outcome.losses == pytest.approx(want[3:], abs=TOLERANCE)
    plain, task = make_model(softmax), make_task(softmax, ShardingEnv.single())
    assert losses_of(plain, task, 3, STEPS, path) == pytest.approx(want[3:], abs=TOLERANCE)


# ---- as a user runs it ----


@pytest.mark.slow
def test_trained_on_two_processes() -> None:
    arguments = ["--items", "40", "--users", "10", "--dim", "16", "--layers", "1", "--heads", "2", "--steps", "80"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, *launcher, str(TRAIN), *arguments, "--axes", "shard"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    reached = re.search(r"^held-out: +HR@1 ([0-9.]+), HR@10 ([0-9.]+)$", result.stdout, re.M)
    assert reached, result.stdout
    assert float(reached[1]) > 0.3  # 0.025 by chance, 0.805 at best
    assert float(reached[2]) > 0.7  # 0.25 by chance, 0.85 at best
    for text in ("best reachable: HR@1 0.8050, HR@10 0.8500", "items.embeddings.item ", "rank 1 holds "):
        assert result.stdout.count(text) == 1
    assert "tokens/s" in result.stderr and "loss" in result.stderr


def load_train() -> ModuleType:
    """train.py under a name of its own: another example's is `train` too."""
    spec = importlib.util.spec_from_file_location("generative_recommender_train", TRAIN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_help_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load_train().parse_arguments(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for word in ("examples:", "--mesh 2x2 --axes shard,tp", "--softmax", "--order", "--resume", "over all data ranks"):
        assert word in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--order", "2"], "argument --order: expected 0 to 1, got 2.0 (see --help)"),
        (["--items", "0"], "argument --items: expected at least 1, got 0 (see --help)"),
        (["--mesh", "2by2"], "argument --mesh: invalid mesh shape value: '2by2' (see --help)"),
    ],
)
def test_mistaken_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        load_train().parse_arguments(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"
