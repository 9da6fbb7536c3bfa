"""The oracle: the unsharded module on the global batch, beside the sharded one on a mesh, for three steps.

`check_case` runs on every rank of a process group. Nothing here reads how the sharded module works: it compares
outputs, weights and optimizer state with the unsharded module's.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

import dmp
from dmp import Shard, ShardingEnv, column_wise, data_parallel, grid, rectangles, row_wise, table_row_wise, table_wise
from tests.oracle import LR, Oracle, attach
from tests.ranks import mesh
from tests.results import is_empty, loss_of, same_empty_result, same_result
from tests.row_oracles import CASES

OPTIMIZERS = (None, "sgd", "adagrad", "rowwise_adagrad", "adam")
MORE_OPTIMIZERS = [name for name in CASES if "clipped" not in name]  # a clipped gradient is not seen in `.grad`
KINDS = ("ebc", "ebc_weighted", "ec", "bag", "bag_mean", "bag_weighted", "embedding")
MESHES = {
    "single": ((), ()),
    "dp1": ((1,), ("dp",)),
    "dp2": ((2,), ("dp",)),
    "dp4": ((4,), ("dp",)),
    "replicate2": ((2,), ("replicate",)),
    "replicate2xshard2": ((2, 2), ("replicate", "shard")),
    "shard2xreplicate2": ((2, 2), ("shard", "replicate")),
    "host2xlocal2": ((2, 2), ("host", "local")),
    "replicate2xhost2xlocal2": ((2, 2, 2), ("replicate", "host", "local")),
    "host2xlocal4": ((2, 4), ("host", "local")),
    "tp2": ((2,), ("tp",)),
    "shard2xtp2": ((2, 2), ("shard", "tp")),
    "tp2xdp2": ((2, 2), ("tp", "dp")),
    "replicate2xtp2": ((2, 2), ("replicate", "tp")),
    "replicate2xshard2xtp2": ((2, 2, 2), ("replicate", "shard", "tp")),
    "tp4": ((4,), ("tp",)),
}
Shards = tuple[tuple[str, tuple[Shard, ...]], ...]
Layouts = Callable[[int, tuple[int, int], ShardingEnv], dmp.Layout]


def env_of(name: str) -> ShardingEnv:
    """The env of one of `MESHES` in this process."""
    shape, names = MESHES[name]
    return ShardingEnv.from_mesh(mesh(shape, names)) if shape else ShardingEnv.single()


def layouts_for(env: ShardingEnv) -> dict[str, Layouts]:
    """Name -> (table index, shape, env) -> layout: every layout that fits the mesh, mixed ones too."""
    size = env.table_size
    last = size - 1
    cases: dict[str, Layouts] = {
        "table_wise": lambda i, s, e: table_wise(i % size),
        "all_on_last": lambda i, s, e: table_wise(last),  # other ranks own nothing
        "row_wise": lambda i, s, e: row_wise(),
        "column_wise": lambda i, s, e: column_wise([j % size for j in range(2)]) if s[1] >= 8 else table_wise(0),
        "column_twice": lambda i, s, e: column_wise([last, last]) if s[1] >= 8 else table_wise(last),
        "data_parallel": lambda i, s, e: data_parallel(),
        "uneven": lambda i, s, e: rectangles(_uneven(s, size, i)),
        "random": lambda i, s, e: rectangles(random_rectangles(s, size, 1000 + i)),
    }
    if size > 1:
        cases["row_reversed"] = lambda i, s, e: row_wise(list(reversed(range(size))))
        cases["row_subset"] = lambda i, s, e: row_wise([last])
        cases["grid"] = lambda i, s, e: grid([[0, last], [last, 0]]) if s[1] >= 8 else row_wise([last, 0])
    if len(env.table_shape) > 1:
        cases["table_row_wise"] = lambda i, s, e: table_row_wise(i % e.table_shape[0])
        cases["table_row_wise_all"] = lambda i, s, e: table_row_wise([1, 0])
    mixed = [cases[n] for n in ("row_wise", "column_wise", "data_parallel", "table_wise", "uneven")]
    cases["mixed"] = lambda i, s, e: mixed[i % len(mixed)](i, s, e)
    return cases


def _uneven(shape: tuple[int, int], size: int, i: int) -> list[Shard]:
    """The first row alone, then the rest in two unequal column blocks."""
    rows, cols = shape
    cut = max(1, cols // 3)
    if rows < 2 or cols < 2:
        return [Shard((0, 0), shape, i % size)]
    return [
        Shard((0, 0), (1, cols), i % size),
        Shard((1, 0), (rows - 1, cut), (i + 1) % size),
        Shard((1, cut), (rows - 1, cols - cut), (i + 2) % size),
    ]


def random_rectangles(shape: tuple[int, int], size: int, seed: int) -> list[Shard]:
    """An exact cover by recursive random cuts, on random ranks."""
    rng = random.Random(seed)
    done: list[Shard] = []

    def cut(r: int, c: int, rows: int, cols: int, depth: int) -> None:
        if depth == 0 or rows * cols == 1 or rng.random() < 0.2:
            done.append(Shard((r, c), (rows, cols), rng.randrange(size)))
        elif cols == 1 or (rows > 1 and rng.random() < 0.6):
            at = rng.randrange(1, rows)
            cut(r, c, at, cols, depth - 1)
            cut(r + at, c, rows - at, cols, depth - 1)
        else:
            at = rng.randrange(1, cols)
            cut(r, c, rows, at, depth - 1)
            cut(r, c + at, rows, cols - at, depth - 1)

    cut(0, 0, *shape, 4)
    rng.shuffle(done)
    return done


def make_module(kind: str, seed: int = 7) -> nn.Module:
    """An unsharded module; tables of several dims, some with fewer rows than ranks; features shared both ways."""
    torch.manual_seed(seed)
    kind = kind.removesuffix("_vbe")  # of the batches alone
    if kind.startswith("ebc"):
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

        mean = PoolingType.SUM if kind == "ebc_weighted" else PoolingType.MEAN
        return EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name="t0", num_embeddings=13, embedding_dim=8, feature_names=["a", "b"]),
                EmbeddingBagConfig(name="t1", num_embeddings=3, embedding_dim=4, feature_names=["c"], pooling=mean),
                EmbeddingBagConfig(name="t2", num_embeddings=29, embedding_dim=16, feature_names=["a"], pooling=mean),
                EmbeddingBagConfig(name="t3", num_embeddings=50, embedding_dim=8, feature_names=["d"]),
                EmbeddingBagConfig(name="t4", num_embeddings=1, embedding_dim=4, feature_names=["e"]),
            ],
            is_weighted=kind == "ebc_weighted",
        )
    if kind == "ec":
        from torchrec import EmbeddingCollection, EmbeddingConfig

        return EmbeddingCollection(
            tables=[
                EmbeddingConfig(name="t0", num_embeddings=13, embedding_dim=8, feature_names=["a", "b"]),
                EmbeddingConfig(name="t1", num_embeddings=3, embedding_dim=8, feature_names=["c"]),
                EmbeddingConfig(name="t2", num_embeddings=29, embedding_dim=8, feature_names=["a"]),
            ]
        )
    if kind == "embedding":
        return nn.Embedding(23, 8)
    return nn.EmbeddingBag(23, 8, mode="mean" if kind == "bag_mean" else "sum", include_last_offset=kind == "bag")


ROWS = {"a": 13, "b": 13, "c": 3, "d": 50, "e": 1}


def make_batch(kind: str, rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[object, ...]:
    """Arguments of one rank's forward: sizes differ by rank, one rank has none, bags may be empty, keys shuffled.

    Per-id weights have the dtype. Of a kind that ends in `vbe` each key has a batch size of its own.
    """
    rng = torch.Generator().manual_seed(100 * step + rank)
    size = (4, 0, 3, 5, 2, 1, 0, 6)[(rank + step) % 8]
    if kind in ("embedding",):
        return (torch.randint(0, 23, (size, 3), generator=rng),)
    if kind.startswith("bag"):
        lengths = torch.randint(0, 4, (size,), generator=rng)
        ids = torch.randint(0, 23, (int(lengths.sum()),), generator=rng)
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        weights = torch.rand(ids.numel(), generator=rng).to(dtype) if kind == "bag_weighted" else None
        return ids, bounds if kind == "bag" else bounds[:-1], weights
    from torchrec import KeyedJaggedTensor

    keys = ["a", "b", "c", "x"] + ([] if kind.startswith("ec") else ["d", "e"])
    random.Random(1000 * step + rank).shuffle(keys)
    rows = [size] * len(keys)
    if kind.endswith("vbe") and size:
        rows = torch.randint(0 if kind == "ec_vbe" else 1, size + 1, (len(keys),), generator=rng).tolist()
    lengths = torch.randint(0, 4, (sum(rows),), generator=rng)
    values = [
        torch.randint(0, ROWS.get(k, 5), (int(n.sum()),), generator=rng)
        for k, n in zip(keys, lengths.split(rows), strict=True)
    ]
    ids = torch.cat(values)
    weights = torch.rand(ids.numel(), generator=rng).to(dtype) if kind.startswith("ebc_weighted") else None
    variable: dict[str, Any] = {}
    if kind.endswith("vbe"):
        inverse = [torch.randperm(size, generator=rng) % max(n, 1) for n in rows]  # every row is some sample's
        named = sorted(zip(keys, inverse, strict=True), key=lambda of_key: of_key[0])  # in an order of their own
        variable["stride_per_key_per_rank"] = [[n] for n in rows]
        if kind != "ec_vbe":
            variable["inverse_indices"] = ([key for key, _ in named], torch.stack([of_key for _, of_key in named]))
    return (KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths, weights=weights, **variable),)


def weights_of(batch: tuple[object, ...]) -> torch.Tensor | None:
    """The batch's per-id weights, where it has any."""
    if isinstance(batch[0], torch.Tensor):
        return batch[2] if len(batch) == 3 else None  # type: ignore[return-value]
    return batch[0].weights_or_none()  # type: ignore[attr-defined,no-any-return]


