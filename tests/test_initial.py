"""Values: those present are kept, rank 0's where ranks differ; those on meta depend on (name, seed) alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from dmp import (
    DistributedModelParallel,
    Layout,
    Shard,
    ShardError,
    ShardingEnv,
    column_wise,
    data_parallel,
    grid,
    rectangles,
    row_wise,
    table_wise,
)
from dmp.bits import checksum
from dmp.chunked import ChunkedTensor, as_chunks
from dmp.wrap.making.agreement import sync_from_first_rank
from dmp.wrap.values.initial_values import BLOCK_COLUMNS, BLOCK_ELEMENTS, fill_chunks
from tests.equality import env_of, make_module, random_rectangles
from tests.ranks import run_ranks

LAYOUTS: dict[str, Layout] = {
    "row_wise": row_wise(),
    "table_wise": table_wise(0),
    "column_wise": column_wise([0, 0]),
    "data_parallel": data_parallel(),
    "grid": grid([[0, 0], [0, 0]]),
}


class Net(nn.Module):
    """Every kind of table, a table of more than one block, dense layers, and a tied pair."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.ebc = make_ebc(device)
        with torch.device(device):
            self.words = nn.Embedding(9, 8, padding_idx=2)
            self.bag = nn.EmbeddingBag(13, 8)
            self.over = nn.Linear(8, 4)
            self.norm = nn.BatchNorm1d(4)
            self.tied = nn.Embedding(4, 8)
            self.head = nn.Linear(8, 4, bias=False)
        self.head.weight = self.tied.weight


def make_ebc(device: str) -> nn.Module:
    """One table whose config says how it begins, one that spans two blocks of initial values."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    rows = BLOCK_ELEMENTS // 8 + 3
    return EmbeddingBagCollection(
        device=torch.device(device),
        tables=[
            EmbeddingBagConfig(
                name="ones", num_embeddings=10, embedding_dim=8, feature_names=["a"], init_fn=nn.init.ones_
            ),
            EmbeddingBagConfig(name="large", num_embeddings=rows, embedding_dim=8, feature_names=["b"]),
        ],
    )


TABLES = ("ebc.embedding_bags.ones.weight", "ebc.embedding_bags.large.weight", "words.weight", "bag.weight")


def digests(model: DistributedModelParallel) -> dict[str, list[tuple[Any, int]]]:
    """Name -> (offset, size, checksum) of what this rank holds."""
    pieces = {name: as_chunks(value) for name, value in model.state_dict().items()}
    return {
        name: [(o, tuple(c.shape), checksum(c)) for c, o in zip(held.chunks, held.offsets, strict=True)]
        for name, held in pieces.items()
    }


def expected(whole: dict[str, torch.Tensor], held: dict[str, list[Any]]) -> None:
    """What a rank holds are pieces of `whole`."""
    assert set(held) == set(whole)
    for name, pieces in held.items():
        for at, size, digest in pieces:
            part = whole[name].detach()[tuple(slice(o, o + n) for o, n in zip(at, size, strict=True))]
            assert checksum(part) == digest, (name, at, size)


def whole_values(seed: int = 5) -> dict[str, torch.Tensor]:
    """One process, whole tables."""
    torch.manual_seed(seed)
    model = DistributedModelParallel(Net(), plan=dict.fromkeys(TABLES, data_parallel()))
    return {n: t.chunks[0] if hasattr(t, "chunks") else t for n, t in model.state_dict().items()}


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    return whole_values()


def _wrapped(at: str, kind: str, draws: int) -> dict[str, list[Any]]:
    env = env_of(at)
    torch.manual_seed(5 + (dist.is_initialized() and dist.get_rank()))  # rank 0's seed is the one that counts
    torch.rand(draws)  # where the generator stands does not
    layout = LAYOUTS.get(kind)
    module = Net()
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters() if n in TABLES}
    plan = {n: layout or rectangles(random_rectangles(s, env.table_size, i)) for i, (n, s) in enumerate(shapes.items())}
    before = torch.get_rng_state()
    model = DistributedModelParallel(module, env=env, plan=plan)
    assert torch.equal(before, torch.get_rng_state())  # and it is left as it was
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
    assert model.module.head.weight is model.module.tied.weight
    return digests(model)


@pytest.mark.parametrize("kind", [*LAYOUTS, "random"])
def test_same_for_every_plan(kind: str, reference: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(5)
    expected(reference, _wrapped("single", kind, 3))


@pytest.mark.parametrize(
    ("world", "at"), [(2, "dp2"), (2, "replicate2"), (4, "replicate2xshard2"), (4, "host2xlocal2")]
)
@pytest.mark.sampled(4)
def test_same_for_every_mesh(world: int, at: str, reference: dict[str, torch.Tensor]) -> None:
    for held in run_ranks(world, _wrapped, at, "random", 7):
        expected(reference, held)


def test_values_are_what_the_modules_say(reference: dict[str, torch.Tensor]) -> None:
    assert torch.equal(reference["ebc.embedding_bags.ones.weight"], torch.ones(10, 8))
    large = reference["ebc.embedding_bags.large.weight"]
    bound = large.shape[0] ** -0.5  # TorchRec's own
    assert large.abs().max() <= bound and large[:-3].std() > bound / 2 and large[-3:].std() > bound / 4
    assert not torch.equal(large[:3], large[-3:])
    assert torch.equal(reference["words.weight"][2], torch.zeros(8)) and reference["words.weight"].std() > 0.5
    assert reference["over.weight"].abs().max() <= 8**-0.5 and reference["over.weight"].std() > 0.1
    assert torch.equal(reference["norm.running_var"], torch.ones(4))
    other = whole_values(6)
    assert not torch.equal(other["over.weight"], reference["over.weight"])
    assert not torch.equal(other["bag.weight"], reference["bag.weight"])


class _Drawn(TorchDispatchMode):
    """Elements that are drawn in it."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += args[0].numel() if func is torch.ops.aten.uniform_.default else 0
        return func(*args, **(kwargs or {}))


