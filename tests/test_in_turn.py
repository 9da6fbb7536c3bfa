"""Modules that only some ranks run: they are no units of FSDP2, which would mix their weights in silence."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dmp import DistributedModelParallel, ShardingEnv
from sharders.data_parallel.blocks import find_units, say_of_unsure
from sharders.data_parallel.in_turn import runs_in_turn
from tests.beside_plain import trains
from tests.ranks import mesh, run_ranks


class Expert(nn.Module):
    """A small feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x).relu())
        return out


class Lists(nn.Module):
    """Modules in a list, that others run."""

    def __init__(self, number: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Expert() for _ in range(number))
        self.head = nn.Linear(6, 2)


class InTurn(Lists):
    """Each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, (part, _) in enumerate(zip(self.parts[:], range(9), strict=False)):
            if number and self.training:
                x = checkpoint(part, x, use_reentrant=False)
            else:
                x = part(x)
        out: torch.Tensor = self.head(x)
        return out


class ByNumber(Lists):
    """Each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for i in range(len(self.parts)):
                x = self.parts[i](x)
        return x


class Together(InTurn):
    """Each, in a comprehension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(x) for part in self.parts]).sum(0)


class Asked(Lists):
    """Those that a batch's samples ask for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, which = torch.zeros_like(x), (x[:, 0] * 10).long().clamp(0, len(self.parts) - 1)
        for i, part in enumerate(self.parts):
            if (rows := which == i).any():
                out[rows] = part(x[rows])
        found: torch.Tensor = self.head(out)
        return found


class Dropped(Lists):
    """Some are passed over."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            if torch.rand(()) < 0.5:
                continue
            x = part(x)
        return x


class ByMethod(InTurn):
    """Each, in a method that forward calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x) + 1

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Filled(Asked):
    """Each is only filled in turn."""

    def reset(self) -> None:
        for part in self.parts:
            self.fill(part)

    def fill(self, part: nn.Module) -> None:
        for p in part.parameters():
            nn.init.zeros_(p)


class Chosen(Lists):
    """One of them, or one in a branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, part in enumerate(self.parts):
            x = part(x) if x.sum() > i else x
        for i in range(3):
            x = x + self.norm(x, i)
        out: torch.Tensor = self.parts[int(x.sum())](x)
        return out

    def norm(self, x: torch.Tensor, by: int) -> torch.Tensor:
        return x / (1 + by)


class Branches(nn.Module):
    """Towers of several blocks, one of which a batch runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low, self.high = (nn.Sequential(Expert(), Expert()) for _ in range(2))
        self.always, self.head = nn.Sequential(Expert(), Expert()), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.low(x) if x[:, 0].mean() < 0.2 else self.high(x)
        out: torch.Tensor = self.head(self.always(x))
        return out


class Returns(Branches):
    """Likewise, by a forward that ends early."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.always(x)
        if x[:, 0].mean() < 0.2:
            return self.low(x)  # type: ignore[no-any-return]
        return self.high(x)  # type: ignore[no-any-return]


class Keyed(Branches):
    """Likewise, by a key."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"low": self.low, "high": self.high})
        del self.low, self.high

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.towers["low" if x[:, 0].mean() < 0.2 else "high"](x)
        out: torch.Tensor = self.head(self.always(x))
        return out


class NamedKeys(Keyed):
    """Likewise, by keys that stand in branches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.towers["low"](x) if x[:, 0].mean() < 0.2 else self.towers["high"](x)
        out: torch.Tensor = self.head(self.always(x))
        return out


@pytest.mark.parametrize("kind", [Branches, Returns, Keyed, NamedKeys])
def test_towers_that_a_batch_chooses_are_no_units(kind: Any) -> None:
    assert list(find_units(kind(), None)) == ["always.0", "always.1"]
    assert len(find_units(kind(), [Expert])) == 6


def test_a_class_that_has_no_source_of_its_own() -> None:
    """As one that `torch.nn.utils.parametrize` makes: its methods were written somewhere. Towers were units."""
    towers, each = type("Made", (Branches,), {}), type("Made", (InTurn,), {"also": staticmethod(len)})
    assert list(find_units(towers(), None)) == ["always.0", "always.1"]
    assert list(find_units(each(), None)) == ["parts.0", "parts.1", "parts.2"]
    eager = type("Made", (InTurn,), {"forward": torch.relu})  # of which nobody can read what it runs
    assert not runs_in_turn(eager, "parts")


class Nested(Keyed):
    """All of them, in a dict that holds what others call by attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.towers["low"](x)
        out: torch.Tensor = self.head(self.always(self.towers.high(x)))
        return out