class Taken(NamedTuple):
    """A step that the unsharded module has taken, or its beginning.

    Args:
        outs: for each rank's batch; None where it is empty.
        weight_grads: of each rank's per-id weights, where they were learned.
        values: its weights then.
        state: its optimizer state then, by parameter.
        steps: so far.
    """

    outs: list[object | None]
    weight_grads: list[torch.Tensor | None]
    values: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]
    steps: int


@functools.cache
def unsharded(
    kind: str, optimizer: str | None, ranks: int, steps: int, shards: Shards | None, dtype: torch.dtype = torch.float32
) -> list[Taken]:
    """The beginning, then each step on the global batch; `shards` where the numbers depend on them."""
    module, oracle = make_module(kind).to(dtype), Oracle(optimizer, dict(shards or ()), {})
    taken = [_taken([], [], module, oracle)]
    for step in range(steps):
        batches = [make_batch(kind, rank, step, dtype) for rank in range(ranks)]
        weights = [weights_of(batch) for batch in batches]
        for each in weights:
            if each is not None and step % 2 == 0:
                each.requires_grad_()
        outs = [None if is_empty(batch) else module(*batch) for batch in batches]
        loss = sum((loss_of(out) for out in outs if out is not None), torch.zeros((), requires_grad=True))
        (loss / ranks).backward()
        oracle.step(module)
        taken.append(_taken(outs, [None if each is None else each.grad for each in weights], module, oracle))
    return taken


