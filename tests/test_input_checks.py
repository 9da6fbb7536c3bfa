"""Ids outside their tables are found, and named, whichever way a batch of that form is looked through."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from sharders.embedding.batches import input_checks
from sharders.embedding.batches.batch import Ids
from sharders.embedding.batches.input_faults import Fault

ROWS = (7, 5, 9, 3)
FORMS = {  # ids of each of three keys
    "as many of each": (4, 4, 4),
    "few, uneven": (3, 0, 6),
    "many, uneven": (3, 1, 6),
    "an unread key": (2, 5, 4),
}


def _batch(form: str, dtype: torch.dtype) -> tuple[Ids, list[int]]:
    """Ids within their tables, and for each the smallest table that reads it; the second key is read twice."""
    counts = FORMS[form]
    key_of = (0, 1, 1, 0) if form == "an unread key" else (0, 1, 1, 2)
    limits = [min((n for n, k in zip(ROWS, key_of, strict=True) if k == key), default=10**6) for key in range(3)]
    of_ids = [limits[key] for key, count in enumerate(counts) for _ in range(count)]
    lengths = torch.tensor([[count, 0] for count in counts])
    return Ids(torch.tensor([n - 1 for n in of_ids]).to(dtype), lengths, key_of), of_ids


@pytest.fixture(params=["torch", "numba", "as on a device"])
def compiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """What looks through a batch; the last is torch's operators with one read."""
    if request.param == "as on a device":
        monkeypatch.setattr(input_checks, "_is_waited_for", lambda _: True)
    return bool(request.param == "numba")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", FORMS)
def test_an_id_outside_is_found(form: str, dtype: torch.dtype, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "many, uneven":
        monkeypatch.setattr(input_checks, "_FEW_IDS", 0)
    check_batch = partial(input_checks.check_batch, compiles=compiles)
    ids, limits = _batch(form, dtype)
    assert check_batch(ids, ROWS, True).counts == FORMS[form]
    for place, limit in enumerate(limits):
        for wrong in (-1, limit, torch.iinfo(dtype).max, torch.iinfo(dtype).min):
            kept = int(ids.values[place])
            ids.values[place] = wrong
            if limit == 10**6:  # nobody reads it
                assert check_batch(ids, ROWS, True).values is ids.values
            else:
                with pytest.raises(Fault) as found:
                    check_batch(ids, ROWS, True)
                assert found.value.value == wrong
                inside = check_batch(ids, ROWS, False).values
                assert 0 <= int(inside[place]) < limit
            ids.values[place] = kept


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("lengths", "kind"),
    [
        ([[2, 1], [0, -1]], "length negative"),
        ([[2, 1], [0, 5]], "length large"),
        ([[2, 1], [0, 0]], "length sum"),
        ([[torch.iinfo(torch.int32).min, 1], [0, 0]], "length negative"),
        ([[torch.iinfo(torch.int32).max] * 2, [0, 0]], "length large"),
    ],
)
def test_lengths_that_do_not_fit_are_found_before_ids_are_read(
    lengths: list[list[int]], kind: str, dtype: torch.dtype, compiles: bool
) -> None:
    ids = Ids(torch.tensor([99, 0, 0, 0]), torch.tensor(lengths, dtype=dtype), (0, 1))
    with pytest.raises(Fault) as found:
        input_checks.check_batch(ids, (3, 3), True, compiles)
    assert found.value.kind.name.lower().replace("_", " ") == kind


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (0, 3)])
def test_a_batch_without_lengths_has_no_ids(shape: tuple[int, int], compiles: bool) -> None:
    ids = Ids(torch.zeros(0, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64), tuple(range(shape[0])))
    batch = input_checks.check_batch(ids, (3,) * shape[0], True, compiles)
    assert (batch.counts, batch.shortest, batch.longest) == ((0,) * shape[0], 0, 0)
    if not all(shape):
        with pytest.raises(Fault):
            input_checks.check_batch(replace(ids, values=torch.zeros(2, dtype=torch.int64)), (3,), True, compiles)
