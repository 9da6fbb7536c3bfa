"""Tables that are left to the data-parallel part are said once, on rank 0, with their bytes and why."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, PlanError, ShardingEnv, row_wise, to_unsharded
from tests.ranks import mesh, run_ranks


class Shifted(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids + 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.EmbeddingBag(8, 4, mode="sum")
        self.scaled = nn.EmbeddingBag(8, 4, scale_grad_by_freq=True)
        self.sparse, self.most = nn.Embedding(8, 4, sparse=True), nn.EmbeddingBag(8, 4, mode="max")
        self.shifted, self.tied, self.head = Shifted(9, 4), nn.Embedding(8, 4), nn.Linear(4, 8)
        self.head.weight = self.tied.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.tied(ids))  # type: ignore[no-any-return]


def said(large: bool) -> list[tuple[str, str]]:
    return said_of(Net(), large)


def said_of(model: nn.Module, large: bool = False) -> list[tuple[str, str]]:
    from dmp.plans import remarks

    records: list[logging.LogRecord] = []
    handler, log, before = logging.Handler(), logging.getLogger("dmp"), remarks.LARGE_BYTES
    handler.emit = records.append  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    remarks.LARGE_BYTES = 1 if large else before
    try:
        DistributedModelParallel(model, ShardingEnv.from_mesh(mesh((2,), ("dp",))))
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
        remarks.LARGE_BYTES = before
    return [(r.levelname, r.getMessage()) for r in records]


def test_what_stays_whole_is_said_once_with_the_reason() -> None:
    on_first, on_second = run_ranks(2, said, False)
    assert on_second == []
    texts = [text for _, text in on_first]
    for name, num_bytes, why in [
        ("scaled", 128, "scale_grad_by_freq=True"),
        ("sparse", 128, "sparse=True"),
        ("most", 128, "mode='max'"),
        ("shifted", 144, "Shifted has a forward of its own"),
        ("tied", 128, "tied to 'head.weight'"),
    ]:
        (text,) = [t for t in texts if t.startswith(f"'{name}.weight' ({num_bytes} bytes)")]
        assert text.endswith(why) and "whole on every rank" in text
    assert not any("'kept.weight'" in text for text in texts)
    assert any(text == "6 dense parameters of 688 bytes are whole on every data rank" for text in texts)
    (counts,) = [text for level, text in on_first if level != "INFO"]
    assert "'scaled' has scale_grad_by_freq=True: each of the 2 data ranks divides" in counts


class Quotients(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.weight, self.sparse = nn.Parameter(torch.ones(8, 4)), sparse


def _said_of_quotients() -> list[tuple[str, str]]:
    return said_of(nn.ModuleDict({"one": Quotients(True), "other": Quotients(False)}))


def test_gradients_that_nobody_averages_are_told_before_the_backward_pass() -> None:
    on_first, _ = run_ranks(2, _said_of_quotients)
    (text,) = [text for level, text in on_first if level == "WARNING"]
    assert text.startswith("Quotients at 'one' has sparse=True") and text.endswith("sparse=False before wrapping")


def test_a_large_one_is_a_warning() -> None:
    on_first, _ = run_ranks(2, said, True)
    assert sum(level == "WARNING" for level, _ in on_first) == 6


def _said_of_collections() -> list[tuple[str, str]]:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    class Doubled(EmbeddingBagCollection):
        def forward(self, features: object) -> object:
            return super().forward(features)

    class Scaled(EmbeddingBagCollection):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.scale = nn.Parameter(torch.ones(2))

    class Named(EmbeddingBagCollection):
        """Keeps the forward."""

    def made(kind: type[nn.Module]) -> nn.Module:
        names = ("t", "u")
        tables = [EmbeddingBagConfig(name=n, num_embeddings=8, embedding_dim=4, feature_names=[n]) for n in names]
        return kind(tables=tables)

    model = nn.ModuleDict(
        {"own": made(Doubled), "more": made(Scaled), "named": made(Named), "tied": made(EmbeddingBagCollection)}
    )
    model["twin"] = made(EmbeddingBagCollection)
    for name in ("t", "u"):
        model["twin"].embedding_bags[name].weight = model["tied"].embedding_bags[name].weight
    return said_of(model)


def test_a_collection_with_a_forward_of_its_own_is_said_aloud() -> None:
    on_first, on_second = run_ranks(2, _said_of_collections)
    assert on_second == []
    (own,) = [(level, text) for level, text in on_first if "'own'" in text]
    assert own[0] == "WARNING" and "Doubled at 'own' (256 bytes in 2 parameters)" in own[1]
    assert "Doubled has a forward of its own" in own[1] and "module_type is Doubled" in own[1]
    (more,) = [(level, text) for level, text in on_first if "Scaled at 'more'" in text]
    assert more[0] == "WARNING" and "parameters and buffers" in more[1]
    assert [level for level, text in on_first if "'tied'" in text and "tied to 'twin" in text] == ["INFO"]
    assert not any("'named'" in text or "of this EmbeddingBag" in text for _, text in on_first)


def _changed_collections() -> dict[str, tuple[bool, str]]:
    """What was done to a collection or to its table -> whether the results are the plain one's, and what is said."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    config = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])
    batch = KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 3, 5]), lengths=torch.tensor([2, 1]))

    def change(ebc: Any, what: str) -> nn.Module:
        bag, forward = ebc.embedding_bags["t"], ebc.forward
        if what == "hook":
            bag.register_forward_hook(lambda module, given, out: out * 2)
        elif what == "forward":
            ebc.forward = lambda features: forward(features)
        elif what == "class":
            ebc.embedding_bags["t"] = Tripled(8, 4, mode="sum", include_last_offset=True)
        elif what in ("mode", "scale_grad_by_freq", "padding_idx"):
            setattr(bag, what, {"mode": "mean", "scale_grad_by_freq": True, "padding_idx": 3}[what])
        return ebc  # type: ignore[no-any-return]

    found = {}
    for what in ("hook", "forward", "class", "mode", "scale_grad_by_freq", "padding_idx"):
        torch.manual_seed(0)
        plain = change(EmbeddingBagCollection(tables=[config]), what)
        torch.manual_seed(0)
        model = nn.ModuleDict({"ebc": change(EmbeddingBagCollection(tables=[config]), what)})
        said_all = said_of(model)
        same = torch.equal(model["ebc"](batch).values(), plain(batch).values())
        found[what] = same, " ".join(text for level, text in said_all if level == "WARNING")
    return found


