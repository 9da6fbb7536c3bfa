"""What a model's own code computes of the attention weights that its split attentions give out: of all heads."""

from __future__ import annotations

import copy
import warnings
from unittest import mock

import pytest
import torch
from torch import nn

from dmp import DistributedModelParallel, ShardingEnv, ranks
from sharders.tensor_parallel.split import attention_weights, own_heads, program_hooks
from sharders.tensor_parallel.structure.transformer import Heads
from tests.ranks import mesh, run_ranks

DIM, HEADS, WORDS = 16, 4, 6


class Attention(nn.Module):
    """Returns (B, heads, T, T) weights; or with heads first, or their mean over heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.drop, self.last = nn.Dropout(0.0), torch.empty(0)

    def forward(self, x: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v = (of(x).unflatten(2, (-1, DIM // HEADS)).transpose(1, 2) for of in (self.q, self.k, self.v))
        scores = q @ k.transpose(2, 3)
        weights = self.last = self.drop(scores.softmax(-1))
        out = self.out((weights @ v).transpose(1, 2).flatten(2))
        weights = scores if form == "scores" else weights
        weights = weights.transpose(0, 1) if form == "heads first" else weights
        return out, (weights.mean(1) if form == "mean of own" else weights) if form else None


class Block(nn.Module):
    """With what the form says of the weights in its output."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up, self.down = Attention(), nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, weights = self.attention(x, form)
        if form == "used" and weights is not None:
            x = x + weights.amax((1, 3)).unsqueeze(2)
        x = x + out
        return x + self.down(self.up(x).relu()), weights


class Model(nn.Module):
    """A transformer that computes of its attentions' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, DIM), nn.Linear(DIM, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor, form: str = "") -> tuple[torch.Tensor, torch.Tensor]:
        x, kept = self.words(ids), list[torch.Tensor]()
        for block in self.blocks:
            x, weights = block(x, form)
            kept += [] if weights is None else [weights]
        value = kept[0] if kept else x
        if form == "stack":
            value = torch.stack(kept)
        elif form == "rollout":
            value = kept[0].mean(1) @ (kept[1].mean(1) + 1)
        elif form == "entropy":
            value = -(kept[0] * kept[0].log()).sum(-1).mean()
        return self.head(x), value


class _Always(Block):
    """Computes of its weights whatever it is asked for."""

    def forward(self, x: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, weights = super().forward(x, "used")
        return out, weights if form else None


def _always() -> None:
    """The proof runs such a model too: ranks that are simulated were taken for those of a group that is gone."""
    oracle = Model()
    oracle.blocks = nn.ModuleList(_Always() for _ in range(2))
    model = DistributedModelParallel(copy.deepcopy(oracle), ShardingEnv.from_mesh(mesh((2,), ("tp",))))
    assert model.module.blocks[0].attention.q.weight.placements[0].is_shard()
    ids = torch.randint(50, (3, WORDS), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(ids)[0], oracle(ids)[0])


def test_a_model_that_always_computes_of_weights_is_split() -> None:
    run_ranks(2, _always)


def _compiled(forms: tuple[str, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's of hooks that it does not trace
        _as_in_one_process(forms, True)


def _as_in_one_process(forms: tuple[str, ...], compiled: bool = False) -> None:
    torch.manual_seed(0)
    oracle = Model().double()
    model = DistributedModelParallel(copy.deepcopy(oracle), ShardingEnv.from_mesh(mesh((2,), ("tp",))))
    for block in model.module.blocks if compiled else ():
        block.compile(backend="aot_eager")
    ids = torch.randint(50, (3, WORDS))
    for form in forms:
        got, want = model(ids, form), oracle(ids, form)
        torch.testing.assert_close(got, want, msg=lambda said, form=form: f"{form}: {said}")
        assert type(got[1]) is torch.Tensor
        for out, value in (got, want):
            (out.square().mean() + value.square().mean()).backward()
        for (name, mine), of in zip(model.named_parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), of.grad, msg=f"{form} {name}")  # type: ignore[union-attr]
    if not compiled:
        model(ids), oracle(ids)
        kept, whole = (m.blocks[0].attention.last for m in (model.module, oracle))
        torch.testing.assert_close(kept.mean(1), whole.mean(1))


def test_what_a_model_makes_of_weights_is_of_all_heads() -> None:
    """It was of each rank's own heads, without a word, and a loss of it trained each rank otherwise."""
    run_ranks(2, _as_in_one_process, ("heads first", "mean of own", "used", "entropy", "rollout", "stack"))


@pytest.mark.slow
def test_where_a_model_is_compiled() -> None:
    run_ranks(2, _compiled, ("used", "mean of own", "stack"), timeout=300)


def _dropped() -> None:
    model = DistributedModelParallel(Model(), ShardingEnv.from_mesh(mesh((2,), ("tp",))))
    ids = torch.randint(50, (3, WORDS))
    with mock.patch.object(own_heads, "_together") as asked:
        for block in model.module.blocks:
            block.register_forward_hook(lambda _, __, output: (output[0], None))
        model(ids, "stack and drop")
    assert not asked.called


def test_weights_that_nobody_reads_are_not_exchanged() -> None:
    run_ranks(2, _dropped)


