"""Bad batches: what one rank finds is raised on every rank, in words, and the model trains on as if nothing was."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

import dmp
from dmp import InputError, column_wise, data_parallel, row_wise, table_wise
from tests.equality import attach, env_of, loss_of, make_module, same_result
from tests.ranks import run_ranks

with_lengths = {"a": [2, 0, 1], "b": [1, 1, 0], "c": [0, 2, 1], "d": [1, 0, 1], "e": [1, 1, 1]}


def kjt(kind: str, change: str = "") -> Any:
    """A good batch of three samples, or one with a fault."""
    from torchrec import KeyedJaggedTensor

    keys = [k for k in with_lengths if not (change == "missing key" and k == "c")]
    if kind == "ec":
        keys = [k for k in keys if k in "abc"]
    lengths = torch.tensor([n for k in keys for n in with_lengths[k]])
    ids = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    ids[:3] = torch.tensor([12, 3, 0])  # feature a, 13 rows
    weights = torch.linspace(0, 1, len(ids)) if kind == "ebc_weighted" else None
    if change == "id == rows":
        ids[1] = 13
    elif change == "negative id":
        ids[2] = -7
    elif change == "float ids":
        ids = ids.float()
    elif change == "int8 ids":
        ids = ids.to(torch.int8)
    elif change == "ids of two dims":
        ids = ids.view(-1, 1)
    elif change == "lengths do not add up":
        lengths[0] += 1
    elif change == "too few lengths":
        lengths = lengths[:-1]
    elif change == "negative length":
        lengths[1], lengths[0] = -1, 3
    elif change == "lengths whose sum wraps around":  # to the number of ids
        lengths[0] = lengths[0] - 2
        lengths[1], lengths[2] = 2**63 - 1, 2**63 - 1
        lengths[3:] = 0
        lengths[0] = len(ids) + 2
    elif change == "no weights":
        weights = None
    elif change == "weights of another length":
        weights = torch.ones(len(ids) + 1)
    elif change == "weights of two dims":
        weights = torch.ones(len(ids), 1)
    elif change == "integer weights":
        weights = torch.ones(len(ids), dtype=torch.int64)
    elif change == "a key twice":
        keys[1] = keys[0]
    elif change == "an unread key twice":
        keys, lengths = [*keys, "x", "x"], torch.cat([lengths, torch.zeros(6, dtype=torch.int64)])
    elif change == "lengths for weights":
        return KeyedJaggedTensor(keys, ids, lengths)
    elif change == "a plain tensor":
        return ids
    elif change == "nothing":
        return None
    elif change == "a list":
        return ids.tolist()
    others = {"another stride": {"stride": 2}, "too few offsets": {"offsets": torch.zeros(len(lengths) - 1).long()}}
    return KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths, weights=weights, **others.get(change, {}))


def bag(change: str = "") -> tuple[Any, ...]:
    """(ids, offsets, weights) of three bags for `nn.EmbeddingBag`."""
    ids, offsets, weights = torch.tensor([1, 22, 3, 4]), torch.tensor([0, 1, 3]), torch.ones(4)
    if change == "id == rows":
        ids[2] = 23
    elif change == "offsets begin late":
        offsets[0] = 1
    elif change == "offsets decrease":
        offsets = torch.tensor([0, 3, 1])
    elif change == "offsets pass the end":
        offsets[2] = 5
    elif change == "offsets whose differences wrap around":
        offsets = torch.tensor([0, 2**63 - 1, -(2**63), -1])
    elif change == "float offsets":
        offsets = offsets.float()
    elif change == "offsets in a list":
        return ids, offsets.tolist(), weights
    elif change == "offsets of two dims":
        return ids, offsets.view(1, -1), weights
    elif change == "no offsets":
        return ids, None, weights
    elif change == "three dims":
        return ids.view(1, 2, 2), None, None
    elif change == "weights in a list":
        return ids, offsets, weights.tolist()
    elif change == "weights of another length":
        return ids, offsets, weights[:3]
    elif change == "a list":
        return ids.tolist(), offsets, weights
    return ids, offsets, weights


def embedding(change: str = "") -> tuple[Any, ...]:
    """Ids for `nn.Embedding`."""
    ids = torch.tensor([[1, 22], [3, 4]])
    changes = {"float ids": ids.float(), "a list": [1, 2], "id == rows": ids + 1, "negative id": -ids, "bool": ids > 2}
    return (changes.get(change, ids),)


def batch_of(kind: str, change: str = "") -> tuple[Any, ...]:
    """Arguments of the forward."""
    if kind.startswith("bag"):
        return bag(change)
    return embedding(change) if kind == "embedding" else (kjt(kind, change),)


def build(kind: str) -> tuple[dmp.DistributedModelParallel, nn.Module, dmp.ShardingEnv]:
    """A sharded module of mixed layouts with in-backward SGD, and the unsharded one."""
    env = env_of("dp2")
    module = make_module(kind)
    attach(module, "sgd")
    layouts = (row_wise(), table_wise(1), column_wise([1, 0]), data_parallel(), table_wise(0))
    plan = {n: layouts[i % 5] for i, (n, _) in enumerate(module.named_parameters())}
    return dmp.DistributedModelParallel(module, env=env, plan=plan), make_module(kind), env


def snapshot(model: dmp.DistributedModelParallel) -> list[torch.Tensor]:
    """Local weights."""
    return [p.detach().clone() for p in model.parameters()]


def train_equals(model: dmp.DistributedModelParallel, oracle: nn.Module, kind: str) -> None:
    """Two steps of both on a good batch give the same weights."""
    for _ in range(2):
        loss_of(model(*batch_of(kind))).backward()
        loss_of(oracle(*batch_of(kind))).backward()
        with torch.no_grad():
            for p in oracle.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    for name, p in oracle.named_parameters():
        mine = model.state_dict()[name]
        if not isinstance(mine, dmp.ChunkedTensor):
            torch.testing.assert_close(mine.detach(), p.detach())
            continue
        for chunk, at in zip(mine.chunks, mine.offsets, strict=True):
            part = p.detach()[tuple(slice(o, o + n) for o, n in zip(at, chunk.shape, strict=True))]
            torch.testing.assert_close(chunk, part)


def _faults(kind: str, changes: list[str]) -> dict[str, str]:
    """Change -> error message on this rank, or what went wrong instead; the bad batch is on rank 1, then on rank 0."""
    model, oracle, env = build(kind)
    found = {}
    for i, change in enumerate(changes):
        bad_rank = (i + 1) % 2
        before = snapshot(model)
        batch = batch_of(kind, change if env.rank == bad_rank else "")
        start = time.monotonic()
        try:
            model(*batch)
            found[change] = "no error"
        except InputError as error:
            found[change] = str(error) if f"rank {bad_rank}" in str(error) else f"wrong rank: {error}"
        assert time.monotonic() - start < 10
        assert all(torch.equal(a, b) for a, b in zip(before, snapshot(model), strict=True)), change
    train_equals(model, oracle, kind)
    return found


KEYED = {
    "id == rows": ["'a'", "id 13", "13 rows", "0..12"],
    "negative id": ["'a'", "-7", "13 rows"],
    "float ids": ["int32 or int64", "float32"],
    "int8 ids": ["int32 or int64", "int8"],
    "ids of two dims": ["1 dim", "got 2"],
    "lengths do not add up": ["sum to"],
    "too few lengths": ["lengths"],
    "negative length": ["'a'", "negative length -1"],
    "lengths whose sum wraps around": ["'a'", "a length", "ids in all"],
    "another stride": ["lengths", "stride"],
    "too few offsets": ["lengths", "offsets"],
    "lengths for weights": ["neither lengths nor offsets", "lengths="],
    "missing key": ["'c'", "missing"],
    "a key twice": ["keys must be unique", "'a'"],
    "an unread key twice": ["keys must be unique", "differ"],
    "a plain tensor": ["type"],
    "nothing": ["type"],
    "a list": ["type"],
}
WEIGHTED = {
    "no weights": ["weighted", "no weights"],
    "weights of another length": ["weights", "ids"],
    "integer weights": ["floating point", "int64"],
    "weights of two dims": ["1 dim", "got 2"],
}
CASES = {
    "ebc": KEYED,
    "ec": KEYED,
    "ebc_weighted": WEIGHTED,
    "bag_weighted": {
        "id == rows": ["'input'", "id 23", "23 rows"],
        "offsets begin late": ["offsets", "found 1"],
        "offsets decrease": ["offsets", "not decrease"],
        "offsets pass the end": ["offsets", "not pass the 4 ids"],
        "offsets whose differences wrap around": ["offsets", "not pass the 4 ids"],
        "float offsets": ["offsets", "float32"],
        "no offsets": ["dims"],
        "three dims": ["3 dims"],
        "weights of another length": ["3 weights for 4 ids"],
        "a list": ["type"],
    },
    "embedding": {
        "id == rows": ["'input'", "23"],
        "negative id": ["-1"],
        "float ids": ["float32"],
        "bool": ["bool"],
        "a list": ["type"],
    },
}


@pytest.mark.parametrize("kind", CASES)
def test_a_fault_on_one_rank_is_raised_on_all(kind: str) -> None:
    for found in run_ranks(2, _faults, kind, list(CASES[kind]), timeout=60):
        assert list(found) == list(CASES[kind])
        wrong = {c: text for c, text in found.items() if not all(word in text for word in CASES[kind][c])}
        assert not wrong, wrong


@pytest.mark.parametrize("kind", ["ebc", "bag_weighted"])
def test_one_process_raises_the_same(kind: str) -> None:
    """One path for one process and for many."""
    module = make_module(kind)
    plan = {n: row_wise() for n, _ in module.named_parameters()}
    model = dmp.DistributedModelParallel(module, plan=plan)
    for change, words in CASES[kind].items():
        with pytest.raises(InputError) as error:
            model(*batch_of(kind, change))
        assert all(word in str(error.value) for word in ["rank 0", *words]), (change, str(error.value))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("bag_weighted", "offsets in a list"),
        ("bag_weighted", "offsets of two dims"),
        ("bag_weighted", "weights in a list"),
    ],
)
def test_arguments_of_other_types_and_shapes(kind: str, change: str) -> None:
    """Anything but an InputError would be raised on one rank alone, and the others would wait for it."""
    module = make_module(kind)
    model = dmp.DistributedModelParallel(module, plan={n: row_wise() for n, _ in module.named_parameters()})
    with pytest.raises(InputError):
        model(*batch_of(kind, change))


def _other_ranks(world: int, at: str) -> str:
    """A fault with more ranks, and with replicas: everybody hears of it, and of the first one."""
    env = env_of(at)
    module = make_module("embedding")
    model = dmp.DistributedModelParallel(module, env=env, plan={"weight": row_wise()})
    try:
        model(torch.tensor([[100 + env.rank if env.rank >= 2 else 1]]))
    except InputError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("at", ["dp4", "replicate2xshard2", "host2xlocal2"])
def test_all_ranks_raise_the_same_text(at: str) -> None:
    texts = set(run_ranks(4, _other_ranks, 4, at, timeout=60))
    assert len(texts) == 1, texts
    assert "rank 2" in (text := texts.pop()) and "102" in text


class Pair(nn.Module):
    """Two tables, called in an order that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Embedding(10, 4), nn.Embedding(10, 4)

    def forward(self, ids: torch.Tensor, is_reversed: bool) -> torch.Tensor:
        a, b = (self.second, self.first) if is_reversed else (self.first, self.second)
        return a(ids) + b(ids)


