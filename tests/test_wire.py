"""Values on the wire in 16 bits: each is rounded once; results and gradients apart; too large is largest."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import dmp
from dmp import ShardError
from sharders import EmbeddingBagCollectionSharder, EmbeddingBagSharder, EmbeddingSharder
from sharders.embedding.exchange.codec import Cast, Codecs, Wire
from tests.equality import env_of
from tests.ranks import run_ranks

BOUND = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
ROWS, LR = 16, 0.5


def _step(kind: str, wire: Wire) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A table on rank 0, of which every row is read by one rank: result, its gradient, and the weights afterwards."""
    env = env_of("dp2")
    values = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(3)) * 10.0 ** torch.arange(-4, 4)
    values[ROWS - 1] = 1e6
    module, sharder = (nn.EmbeddingBag, EmbeddingBagSharder) if kind == "bag" else (nn.Embedding, EmbeddingSharder)
    table = module.from_pretrained(values, freeze=False, **({"mode": "sum"} if kind == "bag" else {}))
    plan = {"weight": dmp.table_wise(0)}
    model = dmp.DistributedModelParallel(table, env, plan=plan, sharders=[sharder(wire=wire)])
    ids = torch.arange(env.rank, ROWS, 2)
    out = model(ids.view(-1, 1) if kind == "bag" else ids)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(env.rank)) * 10.0 ** torch.arange(-3, 5)
    out.backward(grad)
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return out.detach(), grad, dmp.full_state_dict(model)["weight"]


def _rounded_once(kind: str, results: torch.dtype | None, gradients: torch.dtype | None) -> None:
    rank = env_of("dp2").rank
    (exact, grad, weights), (out, _, near) = _step(kind, None), _step(kind, (results, gradients))
    limit = math.inf if results is None else torch.finfo(results).max
    held = exact.clamp(-limit, limit)
    if rank == 0 or results is None:  # what is for the rank itself does not travel
        assert torch.equal(out, exact)
    else:
        assert not torch.equal(out, exact) and out.isfinite().all()
        assert bool(((out - held).abs() <= BOUND[results] * held.abs() + 2**-24).all())
    own, moved = slice(rank, ROWS, 2), (near - weights).abs()[rank::2]
    if rank == 0 or gradients is None:
        assert torch.equal(near[own], weights[own])
    else:  # a mean over two ranks, and the rounding of the update itself
        assert moved.any()
        sent = BOUND[gradients] * LR * grad.view_as(moved).abs() / 2
        assert bool((moved <= sent + 2**-23 * weights[own].abs() + 2**-24).all())


@pytest.mark.parametrize("kind", ["bag", "embedding"])
@pytest.mark.parametrize(
    ("results", "gradients"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (None, torch.bfloat16), (torch.float16, None)],
)
@pytest.mark.sampled(2)
def test_each_value_is_rounded_once(kind: str, results: torch.dtype | None, gradients: torch.dtype | None) -> None:
    run_ranks(2, _rounded_once, kind, results, gradients)


def test_what_wire_may_be() -> None:
    for wire in (torch.int8, (torch.bfloat16,), "bfloat16", (torch.float64, None)):
        with pytest.raises(ShardError, match=r"wire must be torch.bfloat16 or torch.float16, a pair .*; got "):
            EmbeddingBagCollectionSharder(wire=wire)  # type: ignore[arg-type]
    with pytest.raises(ShardError, match="both say how values travel"):
        EmbeddingBagCollectionSharder(wire=torch.float16, codecs=Codecs(Cast(torch.bfloat16)))
    assert EmbeddingBagCollectionSharder(wire=torch.float16).options == (
        EmbeddingBagCollectionSharder(codecs=Codecs(Cast(torch.float16), Cast(torch.float16))).options
    )
