"""Batches between data layout and tensor layout, and jagged rows between two shapes: forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from dmp import InputError, ShardError, ShardingEnv
from sharders.tensor_axis.batch_layout import gather_batch, slice_batch
from sharders.tensor_axis.jagged import Jagged, dense_to_jagged, jagged_to_dense
from tests.exchanges import Exchanges
from tests.ranks import mesh, run_ranks


class Pair(NamedTuple):
    """A named tuple as a user's data loader may give."""

    x: torch.Tensor
    ids: Any


def _env(shape: tuple[int, ...], names: tuple[str, ...]) -> ShardingEnv:
    return ShardingEnv.from_mesh(mesh(shape, names))


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- dense ----


def _dense(size: int) -> list[tuple[int, int]]:
    """What slicing is worth, and that both are transposes: dot products over what is distinct are equal."""
    env = _env((2,), ("tp",))
    x = _random(size, 3, 2).requires_grad_()
    part = slice_batch(x, env)
    bounds = [size * t // 2 for t in range(3)]
    torch.testing.assert_close(part, x[bounds[env.rank] : bounds[env.rank + 1]])
    whole = gather_batch(part, env)
    torch.testing.assert_close(whole, x.detach().clone())
    weight = _random(size, 3, 2, seed=1)
    (whole * weight).sum().backward()  # the same loss on both ranks: its gradient comes back whole, on both
    torch.testing.assert_close(x.grad, weight)
    x.grad = None
    mine = weight[bounds[env.rank] : bounds[env.rank + 1]]
    (slice_batch(x, env) * mine).sum().backward()  # each rank's part of one loss
    torch.testing.assert_close(x.grad, weight)
    return [(len(part), len(whole))]


@pytest.mark.parametrize("size", [0, 1, 4, 5])
def test_dense(size: int) -> None:
    assert run_ranks(2, _dense, size) == [[(size // 2, size)], [(size - size // 2, size)]]


def _bad_on_one_rank() -> list[str]:
    env = _env((2,), ("tp",))
    said = []
    for bad in (torch.tensor(1.0), "text", [torch.ones(2)] * 3):
        try:
            gather_batch(bad if env.rank else [torch.ones(3)], env)
        except InputError as error:
            said.append(str(error))
    many = [torch.full((env.rank + 1, 1), float(i)) for i in range(100)]  # more than the first exchange holds
    whole = gather_batch(many, env)
    assert all(torch.equal(w, torch.full((3, 1), float(i))) for i, w in enumerate(whole))
    return said


def test_bad_input_of_one_rank_is_raised_on_all() -> None:
    for said in run_ranks(2, _bad_on_one_rank):
        assert len(said) == 3
        assert said[0].startswith("rank 1 of the tensor group: batch is a tensor of no dims")
        assert said[1].startswith("rank 1 of the tensor group: batch is of type str")
        assert said[2] == "the batches of a tensor group differ in structure: [1, 3] sizes"


def _uneven() -> None:
    """Parts of any sizes are gathered; backward is this rank's rows."""
    env = _env((2, 2), ("dp", "tp"))
    dp, tp = env.coordinate
    parts = [_random(n, 2, seed=10 * dp + t) for t, n in enumerate(((3, 0), (1, 4))[dp])]
    mine = parts[tp].clone().requires_grad_()
    whole = gather_batch(mine, env)
    torch.testing.assert_close(whole, torch.cat(parts))
    weight = _random(*whole.shape, seed=5)
    (whole * weight).sum().backward()
    start = 0 if tp == 0 else len(parts[0])
    torch.testing.assert_close(mine.grad, weight[start : start + len(mine)])


def test_uneven_parts() -> None:
    run_ranks(4, _uneven)


def _two_axes() -> None:
    """Tensor axes outside and inside of the data axis count together, outer first."""
    env = ShardingEnv.from_mesh(mesh((2, 1, 2), ("outer", "dp", "inner")), tensor=("outer", "inner"))
    x = torch.arange(8).view(8, 1)
    part = slice_batch(x, env)
    assert part.flatten().tolist() == [2 * dist.get_rank(), 2 * dist.get_rank() + 1]
    assert gather_batch(part, env).equal(x)


def test_several_tensor_axes() -> None:
    run_ranks(4, _two_axes)


# ---- jagged, TorchRec's, nested ----


def _jagged() -> None:
    env = _env((2,), ("tp",))
    lengths = torch.tensor([2, 0, 3, 1, 0], dtype=torch.int32)
    values = _random(6, 2).requires_grad_()
    part = slice_batch(Jagged(values, lengths), env)
    assert isinstance(part, Jagged) and part.lengths.dtype == torch.int32
    assert part.lengths.tolist() == [[2, 0], [3, 1, 0]][env.rank]
    torch.testing.assert_close(part.values, values[[slice(0, 2), slice(2, 6)][env.rank]])
    whole = gather_batch(part, env)
    assert whole.lengths.equal(lengths)
    weight = _random(6, 2, seed=1)
    (whole.values * weight).sum().backward()
    torch.testing.assert_close(whole.values, values)
    torch.testing.assert_close(values.grad, weight)


def test_jagged_pair() -> None:
    run_ranks(2, _jagged)


def _structure() -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

    lengths = torch.tensor([1, 0, 2, 3, 0, 1])  # two keys, three samples
    weights = _random(7, seed=2).requires_grad_()
    dense = _random(3, 2, seed=3).requires_grad_()
    batch = {
        "ids": KeyedJaggedTensor(keys=["b", "a"], values=torch.arange(7), lengths=lengths, weights=weights),
        "nested": [Pair(dense, (None, JaggedTensor(values=_random(4, 2), lengths=torch.tensor([3, 0, 1]))))],
        "pooled": KeyedTensor(["u", "v"], [1, 3], _random(3, 4)),
    }
    return batch, weights, dense


def _nested() -> None:
    from torchrec import KeyedJaggedTensor, KeyedTensor

    env = _env((2,), ("tp",))
    batch, weights, dense = _structure()
    part = slice_batch(batch, env)
    assert list(part) == list(batch) and isinstance(part["nested"][0], Pair)
    ids = part["ids"]
    assert isinstance(ids, KeyedJaggedTensor) and ids.keys() == ["b", "a"]
    assert ids.lengths().tolist() == [[1, 3], [0, 2, 0, 1]][env.rank]
    assert ids.values().tolist() == [[0, 3, 4, 5], [1, 2, 6]][env.rank]
    x, (nothing, jagged) = part["nested"][0]
    assert nothing is None and x.shape == (1 + env.rank, 2)
    assert jagged.lengths().tolist() == [[3], [0, 1]][env.rank] and len(jagged.values()) == [3, 1][env.rank]
    assert isinstance(part["pooled"], KeyedTensor) and part["pooled"]["v"].shape == (1 + env.rank, 3)

    whole = gather_batch(part, env)
    for name, method in (("ids", "values"), ("ids", "lengths"), ("ids", "weights"), ("pooled", "values")):
        torch.testing.assert_close(getattr(whole[name], method)(), getattr(batch[name], method)())
    for method in ("values", "lengths"):
        torch.testing.assert_close(
            getattr(whole["nested"][0].ids[1], method)(), getattr(batch["nested"][0].ids[1], method)()
        )
    torch.testing.assert_close(whole["nested"][0].x, dense)
    coefficient = _random(7, seed=7)
    (whole["ids"].weights() * coefficient).sum().backward()
    torch.testing.assert_close(weights.grad, coefficient)
    assert dense.grad is not None and not dense.grad.any()


def test_torchrec_and_nested() -> None:
    run_ranks(2, _nested)


def _kjt_of_other_sizes() -> None:
    """What each rank's own data loader gives, as one group's batch: equal to TorchRec's concatenation by sample."""
    from torchrec import KeyedJaggedTensor

    env = _env((2,), ("tp",))
    every = [
        KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(5), lengths=torch.tensor([2, 0, 1, 2])),
        KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(10, 14), lengths=torch.tensor([1, 3])),
    ]
    whole = gather_batch(every[env.rank], env)
    assert whole.lengths().tolist() == [2, 0, 1, 1, 2, 3]
    assert whole.values().tolist() == [0, 1, 10, 2, 3, 4, 11, 12, 13]
    empty = KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(0), lengths=torch.arange(0))
    whole = gather_batch([empty, every[0]][env.rank], env)
    assert whole.lengths().tolist() == [2, 0, 1, 2] and whole.values().tolist() == [0, 1, 2, 3, 4]


def test_batches_of_other_sizes() -> None:
    run_ranks(2, _kjt_of_other_sizes)


def _collectives() -> tuple[int, int, int, int]:
    env = _env((2,), ("tp",))
    x = _random(4, 2).requires_grad_()
    found = []
    for convert in (slice_batch, gather_batch):
        with Exchanges() as forward:
            out = convert({"x": x, "y": x * 2, "jagged": Jagged(x, torch.tensor([1, 3]))}, env)
        with Exchanges() as backward:
            (out["x"].sum() + out["jagged"].values.sum()).backward()
        found += [forward.get_total_counts(), backward.get_total_counts()]
    return tuple(found)  # type: ignore[return-value]


def test_collectives() -> None:
    # Slicing: none, and the gradients' all-gather. Gathering: sizes, float64, int64; and none.
    assert run_ranks(2, _collectives) == [(0, 1, 3, 0)] * 2


def test_without_a_tensor_axis_nothing_is_done() -> None:
    env = ShardingEnv.single()
    batch = {"x": torch.ones(2)}
    assert slice_batch(batch, env) is batch and gather_batch(batch, env) is batch


def _bad() -> None:
    env = _env((2,), ("tp",))
    for batch, words in (
        ({"a": [torch.tensor(1.0)]}, r"batch\['a'\]\[0\] is a tensor of no dims"),
        ((1,), r"batch\[0\] is of type int; expected tensors"),
        (Jagged(torch.ones(3), torch.tensor([1, 1])), "sum to 2, but there are 3 rows"),
        (Jagged(torch.ones(1), torch.tensor([2, -1])), "number 1 is -1"),
        (Jagged(torch.ones(1), torch.ones(1)), "int32 or int64; got torch.float32"),
    ):
        for convert in (slice_batch, gather_batch):
            with pytest.raises(InputError, match=words):
                convert(batch, env)


def test_errors_say_where() -> None:
    run_ranks(2, _bad)


def test_an_abstract_mesh_cannot_run() -> None:
    with pytest.raises(ShardError, match="abstract"):
        slice_batch(torch.ones(2), ShardingEnv.abstract((2,), ("tp",)))


# ---- jagged <-> dense ----


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
@pytest.mark.parametrize("max_length", [0, 2, 4])
@pytest.mark.parametrize("lengths", [[2, 0, 4, 1], [0, 0], []])
def test_jagged_to_dense(shape: tuple[int, ...], max_length: int, lengths: list[int]) -> None:
    values = _random(sum(lengths), *shape).requires_grad_()
    weight = _random(len(lengths), max_length, *shape, seed=1)
    expected = torch.full(weight.shape, -1.0, dtype=torch.float64)
    expected_grad = torch.zeros_like(values)
    row = 0
    for b, n in enumerate(lengths):
        for t in range(n):
            if t < max_length:
                expected[b, t], expected_grad[row] = values[row].detach(), weight[b, t]
            row += 1
    dense = jagged_to_dense(values, torch.tensor(lengths, dtype=torch.int32), max_length, padding=-1.0)
    assert dense.equal(expected)
    (dense * weight).sum().backward()
    torch.testing.assert_close(values.grad, expected_grad)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_dense_to_jagged_is_its_inverse(shape: tuple[int, ...]) -> None:
    lengths = torch.tensor([2, 0, 4, 1])
    values = _random(7, *shape)
    dense = jagged_to_dense(values, lengths, 5, padding=9.0).requires_grad_()
    back = dense_to_jagged(dense, lengths)
    assert back.equal(values)
    weight = _random(7, *shape, seed=1)
    (back * weight).sum().backward()
    torch.testing.assert_close(dense.grad, jagged_to_dense(weight, lengths, 5))  # its transpose
    assert dense_to_jagged(dense[:0], lengths[:0]).shape == (0, *shape)


def test_jagged_ids() -> None:
    assert jagged_to_dense(torch.tensor([4, 5, 6]), torch.tensor([1, 2]), 2, padding=-1).tolist() == [[4, -1], [5, 6]]


def test_gradcheck() -> None:
    lengths = torch.tensor([2, 0, 3])
    values, dense = _random(5, 2).requires_grad_(), _random(3, 3, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: jagged_to_dense(v, lengths, 2), values)
    assert torch.autograd.gradcheck(lambda d: dense_to_jagged(d, lengths), dense)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: jagged_to_dense(torch.ones(3, 2), torch.tensor([1, 1]), 2), "sum to 2, but there are 3 rows"),
        (lambda: jagged_to_dense(torch.ones(1, 2), torch.tensor([2, -1]), 2), "number 1 is -1"),
        (lambda: jagged_to_dense(torch.ones(1, 2), torch.tensor([1.0]), 2), "int32 or int64"),
        (lambda: jagged_to_dense(torch.ones(1, 2), torch.tensor([[1]]), 2), "one dim"),
        (lambda: jagged_to_dense(torch.ones(1, 2), torch.tensor([1]), -1), "max_length must be >= 0; got -1"),
        (lambda: dense_to_jagged(torch.ones(2, 2, 1), torch.tensor([1, 3])), "sample 1 has 3.*clamp.max=2"),
        (lambda: dense_to_jagged(torch.ones(2, 2, 1), torch.tensor([1])), "one length for each of the 2 samples"),
        (lambda: dense_to_jagged(torch.ones(2, 2, 1), torch.tensor([1, -1])), "number 1 is -1"),
        (lambda: dense_to_jagged(torch.ones(2), torch.tensor([1, 1])), "must be .B, T"),
    ],
)
def test_bad_lengths(call: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()
