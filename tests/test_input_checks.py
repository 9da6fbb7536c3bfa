"""Ids outside their tables are found, and named, whichever way a batch of that form is looked through."""

from __future__ import annotations

import pytest
import torch

from sharders.embedding import input_checks
from sharders.embedding.batch import Ids
from sharders.embedding.input_checks import check_batch
from sharders.embedding.input_faults import Fault

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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", FORMS)
def test_an_id_outside_is_found(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "many, uneven":
        monkeypatch.setattr(input_checks, "_FEW_IDS", 0)
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
