"""Lookups and updates by FBGEMM's table-batched CPU operators: float32 on the CPU.

What FBGEMM is called with, beyond ids, offsets and gradients:
    features: one per row range; those of one physical table are adjacent and have equal entries in `hash_size_cumsum`,
        weights and state offsets; only then are their gradients of a row combined before the update.
    hash size: number of rows; a size of 0 would mean "same table as the next", so empty ranges claim one row.
    unpooled updates: bags of one id in one table that is the whole region, as FBGEMM's own unpooled row-wise Adagrad
        is some 30 times slower than its pooled one.
FBGEMM does not check ids on the way back; callers have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from sharders.embedding.lookup.bank import Bank, RowRange
from sharders.embedding.lookup.optimizers import OPTIMIZERS, OptimizerSpec
from sharders.embedding.lookup.reads import Bags, Segmented
from sharders.embedding.lookup.torch_kernel import TorchLookup
from sharders.quiet import quiet

_SUM = 0  # FBGEMM's PoolingMode.SUM
_FLOAT32 = 0  # FBGEMM's SparseType.FP32
_MAX_ROWS = 2**31 - 1
_MAX_WIDTH = 4096  # row-wise Adagrad keeps 64 rows of gradient on the stack


@dataclass(frozen=True)
class _Features:
    """FBGEMM's description of the row ranges (T features)."""

    weights_offsets: Tensor
    """(T,) int64"""

    state_offsets: Tensor
    """(T,) int64: first bank row; pointwise state goes by `weights_offsets`."""

    column_offsets: Tensor
    """(T + 1,) int32"""

    hash_size_cumsum: Tensor
    """(T + 1,) int64"""

    placements: Tensor
    ones: Tensor
    max_width: int
    max_rows: int


def _features(ranges: Sequence[RowRange]) -> _Features:
    # Each distinct range's rows follow those of the one before; equal ranges, which are adjacent, begin alike.
    cumsum, total_rows = [], 0
    for r, equal in groupby(ranges):
        cumsum += [total_rows for _ in equal]
        total_rows += max(r.rows, 1)
    filled = [r for r, _ in groupby(ranges) if r.rows]
    assert len(set(filled)) == len(filled), "equal row ranges not adjacent"
    columns = [*accumulate((r.chunk.width for r in ranges), initial=0)]
    with torch.device("cpu"):  # whatever the default device is
        return _Features(
            weights_offsets=torch.tensor([r.chunk.element_offset + r.first_row * r.chunk.width for r in ranges]),
            state_offsets=torch.tensor([r.chunk.row_offset + r.first_row for r in ranges]),
            column_offsets=torch.tensor(columns, dtype=torch.int32),
            hash_size_cumsum=torch.tensor([*cumsum, total_rows]),
            placements=torch.zeros(len(ranges), dtype=torch.int32),
            ones=torch.ones(len(ranges), dtype=torch.float32),
            max_width=max(r.chunk.width for r in ranges),
            max_rows=max(r.rows for r in ranges),
        )


def _region_features(bank: Bank, width: int) -> tuple[_Features, int] | None:
    """A region as one table, and its first row; None where FBGEMM cannot update it or address its row-wise state."""
    region = bank.regions[width]
    chunks = [c for table in bank.chunks for c in table if c.width == width and c.rows]
    if not chunks or len(set(region.row_shifts)) > 1:
        return None
    chunks.sort(key=lambda c: c.element_offset)
    num_rows = (chunks[-1].element_offset - chunks[0].element_offset) // width + chunks[-1].rows
    features = _features([RowRange(chunks[0], 0, num_rows)])
    return (features, region.first_rows[0]) if _can_update(bank, features) else None


def _can_update(bank: Bank, features: _Features) -> bool:
    """Whether FBGEMM can update these features with the bank's optimizer."""
    fits = features.max_rows < _MAX_ROWS and features.max_width <= _MAX_WIDTH
    return bank.spec is not None and bank.spec.optimizer.fbgemm is not None and fits


