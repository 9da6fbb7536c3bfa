"""Trains a sharded DLRM on click logs in the Criteo format, and reports AUC and log loss on held-out lines.

Runs under torchrun on any number of processes, or with plain python on one: `train.py --help` has example lines. With
--unsharded the same model trains in one process without any wrapper: what every sharded run is to be compared with.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what the examples share

import torch
import torch.distributed as dist
from arguments import parse_arguments
from criteo import MalformedLine, rows_per_table
from generate import ensure_generated, read_truth
from launch import fail, is_first, leave, make_env, say
from logs import START, ClickLogs
from metrics import Metrics, compute_metrics, gather_rows
from model import make_dlrm, split_parameters
from plans import make_plan
from resume import Progress, StopAsked, Stopped, check_place, command_to_resume
from steps import Step, global_steps, num_skipped
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.optim import RowWiseAdagrad
from tqdm import tqdm

from dmp import DistributedModelParallel, DmpError, ShardingEnv, load_checkpoint, save_checkpoint
from sharders import EmbeddingBagCollectionSharder

OPTIMIZERS = {
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
}


def main() -> None:
    args = parse_arguments()
    stop = StopAsked()
    try:
        run(args, stop)
    except Stopped:
        sys.exit(stop.exit_code())


def run(args: argparse.Namespace, stop: StopAsked) -> None:
    """Train and evaluate as the command line says."""
    env = make_env(args.mesh, args.axes, args.device)
    group = env.group("replicate", "shard")  # of the data ranks: those whose samples differ
    if args.unsharded and env.size > 1:
        raise ValueError(f"--unsharded runs in one process, this run has {env.size}")
    if args.save:
        check_place(args.save)
    paths = [args.data] if isinstance(args.data, str) else args.data
    if args.generate is not None:
        generate_on_first(paths[0], args.generate, args.seed)

    lines = {part: make_lines(args, paths, part, group) for part in ("train", "heldout")}
    model = make_model(args, env)
    _, dense = split_parameters(model)
    optimizer = OPTIMIZERS[args.dense_optimizer](dense.values(), lr=args.dense_lr)
    progress = start(args, model, optimizer, lines["train"])
    if not args.eval_only:
        train(args, model, optimizer, lines["train"], progress, group, env.device, stop)
    if args.save:
        save(args.save, model, optimizer, progress)

    say(f"held-out: {evaluate(model, lines['heldout'], group, env.device, stop)}")
    for part, reader in lines.items():
        skipped = num_skipped(reader, group, env.device)
        if skipped:
            say(f"malformed lines skipped in the {part} part: {skipped:,}")
    truth = read_truth(lines["train"].files[0]) if len(lines["train"].files) == 1 else None
    if truth is not None:
        say(f"best reachable: AUC {truth.best_auc:.6f}, log loss {truth.best_log_loss:.6f}")


def start(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, lines: ClickLogs) -> Progress:
    """Anew, or as the checkpoint of --resume or --load says."""
    path = args.resume or args.load
    if not path:
        return Progress.of_new(lines)
    extra = load_checkpoint(path, model, None if args.eval_only else optimizer)
    if args.load:
        step = extra["step"] if extra else 0
        say(f"loaded {path}, saved after {step:,} steps")
        return Progress.of_new(lines, step)
    progress = Progress.of_saved(extra, lines, path)
    say(f"goes on from {path}, after {progress.step:,} steps")
    if progress.epoch >= args.epochs:
        say(f"nothing is left of --epochs {args.epochs}")
    return progress


def train(
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lines: ClickLogs,
    progress: Progress,
    group: dist.ProcessGroup | None,
    device: torch.device,
    stop: StopAsked,
) -> None:
    """The epochs that are left. When it is stopped, by a signal or a bad line, what was trained is saved first."""

    def after_step() -> None:
        if args.save_every and progress.step % args.save_every == 0:
            save(args.save, model, optimizer, progress)

    model.train()
    before = progress.step
    try:
        while progress.epoch < args.epochs:
            title = f"epoch {progress.epoch + 1}/{args.epochs}"
            steps = global_steps(lines, group, device, stop)
            train_epoch(model, optimizer, lines, steps, progress, title, after_step)
    except (Stopped, ValueError, OSError) as error:
        say(f"stopped after {progress.step:,} steps")
        if isinstance(error, MalformedLine):
            say("--on-bad-line skip goes on without such lines, and counts them")
        if args.save and progress.step > before:
            save(args.save, model, optimizer, progress)
            more = ["--on-bad-line", "skip"] if isinstance(error, MalformedLine) else []
            say(f"to go on:\n  {command_to_resume(args.save, more)}")
        elif not args.save:
            say("nothing was saved; --save DIR does that at a stop")
        raise


def save(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    save_checkpoint(path, model, optimizer, extra=progress.saved())
    with tqdm.external_write_mode():
        say(f"saved {path}, after {progress.step:,} steps")


def make_lines(args: argparse.Namespace, paths: list[str], part: str, group: dist.ProcessGroup | None) -> ClickLogs:
    """This rank's share of one part of the lines."""
    return ClickLogs(
        paths,
        args.rows,
        args.batch_size,
        rank=0 if group is None else group.rank(),
        num_ranks=1 if group is None else group.size(),
        part=part,
        on_error=args.on_bad_line,
    )


