"""Updates of rows in the backward pass, by every kernel, against formulas row by row and FBGEMM's own modules."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from sharders.embedding.lookup.bank import Bank, RowRange
from sharders.embedding.lookup.given_optimizers import spec_of_fused_params
from sharders.embedding.lookup.kernels import Lookup
from sharders.embedding.lookup.reads import Segmented
from sharders.embedding.lookup.torch_kernel import spread, touched_of
from tests.row_oracles import CASES, Case
from tests.test_kernels import MIXED, Batch, assert_close, make, make_batch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
        WeightDecayMode,
    )


class Oracle:
    """A bank's rows one by one."""

    def __init__(self, bank: Bank, case: Case) -> None:
        self.case, self.steps = case, 0
        self.tables = {c: bank.chunk_view(t, i).clone() for t, of in enumerate(bank.chunks) for i, c in enumerate(of)}
        self.states: dict[Any, dict[str, Tensor]] = {}

    def update(self, named: list[tuple[RowRange, int, Tensor]]) -> None:
        """One step, given each id (of a range) with its gradient."""
        self.steps += 1
        sums: dict[Any, Tensor] = {}
        for of, id_, grad in named:
            key = of.chunk, of.first_row + id_
            sums[key] = sums[key] + grad if key in sums else grad
        for (chunk, row), grad in sums.items():
            state = self.states.setdefault((chunk, row), {})
            self.case.step(self.tables[chunk][row], grad, state, self.case.options, self.steps)

    def check(self, bank: Bank) -> None:
        for table, chunks in enumerate(bank.chunks):
            for i, chunk in enumerate(chunks):
                assert_close(bank.chunk_view(table, i), self.tables[chunk])
                for row in range(chunk.rows):
                    for name, value in self.states.get((chunk, row), {}).items():
                        assert_close(bank.state_view(name, table, i)[row].view(-1), value)


def ids_of(lookup: Lookup, batch: Batch, grad: Tensor, bound: float) -> list[tuple[RowRange, int, Tensor]]:
    """Each id of a pooled batch with what its bag gives it of the gradient."""
    named, place, column = [], 0, 0
    for of, lengths in zip(lookup.ranges, batch.lengths.tolist(), strict=True):
        for bag, length in enumerate(lengths):
            part = grad[bag, column : column + of.chunk.width].clamp(-bound, bound)
            for p in range(place, place + length):
                weight = 1.0 if batch.weights is None else batch.weights[p]
                named.append((of, int(batch.ids[p]), part * weight))
            place += length
        column += of.chunk.width
    return named


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("torch", torch.float64), ("fbgemm", torch.float32), ("numba", torch.float64)]
)
@pytest.mark.sampled(2)
def test_kernels_update_by_the_formula(kernel: str, dtype: torch.dtype, name: str) -> None:
    """Pooled, weighted and unpooled; ids come twice in a bag, and in two features of a table."""
    case = CASES[name]
    bank, lookup = make(MIXED, dtype, case.spec, kernel)
    dense = copy.deepcopy(lookup)
    oracle, g = Oracle(bank, case), torch.Generator().manual_seed(0)
    for step in range(3):
        batch = make_batch(lookup, 6, weighted=step == 1, seed=step)
        grad = torch.randn(6, lookup.num_columns, dtype=dtype, generator=g)
        bank.step()
        lookup.update_pooled(grad, batch.read())
        oracle.update(ids_of(lookup, batch, grad, case.bound))
        oracle.check(bank)
        dense.bank.step()
        sums = spread(dense.bank, dense.pooled_row_gradients(grad, batch.read()))
        dense.update_touched([touched_of(dense.bank, *sums)])
        assert_close(dense.bank.weights, bank.weights)
    bank.step()
    named = []
    for width in bank.regions:
        slots = [i for i, s in enumerate(lookup.ranges) if s.chunk.width == width and s.rows]
        segments = [(i, n) for n in (4, 0, 9) for i in slots]
        ids = torch.cat([torch.randint(0, lookup.ranges[i].rows, (n,), generator=g) for i, n in segments])
        grad = torch.randn(len(ids), width, dtype=dtype, generator=g)
        lookup.update_rows(grad, Segmented(ids, segments))
        owners = [lookup.ranges[i] for i, n in segments for _ in range(n)]
        clamped = grad.clamp(-case.bound, case.bound)
        named += list(zip(owners, ids.tolist(), clamped, strict=True))
    oracle.update(named)
    oracle.check(bank)