def _at_different_modules() -> tuple[str, float]:
    env = env_of("dp2")
    model = dmp.DistributedModelParallel(
        Pair(), env=env, plan={"first.weight": row_wise(), "second.weight": row_wise()}
    )
    start = time.monotonic()
    try:
        model(torch.tensor([1, 2]), env.rank == 1)
    except InputError as error:
        text = str(error)
    took = time.monotonic() - start
    out = model(torch.tensor([1, 2]), False)  # and all is well again
    torch.testing.assert_close(out.detach(), Pair()(torch.tensor([1, 2]), False).detach())
    return text, took


def test_ranks_at_different_modules() -> None:
    for text, took in run_ranks(2, _at_different_modules, timeout=60):
        assert "'first'" in text and "'second'" in text and "rank 1" in text and took < 10, text


def _one_does_not_train() -> list[str]:
    model, oracle, env = build("ebc")
    texts = []
    for not_training in (0, 1):
        before = snapshot(model)
        with torch.set_grad_enabled(env.rank != not_training):
            try:
                model(*batch_of("ebc"))
            except InputError as error:
                texts.append(str(error))
        assert all(torch.equal(a, b) for a, b in zip(before, snapshot(model), strict=True))
    train_equals(model, oracle, "ebc")
    return texts


def test_one_rank_without_gradients() -> None:
    for texts in run_ranks(2, _one_does_not_train, timeout=60):
        assert len(texts) == 2
        assert "rank 0 does not train" in texts[0] and "rank 1 trains" in texts[0]
        assert "rank 0 trains" in texts[1] and "rank 1 does not train" in texts[1]


