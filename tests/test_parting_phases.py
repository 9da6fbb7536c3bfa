"""Ranks that part ways between the two phases of a call: told on all of them within seconds, before a wrong number."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import dmp
from dmp import row_wise
from tests.equality import env_of
from tests.ranks import run_ranks
from tests.test_parting import TOLD_S, slow
from tests.test_survival import mortal_ranks


def part(what: str, is_even: bool) -> tuple[str, float]:
    """A step together, then something that one rank does otherwise: its error, after seconds."""
    model = dmp.DistributedModelParallel(nn.EmbeddingBag(64, 8, mode="sum"), env_of("dp2"), plan={"weight": row_wise()})
    tables, is_first = model.module, model.env.rank == 0
    a, b = torch.arange(12).view(4, 3), torch.arange(12 if is_even else 21).view(-1, 3)

    def step() -> None:
        tables(a).sum().backward()

    def finish(call: object) -> None:
        tables.finish(call).sum().backward()  # type: ignore[operator]

    step()
    started = time.monotonic()
    try:
        calls = [tables.begin(a), *([tables.begin(b)] if "two" in what else [])]  # type: ignore[operator]
        if what == "begun alone":
            if is_first:
                tables.begin(b)  # type: ignore[operator]
            finish(calls[0])
        elif what == "two, in another order":
            for call in calls if is_first else calls[::-1]:
                finish(call)
        elif what == "two, one passed over":
            for call in calls[1:] if is_first else calls:
                finish(call)
        elif what == "dropped for a whole one":
            step() if is_first else finish(calls[0])
        elif what == "finished twice":
            tables.finish(calls[0])  # type: ignore[operator]
            step() if is_first else finish(calls[0])
        elif what == "backward twice":
            out, following = tables.finish(calls[0]).sum(), tables.begin(b)  # type: ignore[operator]
            out.backward(retain_graph=True)
            finish(following) if is_first else out.backward()
        elif what == "two, backward of one":
            outs = [tables.finish(call).sum() for call in calls]  # type: ignore[operator]
            outs[not is_first].backward()
        step()
    except Exception as error:
        told = f"{type(error).__name__}: {error}", time.monotonic() - started
        time.sleep(2.0)  # a program that ends would be another end
        return told
    return "", time.monotonic() - started


WHERE = {
    "begun alone": ("the forward of", "the lookup of"),
    "two, in another order": ("the lookup of", "the lookup of"),
    "two, one passed over": ("the lookup of", "the lookup of"),
    "dropped for a whole one": ("the forward of", "the lookup of"),
    "backward twice": ("the lookup of", "the backward of"),
}


@slow
@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("what", WHERE)
def test_parted_between_the_phases(what: str, is_even: bool) -> None:
    """Also where the sizes of what they would take from each other fit."""
    for message, seconds in mortal_ranks(2, part, what, is_even):
        assert message.startswith("RanksError: the ranks have parted ways: "), message
        for rank, place in enumerate(WHERE[what]):
            assert f"rank {rank} is in {place} 'the model'" in message, message
        assert seconds < TOLD_S


@slow
@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "finished twice",
            "the ranks have parted ways: rank 0 is in the forward of 'the model' (begins a batch), rank 1 is in the "
            "lookup of 'the model', call ",
        ),
        ("two, backward of one", "rank 0: the backward of 'the model', call "),
    ],
)
def test_parted_where_headers_meet(what: str, told: str) -> None:
    for message, _ in mortal_ranks(2, part, what, True):
        assert message.startswith("RanksError: ") and told in message, message


def _out_of_turn() -> None:
    """All ranks alike: another order, one dropped, one finished twice: right, and one exchange more each."""
    model = dmp.DistributedModelParallel(nn.EmbeddingBag(64, 8, mode="sum"), env_of("dp2"), plan={"weight": row_wise()})
    tables, batches = model.module, [torch.arange(12).view(4, 3) + i for i in range(3)]
    expected = [tables(batch) for batch in batches]
    calls = [tables.begin(batch) for batch in batches]  # type: ignore[operator]
    for i in (2, 0, 0):
        assert torch.equal(tables.finish(calls[i]), expected[i])  # type: ignore[operator]
    del calls
    assert torch.equal(tables(batches[1]), expected[1])


def test_calls_out_of_turn_on_all_ranks() -> None:
    run_ranks(2, _out_of_turn)