def _hooked() -> None:
    """From before wrapping: behind what converts."""
    oracle, seen = Model(), dict[tuple[bool, str], torch.Tensor]()
    split = copy.deepcopy(oracle)
    for model in (oracle, split):
        for path in ("words", "blocks.0.attention", "blocks.0.attention.out", "blocks.0.up", "blocks.0.down"):
            where = (model is split, path)
            model.get_submodule(path).register_forward_hook(
                lambda _, __, out, where=where: seen.update({where: out[0] if isinstance(out, tuple) else out})
            )
    wrapped = DistributedModelParallel(split, ShardingEnv.from_mesh(mesh((2,), ("tp",))))
    ids = torch.randint(50, (3, WORDS))
    wrapped(ids), oracle(ids)
    for (of_split, path), out in seen.items():
        assert type(out) is torch.Tensor, path
        if of_split:
            torch.testing.assert_close(out, seen[False, path])


def _hooked_backward() -> None:
    model = DistributedModelParallel(Model(), ShardingEnv.from_mesh(mesh((2,), ("tp",))))
    with mock.patch.object(program_hooks.logger, "warning") as said:
        model.module.blocks[0].register_full_backward_hook(lambda *_: None)
        model(torch.randint(50, (3, WORDS)))
        assert not said.called
        model.module.blocks[1].down.register_full_backward_hook(lambda *_: None)
        model(torch.randint(50, (3, WORDS))), model(torch.randint(50, (3, WORDS)))
    assert said.call_count == 1 and said.call_args[0][1] == "blocks.1.down"


def test_hooks_of_the_program_on_what_is_split() -> None:
    """Those from before wrapping saw DTensors, and backward hooks a rank's part, without a word."""
    run_ranks(2, _hooked)
    run_ranks(2, _hooked_backward)


def _told_of_a_part() -> None:
    model = DistributedModelParallel(Model(), ShardingEnv.from_mesh(mesh((2,), ("tp",))))
    ids = torch.randint(50, (3, WORDS))
    model(ids)
    first, second = model.module.blocks
    for block in (first, second):  # the latter's is of what all ranks have
        block.register_forward_hook(lambda *_: None)
    first.attention.drop.register_forward_hook(lambda *_: None)
    with mock.patch.object(ranks, "say_once") as said:
        model(ids), model(ids)
    shape = 3, 2, WORDS, WORDS
    assert said.call_count == 1
    assert f"a hook on 'blocks.*.attention.drop' is shown a tensor {shape} of this rank's" in said.call_args[0][0]
    with mock.patch.object(ranks, "say_once") as said:
        model(ids, "mean of own"), model(ids, "scores"), model(ids, "scores")
    assert said.call_count == 1 and "attention 'blocks.*.attention', whose heads are split" in said.call_args[0][0]


def test_hooks_and_scores_that_are_of_a_part_are_told() -> None:
    """Of attention dropout, whose shape does not tell where heads are, and of what no softmax gave; once."""
    run_ranks(2, _told_of_a_part)


def _as_many_samples_as_heads() -> None:
    """Where a dimension of as many may be either, what another batch has told, or the form of the output, decides."""
    model = DistributedModelParallel(Model(), ShardingEnv.from_mesh(mesh((2,), ("tp",))))
    for num in (3, HEADS // 2):
        shape = model(torch.randint(50, (num, WORDS)), "heads first")[1].shape
        assert shape == (HEADS, num, WORDS, WORDS)
    maker = attention_weights._Maker("", mesh((2,), ("tp",)), Heads(HEADS, HEADS, DIM // HEADS))
    for out, heads in (((5, 2, 8), 0), ((2, 5, 8), 1), ((2, 2, 8), 1)):
        of = maker._of(torch.empty(2, 2, 5, 5), torch.empty(out), False)
        assert of is not None and of.heads == heads


def test_as_many_samples_as_a_rank_has_heads() -> None:
    run_ranks(2, _as_many_samples_as_heads)


def _masks() -> None:
    """In training, where dropout may have made weights larger: one that all ranks have stays what it is."""
    weights = nn.functional.dropout(torch.rand(3, 1, WORDS, WORDS).softmax(-1), 0.5)
    zero = torch.zeros(3, 1, WORDS, WORDS)  # values of a projection that begins at zero
    for given, whole in ((zero, 1), (torch.ones(3, 1, WORDS, WORDS).tril(), 1), (weights, 2), (-weights, 1)):
        own_heads.mark(given, own_heads.Of(mesh((2,), ("tp",)), 1, True))
        assert (given + 0).shape == (3, whole, WORDS, WORDS)


def test_masks_are_no_weights() -> None:
    run_ranks(2, _masks)


def _copied_alone() -> None:
    """Where an attention keeps its weights, which are no part of its state."""
    model = DistributedModelParallel(Model(), ShardingEnv.from_mesh(mesh((2,), ("tp",))))
    with torch.no_grad():
        model(torch.randint(50, (3, WORDS)))
    attention = model.module.blocks[0].attention
    if model.env.rank == 0:
        attention.copied = copy.deepcopy(attention.last)
        assert type(attention.copied) is own_heads.OwnHeads
    assert attention.last.shape[1] == HEADS


def test_a_rank_copies_kept_weights_alone() -> None:
    run_ranks(2, _copied_alone)
