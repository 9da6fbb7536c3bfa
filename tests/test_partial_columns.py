"""Partials end in the columns of results that they are parts of, and their gradients come back from there."""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import dmp
from sharders.embedding.lookup import numba_kernel
from sharders.embedding.results import columns, partial_columns
from sharders.embedding.results.partial_columns import PartialColumns
from sharders.embedding.results.partials import Piece
from sharders.embedding.results.ragged import Columns

SENDERS, OTHERS = 3, 5  # ranks that send; columns of other tables on each side
needs_numba = pytest.mark.skipif(bool(numba_kernel.problem()), reason="it is numba's code that is looked at")


class Drawn(NamedTuple):
    """Features, row blocks of them, and a batch."""

    plan: Any
    target: list[Columns]
    partials: Any
    came: list[torch.Tensor]


def draw(rng: torch.Generator, samples: int) -> Drawn:
    def below(stop: int) -> int:
        return int(torch.randint(0, stop, (), generator=rng))

    target: list[Columns] = [(f, 0, (4, 16, 20, 64)[below(4)]) for f in range(6)]
    of_senders: list[list[Columns]] = [[] for _ in range(SENDERS)]
    for f, _, dim in target:
        for of_sender in of_senders:  # of row blocks cut at other columns than others, one has what several have
            how = below(3)
            of_sender += [(f, 0, dim)] if how == 0 else [(f, 0, dim // 2), (f, dim // 2, dim // 2)] if how == 1 else []
        if not any((f, 0, dim) in of for of in of_senders):
            of_senders[below(SENDERS)].append((f, 0, dim))
    slots = [(sender, *of) for sender, of_sender in enumerate(of_senders) for of in of_sender]
    pieces, at = [], 0
    for (sender, width), run in groupby(slots, key=lambda slot: (slot[0], slot[3])):
        stop = at + len([*run])
        pieces.append(Piece(sender, range(at, stop), width))
        at = stop
    lengths = torch.randint(0, 3, (len(slots), samples), generator=rng, dtype=(torch.int32, torch.int64)[below(2)])
    counts = (lengths > 0).sum(1).tolist()
    came = [
        torch.randint(-99, 99, (sum(n * s[3] for s, n in zip(slots, counts, strict=True) if s[0] == i),)).float()
        for i in range(SENDERS)
    ]
    plan = SimpleNamespace(columns=[slot[1:] for slot in slots], pieces=pieces)
    return Drawn(plan, target, SimpleNamespace(lengths=lengths, counts=counts, place_of=lambda rank: rank), came)


@needs_numba
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("streamed_from", [columns._STREAMED_BYTES, 1])
def test_partials_are_added_up_where_they_belong(
    parts: int, streamed_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_columns.threads, "num_parts", lambda _: parts)
    monkeypatch.setattr(columns, "_STREAMED_BYTES", streamed_from)
    rng = torch.Generator().manual_seed(0)
    for samples in [0, 1, 7, 64] * 10:
        plan, target, partials, came = draw(rng, samples)
        of = PartialColumns(plan, target, None)
        width = sum(c[2] for c in target)
        wide = torch.full((samples, width + 2 * OTHERS), 7.0)
        of.add_up(partials, came, wide[:, OTHERS:-OTHERS])
        starts = {f: sum(c[2] for c in target[:f]) for f, _, _ in target}
        expected, picked = torch.zeros(samples, width), [torch.empty_like(flat) for flat in came]
        gradient = torch.randn(samples, width + 3, generator=rng)[:, 2:-1]
        done = [0] * SENDERS
        slots = zip((piece.sender for piece in plan.pieces for _ in piece.slots), plan.columns, strict=True)
        for (sender, (f, column, dim)), lengths in zip(slots, partials.lengths, strict=True):
            for sample in lengths.nonzero().view(-1).tolist():
                to = slice(starts[f] + column, starts[f] + column + dim)
                there = slice(done[sender], done[sender] + dim)
                expected[sample, to] += came[sender][there]
                picked[sender][there] = 0.25 * gradient[sample, to]
                done[sender] += dim
        assert torch.equal(wide[:, OTHERS:-OTHERS], expected)
        assert (wide[:, :OTHERS] == 7).all() and (wide[:, -OTHERS:] == 7).all()
        for sender, flat in enumerate(picked):
            found = torch.full_like(flat, 7.0)
            of.pick(partials, sender, gradient, 0.25, found)
            assert torch.equal(found, flat)


@needs_numba
def test_the_gradient_of_a_sum_takes_no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one number, expanded: what compiled code cannot read is made whole once, not column by column."""
    by_torch: list[Any] = []
    monkeypatch.setattr(columns.Placing, "_place", lambda *given: by_torch.append(given))
    configs = [EmbeddingBagConfig(50, 16, name=f"t{i}", feature_names=[f"f{i}"]) for i in (0, 1)]
    model = dmp.DistributedModelParallel(
        EmbeddingBagCollection(configs),
        plan={"embedding_bags.t0.weight": dmp.row_wise(), "embedding_bags.t1.weight": dmp.data_parallel()},
    )
    ids, lengths = torch.arange(2 * 600 * 2) % 50, torch.full((2 * 600,), 2)
    for _ in range(2):
        model(KeyedJaggedTensor(["f0", "f1"], ids, lengths=lengths)).values().sum().backward()
    assert not by_torch
    for table in dmp.full_state_dict(model):
        grad = model.get_parameter(table).grad
        assert grad is not None
        torch.testing.assert_close(grad, torch.full((50, 16), 2 * 2 * 600 / 50))
