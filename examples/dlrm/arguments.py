"""Command line of `train.py`."""

from __future__ import annotations

import argparse

from command_line import Parser, mesh_shape, names, positive
from generate import GENERATED, GENERATED_LINES
from plans import LAYOUTS

DESCRIPTION = """\
Trains a sharded DLRM on click logs in the Criteo format, and reports AUC and log loss on held-out lines.
Runs under torchrun on any number of processes, or with plain python on one."""
EPILOG = """\
examples:
  one process, 150,000 generated lines:
    python examples/dlrm/train.py
  two processes, planned; saved every 100 steps, at Ctrl-C and at the end:
    torchrun --nproc_per_node=2 examples/dlrm/train.py --save checkpoint --save-every 100
  on from there, after Ctrl-C or for a second pass over the lines:
    torchrun --nproc_per_node=2 examples/dlrm/train.py --save checkpoint --resume checkpoint --epochs 2
  four processes, replicate x shard:
    torchrun --nproc_per_node=4 examples/dlrm/train.py --mesh 2x2
  the checkpoint on four processes, under another plan:
    torchrun --nproc_per_node=4 examples/dlrm/train.py --load checkpoint --eval-only --layout row_wise
  the checkpoint in a plain module, without any wrapper:
    python examples/dlrm/train.py --load checkpoint --eval-only --unsharded

Real data, as it comes: --data train.txt of the Kaggle display-advertising challenge, or the terabyte click logs,
file by file (--data day_0 day_1) or as a folder (--data days).
"""
TABLE_OPTIMIZERS = ("rowwise_adagrad", "adagrad", "sgd", "adam")
WIRES = ("bfloat16", "float16")
DENSE_OPTIMIZERS = ("adam", "adagrad")


def parse_arguments() -> argparse.Namespace:
    """The parsed command line; what is wrong with it is said once, by rank 0."""
    parser = Parser(DESCRIPTION, EPILOG)

    data = parser.options("data")
    logs = "click logs, plain or gzip, or folders of them; a tenth of the lines is held out (default: generated)"
    data("--data", logs, metavar="PATH", nargs="+")
    data("--generate", "first write N lines with a known best AUC to --data", metavar="N", type=positive)
    data("--on-bad-line", "stop at a malformed line, or skip and count it", choices=("error", "skip"), default="error")
    data("--batch-size", "lines a step, about, over all processes", metavar="B", type=positive, default=512)
    data("--epochs", "passes over the lines", metavar="E", type=positive, default=1)

    model = parser.options("model")
    rows = "rows of every table, or 26 numbers with commas between; categories are hashed to them"
    model("--rows", rows, type=_rows, default=50_000)
    model("--dim", "embedding dimension", type=positive, default=16)
    model("--optimizer", "of the tables, in the backward pass", choices=TABLE_OPTIMIZERS, default=TABLE_OPTIMIZERS[0])
    model("--lr", "of the tables", type=float, default=0.03)
    model("--dense-optimizer", "of the rest", choices=DENSE_OPTIMIZERS, default=DENSE_OPTIMIZERS[0])
    model("--dense-lr", "of the rest", type=float, default=0.005)
    model("--seed", "of the initial weights, and of --generate", type=int, default=0)

    where = parser.options("where it runs")
    where("--mesh", "shape of the device mesh (default: all processes in one axis)", metavar="NxM", type=mesh_shape)
    where("--axes", "its axis names (default: dp, or replicate,shard)", metavar="NAMES", type=names)
    where("--layout", "one layout for all tables, or a mix (default: the planner's choice)", choices=LAYOUTS)
    where("--wire", "what results and gradients of tables travel as (default: float32)", choices=WIRES)
    where("--device", "processor", choices=("cpu", "cuda"), default="cpu")
    where("--unsharded", "a plain module in one process, without any wrapper", action="store_true")

    checkpoint = parser.options("checkpoints")
    checkpoint("--save", "write one at the end, and when the run is stopped (Ctrl-C, a bad line)", metavar="DIR")
    checkpoint("--save-every", "and every N steps", metavar="N", type=positive)
    checkpoint("--resume", "go on from one, at the line where it was saved", metavar="DIR")
    checkpoint("--load", "start from one, saved on any mesh and plan, at the first line", metavar="DIR")
    checkpoint("--eval-only", "do not train", action="store_true")

    args = parser.parse_args()
    if args.unsharded and (args.mesh or args.layout):
        parser.error("--unsharded has no mesh and no layout")
    if args.unsharded and args.wire:
        parser.error("--unsharded sends nothing, so it has no --wire")
    if args.save_every and not args.save:
        parser.error("--save-every needs --save, which says where")
    if args.resume and args.load:
        parser.error("--resume and --load both name a checkpoint to start from; give one")
    if args.resume and args.eval_only:
        parser.error("--eval-only does not train; give --load")
    if args.generate and args.data and len(args.data) > 1:
        parser.error(f"--generate writes one file, --data names {len(args.data)}")
    if args.data is None:
        args.data, args.generate = GENERATED, args.generate or GENERATED_LINES
    return args


def _rows(text: str) -> int | list[int]:
    numbers = [positive(word) for word in text.split(",")]
    return numbers[0] if len(numbers) == 1 else numbers


_rows.__name__ = "number of rows"  # argparse shows this name in its errors