def _between_forward_and_backward() -> None:
    """A fault in a second forward leaves the first one's backward as it was."""
    model, oracle, env = build("ebc")
    loss = loss_of(model(*batch_of("ebc")))
    try:
        model(*batch_of("ebc", "negative id" if env.rank else ""))
    except InputError:
        loss.backward()
    loss_of(oracle(*batch_of("ebc"))).backward()
    with torch.no_grad():
        for p in oracle.parameters():
            p -= 0.1 * p.grad
            p.grad = None
    train_equals(model, oracle, "ebc")


def test_a_fault_between_forward_and_backward() -> None:
    run_ranks(2, _between_forward_and_backward, timeout=60)


def test_good_batches_are_not_changed() -> None:
    module = make_module("ebc")
    model = dmp.DistributedModelParallel(module, plan={n: row_wise() for n, _ in module.named_parameters()})
    batch = kjt("ebc")
    before = copy.deepcopy(batch.to_dict())
    model(batch)
    after = batch.to_dict()
    assert all(torch.equal(before[k].values(), after[k].values()) for k in before)


def test_ids_that_no_feature_reads_may_be_anything() -> None:
    from torchrec import KeyedJaggedTensor

    module = make_module("ec")
    model = dmp.DistributedModelParallel(module, plan={n: row_wise() for n, _ in module.named_parameters()})
    good = kjt("ec")
    keys, lengths = [*good.keys(), "other"], torch.cat([good.lengths(), torch.tensor([1, 1, 0])])
    values = torch.cat([good.values(), torch.tensor([-5, 10**12])])
    out = model(KeyedJaggedTensor(keys=keys, values=values, lengths=lengths))
    same_result(out, make_module("ec")(good))