def test_towers_that_are_all_run() -> None:
    assert len(find_units(Nested(), None)) == 6


class UnlessGiven(Branches):
    """As encoders are run: where nobody hands in what they gave; and as towers of images are, where there are some."""

    def forward(self, x: torch.Tensor | None = None, image: Any = None, *, encoded: Any = None) -> torch.Tensor:
        if x is None:
            return torch.zeros(())
        if encoded is None:
            encoded = self.low(x)
        if image is not None:
            encoded = encoded + self.high(image)
        out: torch.Tensor = self.head(self.always(encoded))
        return out


def test_what_is_run_unless_its_result_is_given() -> None:
    """Encoders of T5, BART and their like were gathered whole, with the root."""
    assert list(find_units(UnlessGiven(), None)) == ["low.0", "low.1", "always.0", "always.1"]


class Pairs(nn.Module):
    """Layers that are lists, as of an attention and an MLP in vit-pytorch; of each the last is passed over at times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(nn.ModuleList((Expert(), Mixing(), Expert())) for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for expert, mixing, last in self.stages:
            x = mixing(x + expert(x))
            if x[:, 0].mean() < 0.2:
                x = last(x)
        out: torch.Tensor = self.head(x)
        return out


class Mixing(Expert):
    """Another class."""


class ByPlace(Pairs):
    """By its place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, stage in enumerate(self.stages):
            x = stage[1](x + self.stages[number][0](x))
        for i in range(2):
            x = self.stages[i][2](x)
        out: torch.Tensor = self.head(x)
        return out


def test_layers_that_are_lists() -> None:
    """They were gathered whole, with the root, and nothing was said."""
    assert list(find_units(Pairs(), None)) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    assert list(find_units(ByPlace(), None)) == [f"stages.{i}.{place}" for i in range(2) for place in (1, 2)]


class EitherWay(Branches):
    """As a model with an encoder, or without, calls its language model."""

    def forward(self, x: torch.Tensor, *, encoded: Any = None) -> torch.Tensor:
        if encoded is not None:
            x = self.always(x + self.low(encoded))
        elif x[:, 0].mean() < 0.2:
            x = self.always(self.high(x))
        else:
            x = self.always(x)
        out: torch.Tensor = self.head(x)
        return out


def test_what_each_branch_runs() -> None:
    """BLIP-2's language model was gathered whole, with the root."""
    assert list(find_units(EitherWay(), None)) == ["always.0", "always.1"]


class InEachBranch(Branches):
    """In each branch, as the blocks of vision transformers are run; and those of a head, where the model has one."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is not None:
            for block in self.low:
                x = block(x) * mask
        elif self.training and len(x) > 2:
            x = checkpoint(self.low, x)
        else:
            x = self.low(x)
        if self.high is not None:
            x = self._last(x)
        return self.head(self.always(x)) if len(x) > 1 else self.head(x)

    def _last(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.high(x)
        return out


def test_what_is_run_in_each_branch() -> None:
    """Blocks of timm's vision transformers were gathered whole, with the root."""
    assert list(find_units(InEachBranch(), None)) == ["low.0", "low.1", "high.0", "high.1"]


