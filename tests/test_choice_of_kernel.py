"""Which lookup kernel is used: the one that is named, else the fastest that takes the tables; another can be added."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardError, ShardingEnv, table_wise
from dmp.ranks import say_once
from sharders import EmbeddingBagSharder
from sharders.embedding.lookup import fbgemm_kernel, numba_kernel, numba_training
from sharders.embedding.lookup.bank import Bank, RowRange
from sharders.embedding.lookup.kernels import KERNELS, Kernel, compile_lookup, register_kernel
from sharders.embedding.lookup.numba_kernel import NumbaLookup
from sharders.embedding.lookup.torch_kernel import TorchLookup


def test_choice_of_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = Bank([[(2, 3)]], torch.float32, "cpu")
    slots = [RowRange(bank.chunks[0][0], 0, 2)]
    assert type(compile_lookup(bank, slots)) is NumbaLookup
    assert type(compile_lookup(bank, slots, kernel="fbgemm")) is fbgemm_kernel.FbgemmLookup
    assert type(compile_lookup(bank, slots, kernel="torch")) is TorchLookup
    with pytest.raises(ShardError, match="'cuda'"):
        compile_lookup(bank, slots, kernel="cuda")
    with pytest.raises(ShardError, match="float64"):
        compile_lookup(Bank([], torch.float64, "cpu"), [], kernel="fbgemm")
    monkeypatch.setattr(numba_kernel, "problem", lambda *_: "ModuleNotFoundError: no such module")
    assert type(compile_lookup(bank, slots)) is fbgemm_kernel.FbgemmLookup
    with pytest.raises(ShardError, match="no such module"):
        compile_lookup(bank, slots, kernel="numba")
    monkeypatch.setattr(fbgemm_kernel, "problem", lambda: "OSError: no such library")
    assert type(compile_lookup(bank, slots)) is TorchLookup
    with pytest.raises(ShardError, match="no such library"):
        compile_lookup(bank, slots, kernel="fbgemm")


def test_what_the_fast_kernels_do_not_take_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba_kernel, "problem", lambda dtype, _: "no numba" if dtype != torch.float32 else "")
    say_once.cache_clear()
    with caplog.at_level("WARNING", logger="dmp"):
        for dtype in (torch.float64, torch.float64, torch.bfloat16, torch.float32):
            compile_lookup(Bank([], dtype, "cpu"), [])
        compile_lookup(Bank([], torch.float64, "cpu"), [], kernel="torch")  # asked for: nothing fell back
    say_once.cache_clear()
    assert all("by the torch kernel: the numba kernel" in text and "no numba" in text for text in caplog.messages)
    assert [("float64" in text, "bfloat16" in text) for text in caplog.messages] == [(True, False), (False, True)]


def test_without_numba_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import fails: the next kernel is taken, and the tables train."""
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "sharders.embedding.lookup.numba_functions", raising=False)
    for cached in (numba_kernel.problem, numba_kernel.entry_of):
        monkeypatch.setattr(numba_kernel, cached.__name__, cached.__wrapped__)
    say_once.cache_clear()
    model = wrapped(None, 4)
    assert "kernel=fbgemm" in repr(model.module)
    model(torch.tensor([[1, 2]])).sum().backward()
    assert model.get_parameter("weight").grad is not None
    with pytest.raises(ShardError, match=r"numba kernel cannot be used: .*pip install numba"):
        wrapped("numba", 4)


def test_it_is_shown_which_is_used(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    with caplog.at_level("INFO", logger="dmp"):
        assert "kernel=numba" in repr(wrapped(None, 4).module) and "kernel=torch" in repr(wrapped("torch", 4).module)
    assert [text for text in caplog.messages if "looked up" in text] == [
        "tables are looked up by the numba kernel",
        "tables are looked up by the torch kernel",
    ]


def test_probe_reports_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> str:
        raise OSError("undefined\n symbol")

    monkeypatch.setattr(fbgemm_kernel, "_compare", broken)
    assert fbgemm_kernel.problem.__wrapped__() == "OSError: undefined symbol"


class Counting(TorchLookup):
    """Another's kernel."""

    calls = 0

    def pooled(self, *arguments: Any) -> torch.Tensor:
        Counting.calls += 1
        return super().pooled(*arguments)


def narrow(device: Any, dtype: Any, optimizer: Any, ranges: Any) -> str | None:
    return "it takes no rows wider than 4" if any(r.chunk.width > 4 for r in ranges) else None


@pytest.fixture
def counting() -> Iterator[None]:
    register_kernel(Kernel("counting", narrow, Counting))
    yield
    del KERNELS["counting"]


def wrapped(kernel: str | None, width: int) -> DistributedModelParallel:
    sharder = EmbeddingBagSharder(kernel=kernel)
    module = nn.EmbeddingBag(5, width, mode="sum")
    return DistributedModelParallel(module, ShardingEnv.single(), plan={"weight": table_wise(0)}, sharders=[sharder])


@pytest.mark.usefixtures("counting")
def test_another_kernel_is_used_where_it_is_named() -> None:
    model, ids = wrapped("counting", 4), torch.tensor([[1, 2], [4, 0]])
    before = Counting.calls
    result = model(ids)
    assert Counting.calls == before + 1
    torch.testing.assert_close(result, nn.functional.embedding_bag(ids, model.state_dict()["weight"], mode="sum"))
    wrapped(None, 4)(ids)
    assert Counting.calls == before + 1


@pytest.mark.usefixtures("counting")
def test_a_named_kernel_that_does_not_fit_says_why() -> None:
    with pytest.raises(ShardError, match="counting kernel cannot be used: it takes no rows wider than 4"):
        wrapped("counting", 8)
    with pytest.raises(ShardError, match=r"'counting', 'fbgemm', 'numba', 'torch', 'triton'.*got 'cuda'"):
        wrapped("cuda", 4)
    model = wrapped("fbgemm", 4)
    with pytest.raises(ShardError, match=r"float64 on cpu.*kernel='torch'"):
        model.double()
    assert model.state_dict()["weight"].dtype == torch.float32
    assert model(torch.tensor([[1, 2]])).dtype == torch.float32


def test_where_nothing_is_updated_no_update_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever places columns or sorts ids asks whether numba works, and waits for what that compiles."""
    asked: set[str] = set()
    for module in (numba_kernel, numba_training):
        made = module.entry_of
        monkeypatch.setattr(module, "entry_of", lambda name, *of, made=made: (asked.add(name), made(name, *of))[1])
    assert numba_kernel.problem.__wrapped__() == "" and asked == {"sum_bags"}
    assert numba_kernel.supports(torch.device("cpu"), torch.float32, None, []) is None
    numba_kernel.problem.__wrapped__(torch.float32, "gradients")
    assert {"sort_tables", "update_copy"} < asked
