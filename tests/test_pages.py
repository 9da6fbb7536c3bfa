"""Tables and their optimizer state ask for large pages, however they came to be where they are."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dmp.ranks import say_once
from sharders.embedding.lookup import pages
from sharders.embedding.lookup.bank import Bank, RowRange
from sharders.embedding.lookup.kernels import compile_lookup
from sharders.embedding.lookup.optimizers import OptimizerSpec
from sharders.embedding.lookup.pages import on_large_pages, to_write
from sharders.embedding.lookup.reads import Bags, Segmented

ROWS, WIDTH = 50_000, 64  # 12.8 MB
ADAM = OptimizerSpec.make("adam")


def flags(tensor: Tensor) -> set[str]:
    """Linux's of the memory in the tensor's middle."""
    place, found = tensor.data_ptr() + tensor.numel() * tensor.element_size() // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, stop = (int(bound, 16) for bound in first.split("-"))
            found = start <= place < stop
        elif found and first == "VmFlags:":
            return set(rest)
    raise AssertionError(f"{place:x} is not mapped")


@pytest.fixture
def asked() -> None:
    if not pages._page_bytes():
        pytest.skip("this system has no large pages")


def tensors(bank: Bank) -> list[Tensor]:
    return [bank.weights, *bank.state.values()]


@pytest.mark.usefixtures("asked")
def test_tables_and_state_lie_on_large_pages() -> None:
    """When made, copied and cast; what they hold is what it would be anyway."""
    bank = Bank([[(ROWS, WIDTH)]], torch.float32, "cpu", ADAM)
    assert all("hg" in flags(tensor) and not tensor.any() for tensor in tensors(bank))
    bank.weights.copy_(torch.arange(bank.weights.numel()))
    other = copy.deepcopy(bank)
    assert all("hg" in flags(tensor) for tensor in tensors(other))
    assert torch.equal(other.weights, bank.weights) and other.weights.data_ptr() != bank.weights.data_ptr()
    bank.apply(torch.Tensor.double)
    assert all("hg" in flags(tensor) for tensor in tensors(bank))
    assert torch.equal(other.weights, bank.weights.float())


@pytest.mark.usefixtures("asked")
def test_large_results_lie_on_large_pages() -> None:
    bank = Bank([[(9, WIDTH)]], torch.float32, "cpu", ADAM)
    lookup = compile_lookup(bank, [RowRange(bank.chunks[0][0], 0, 9)], kernel="numba")
    ids = torch.zeros(ROWS, dtype=torch.int64)
    for result in (lookup.pooled(Bags(ids, torch.arange(ROWS + 1))), lookup.rows(Segmented(ids, [(0, ROWS)]))):
        assert "hg" in flags(result) and not result.any()


@pytest.mark.usefixtures("asked")
def test_memory_of_results_that_is_used_again_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    wishes: list[int] = []
    monkeypatch.setattr(pages, "_advise", lambda start, stop, wish: wishes.append(wish))
    memory = torch.zeros(3 * ROWS, WIDTH)
    assert to_write(memory[:ROWS]).data_ptr() == memory.data_ptr()
    assert wishes == [pages._ON_WRITING]


@pytest.mark.usefixtures("asked")
def test_only_whole_pages_of_a_tensor_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of small and shared tensors."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(pages, "_advise", lambda start, stop, _: found.append((start, stop)))
    page = pages._page_bytes()
    part = torch.zeros(3 * ROWS, WIDTH)[ROWS : 2 * ROWS]
    for tensor in (part, torch.zeros(8, WIDTH), torch.zeros(ROWS, WIDTH).share_memory_()):
        assert on_large_pages(tensor) is tensor
    assert found and len({*found}) == 1
    start, stop = found[0]
    assert start % page == stop % page == 0
    assert part.data_ptr() <= start < stop <= part.data_ptr() + part.numel() * 4 < stop + page


@pytest.mark.parametrize("setting", ["missing", "always madvise [never]", "always [madvise] never"])
def test_systems_without_large_pages_have_tables_too(
    setting: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where there is no such setting, where it is off, and where the wish is refused, which is said once."""
    monkeypatch.setattr(pages, "_SETTINGS", tmp_path)
    monkeypatch.setattr(pages, "_page_bytes", pages._page_bytes.__wrapped__)
    monkeypatch.setattr(pages, "_ON_WRITING", -1)
    say_once.cache_clear()
    if setting != "missing":
        (tmp_path / "enabled").write_text(setting)
        (tmp_path / "hpage_pmd_size").write_text(str(2 << 20))
    with caplog.at_level("DEBUG", logger="dmp"):
        banks = [Bank([[(ROWS, WIDTH)]], torch.float32, "cpu", ADAM) for _ in range(2)]
    assert not any(tensor.any() for bank in banks for tensor in tensors(bank))
    said = [text for text in caplog.messages if "small pages" in text]
    assert len(said) == (1 if "[madvise]" in setting and pages._page_bytes() else 0)
