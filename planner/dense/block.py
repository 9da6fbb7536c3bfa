"""`DenseBlock`: dense weights with one decision, and what they take on a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TENSOR_PARALLEL, FULLY_SHARDED, REPLICATED = KINDS = ("tensor parallel", "fully sharded", "replicated")
COMPUTE, TENSOR, DATA = "compute", "tensor collectives", "data-parallel collectives"
SECONDS = (COMPUTE, TENSOR, DATA)
"""Of a step: forward, backward and the optimizer; those of the tensor axis; of the others what compute hides not."""
WEIGHTS, GRADIENTS, STATE, GATHERED, ACTIVATIONS = (
    "weights",
    "gradients",
    "optimizer state",
    "gathered weights and buckets",
    "activations",
)
PARTS = (WEIGHTS, GRADIENTS, STATE, GATHERED, ACTIVATIONS)


@dataclass(frozen=True)
class DenseBlock:
    """Weights with one decision.

    Args:
        name: of the block, `*` for the index of a repeated one; empty for what is in none.
        count: how many such blocks there are.
        num_parameters: elements of all of them together, unsharded.
        rank_bytes: of their weights on each rank, by kind (one of `KINDS`).
        training_bytes: on each rank, by part (one of `PARTS`); activations as they are without recomputation, or with
            it where the module says so.
        recomputed_bytes: the activations, were they recomputed in the backward pass.
        flops: of a step on each rank.
        seconds: of a step, by what they go to (one of `SECONDS`).
        hidden_seconds: of collectives that run while the rank computes.
    """

    name: str
    count: int
    num_parameters: int
    rank_bytes: Mapping[str, int]
    training_bytes: Mapping[str, int] = field(default_factory=dict)
    recomputed_bytes: int = 0
    flops: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    hidden_seconds: float = 0.0
