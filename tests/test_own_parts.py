"""What branches draw of a rank's part is another's on each rank; what they read and keep of it is told."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dmp import DistributedModelParallel, ShardingEnv, local_of, ranks
from sharders import TensorParallelSharder
from sharders.tensor_parallel.split import own_parts
from tests.ranks import mesh, run_ranks

WIDTH, HEADS, WORDS, BATCH = 16, 4, 6, 8
SEEN: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
"""By way, of what all ranks have, and of a part: where it is dropped."""
INSIDE = ("inside, reentrant", "inside, not so")
"""The core of an attention is checkpointed by itself: what is drawn there is alike."""


def _by_hand(scores: torch.Tensor, p: float) -> torch.Tensor:
    return scores.softmax(-1) * (torch.rand_like(scores) > p) / (1 - p)


def _without_graph(scores: torch.Tensor, p: float) -> torch.Tensor:
    with torch.no_grad():
        kept = torch.empty_like(scores).bernoulli_(1 - p)
    return scores.softmax(-1) * kept / (1 - p)


def _of_samples(scores: torch.Tensor, p: float) -> torch.Tensor:
    return scores.softmax(-1) * scores.new_empty(len(scores), 1, 1, 1).bernoulli_(1 - p)


WAYS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "dropout": lambda scores, p: F.dropout(scores.softmax(-1), p),
    "noise": _by_hand,
    "without a graph": _without_graph,
    "a generator": lambda scores, p: scores.softmax(-1) * torch.empty_like(scores).bernoulli_(generator=_generator()),
    "of samples": _of_samples,
}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


class Attention(nn.Module):
    """Drops its weights in the named way, and, between, positions that all ranks have."""

    def __init__(self, way: str, p: float) -> None:
        super().__init__()
        self.num_heads, self.way, self.dropout = HEADS, way, p
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.way == "at once":
            heads = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout * self.training)
        elif self.way in INSIDE:
            heads = checkpoint(self.attend, q, k, v, use_reentrant=self.way == INSIDE[0])
        else:
            heads = self.attend(q, k, v)
        return self.out(heads.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.dropout:
            return (q @ k.transpose(2, 3)).softmax(-1) @ v
        positions = F.dropout(torch.ones(q.shape[2], k.shape[2]), self.dropout)
        weights = WAYS.get(self.way, WAYS["dropout"])(q @ k.transpose(2, 3) + positions, self.dropout)
        SEEN[self.way] = positions.detach() == 0, weights.detach() == 0
        return weights @ v


class Block(nn.Module):
    def __init__(self, way: str, p: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, p) if way == "torch's" else Attention(way, p)
        self.up, self.drop, self.down, self.way = nn.Linear(WIDTH, 32), nn.Dropout(p), nn.Linear(32, WIDTH), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.attention
        x = x + self.drop(a(x, x, x, need_weights=False)[0] if isinstance(a, nn.MultiheadAttention) else a(x))
        hidden = self.drop(F.gelu(self.up(x)))
        SEEN[f"MLP after {self.way}"] = x.detach() * 0, hidden.detach() == 0
        return x + self.down(hidden)  # type: ignore[no-any-return]


class Model(nn.Module):
    """A block for each way; `again` is how they are checkpointed."""

    def __init__(self, *ways: str, p: float = 0.5) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList(Block(way, p) for way in ways)
        self.again = ""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.again == "reentrant") if self.again else block(x)
        return self.head(x)  # type: ignore[no-any-return]


def _wrapped(*ways: str, sharder: Any = None) -> DistributedModelParallel:
    torch.manual_seed(0)
    sharders = None if sharder is None else [sharder]
    return DistributedModelParallel(Model(*ways), ShardingEnv.from_mesh(mesh((2,), ("tp",))), sharders=sharders)


_Masks = dict[str, tuple[torch.Tensor, torch.Tensor]]


def _step(model: DistributedModelParallel, again: str = "") -> tuple[list[torch.Tensor], _Masks]:
    """What all ranks are to have alike (output, the generator, gradients), and masks."""
    torch.manual_seed(3)
    SEEN.clear()
    model.module.again = again
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a checkpoint inside another, where gradients are off
        out = model(torch.arange(BATCH * WORDS).view(BATCH, WORDS))
    state, masks = torch.get_rng_state(), dict(SEEN)
    model.zero_grad()
    out.square().mean().backward()
    return [out.detach(), state, *(local_of(p.grad) for p in model.parameters() if p.grad is not None)], masks


def _drawn() -> tuple[list[torch.Tensor], _Masks, _Masks]:
    model = _wrapped(*WAYS, "at once", "torch's", *INSIDE)
    of_first = _step(model)
    for again in ("", "reentrant", "not so"):
        for now, was in zip(_step(model, again)[0], of_first[0], strict=True):
            torch.testing.assert_close(now, was, msg=again)
    for module in model.modules():
        vars(module).update({name: 0.0 for name in ("p", "dropout") if name in vars(module)})
    before = torch.Generator().manual_seed(3).get_state()
    assert torch.equal(_step(model)[0][1], before)
    whole = _step(_wrapped("dropout", sharder=TensorParallelSharder({})))[1]
    return of_first[0][:2], of_first[1], whole


def test_ranks_draw_apart_what_is_their_own() -> None:
    """Head h and head h + H / n dropped the same; generators, and what all ranks have, stay alike."""
    (alike, mine, whole), (also, others, of_other) = run_ranks(2, _drawn)
    torch.testing.assert_close(alike, also)
    assert all(map(torch.equal, whole["dropout"], of_other["dropout"]))
    assert mine.keys() == others.keys() and len(mine) == 2 * len(WAYS) + 2 * len(INSIDE) + 2
    for way, (of_all, own) in mine.items():
        assert torch.equal(of_all, others[way][0]), way
        is_one = way in ("of samples", *INSIDE)
        share = (own != others[way][1]).float().mean()
        assert share == 0 if is_one else 0.4 < share < 0.6, way
        assert 0.4 < own.float().mean() < 0.6 or is_one, way
    assert not torch.equal(mine["dropout"][1], mine["noise"][1]), "blocks draw apart"


class Watching(nn.Module):
    """An MLP that reads, keeps and counts what it computes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), kind
        self.register_buffer("running", torch.zeros(()))
        self.last: Any = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).relu()
        if self.kind == "reads":
            self.last = float(hidden.detach().mean())
        elif self.kind == "keeps":
            self.last.append(hidden.detach())
        elif self.kind == "counts":
            self.running.mul_(0.9).add_(hidden.detach().mean(), alpha=0.1)
        elif self.kind == "of all":
            self.last = x.detach(), self.running.add_(x.detach().mean()), x.detach().mean().item()
        return self.down(hidden)  # type: ignore[no-any-return]