class EachWayOut(Branches):
    """On each way that returns, as PEFT calls the model that it adapts; of the last, one only, and one by a method."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 4:
            if len(x) > 8:
                raise ValueError("too many")
            with torch.enable_grad():
                return self.high(self.always(x))  # type: ignore[no-any-return]
        if len(x) > 2:
            return self._late(x)
        out: torch.Tensor = self.always(self.low(x))
        return out

    def _late(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.always(x)
        return out if len(x) > 3 else self.low(out)


def test_what_is_run_on_each_way_out() -> None:
    """What a low-rank adapter of PEFT is around was told to be gathered whole."""
    assert list(find_units(EachWayOut(), None)) == ["always.0", "always.1"]


@pytest.mark.parametrize("kind", [InTurn, ByNumber, Together, ByMethod])
def test_each_is_run(kind: Any) -> None:
    assert runs_in_turn(kind, "parts") and not runs_in_turn(kind, "others")
    assert list(find_units(kind(), None)) == ["parts.0", "parts.1", "parts.2"]


@pytest.mark.parametrize("kind", [Asked, Dropped, Chosen, Filled])
def test_it_is_not_seen_that_each_is_run(kind: Any) -> None:
    assert not runs_in_turn(kind, "parts") and not find_units(kind(), None)
    assert list(find_units(kind(), "parts.*")) == ["parts.0", "parts.1", "parts.2"]


class Words(nn.Module):
    """torch's own: of rare words, a rank's batch may have none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.out = nn.Linear(6, 16), nn.AdaptiveLogSoftmaxWithLoss(16, 40, [5, 20])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.body(x), (x[:, 0] * 40).long().clamp(0, 39)).output
        return out


def batch(random: torch.Generator) -> torch.Tensor:
    """(ranks, samples, columns): the first columns of ranks differ, in which experts are told apart."""
    x = torch.rand(2, 5, 6, generator=random)
    x[..., 0] = torch.tensor([[0.05, 0.1, 0.15, 0.11, 0.01], [0.11, 0.2, 0.25, 0.9, 0.3]])
    return x


def beside_one_process(kind: Any, axis: str) -> None:
    env = ShardingEnv.from_mesh(mesh((2,), (axis,)))
    trains(DistributedModelParallel(kind(), env), kind(), env, batch)


@pytest.mark.parametrize("axis", ["dp", "shard"])
@pytest.mark.parametrize("kind", [Asked, Words, Branches, Keyed, Pairs])
@pytest.mark.sampled(6)
def test_experts_that_only_some_ranks_run(kind: Any, axis: str) -> None:
    run_ranks(2, beside_one_process, kind, axis)


def test_what_is_no_unit_is_told(caplog: pytest.LogCaptureFixture) -> None:
    from sharders.data_parallel.blocks import say_of_unsure

    with caplog.at_level(logging.WARNING, "dmp"):
        say_of_unsure(InTurn(), (), ())
        say_of_unsure(Asked(), (), ["parts.0", "parts.1", "parts.2"])  # by the model's own plan
        assert not caplog.text
        say_of_unsure(Asked(), (), ())
        say_of_unsure(Branches(), (), ["always.0", "always.1"])
    assert "modules of 'parts' are gathered with what holds them" in caplog.text
    assert "FSDPWrapper(units=['parts.*'])" in caplog.text and "FSDPWrapper(units=['low.*'])" in caplog.text


class NotPenalized(Lists):
    """Its forward comes to nothing that goes over the values of all weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        out: torch.Tensor = self.head(x) * self.count()
        return out

    def penalty(self) -> torch.Tensor:
        return sum(p.norm() for p in self.parameters())  # type: ignore[return-value]

    def count(self) -> int:
        return sum(p.numel() for p in self.parameters()) * next(self.parameters()).element_size()


class Penalized(NotPenalized):
    """With a term over all weights in its loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        out: torch.Tensor = self.head(x) + self.penalty()
        return out


class Around(nn.Module):
    """A loss around a model, of which it asks the penalty."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.model = kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(x) + self.model.penalty()
        return out


def test_blocks_of_a_forward_that_reads_all_weights_are_gathered_with_the_root(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Their weights were in pieces beside the root's, in FuxiCTR's models: an AssertionError of torch's, bare."""
    assert list(find_units(Penalized(), None)) == [] and list(find_units(Around(NotPenalized), None)) == []
    assert list(find_units(NotPenalized(), None)) == ["parts.0", "parts.1", "parts.2"]
    say_of_unsure(Penalized(), (), ())
    (said,) = (record.getMessage() for record in caplog.records if "goes over all parameters" in record.getMessage())
    assert said.startswith("'parts.0' (and 2 more) is gathered with the root, not by itself: Penalized.penalty()")
