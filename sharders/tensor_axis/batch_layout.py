"""Batches between two layouts.

In the *data layout* every rank has samples of its own; in the *tensor layout* the ranks along the mesh's tensor axes
all have the same samples, those of their group. `slice_batch` and `gather_batch` go from one to the other. Both are
differentiable and, by [Note: gradients] of `tensor_slice`, transposes of each other where the loss is computed alike on
all ranks of a tensor group: activations that are equal there have equal gradients, and nothing is summed or scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from dmp import InputError, ShardingEnv, map_nested
from dmp import ranks as of_all
from sharders.channel import Channel
from sharders.embedding.exchange.tensor_slice import Cut, cut_of_lengths, cut_rows, even_cut, gather_rows, tensor_ranks
from sharders.tensor_axis.jagged import Jagged, check_lengths

_SIZES = 62  # in the first exchange of `gather_batch`


def slice_batch(x: Any, env: ShardingEnv) -> Any:
    """Tensor layout to data layout: of samples that all ranks of a tensor group have, this rank's.

    Rank t of T takes samples B * t // T to B * (t + 1) // T; some ranks take none where B < T.
    Forward: no exchange. Backward: the parts' gradients are all-gathered along the tensor axes, one exchange for each
    dtype; every rank gets the whole gradient, so the loss is the sum of the ranks' losses.

    Args:
        x: (B, ...) tensors, `Jagged` pairs, TorchRec's `JaggedTensor`, `KeyedJaggedTensor` and `KeyedTensor`; None; and
            dicts, lists and tuples of these. Equal on all ranks of a tensor group.
        env: the mesh.

    Returns:
        The same structure, with this rank's samples; `x` itself on a mesh without tensor axes.

    Raises:
        InputError: something else in `x`, or lengths that do not fit their values.
    """
    ranks = tensor_ranks(env)
    if ranks.size == 1:
        return x
    leaves: list[_Leaf] = []
    _read(x, leaves)

    def cuts_of(leaf: _Leaf) -> list[Cut]:
        (samples,) = even_cut([leaf.batch_size], ranks.size)
        return leaf.cuts(samples, [] if leaf.lengths is None else cut_of_lengths(leaf.lengths, samples))

    return _replace_all(x, leaves, [cuts_of(leaf) for leaf in leaves], cut_rows, ranks)


def gather_batch(x: Any, env: ShardingEnv) -> Any:
    """Data layout to tensor layout: the samples of all ranks of a tensor group, in their order, on each of them.

    Forward: one small all-gather of sizes (two for more than a few tens of tensors), then one for each dtype, padded
    to the rank that has most.
    Backward: this rank's slice, no exchange. That is right where all ranks of the group compute the same loss of the
    results, as tensor-parallel modules do; where each computes a loss of its own, sum the gradients first.

    Args:
        x: as `slice_batch` takes; any sizes, the same structure (keys, dims) on all ranks of a tensor group.
        env: the mesh.

    Returns:
        The same structure, with the group's samples; `x` itself on a mesh without tensor axes.

    Raises:
        InputError: as `slice_batch`, on all ranks of the group; also for other structures than the first rank's.
    """
    ranks = tensor_ranks(env)
    if ranks.size == 1:
        return x
    leaves: list[_Leaf] = []
    fault: InputError | None = None
    try:
        _read(x, leaves)
    except InputError as error:
        fault = error
    sizes = [n for leaf in leaves for n in (leaf.batch_size, *leaf.counts)]
    by_rank = _gather_sizes(sizes, fault, ranks, env.device)
    if not sizes:
        return x
    cuts: list[list[Cut]] = []
    for leaf in leaves:
        num = 1 + len(leaf.counts)
        of_leaf, by_rank = [of_rank[:num] for of_rank in by_rank], [of_rank[num:] for of_rank in by_rank]
        samples, *rows = [[*accumulate(of_all, initial=0)] for of_all in zip(*of_leaf, strict=True)]
        starts = accumulate((bounds[-1] for bounds in rows), initial=0)
        cuts.append(leaf.cuts(samples, [[a + b for b in bounds] for a, bounds in zip(starts, rows, strict=False)]))
    return _replace_all(x, leaves, cuts, gather_rows, ranks)


def _gather_sizes(sizes: list[int], fault: InputError | None, ranks: Channel, device: torch.device) -> list[list[int]]:
    """Every rank's sizes; a fault of one is raised on all. The first exchange has one length, whatever the batch is."""
    head = [len(sizes), int(fault is not None), *sizes[:_SIZES], *[0] * (_SIZES - len(sizes))]
    mine = torch.tensor(head, dtype=torch.int64, device=device)
    by_rank = ranks.all_gather(mine).tolist()
    if any(is_fault or num != by_rank[0][0] for num, is_fault, *_ in by_rank):
        said = of_all.gather_objects("gather_batch", str(fault or ""), ranks.group)
        faults = [f"rank {rank} of the tensor group: {text}" for rank, text in enumerate(said) if text]
        numbers = [num for num, *_ in by_rank]
        raise InputError(
            "; ".join(faults) or f"the batches of a tensor group differ in structure: {numbers} sizes"
        ) from fault
    found = [row[2 : 2 + len(sizes)] for row in by_rank]
    if len(sizes) > _SIZES:
        mine = torch.tensor(sizes[_SIZES:], dtype=torch.int64, device=device)
        rest = ranks.all_gather(mine).tolist()
        found = [a + b for a, b in zip(found, rest, strict=True)]
    return found