def _taken(
    outs: list[object | None], weight_grads: list[torch.Tensor | None], module: nn.Module, oracle: Oracle
) -> Taken:
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    return Taken(outs, weight_grads, values, copy.deepcopy(oracle.state), oracle.steps)


def compare_state(
    model: dmp.DistributedModelParallel, taken: Taken, shards: Mapping[str, Sequence[Shard]], near: float = 1e-5
) -> None:
    """This rank's pieces of weights and optimizer state against the oracle's."""
    assert {n for n, _ in model.named_parameters()} == set(taken.values)
    state = model.state_dict()
    assert set(state) == set(taken.values)
    for name, value in state.items():
        _compare(value, taken.values[name], f"{name}", near)
    fused = model.fused_optimizer.state_dict()["state"]
    if not fused or taken.steps == 0:
        return
    assert set(fused) == set(taken.values)
    for name, states in fused.items():
        for key, value in states.items():
            if key == "step":
                assert float(value) == taken.steps, (name, value, taken.steps)
                continue
            want = taken.state[name][key]
            if value.dim() == 1:
                want = want[:, 0]
            elif value.shape != want.shape:  # (rows, column blocks)
                starts = sorted({s.offsets[1] for s in shards[name]})
                want = want[:, starts]
            _compare(value, want, f"{name}.{key}", near)


def _compare(value: torch.Tensor, want: torch.Tensor, name: str, near: float) -> None:
    assert value.shape == want.shape, (name, value.shape, want.shape)
    if not isinstance(value, dmp.ChunkedTensor):
        torch.testing.assert_close(value.detach(), want, atol=near, rtol=near, msg=lambda m: f"{name}: {m}")
        return
    for chunk, offset in zip(value.chunks, value.offsets, strict=True):
        part = want[tuple(slice(o, o + n) for o, n in zip(offset, chunk.shape, strict=True))]
        torch.testing.assert_close(
            chunk, part, atol=near, rtol=near, msg=functools.partial("{} at {}: {}".format, name, offset)
        )


