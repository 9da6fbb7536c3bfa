"""Seconds that dense weights take of a step: products, collectives, and what of these compute hides.

[Note: dense step]
A product with a weight takes 2 flops for each element and token forward, as many for the gradient of its input and as
many for the weight's, if that is trained, and once more where activations are recomputed, at the rate of the dtype it
is done in, and not less than it takes to read the weight; an attention 4 T squared for each sample and unit of its
heads' width. The optimizer reads weight, gradient and two states and writes all but the gradient. Tensor parallelism
sums the hidden state once for each row-wise weight forward, and once backward, and the rank waits for it. FSDP2 gathers
a unit before its forward and again before its backward, and reduces its gradients after it; copies are reduced by DDP
while the backward pass goes on. Of these a unit's part that is longer than the compute it runs beside is waited for,
and so are the first unit's gather and the last's reduction.

Not modelled: kernel launches, activations' own traffic, convolutions (a kernel is taken as applied once for each
token), a mixture's exchange of tokens, memory bandwidth that collectives take from compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dmp import ShardingEnv
from planner.costs.rings import Ring
from planner.costs.topology import Topology
from planner.dense.block import COMPUTE, DATA, TENSOR
from planner.dense.model import DenseModel
from planner.dense.placed import Placed, PlacedWeight

_BUCKET_BYTES = 25 << 20  # of DDP
_OPTIMIZER_TENSORS = 7  # weight, gradient and two states read, and all but the gradient written


@dataclass(frozen=True)
class BlockTime:
    """What a block takes of a step: flops on a rank, seconds by what they go to, and seconds of hidden collectives."""

    flops: float
    seconds: Mapping[str, float]
    hidden_seconds: float


NO_TIME = BlockTime(0.0, {}, 0.0)


@dataclass(frozen=True)
class _Work:
    """A block's own work: seconds forward, backward, of the optimizer and in tensor collectives."""

    flops: float
    forward: float
    backward: float
    optimizer: float
    tensor: float


