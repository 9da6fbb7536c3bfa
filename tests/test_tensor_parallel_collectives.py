"""Collectives of tensor and sequence parallelism are those by hand; torch's styles are applied as they are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dmp import ShardingEnv
from sharders import TensorParallelSharder
from tests.ranks import mesh, run_ranks
from tests.test_tensor_parallel import BATCH, LENGTH, VOCAB, batches, build, split, whole
from tests.transformers_zoo import LlamaBlock, rotary


def count(block: nn.Module, x: torch.Tensor, positions: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of forward and backward."""
    x = x.clone().requires_grad_()
    counts = []
    with CommDebugMode() as mode:
        out = block(x, positions)
    counts.append(mode)
    with CommDebugMode() as mode:
        whole(out).sum().backward()
    counts.append(mode)
    return tuple(  # type: ignore[return-value]
        dict(Counter({op.__name__.split(".")[-1]: n for op, n in m.get_comm_counts().items()})) for m in counts
    )


def check_collectives() -> None:
    tp = mesh((2,), ("tp",))
    x, positions = torch.randn(2, LENGTH, 32), rotary(LENGTH, 8, torch.device("cpu"))

    def made() -> nn.Module:
        torch.manual_seed(0)
        return LlamaBlock(32, 4, 4, 64)

    theirs = made()
    theirs.attention.heads = theirs.attention.kv_heads = 2
    parallelize_module(
        theirs,
        tp,
        {
            "attention": PrepareModuleInput(
                input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)
            ),
            "feed_forward": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
            **{f"attention.{n}": ColwiseParallel() for n in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(),
        },
    )
    plan = {
        "attention.w[qkv]": "colwise",
        "attention.wo": "rowwise",
        "feed_forward.w[13]": "colwise",
        "feed_forward.w2": "rowwise",
    }
    ours = made()
    split(ours, (2,), ("tp",), plan, example_inputs=(x, positions))
    ours.attention.heads = ours.attention.kv_heads = 2
    for _ in range(8):  # in which ranks look at each other's calls and gradients
        count(ours, x, positions)
        ours.zero_grad()
    counted = count(ours, x, positions)
    assert counted == count(theirs, x, positions)
    assert counted == ({"all_reduce": 2}, {"all_reduce": 2})
    torch.testing.assert_close(ours(x, positions), theirs(x, positions))


def test_collectives_are_those_of_a_plan_by_hand() -> None:
    run_ranks(2, check_collectives)


def check_sequence_collectives() -> None:
    model = build("llama")
    split(model, (2,), ("tp",), sequence_parallel=True)
    ids = batches()[0]
    with CommDebugMode() as forward:
        out = model(ids)
    counts = {op.__name__.split(".")[-1]: n for op, n in forward.get_comm_counts().items()}
    # A block gathers and scatters twice; the vocabulary is summed, the final norm's output and the logits are gathered.
    # The first calls tell whether all ranks have the same ids, and draw the same, see same_samples.py.
    assert counts.pop("allgather_") == 2
    assert counts == {"all_reduce": 1, "all_gather_into_tensor": 2 * 2 + 2, "reduce_scatter_tensor": 2 * 2}
    assert out.shape == (BATCH, LENGTH, VOCAB)


def test_collectives_of_sequence_parallelism() -> None:
    run_ranks(2, check_sequence_collectives)


def check_torchs_sequence_parallel(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """torch's objects are applied as they are."""
    where: DeviceMesh = mesh(shape, names)
    norm = nn.ModuleDict({"norm": nn.LayerNorm(4)})
    placement = TensorParallelSharder({"norm": SequenceParallel()}).place(norm, {}, ShardingEnv.from_mesh(where))
    placement.apply(norm)
    out = norm["norm"](torch.randn(2, 3, 4))
    assert isinstance(out, DTensor) and out.placements == (Shard(1),)
    assert set(placement.layouts) == {"norm.weight", "norm.bias"}


def test_torchs_sequence_parallel() -> None:
    run_ranks(2, check_torchs_sequence_parallel, (2,), ("tp",))