@dataclass
class _Leaf:
    """One thing with samples in it: tensors, and how they lie.

    Args:
        tensors: what travels: dense, or lengths, values and perhaps weights.
        build: the same thing of other tensors.
        batch_size: samples.
        lengths: (K, B) of a jagged one; None of a dense one.
        counts: rows of each key.
    """

    tensors: list[torch.Tensor]
    build: Callable[..., Any]
    batch_size: int
    lengths: torch.Tensor | None = None
    counts: list[int] = field(default_factory=list)

    def cuts(self, samples: list[int], rows: Cut) -> list[Cut]:
        """A cut for each tensor, from the T + 1 bounds of samples and the cut of values."""
        if self.lengths is None:
            return [[samples]]
        of_lengths = [[k * samples[-1] + s for s in samples] for k in range(len(self.counts))]
        return [of_lengths, *[rows] * (len(self.tensors) - 1)]


def _replace_all(
    x: Any,
    leaves: Sequence[_Leaf],
    cuts: Sequence[Sequence[Cut]],
    move: Callable[[Sequence[torch.Tensor], Sequence[Cut], Channel], list[torch.Tensor]],
    ranks: Channel,
) -> Any:
    """The structure with all its tensors moved together."""
    tensors = [t for leaf in leaves for t in leaf.tensors]
    moved = iter(move(tensors, [cut for of_leaf in cuts for cut in of_leaf], ranks)) if tensors else iter(())
    rebuilt = iter([leaf.build(*(next(moved) for _ in leaf.tensors)) for leaf in leaves])
    return map_nested(x, lambda *_: next(rebuilt), is_leaf=_is_jagged)


def _read(x: Any, leaves: list[_Leaf]) -> None:
    """Append the leaves of `x`, those before one that does not fit too."""
    map_nested(x, lambda leaf, path: leaves.append(_leaf(leaf, path)), "batch", _is_jagged)


def _is_jagged(x: Any) -> bool:
    return isinstance(x, Jagged)


def _leaf(x: Any, path: str) -> _Leaf:
    if isinstance(x, torch.Tensor):
        if not x.dim():
            raise InputError(f"{path} is a tensor of no dims; its dim 0 must be the samples")
        return _Leaf([x], lambda new: new, len(x))
    if isinstance(x, Jagged):
        return _jagged_leaf(path, 1, lambda lengths, values: Jagged(values, lengths), x.lengths, x.values)
    kind: Any = type(x)
    if _has(x, "keys", "values", "length_per_key", "key_dim"):  # KeyedTensor
        if x.key_dim() != 1:
            raise InputError(f"{path} joins its keys along dim {x.key_dim()}; expected dim 1, with samples in dim 0")
        keys, dims = x.keys(), x.length_per_key()
        return _Leaf([x.values()], lambda values: kind(keys, dims, values), len(x.values()))
    if _has(x, "values", "lengths", "weights_or_none"):  # JaggedTensor and KeyedJaggedTensor
        options = {"keys": x.keys()} if _has(x, "keys") else {}
        if options and (len({*x.stride_per_key()}) > 1 or x.inverse_indices_or_none() is not None):
            raise InputError(
                f"{path} has a batch size of its own for each key, or inverse indices; expected one batch size for all "
                "keys: give each sample its rows first, or hand it to the sharded model uncut, which takes it"
            )

        def build(lengths: torch.Tensor, values: torch.Tensor, weights: torch.Tensor | None = None) -> Any:
            return kind(**options, values=values, lengths=lengths, weights=weights)

        num_keys = len(options["keys"]) if options else 1
        weights = x.weights_or_none()
        return _jagged_leaf(path, num_keys, build, x.lengths(), x.values(), *([] if weights is None else [weights]))
    raise InputError(
        f"{path} is of type {kind.__name__}; expected tensors, Jagged pairs, TorchRec's JaggedTensor, "
        "KeyedJaggedTensor or KeyedTensor, None, and dicts, lists and tuples of these"
    )


def _jagged_leaf(
    path: str, num_keys: int, build: Callable[..., Any], lengths: torch.Tensor, *rows: torch.Tensor
) -> _Leaf:
    """Of values, and perhaps weights, by key and sample."""
    check_lengths(lengths, len(rows[0]), path)
    by_key = lengths.reshape(num_keys, -1) if num_keys else lengths.reshape(0, 0)
    return _Leaf([lengths.reshape(-1), *rows], build, by_key.shape[1], by_key, by_key.sum(1).tolist())


def _has(x: Any, *methods: str) -> bool:
    return all(callable(getattr(x, name, None)) for name in methods)