def test_who_holds_columns_draws_these_alone() -> None:
    """As TorchRec's own initial values are; an init_fn of a user's gets whole rows, of which one holds a part."""
    size, width, seen = (300, 4 * BLOCK_COLUMNS), BLOCK_COLUMNS, []

    @dataclass  # which has no hash
    class OfAUser:
        func: Any = nn.init.uniform_  # as a partial's

        def __call__(self, rows: torch.Tensor) -> None:
            seen.append(rows.shape[1])
            rows.uniform_(-0.1, 0.1)

    for init_fn in (partial(nn.init.uniform_, a=-0.1, b=0.1), OfAUser()):
        whole, part = torch.empty(size), torch.empty(size[0], width)
        fill_chunks(ChunkedTensor(size, [whole], [(0, 0)], whole.dtype, whole.device), init_fn, "t", 1)
        with _Drawn() as drawn:
            fill_chunks(ChunkedTensor(size, [part], [(0, width)], part.dtype, part.device), init_fn, "t", 1)
        assert torch.equal(part, whole[:, width : 2 * width]) and part.unique().numel() > 1000
        assert drawn.number == (part.numel() if isinstance(init_fn, partial) else whole.numel())
    assert set(seen) == {size[1]}


def test_names_decide() -> None:
    """Two modules of one shape begin differently."""
    torch.manual_seed(0)
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Embedding(5, 3), nn.Embedding(5, 3))
    model = DistributedModelParallel(module, plan=dict.fromkeys(("2.weight", "3.weight"), data_parallel()))
    weights = dict(model.named_parameters())
    assert not torch.equal(weights["0.weight"], weights["1.weight"])
    assert not torch.equal(weights["2.weight"], weights["3.weight"])


def test_torch_modules_that_reset_under_another_name() -> None:
    with torch.device("meta"):
        module = nn.TransformerEncoderLayer(8, 2, 16)
    state = DistributedModelParallel(module, plan={}).state_dict()
    assert state["self_attn.in_proj_weight"].std() > 0.1 and torch.equal(state["norm1.weight"], torch.ones(8))


def test_only_what_is_on_meta_is_filled() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Embedding(4, 2))
    weight = module[0].weight.detach().clone()
    module[0].bias = nn.Parameter(torch.empty(2, device="meta"))
    model = DistributedModelParallel(module, plan={"1.weight": row_wise()})
    assert torch.equal(model.module[0].weight, weight) and not model.module[0].bias.is_meta


def test_what_cannot_be_filled_is_an_error_that_says_what_to_do() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(2, device="meta"))

    with pytest.raises(ShardError, match=r"'inner' \(Bare\).*scale.*reset_parameters.*init_parameters=False"):
        DistributedModelParallel(nn.ModuleDict({"inner": Bare()}), plan={})


def test_init_parameters_false_leaves_them_for_values_to_come() -> None:
    source = Net("cpu")
    plan = dict.fromkeys(TABLES, row_wise())
    model = DistributedModelParallel(Net(), plan=plan, init_parameters=False, init_data_parallel=False)
    assert model.module.over.weight.is_meta
    with pytest.raises(ShardError, match=r"'over\.weight' is on meta.*init_parameters=True"):
        model.init_data_parallel()
    model.load_state_dict(source.state_dict(), assign=True)
    model.init_data_parallel()
    expected(dict(source.state_dict()), digests(model))


# ---- values present ----