def check_case(
    kind: str,
    layouts: Layouts,
    optimizer: str | None,
    env: ShardingEnv,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
    near: float = 1e-5,
    **options: Any,
) -> None:
    """Run `steps` steps, and compare outputs, weights and state with the unsharded module's; raises AssertionError.

    Args:
        dtype: of the tables and of per-id weights.
        near: the difference allowed, and its share of the value.
        options: of the wrapper.
    """
    module = make_module(kind).to(dtype)
    attach(module, optimizer)
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
    plan = {n: layouts(i, s, env) for i, (n, s) in enumerate(shapes.items())}
    shards = {n: tuple(layout.shards(shapes[n], env)) for n, layout in plan.items()}
    model = dmp.DistributedModelParallel(module, env=env, plan=plan, **options)
    by_shard = tuple(shards.items()) if optimizer == "rowwise_adagrad" or optimizer in CASES else None
    began, *taken = unsharded(kind, optimizer, env.data_size, steps, by_shard, dtype)
    ordinary = torch.optim.SGD(model.parameters(), lr=LR) if optimizer is None else None
    assert bool(model.fused_optimizer.fused) == (optimizer is not None)
    faults: list[str] = []  # told at the end: a rank that stopped would leave the others waiting
    with _noted(faults, "at the beginning"):
        compare_state(model, began, shards, near)
    me = env.data_rank
    for step, expected in enumerate(taken):
        batch = make_batch(kind, me, step, dtype)
        weights = weights_of(batch)
        if weights is not None and step % 2 == 0:
            weights.requires_grad_()
        out = model(*batch)
        with _noted(faults, f"result of step {step}"):
            if expected.outs[me] is None:
                same_empty_result(out, make_module(kind))
            else:
                same_result(out, expected.outs[me], near)
        loss_of(out).backward()
        with _noted(faults, f"gradients of weights in step {step}"):
            _compare_weight_gradients(weights, expected.weight_grads[me], env.data_size, near)
        if ordinary is not None:
            ordinary.step()
            ordinary.zero_grad()
        with _noted(faults, f"after step {step}"):
            compare_state(model, expected, shards, near)
    assert not faults, "; ".join(faults)


@contextmanager
def _noted(faults: list[str], where: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        faults.append(f"{where}: {str(error)[:400]}")


def _compare_weight_gradients(
    weights: torch.Tensor | None, theirs: torch.Tensor | None, data_size: int, near: float
) -> None:
    assert (weights is not None and weights.requires_grad and weights.numel() > 0) == (
        theirs is not None and theirs.numel() > 0
    )
    if weights is not None and theirs is not None and weights.numel():
        # A rank's weights are its own: their gradient is of its own loss, not of the mean.
        assert weights.grad is not None
        torch.testing.assert_close(weights.grad, theirs * data_size, atol=near, rtol=near)


def run_matrix(mesh_name: str, kind: str, every: int = 1, optimizers: Sequence[str | None] = OPTIMIZERS) -> list[str]:
    """Every layout that fits the mesh x optimizers, or every so many of them; what failed, on every rank alike."""
    env = env_of(mesh_name)
    failed = []
    for i, (name, layouts) in enumerate(layouts_for(env).items()):
        for j, optimizer in enumerate(optimizers):
            if (i + j) % every:
                continue
            try:
                check_case(kind, layouts, optimizer, env)
            except AssertionError as error:
                failed.append(f"{kind} {mesh_name} {name} {optimizer}: {str(error)[:400]}")
    return failed


def run_random(mesh_name: str, kind: str, seeds: range) -> list[str]:
    """Random rectangle plans by seed; the optimizer changes with the seed."""
    env = env_of(mesh_name)
    failed = []
    for seed in seeds:
        optimizer = OPTIMIZERS[seed % len(OPTIMIZERS)]
        try:
            check_case(
                kind,
                lambda i, s, e, seed=seed: rectangles(random_rectangles(s, e.table_size, 97 * seed + i)),
                optimizer,
                env,
            )
        except AssertionError as error:
            failed.append(f"seed {seed} {optimizer}: {str(error)[:400]}")
    return failed
