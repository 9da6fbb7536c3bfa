"""Bytes that dense weights take on a rank: what stays between steps, and what comes and goes within one.

Optimizer state is Adam's, for nobody says which optimizer it will be. FSDP2 holds the unit that computes, the next one
and the gradients of one, beside the root's; DDP holds gradients a second time, in buckets. Activations are an estimate:
for each token what every product takes and gives (what several take together, once), what norms take, and rows looked
up; of recomputed blocks what enters each, and all of one. Attentions are taken to keep no matrix of tokens x tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.dense.block import ACTIVATIONS, GATHERED, GRADIENTS, REPLICATED, STATE, WEIGHTS
from planner.dense.placed import Placed
from planner.dense.time import Clock

_STATE_TENSORS = 2


def training_bytes(blocks: Sequence[Placed], clock: Clock) -> list[tuple[dict[str, int], int]]:
    """Of each block: bytes by part, and its activations, were they recomputed."""
    gathered = _gathered(blocks, clock)
    found = []
    for block in blocks:
        kept = sum(w.times * w.kept * w.item_bytes for w in block.weights)
        trained = sum(w.times * w.kept * w.item_bytes for w in block.weights if w.weight.trained)
        whole, again = _activations(block, clock)
        parts = {WEIGHTS: kept, GRADIENTS: trained, STATE: _STATE_TENSORS * trained, GATHERED: gathered[block.name]}
        parts[ACTIVATIONS] = again if block.name in clock.model.recomputed else whole
        found.append((parts, again))
    return found


def _gathered(blocks: Sequence[Placed], clock: Clock) -> Mapping[str, int]:
    """Of what a rank holds for a while, each block's part: of units that of the largest alone."""
    env = clock.env
    found = dict.fromkeys((block.name for block in blocks), 0)
    largest = ("", 0)
    is_ddp = not env.fully_sharded_axes and not any(block.is_split for block in blocks)
    for block in blocks:
        split = [w for w in block.weights if not w.is_copied]
        weights = sum(w.times * w.used * clock.item_bytes(w) for w in split)
        gradients = sum(w.times * w.used * w.item_bytes for w in split if w.weight.trained)
        if block.is_unit:
            largest = max(largest, (block.name, (2 * weights + gradients) // block.count), key=lambda one: one[1])
        else:
            found[block.name] += weights + gradients
        if env.data_size > 1:
            copied = [w for w in block.weights if w.weight.trained and (is_ddp or w.kind == REPLICATED)]
            found[block.name] += sum(w.times * w.used * w.item_bytes for w in copied)
    if largest[1]:
        found[largest[0]] += largest[1]
    return found


def _activations(block: Placed, clock: Clock) -> tuple[int, int]:
    """Bytes that all repetitions keep for the backward pass, and those where it computes them again."""
    tokens, ranks = clock.batch_size * clock.model.tokens, clock.env.tensor_size
    kept = 0.0
    entered: float | None = None
    taken: set[tuple[str, int, bool]] = set()
    for w in block.weights:
        item = clock.item_bytes(w)
        of_chunk = ranks if w.is_sequence else 1
        into = w.weight.inputs / (ranks if w.tensor_dim == 1 else 1)
        holder = w.weight.owner.rpartition(".")[0]
        if into and (holder, w.weight.inputs, w.tensor_dim == 1) not in taken:
            taken.add((holder, w.weight.inputs, w.tensor_dim == 1))
            kept += w.times * into * item * w.weight.share
            entered = into * item if entered is None else entered
        gives = w.weight.outputs / (ranks if w.tensor_dim == 0 and block.has_rowwise else 1)  # a head's are gathered
        kept += w.times * gives * item * w.weight.share
        kept += w.times * (w.weight.normed / of_chunk + w.weight.looked_up) * item
    chunk = ranks if any(w.is_sequence for w in block.weights) else 1
    again = block.count * (entered or 0.0) / chunk + kept / block.count if block.name else kept
    return int(kept * tokens), int(min(kept, again) * tokens)