def _kept(kinds: tuple[str, ...], at: str) -> None:
    env = env_of(at)
    for kind in kinds:
        whole = dict(make_module(kind).state_dict())
        for seed in range(2):
            module = make_module(kind)
            plan = {
                n: rectangles(random_rectangles(tuple(p.shape), env.table_size, seed + i))
                for i, (n, p) in enumerate(module.named_parameters())
            }
            with CommDebugMode() as counter:
                assert sync_from_first_rank(module, env) == []
            assert counter.get_total_counts() <= 1  # the checksums, and nothing else
            expected(whole, digests(DistributedModelParallel(module, env=env, plan=plan)))


def test_values_present_are_kept() -> None:
    run_ranks(2, _kept, ("ebc", "ec", "bag", "embedding"), "dp2")


def _differ() -> None:
    env, rank = env_of("dp2"), dist.get_rank()
    torch.manual_seed(11)
    first = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3), nn.BatchNorm1d(3))
    first[1].weight.data = first[1].weight.data.t().contiguous().t()  # not contiguous, and written all the same
    module = copy.deepcopy(first)
    if rank == 1:
        with torch.no_grad():
            module[0].weight[5, 3] += 1
            module[1].weight[0, 0] += 1
            module[2].running_mean += 1
            module[2].num_batches_tracked += 1
    sent = sync_from_first_rank(copy.deepcopy(module), env)
    assert sent == ["0.weight", "1.weight", "2.running_mean", "2.num_batches_tracked"], sent
    model = DistributedModelParallel(module, env=env, plan={"0.weight": row_wise()})
    expected(dict(first.state_dict()), digests(model))


def test_rank_0_wins_where_ranks_differ() -> None:
    run_ranks(2, _differ)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.complex64]
)
def test_checksum_sees_every_bit_and_place(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in ((), (3,), (40, 50), (5, 1024), (0, 4), (37, 8191)):  # the last of more words than a block
        tensor = (torch.randn(shape) * 5).to(dtype)
        if dtype == torch.bool:
            tensor = torch.randn(shape) > 0
        assert checksum(tensor) == checksum(tensor.clone())
        if tensor.numel() < 3:
            continue
        flat = tensor.flatten()
        assert checksum(tensor) != checksum(flat.flip(0)) and checksum(flat) == checksum(tensor)
        changed = flat.clone()
        changed[-1] = ~changed[-1] if dtype == torch.bool else changed[-1] + 1
        assert checksum(changed) != checksum(flat)
    rows = torch.randn(4, 1024)
    assert checksum(rows) != checksum(rows[[1, 0, 2, 3]])  # rows that lie under each other are told apart too
    assert checksum(rows.t()) == checksum(rows.t().contiguous())
    waves = torch.complex(rows, rows)
    assert checksum(waves.conj()) == checksum(waves.conj().resolve_conj())
    words = torch.arange(8 * 16 * 1021, dtype=torch.int64)  # whole blocks: order of blocks, and of columns inside
    assert checksum(words) != checksum(words.view(8, -1).flip(0).flatten())
    assert checksum(words) != checksum(words.view(8, 16, 1021).flip(2).flatten())


def test_shards_of_rank_0_come_from_the_group_not_the_world() -> None:
    run_ranks(4, _second_group)


def _second_group() -> None:
    """Ranks 2 and 3 alone: their first rank is rank 2 of the world."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    env = ShardingEnv.from_process_group(groups[dist.get_rank() // 2])
    torch.manual_seed(dist.get_rank())
    mine = nn.Embedding(4, 4)
    torch.manual_seed(dist.get_rank() // 2 * 2)
    first = nn.Embedding(4, 4).weight.detach().clone()
    model = DistributedModelParallel(
        nn.Sequential(mine), env=env, plan={"0.weight": rectangles([Shard((0, 0), (4, 4), 1)])}
    )
    expected({"0.weight": first}, digests(model))
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        module = nn.Sequential(nn.Embedding(4, 4), nn.Linear(2, 2))
    model = DistributedModelParallel(module, env=env, plan={"0.weight": data_parallel()})
    told: list[Any] = [None] * 2
    dist.all_gather_object(told, digests(model), group=env.group())
    assert told[0] == told[1]


class Quantised(torch.Tensor):
    """Says of every operation that it has none, as such classes do in words of their own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            raise NotImplementedError("attempting to run unimplemented operator")
        return super().__torch_function__(func, types, args, kwargs or {})


def wraps_quantised() -> None:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.ones(4, 4).as_subclass(Quantised), requires_grad=False)
    DistributedModelParallel(module, ShardingEnv.from_process_group(dist.group.WORLD))


def test_weights_without_access_to_their_values_are_refused() -> None:
    for error in run_ranks(2, wraps_quantised, expect=ShardError):
        assert "'weight' is a Quantised" in str(error) and "to_unsharded" in str(error)