@dataclass(frozen=True)
class Clock:
    """How long things take on a mesh.

    Args:
        model: whose blocks they are.
        env: the mesh.
        topology: the machine.
        batch_size: samples per data rank.
    """

    model: DenseModel
    env: ShardingEnv
    topology: Topology
    batch_size: float

    def times(self, blocks: Sequence[Placed]) -> list[BlockTime]:
        """Of each block, see [Note: dense step]."""
        works = [self._work(block) for block in blocks]
        exchanged = self._exchanged(blocks, works)
        found = []
        for work, (waited, hidden) in zip(works, exchanged, strict=True):
            compute = work.forward + work.backward + work.optimizer
            found.append(BlockTime(work.flops, {COMPUTE: compute, TENSOR: work.tensor, DATA: waited}, hidden))
        return found

    def item_bytes(self, weight: PlacedWeight) -> int:
        """Of an element while it is computed with."""
        dtype = self.model.compute_dtype
        return weight.item_bytes if dtype is None else min(weight.item_bytes, dtype.itemsize)

    def _work(self, block: Placed) -> _Work:
        tokens, topology = self.batch_size * self.model.tokens, self.topology
        flops = back_flops = forward = backward = optimizer = 0.0
        for w in block.weights:
            item = self.item_bytes(w)
            if w.weight.outputs:
                each = 2 * w.used * tokens * w.weight.share
                read = w.used * item / topology.memory_bandwidth
                seconds, products = w.times * max(each / topology.product_flops(item), read), 1 + w.weight.trained
                forward, backward = forward + seconds, backward + products * seconds
                flops, back_flops = flops + each * w.times, back_flops + products * each * w.times
            if w.weight.looked_up:
                seconds = w.times * 2 * tokens * w.weight.looked_up * item / topology.memory_bandwidth
                forward, backward = forward + seconds, backward + 2 * seconds * w.weight.trained
            if w.weight.trained:
                optimizer += w.times * _OPTIMIZER_TENSORS * w.kept * w.item_bytes / topology.memory_bandwidth
        width = self.model.attention.get(block.name, 0) / (self.env.tensor_size if block.is_split else 1)
        quadratic = 4 * self.batch_size * self.model.tokens**2 * width
        item = max((self.item_bytes(w) for w in block.weights), default=4)
        flops, back_flops = flops + quadratic, back_flops + 2 * quadratic
        seconds = quadratic / topology.product_flops(item)
        forward, backward = forward + seconds, backward + 2 * seconds
        again = 1 if block.name in self.model.recomputed else 0
        flops, backward = (1 + again) * flops + back_flops, backward + again * forward
        return _Work(flops, forward, backward, optimizer, self._tensor_seconds(block, tokens, again))

    def _tensor_seconds(self, block: Placed, tokens: float, again: int) -> float:
        ring = Ring.along(self.env.axes("tensor"), self.env, self.topology.of_collectives)
        if ring.size == 1:
            return 0.0
        on_chunks = any(w.is_sequence for w in block.weights)  # gathers and reduce-scatters in place of all-reduces
        total = 0.0
        for w in block.weights:
            item = self.item_bytes(w)
            if w.tensor_dim == 1 and w.weight.outputs:  # forward, and backward at the branch's entrance
                size, times = tokens * w.weight.outputs * item, (2 + again) * w.times
                total += ring.all_reduce(size * times, times * (2 if on_chunks else 1))
            if w.tensor_dim == 0 and w.weight.looked_up:
                total += ring.all_reduce(tokens * w.weight.looked_up * item * w.times, w.times)
            if w.tensor_dim == 0 and w.weight.outputs and not block.has_rowwise:  # a head: logits are gathered
                total += ring.gather(tokens * w.weight.outputs * item * w.times, w.times)
                total += ring.all_reduce(tokens * w.weight.inputs * item * w.times, w.times)
        return total

    def _exchanged(self, blocks: Sequence[Placed], works: Sequence[_Work]) -> list[tuple[float, float]]:
        """Seconds of each block's data-parallel collectives that are waited for, and those that compute hides."""
        env = self.env
        data = env.axes("replicate", "shard")
        copies = [axis for axis in data if axis not in env.fully_sharded_axes]

        def ring(axes: Sequence[str]) -> Ring:
            return Ring.along(axes, env, self.topology.of_collectives)

        shards, replicas, everyone = ring(env.fully_sharded_axes), ring(copies), ring(data)
        found = []
        is_first = True  # the unit before which nothing is computed
        for block, work in zip(blocks, works, strict=True):
            split = [w for w in block.weights if not w.is_copied]
            found_here = (0.0, 0.0)
            if split and shards.size > 1:
                found_here = self._fully_sharded(block, split, work, (shards, replicas), is_first)
                is_first = is_first and not block.is_unit
            whole = [w for w in block.weights if (w.is_copied or shards.size == 1) and w.weight.trained]
            size = sum(w.times * w.used * w.item_bytes for w in whole)
            if size and everyone.size > 1:
                total = everyone.all_reduce(size, -(-size // _BUCKET_BYTES))
                last = everyone.all_reduce(min(size, _BUCKET_BYTES))
                waited = max(last, total - work.backward)
                found_here = found_here[0] + waited, found_here[1] + total - waited
            found.append(found_here)
        return found

    def _fully_sharded(
        self, block: Placed, split: Sequence[PlacedWeight], work: _Work, rings: tuple[Ring, Ring], is_first: bool
    ) -> tuple[float, float]:
        shards, replicas = rings
        count = block.count if block.is_unit else 1
        gathered = sum(w.times * w.used * self.item_bytes(w) for w in split) / count
        reduced = sum(w.times * w.used * w.item_bytes for w in split if w.weight.trained) / count
        gather, reduce = shards.gather(gathered), shards.gather(reduced) if reduced else 0.0
        if reduced and replicas.size > 1:
            reduce += replicas.all_reduce(reduced / shards.size)
        if not block.is_unit:  # the root: gathered once, before everything, and reduced after everything
            return gather + reduce, 0.0
        tensor = work.tensor / 2
        forward, backward = (work.forward + tensor) / count, (work.backward + tensor) / count
        waited = count * (max(0.0, gather - forward) + max(0.0, gather + reduce - backward))
        waited += (min(gather, forward) if is_first else 0.0) + min(reduce, backward)
        total = count * (2 * gather + reduce)
        waited = min(waited, total)
        return waited, total - waited