class Tripled(nn.EmbeddingBag):
    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        return 3 * super().forward(*args, **options)


def test_what_was_done_to_a_collection_is_kept_and_said() -> None:
    on_first, on_second = run_ranks(2, _changed_collections)
    reasons = {"hook": "embedding_bags.t: it has hooks", "forward": "its forward was replaced", "class": "Tripled"}
    reasons |= {"mode": "", "scale_grad_by_freq": "scale_grad_by_freq=True", "padding_idx": "padding_idx=3"}
    for what, reason in reasons.items():
        assert on_first[what][0] and on_second[what][0], what
        assert "at 'ebc'" in on_first[what][1] and reason in on_first[what][1], (what, on_first[what])


class Coded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding.from_pretrained(torch.arange(32).view(8, 4))
        self.kept = nn.EmbeddingBag(32, 4, mode="sum")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.kept(self.codes(ids))  # type: ignore[no-any-return]


def _coded() -> tuple[bool, str]:
    env, ids, plan = ShardingEnv.from_mesh(mesh((2,), ("dp",))), torch.arange(8), {"kept.weight": row_wise()}
    model = DistributedModelParallel(Coded(), env, plan=plan)
    model(ids).sum().backward()
    with pytest.raises(PlanError) as refused:
        DistributedModelParallel(Coded(), env, plan=plan | {"codes.weight": row_wise()})
    return torch.allclose(model(ids), to_unsharded(model)(ids)), str(refused.value)


def test_a_table_of_whole_numbers_is_left_whole() -> None:
    for is_equal, refused in run_ranks(2, _coded):
        assert is_equal and "no sharder takes (its weight is of torch.int64)" in refused
    assert any(
        "'codes.weight'" in text and text.endswith("torch.int64") for _, text in run_ranks(2, said_of, Coded())[0]
    )