def _copies_that_average() -> list[str]:
    """With an average every k updates the copies exchange no ids: a fault of one must be raised on all the same."""
    from sharders import EmbeddingBagSharder

    env = env_of("replicate2xshard2")
    module = nn.EmbeddingBag(10, 4, mode="sum")
    attach(module, "sgd")
    sharder = EmbeddingBagSharder(sync_interval=2)
    model = dmp.DistributedModelParallel(module, env=env, plan={"weight": row_wise()}, sharders=[sharder])
    texts = []
    for bad_rank in range(4):
        try:
            model(torch.tensor([[1, 10 if env.rank == bad_rank else 2]]))
        except InputError as error:
            texts.append(str(error))
    for _ in range(2):
        model(torch.tensor([[1, 2]])).sum().backward()  # and all is well again
    return texts


def test_a_fault_reaches_copies_that_only_average() -> None:
    for texts in run_ranks(4, _copies_that_average, timeout=60):
        assert len(texts) == 4 and all(f"rank {i}:" in text and "id 10" in text for i, text in enumerate(texts)), texts


def test_orders_of_keys_are_not_kept_for_ever() -> None:
    from torchrec import KeyedJaggedTensor

    module = make_module("ebc")
    model = dmp.DistributedModelParallel(module, plan={n: row_wise() for n, _ in module.named_parameters()})
    batch, plain = kjt("ebc").to_dict(), make_module("ebc")
    for step in range(40):
        keys = [*"abcde", *(f"other{i}" for i in range(step))]
        values = [batch[k] for k in "abcde"]
        given = KeyedJaggedTensor(
            keys=keys,
            values=torch.cat([v.values() for v in values]),
            lengths=torch.cat([*(v.lengths() for v in values), torch.zeros(3 * step, dtype=torch.int64)]),
        )
        out = model(given)
    same_result(out, plain(kjt("ebc")))
    assert len(model.module._engine.input_dist._compiled) <= 16
