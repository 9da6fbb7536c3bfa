"""Command line of `train.py`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from command_line import Parser, mesh_shape, names, positive

DESCRIPTION = """\
Trains a small Llama on the bytes of Python's standard library, on any mesh of these axes:
  dp         other samples, copies of the weights
  replicate  other samples, copies of the weights (with shard: HSDP)
  shard      other samples, weights fully sharded (FSDP2)
  tp         the same samples, weights split inside the layers
Runs on different meshes see the same batches, and have the same losses."""
EPILOG = """\
examples:
  one process:
    python examples/transformer/train.py
  four processes, fully sharded x tensor parallel:
    torchrun --nproc_per_node=4 examples/transformer/train.py --mesh 2x2 --axes shard,tp
  eight, with copies too:
    torchrun --nproc_per_node=8 examples/transformer/train.py --mesh 2x2x2 --axes replicate,shard,tp
  save on one mesh, go on from step 100 on another:
    torchrun --nproc_per_node=2 examples/transformer/train.py --axes tp --checkpoint saved --checkpoint-every 100
    torchrun --nproc_per_node=2 examples/transformer/train.py --axes shard --resume saved/step-100
"""
_DEFAULT_AXES = {1: ["shard"], 2: ["shard", "tp"], 3: ["replicate", "shard", "tp"]}


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed command line; what is wrong with it is said once, by rank 0."""
    parser = Parser(DESCRIPTION, EPILOG)

    where = parser.options("where it runs")
    where("--mesh", "shape of the device mesh (default: all processes in one axis)", metavar="NxM", type=mesh_shape)
    where("--axes", "its axis names (default: shard; shard,tp; replicate,shard,tp)", metavar="NAMES", type=names)
    where("--device", "processor", choices=("cpu", "cuda"), default="cpu")
    where("--sequence-parallel", "between blocks, ranks of tp keep a part of the sequence", action="store_true")
    where("--loss-parallel", "logits stay split over the vocabulary along tp", action="store_true")
    where("--activation-checkpointing", "recompute blocks in the backward pass", action="store_true")

    model = parser.options("model")
    model("--dim", "hidden size", metavar="D", type=positive, default=128)
    model("--layers", "number of blocks", metavar="N", type=positive, default=4)
    model("--heads", "of attention", metavar="N", type=positive, default=4)
    model("--kv-heads", "of keys and values", metavar="N", type=positive, default=2)
    model("--seed", "of initial weights and of the order of the text", type=int, default=0)

    training = parser.options("training")
    training("--steps", "in all, those before --resume too", metavar="N", type=positive, default=150)
    training("--batch-size", "samples a step, over all data ranks", metavar="B", type=positive, default=16)
    training("--length", "bytes of a sample", metavar="T", type=positive, default=128)
    training("--lr", "highest learning rate, after a warm-up", type=float, default=3e-3)

    checkpoint = parser.options("checkpoints")
    checkpoint("--checkpoint", "write DIR/step-N at the end", metavar="DIR")
    checkpoint("--checkpoint-every", "and every N steps", metavar="N", type=positive)
    checkpoint("--resume", "go on from such a DIR/step-N, written on any mesh", metavar="PATH")

    sample = parser.options("sample")
    sample("--sample", "bytes to write at the end; 0 for none", metavar="N", type=int, default=120)
    sample("--temperature", "0 takes the likeliest byte", metavar="X", type=float, default=0.7)

    args = parser.parse_args(words)
    args.axes = args.axes or _DEFAULT_AXES.get(len(args.mesh or [0]))
    if args.checkpoint_every and not args.checkpoint:
        parser.error("--checkpoint-every needs --checkpoint")
    return args
