"""Trains a small Llama on the bytes of Python's standard library: fully sharded, tensor parallel, copied, or all of it.

Runs under torchrun on any mesh, or with plain python in one process: `train.py --help` has example lines. The model
(`model.py`) is written for one process; what this file does for the mesh is in `make_model`.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what the examples share

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import parse_arguments
from launch import fail, is_first, leave, make_env, say
from model import Config, Llama
from text import Rows, Text, read_text, rows_of, training_batch, validation_batches
from torch import nn
from tqdm import tqdm

from dmp import (
    DistributedModelParallel,
    DmpError,
    ShardingEnv,
    ShardingPlan,
    clip_grad_norm_,
    load_checkpoint,
    save_checkpoint,
)
from sharders import FSDPWrapper, TensorParallelSharder

WARM_UP = 0.05  # of the steps
LAST_LR = 0.1  # of the highest
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0
REPORTS = 10  # lines about the loss in a run
PROMPT = b"import os\n\n\ndef "


class Result(NamedTuple):
    """Losses in bits per byte."""

    losses: list[float]
    """Of each step's global batch."""
    before: float
    """Of the held-out text."""
    after: float


def main() -> None:
    args = parse_arguments()
    train(args, make_env(args.mesh, args.axes, args.device))


def train(args: argparse.Namespace, env: ShardingEnv) -> Result:
    """Train, save and sample as the command line says."""
    rows = rows_of(args.batch_size, env)
    text = read_text()
    if args.length >= len(text.held_out):
        raise ValueError(f"--length {args.length} is longer than the held-out text of {len(text.held_out):,} bytes")
    model = make_model(args, env)
    optimizer = make_optimizer(model, args.lr)
    first = resume(args.resume, model, optimizer) if args.resume else 0
    describe(model, text)

    held_out = validation_batches(text, rows, args.length, env.device)
    before = validate(model, held_out, args.loss_parallel)
    say(f"held-out text: {before:.5f} bits per byte before")
    losses = steps(args, model, optimizer, text, rows, first)
    after = validate(model, held_out, args.loss_parallel)
    say(f"held-out text: {after:.5f} bits per byte after")
    if args.checkpoint and args.steps > first:
        save(args, model, optimizer, args.steps)
    if args.sample:
        say(f"\n{sample(model, args.sample, args.length, args.temperature, args.seed)}")
    return Result(losses, before, after)