def _told() -> list[str]:
    kinds = ("reads", "keeps", "counts", "of all")
    module = Model(*kinds, p=0.0)
    for block, kind in zip(module.blocks, kinds, strict=True):
        block.up, block.down = nn.Identity(), Watching(kind)
    model = DistributedModelParallel(module, ShardingEnv.from_mesh(mesh((2,), ("tp",))))
    with mock.patch.object(ranks, "say_once") as said:
        for _ in range(3):
            model(torch.zeros(2, WORDS, dtype=torch.long))
    for block in module.blocks:
        kept = block.down.last if isinstance(block.down.last, list) else [block.down.running]
        assert all(type(each) is torch.Tensor for each in kept)
    return [*dict.fromkeys(call.args[0] for call in said.call_args_list)]


def test_what_a_branch_reads_and_keeps_of_a_part_is_told() -> None:
    """Once for modules alike; they were a rank's own, without a word."""
    for said in run_ranks(2, _told):
        told = ("reads a number (__float__)", "keeps 'last'", "keeps 'running'")
        assert len(said) == 3, said
        for words, line in zip(told, said, strict=True):
            start = f"module 'blocks.*.down', whose Linears are split over axis 'tp' (2 ranks), {words} of this"
            assert line.startswith(start)


def test_what_is_followed_goes_through_functions_that_are_written_in_python() -> None:
    """torch's name plain tensors among the classes there; what is given back as it was is no part, and none is left."""
    following = own_parts.Following(1, lambda _: None)
    try:
        part, whole = own_parts.follow(torch.rand(4, 3)), torch.rand(2, 3)
        found = F.embedding(torch.tensor([1, 2]), part)
        first, second = found.chunk(2)
        kept = [found, first, second, whole.add_(first), part.sum((0, 1)), part.max(0).values]
        assert {type(each) for each in kept} == {own_parts.OwnPart}
        mask = torch.ones(3, dtype=torch.float64)
        assert type(mask.type_as(mask.to(part.dtype))) is torch.Tensor is type(copy.deepcopy(part))
        assert type(mask.type_as(part)) is type(mask.float().type_as(part)) is torch.Tensor
    finally:
        following.end()
    assert {type(each) for each in (*kept, part, whole)} == {torch.Tensor}