def fbgemm_module(weights: list[Tensor], features: list[int], options: dict[str, Any]) -> Any:
    """FBGEMM's own, on the CPU, with these tables."""
    specs = [(*w.shape, EmbeddingLocation.HOST, ComputeDevice.CPU) for w in weights]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = SplitTableBatchedEmbeddingBagsCodegen(
            specs, feature_table_map=features, device=torch.device("cpu"), **options
        )
    for own, w in zip(module.split_embedding_weights(), weights, strict=True):
        own.copy_(w)
    return module


DECAY = {"weight_decay": 0.2, "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
OF_FBGEMM: list[dict[str, Any]] = [
    {"optimizer": EmbOptimType.EXACT_SGD},
    {"optimizer": EmbOptimType.EXACT_SGD, "gradient_clipping": True, "max_gradient": 0.3},
    {"optimizer": EmbOptimType.EXACT_ADAGRAD, "gradient_clipping": True, "max_gradient": 0.3, "eps": 1e-4},
    {"optimizer": EmbOptimType.EXACT_SGD, "weight_decay": 0.2, "momentum": 0.5, "max_norm": 0.1},  # not used
    {"optimizer": EmbOptimType.EXACT_ADAGRAD, "weight_decay": 0.2, "weight_decay_mode": WeightDecayMode.L2},  # nor here
    {**DECAY, "weight_decay_mode": WeightDecayMode.L2},
    {**DECAY, "weight_decay_mode": WeightDecayMode.DECOUPLE},
    {**DECAY, "weight_decay_mode": WeightDecayMode.NONE},
]


@pytest.mark.parametrize("kernel", ["torch", "fbgemm", "numba"])
@pytest.mark.parametrize("options", OF_FBGEMM, ids=str)
def test_as_fbgemm_where_its_cpu_runs_it(options: dict[str, Any], kernel: str) -> None:
    """Two features of one table: its CPU leaves weight decay out of tables of one feature, as its GPUs do not."""
    spec = spec_of_fused_params({**options, "learning_rate": 0.1})
    layout = ([[(9, 4)], [(5, 4)]], [(0, 0, 0, 9), (0, 0, 0, 9), (1, 0, 0, 5), (1, 0, 0, 5)])
    bank, lookup = make(layout, torch.float32, spec, kernel)
    module = fbgemm_module([bank.chunk_view(t, 0) for t in (0, 1)], [0, 0, 1, 1], {**options, "learning_rate": 0.1})
    for step in range(3):
        batch = make_batch(lookup, 6, seed=step, index=torch.int64)
        output = module(*batch.read())
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(step))
        output.backward(grad)
        bank.step()
        lookup.update_pooled(grad, batch.read())
        for table, own in enumerate(module.split_embedding_weights()):
            assert_close(bank.chunk_view(table, 0), own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["lamb", "lamb_decay", "partial_lamb", "lars", "lars_decay"])
def test_a_row_that_is_divided_by_zero_rests(name: str, dtype: torch.dtype) -> None:
    """Gradients of zero, and rows of zeros: FBGEMM's formula gives NaN for the first."""
    for start in (1.0, 0.0):
        bank, lookup = make(MIXED, dtype, CASES[name].spec, None)
        batch = make_batch(lookup, 6)
        before = bank.weights.mul_(start).clone()
        bank.step()
        lookup.update_pooled(torch.zeros(6, lookup.num_columns, dtype=dtype), batch.read())
        if "decay" not in name:
            assert torch.equal(bank.weights, before)
        lookup.update_pooled(torch.ones(6, lookup.num_columns, dtype=dtype), batch.read())
        assert bank.weights.isfinite().all() and all(tensor.isfinite().all() for tensor in bank.state.values())