def make_model(args: argparse.Namespace, env: ShardingEnv) -> DistributedModelParallel:
    """The model on the mesh. Built on meta: each rank allocates what it holds, and values depend on the seed alone."""
    if not env.axes("tensor") and (args.sequence_parallel or args.loss_parallel):
        raise ValueError(f"--sequence-parallel and --loss-parallel need a tp axis; the axes are {','.join(env.names)}")
    torch.manual_seed(args.seed)
    with torch.device("meta"):
        module = Llama(Config(args.dim, args.layers, args.heads, args.kv_heads))
    return DistributedModelParallel(
        module,
        env,
        sharders=[
            TensorParallelSharder(sequence_parallel=args.sequence_parallel, loss_parallel=args.loss_parallel),
        ],
        data_parallel_wrapper=FSDPWrapper(activation_checkpointing=args.activation_checkpointing),
    )


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW that decays matrices alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def resume(path: str, model: DistributedModelParallel, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint of any mesh; returns the number of steps it has seen."""
    extra = load_checkpoint(path, model, optimizer)
    if extra["config"] != asdict(model.config):
        raise ValueError(f"{path} is of another model: expected {asdict(model.config)}, got {extra['config']}")
    say(f"goes on from {path}, after {extra['step']:,} steps")
    return extra["step"]


def save(
    args: argparse.Namespace, model: DistributedModelParallel, optimizer: torch.optim.Optimizer, step: int
) -> None:
    path = Path(args.checkpoint) / f"step-{step}"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(path, model, optimizer, extra={"step": step, "config": asdict(model.config)})
    say(f"saved {path}")


def describe(model: DistributedModelParallel, text: Text) -> None:
    """Say where the model is: its plan, and how much of it each rank holds."""
    total = sum(p.numel() for p in model.parameters())
    mine = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    held = [mine] * model.env.size
    if dist.is_initialized():
        dist.all_gather_object(held, mine)
    say(f"{model.env}\n{short(model.plan)}")
    say(f"weights: {total:,}; on each rank: {' '.join(f'{n:,}' for n in held)}")
    say(f"text: {len(text.train):,} bytes, and {len(text.held_out):,} held out")


def short(plan: ShardingPlan) -> str:
    """The plan with like parameters of all layers in one line."""
    lines = Counter((re.sub(r"\d+", "*", name), str(entry)) for name, entry in plan.items())
    width = max((len(name) for name, _ in lines), default=0)
    rows = [f"  {name:<{width}}  {layout}" + f"  ({n} times)" * (n > 1) for (name, layout), n in lines.items()]
    return "\n".join(["plan:", *rows]) if rows else "plan: nothing is split along a tp axis"


def steps(
    args: argparse.Namespace,
    model: DistributedModelParallel,
    optimizer: torch.optim.Optimizer,
    text: Text,
    rows: Rows,
    first: int,
) -> list[float]:
    """Steps `first` to the last; returns their losses."""
    device, losses, started = model.env.device, [], time.perf_counter()
    with tqdm(total=args.steps, initial=first, desc="training", unit=" steps", disable=not is_first()) as bar:
        for step in range(first, args.steps):
            for group in optimizer.param_groups:
                group["lr"] = args.lr * schedule(step, args.steps)
            optimizer.zero_grad()
            ids = training_batch(text, rows, args.length, args.seed, step, device)
            with vocabulary_split(args.loss_parallel):
                loss = loss_of(model, ids)
                loss.backward()
            clip_grad_norm_(model, MAX_NORM)
            optimizer.step()

            losses.append(bits(loss, model.env))
            done = step + 1
            speed = len(losses) * args.batch_size * args.length / (time.perf_counter() - started)
            bar.set_postfix_str(f"{losses[-1]:.3f} bits per byte, {speed:,.0f} bytes/s", refresh=False)
            bar.update()
            if done % math.ceil(args.steps / REPORTS) == 0:
                with tqdm.external_write_mode():
                    say(f"step {done}: {losses[-1]:.5f} bits per byte")
            if args.checkpoint_every and done % args.checkpoint_every == 0 and done < args.steps:
                save(args, model, optimizer, done)
    return losses


def schedule(step: int, num_steps: int) -> float:
    """Fraction of the highest learning rate: up in a line, down in half a cosine."""
    warm_up = math.ceil(WARM_UP * num_steps)
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, num_steps - warm_up)
    return LAST_LR + (1 - LAST_LR) * (1 + math.cos(math.pi * done)) / 2


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Mean over this rank's samples, in nats; ids (b, T + 1)."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def vocabulary_split(asked: bool) -> AbstractContextManager[None]:
    """Where a loss of logits that are split over the vocabulary, and its backward pass, are right."""
    if not asked:
        return nullcontext()
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def bits(loss: torch.Tensor, env: ShardingEnv) -> float:
    """Mean of a loss over the data ranks, in bits."""
    mean = plain(loss.detach()).clone()
    group = env.group("replicate", "shard")
    if group is not None:
        dist.all_reduce(mean, group=group)
    return mean.item() / env.data_size / math.log(2)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor: logits and their loss are one with --loss-parallel."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def validate(model: DistributedModelParallel, batches: list[torch.Tensor], is_split: bool) -> float:
    """Bits per byte of the held-out text."""
    with vocabulary_split(is_split):
        return sum(bits(loss_of(model, ids), model.env) for ids in batches) / len(batches)


@torch.no_grad()
def sample(model: DistributedModelParallel, num: int, length: int, temperature: float, seed: int) -> str:
    """The prompt and `num` bytes that the model writes after it. All ranks take part; rank 0 chooses each byte."""
    random = torch.Generator().manual_seed(seed)
    written = list(PROMPT)
    for _ in range(num):
        seen = written[-length:]
        # Always `length` wide: what stands behind a byte does not change it.
        ids = torch.tensor([seen + [0] * (length - len(seen))], device=model.env.device)
        logits = plain(model(ids))[0, len(seen) - 1].float().cpu()
        if temperature == 0:
            chosen = logits.argmax()
        else:
            chosen = torch.multinomial((logits / temperature).softmax(0), 1, generator=random).squeeze()
        chosen = chosen.to(model.env.device)
        if dist.is_initialized():
            dist.broadcast(chosen, src=0)
        written.append(int(chosen))
    return bytes(written).decode(errors="replace")


if __name__ == "__main__":
    try:
        main()
    except (DmpError, ValueError, OSError) as error:
        fail(str(error))
    finally:
        leave()
