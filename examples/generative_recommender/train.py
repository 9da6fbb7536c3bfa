"""Trains a generative recommender, tables and a transformer in one model, on any mesh; reports hit rates.

Runs under torchrun on any number of processes, or with plain python on one: `train.py --help` has example lines.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what the examples share

import torch
import torch.distributed as dist
from command_line import Parser, mesh_shape, names, positive
from launch import fail, is_first, leave, make_env, say
from recommender import SOFTMAXES, Recommender
from sequences import MAX_LENGTH, Generator
from torch import nn
from tqdm import tqdm
from training import Task, attach_table_optimizer, bytes_held, evaluate, make_dense_optimizer, train_step, wrap

from dmp import DistributedModelParallel, DmpError, ShardingEnv, load_checkpoint, save_checkpoint

DESCRIPTION = """\
Trains a generative recommender (item and user tables, and a causal transformer over item histories) to predict the next
item, on generated histories whose best hit rate is known. Runs under torchrun on any number of processes, or with plain
python on one; the loss curve is the same, but for rounding, on every mesh."""
EPILOG = """\
examples:
  one process:
    python examples/generative_recommender/train.py
  four processes: dense weights fully sharded over one axis, split by tensor parallelism over the other, tables sharded
  over both:
    torchrun --nproc_per_node=4 examples/generative_recommender/train.py --mesh 2x2 --axes shard,tp
  two processes, dense weights replicated; save what was trained:
    torchrun --nproc_per_node=2 examples/generative_recommender/train.py --mesh 2 --axes dp --checkpoint checkpoint
  go on from there, on four:
    torchrun --nproc_per_node=4 examples/generative_recommender/train.py --mesh 2x2 --axes shard,tp \\
      --resume checkpoint --steps 300

axes: dp (dense weights replicated), shard (fully sharded), replicate (copies of both), tp (tensor parallel: its ranks
work on the same samples). Tables are sharded over dp, shard and tp together.
"""
_DEFAULT_AXES = {1: ["shard"], 2: ["shard", "tp"]}


def main() -> None:
    args = parse_arguments()
    env = make_env(args.mesh, args.axes, "cpu")
    if args.batch_size < env.data_size:
        raise ValueError(f"--batch-size {args.batch_size} gives no sample to some of the {env.data_size} data ranks")
    generator = Generator(args.items, args.users, args.order, args.seed)
    task = Task(generator, args.batch_size, args.softmax, env)

    model = make_model(args, env)
    optimizer = make_dense_optimizer(model, args.lr)
    first_step = 0
    if args.resume:
        extra = load_checkpoint(args.resume, model, optimizer)
        if extra["data"] != asdict(generator):
            raise ValueError(f"{args.resume} is of other data: expected {asdict(generator)}, got {extra['data']}")
        first_step = extra["step"]
        say(f"resumed {args.resume}, saved after {first_step:,} steps")
        if first_step >= args.steps:
            say(f"nothing left to train: --steps {args.steps} counts from the first step of all")
    train(model, optimizer, task, first_step, args.steps)
    if args.checkpoint:
        extra = {"step": max(first_step, args.steps), "data": asdict(generator)}
        save_checkpoint(args.checkpoint, model, optimizer, extra=extra)
        say(f"saved {args.checkpoint}")

    reached, best_1, best_10 = evaluate(model, task), generator.best_hit_rate(1), generator.best_hit_rate(10)
    say(f"held-out:       {reached}")
    say(f"best reachable: HR@1 {best_1:.4f}, HR@10 {best_10:.4f}")
    say(f"reached of it:  HR@1 {reached.at_1 / best_1:.1%}, HR@10 {reached.at_10 / best_10:.1%}")


def make_model(args: argparse.Namespace, env: ShardingEnv) -> DistributedModelParallel:
    """The model on the mesh; says the plan, and what each rank holds."""
    module = Recommender(
        args.items, args.users, args.dim, args.layers, args.heads, MAX_LENGTH, args.softmax, seed=args.seed
    )
    attach_table_optimizer(module, args.table_lr)
    model = wrap(module, env, args.batch_size)
    say(f"{env}\n{model.plan}")
    held = [bytes_held(model)]
    if dist.is_initialized():
        held = held * env.size
        dist.all_gather_object(held, bytes_held(model))
    for rank, (tables, dense) in enumerate(held):
        say(f"rank {rank} holds {tables / 1e3:,.1f} KB of tables, {dense / 1e3:,.1f} KB of dense weights")
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, first_step: int, last_step: int) -> None:
    """Steps up to `last_step`, with a bar on rank 0."""
    num_positions, shown_loss, started = 0, math.nan, time.perf_counter()
    with tqdm(initial=first_step, total=last_step, unit=" steps", disable=not is_first(), mininterval=0.5) as bar:
        for step in range(first_step, last_step):
            loss, n = train_step(model, optimizer, task, step)
            num_positions += n
            shown_loss = loss if step == first_step else 0.95 * shown_loss + 0.05 * loss
            speed = num_positions / (time.perf_counter() - started)
            bar.set_postfix_str(f"loss {shown_loss:.4f}, {speed:,.0f} tokens/s", refresh=False)
            bar.update()


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed command line; what is wrong with it is said once, by rank 0."""
    parser = Parser(DESCRIPTION, EPILOG)

    data = parser.options("data")
    data("--items", "number of items", metavar="N", type=positive, default=300)
    data("--users", "number of users", metavar="N", type=positive, default=100)
    data(
        "--order", "probability that an item is followed by its successor", metavar="P", type=_probability, default=0.8
    )

    model = parser.options("model")
    model("--dim", "hidden size, and embedding dimension", metavar="D", type=positive, default=32)
    model("--layers", "blocks of the transformer", metavar="N", type=positive, default=2)
    model("--heads", "of each attention", metavar="N", type=positive, default=4)
    model("--softmax", "over candidates from the item table, or over all items", choices=SOFTMAXES, default="sampled")
    model("--seed", "of the initial weights and of the data", metavar="N", type=int, default=0)

    training = parser.options("training")
    training("--steps", "in all, those before --resume too", metavar="N", type=positive, default=250)
    training("--batch-size", "histories a step, over all data ranks", metavar="B", type=positive, default=128)
    training("--lr", "of the dense weights (Adam)", metavar="LR", type=float, default=0.01)
    training("--table-lr", "of the tables (row-wise Adagrad, in the backward pass)", type=float, default=0.1)

    where = parser.options("where it runs")
    where("--mesh", "shape of the device mesh (default: all processes in one axis)", metavar="NxM", type=mesh_shape)
    where("--axes", "its axis names (default: shard, or shard,tp)", metavar="NAMES", type=names)

    checkpoint = parser.options("checkpoints")
    checkpoint("--checkpoint", "write one at the end", metavar="DIR")
    checkpoint("--resume", "go on from one, written on any mesh", metavar="DIR")

    args = parser.parse_args(words)
    args.axes = args.axes or _DEFAULT_AXES.get(len(args.mesh or [0]))
    return args


def _probability(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"expected 0 to 1, got {number}")
    return number


_probability.__name__ = "probability"  # argparse shows it in its errors


if __name__ == "__main__":
    logging.getLogger("torch.fx").setLevel(logging.ERROR)  # a remark about how TorchRec asks whether it is traced
    try:
        main()
    except (DmpError, ValueError, OSError) as error:
        fail(str(error))
    finally:
        leave()