def make_model(args: argparse.Namespace, env: ShardingEnv) -> nn.Module:
    """The model, sharded unless --unsharded; its tables are updated in the backward pass."""
    model: nn.Module = make_dlrm(rows_per_table(args.rows), args.dim, args.seed, meta=False if args.unsharded else None)
    if args.unsharded:
        model = model.to(env.device)
    tables, _ = split_parameters(model)
    apply_optimizer_in_backward(OPTIMIZERS[args.optimizer], tables.values(), {"lr": args.lr})
    if args.unsharded:
        return model
    plan = make_plan(args.layout, list(tables), env) if args.layout else None
    sharders = [EmbeddingBagCollectionSharder(wire=getattr(torch, args.wire))] if args.wire else None
    sharded = DistributedModelParallel(model, env=env, plan=plan, sharders=sharders)
    say(f"{env}\n{sharded.plan}")
    return sharded


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lines: ClickLogs,
    steps: Iterator[Step],
    progress: Progress,
    title: str,
    after_step: Callable[[], None],
) -> None:
    """The rest of one pass over the lines; `progress` is changed in place."""
    lines.start = progress.position
    made, rows, shown_loss, started = 0, 0, math.nan, time.perf_counter()
    done = lines.steps_before(progress.position)
    with tqdm(
        total=lines.num_steps, initial=done, desc=title, unit=" steps", disable=not is_first(), mininterval=0.5
    ) as bar:
        for step in steps:
            logits = model(step.batch.dense, step.batch.sparse).squeeze(1)
            losses = nn.functional.binary_cross_entropy_with_logits(logits, step.batch.labels, reduction="sum")
            loss = losses * step.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            made, rows = made + 1, rows + step.num_rows
            progress.step, progress.position = progress.step + 1, lines.position
            shown_loss = loss.item() if made == 1 else 0.95 * shown_loss + 0.05 * loss.item()
            speed = rows / (time.perf_counter() - started)
            bar.set_postfix_str(f"loss {shown_loss:.4f}, {speed:,.0f} samples/s", refresh=False)
            bar.update()
            after_step()
    progress.epoch, progress.position = progress.epoch + 1, START


@torch.no_grad()
def evaluate(
    model: nn.Module, lines: ClickLogs, group: dist.ProcessGroup | None, device: torch.device, stop: StopAsked
) -> Metrics:
    """AUC and log loss over all ranks' lines, on every rank."""
    model.eval()
    rows = [torch.empty(0, 2, device=device)]
    for step in global_steps(lines, group, device, stop):
        logits = model(step.batch.dense, step.batch.sparse).squeeze(1)
        rows.append(torch.stack([logits, step.batch.labels], dim=1))
    logits, labels = gather_rows(torch.cat(rows), group).cpu().unbind(1)
    if not len(labels):
        raise ValueError(f"{lines.path} has no held-out line: too few lines to report on")
    return compute_metrics(logits, labels)


def generate_on_first(path: str, lines: int, seed: int) -> None:
    """Generates the file on rank 0 while the others wait; its error is every rank's."""
    failure: list[Exception | None] = [None]
    if is_first():
        try:
            ensure_generated(path, lines, seed, progress=True)
        except (OSError, ValueError) as error:
            failure = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise failure[0]


if __name__ == "__main__":
    logging.getLogger("torch.fx").setLevel(logging.ERROR)  # a remark about how TorchRec asks whether it is traced
    try:
        main()
    except (DmpError, ValueError, OSError) as error:
        fail(str(error))
    finally:
        leave()