class FbgemmLookup(TorchLookup):
    """Lookups of `ranges` of `bank`; see `sharders.embedding.lookup.kernels.Lookup`.

    What FBGEMM lacks (updates by Adam, for one), or is slower at, is torch's.
    """

    def __init__(self, bank: Bank, ranges: Sequence[RowRange]) -> None:
        super().__init__(bank, ranges)
        self._features = _features(self.ranges) if ranges else None
        self._regions = {width: _region_features(bank, width) for width in bank.regions}
        self._updates = self._features is not None and _can_update(bank, self._features)
        self._one_table = self._features_share_tables()
        self._beyond = bank.spec.optimizer.beyond_fbgemm if bank.spec else ()

    def pooled(self, read: Bags) -> Tensor:
        features = self._features
        if features is None:
            return super().pooled(read)
        output: Tensor = torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
            *(self.bank.weights, *_where(features, self.num_columns), read.ids, read.offsets),
            *(_SUM, _float32(read.weights), _FLOAT32),
        )
        return output

    def update_pooled(self, grad: Tensor, read: Bags, *, order: Any = None) -> None:
        features = self._features
        if features is None or not self._updates or self._is_beyond():
            super().update_pooled(grad, read)
        elif read.ids.numel():
            if self._one_table is not None:
                features, first_row = self._one_table
                rows, grad = self.as_one_range(grad, read)
                read = read._replace(ids=rows.sub_(first_row))
            _update(self.bank, features, self.bank.clipped(grad), read)

    def gradient_pooled(self, grad: Tensor, read: Bags, *, order: Any = None) -> Tensor:
        """FBGEMM's dense gradient; it neither sorts nor reads the weights."""
        features = self._features
        if features is None or not read.ids.numel():
            return super().gradient_pooled(grad, read)
        flat: Tensor = torch.ops.fbgemm.split_embedding_backward_codegen_dense_cpu(
            self.bank.clipped(grad).float(),
            self.bank.weights,
            *_back(features),
            *_bags(read),
        )
        return flat

    def gradient_weights(self, grad: Tensor, read: Bags) -> Tensor:
        features = self._features
        if features is None:
            return super().gradient_weights(grad, read)
        result: Tensor = torch.ops.fbgemm.split_embedding_codegen_grad_indice_weights_cpu(
            _float32(grad),
            self.bank.weights,
            features.weights_offsets,
            features.column_offsets,
            read.ids,
            read.offsets.to(read.ids.dtype),
            features.ones,
        )
        return result

    def update_rows(self, grad: Tensor, read: Segmented, *, order: Any = None) -> None:
        region = self.region_of(read.segments)
        table = self._regions[region.width] if region else None
        if table is None or self._is_beyond():
            super().update_rows(grad, read)
        elif read.ids.numel():
            features, first_row = table
            rows = self.region_rows(read).sub_(first_row)
            bounds = torch.arange(rows.numel() + 1, device="cpu") if read.bags is None else read.bags
            _update(self.bank, features, self.bank.clipped(grad), Bags(rows, bounds, read.weights))

    def _is_beyond(self) -> bool:
        """Whether an option is set, maybe since the last update, that FBGEMM's update leaves out."""
        return any(self.bank.options[option] for option in self._beyond)

    def _features_share_tables(self) -> tuple[_Features, int] | None:
        """The one region to update in place of the ranges; None where FBGEMM is quicker with the ranges as they are.

        Its row-wise Adagrad is scalar code for a table of several features: 8.9 ms for 13 tables of two features,
        width 64 and 2,048 bags, where the region as one table takes 4.3, with the copy of the gradient that it needs.
        """
        shared = any(a == b and a.rows for a, b in pairwise(self.ranges))
        kind = self.bank.spec.kind if self.bank.spec else None
        if not shared or len(self._groups) > 1 or kind != "rowwise_adagrad":
            return None
        return self._regions[self._groups[0].region.width]


def supports(
    device: torch.device, dtype: torch.dtype, optimizer: OptimizerSpec | None, ranges: Sequence[RowRange]
) -> str | None:
    """Why FBGEMM cannot be used for such tables; None where it can. Updates that it lacks are no reason."""
    if dtype != torch.float32 or device.type != "cpu":
        return f"it takes float32 tables on the CPU; got {dtype} on {device.type}"
    reason = problem()
    return f"{reason} (pip install fbgemm-gpu-cpu where it is missing)" if reason else None


def _float32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _where(features: _Features, width: int) -> tuple[Any, ...]:
    """The arguments by which the lookup finds the features' rows; `width` is of all of them, or of the widest."""
    return features.weights_offsets, features.column_offsets, width, features.hash_size_cumsum


def _back(features: _Features) -> tuple[Any, ...]:
    """The arguments by which all gradients and updates find them."""
    return *_where(features, features.max_width), 0  # total_hash_size_bits, read on GPUs only


def _bags(read: Bags) -> tuple[Any, ...]:
    """The arguments by which they find the bags."""
    return read.ids, read.offsets.to(read.ids.dtype), _SUM, _float32(read.weights)


def _update(bank: Bank, features: _Features, grad: Tensor, read: Bags) -> None:
    assert bank.spec is not None and bank.spec.optimizer.fbgemm is not None
    name, options = bank.spec.optimizer.fbgemm
    state: list[Tensor] = []
    for key, tensor in bank.spec.optimizer.state.items():
        offsets_of_state = features.state_offsets if tensor.is_row_wise else features.weights_offsets
        state += [bank.state[key], features.placements, offsets_of_state]
    getattr(torch.ops.fbgemm, f"split_embedding_backward_codegen_{name}_cpu")(
        grad.float(),
        bank.weights,
        features.placements,
        *_back(features),
        *_bags(read),
        False,  # stochastic_rounding
        *state,
        torch.tensor(float(bank.options["lr"]), dtype=torch.float32, device="cpu"),
        *(float(bank.options[option]) for option in options),
    )


@cache
def problem() -> str:
    """Why FBGEMM cannot be used here, in one line; empty where it can: it loads, and a small update is right."""
    try:
        with quiet():
            import fbgemm_gpu
        with torch.device("cpu"):
            return _compare(str(getattr(fbgemm_gpu, "__version__", "of unknown version")))
    except Exception as error:  # a library that does not fit torch fails in many ways, all of them meant here
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _compare(version: str) -> str:
    ids, offsets = torch.tensor([2, 0, 2, 1], dtype=torch.int32), torch.tensor([0, 1, 3, 3, 4], dtype=torch.int32)
    grad, read = torch.arange(16.0).view(2, 8), Bags(ids, offsets)
    for kind in (name for name, optimizer in OPTIMIZERS.items() if optimizer.fbgemm):
        results = []
        for lookup_class in (FbgemmLookup, TorchLookup):
            bank = Bank([[(3, 4)], [(2, 4)]], torch.float32, "cpu", OptimizerSpec.make(kind, lr=0.5))
            bank.weights.copy_(torch.arange(20.0))
            lookup = lookup_class(bank, [RowRange(bank.chunks[0][0], 0, 3), RowRange(bank.chunks[1][0], 0, 2)])
            before = lookup.pooled(read)
            gradients = lookup.gradient_pooled(grad, read), lookup.gradient_weights(grad, read)
            lookup.update_pooled(grad, read)
            results.append(torch.cat([before.flatten(), *gradients, bank.weights]))
        if not torch.allclose(results[0], results[1], rtol=1e-5, atol=1e-5):
            return f"fbgemm_gpu {version} gives wrong numbers for {kind}"
    return ""
