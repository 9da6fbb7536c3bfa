"""Plans of models that start with a convolution are proved on images, or sounds, as large as their tables ask for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dmp import ShardingEnv
from sharders import TensorParallelSharder
from sharders.tensor_parallel import head_counts
from sharders.tensor_parallel.head_counts import ModelRuns
from sharders.tensor_parallel.proof.sample import Sample

TP2 = ShardingEnv.abstract((2,), ("tp",))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n1, self.n2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))


class Patches(nn.Module):
    """(B, C, H, W) -> (B, H / stride * W / stride, width); takes no other H and W than it was made for."""

    def __init__(self, size: tuple[int, int], stride: int, width: int) -> None:
        super().__init__()
        self.img_size = size
        self.proj = nn.Conv2d(3, width, stride, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-2:] != self.img_size:
            raise ValueError(f"{x.shape[-2:]} is not {self.img_size}")
        return self.proj(x).flatten(2).transpose(1, 2)


class Vision(nn.Module):
    def __init__(self, size: tuple[int, int] = (24, 16), stride: int = 8, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.patches = Patches(size, stride, width)
        self.positions = nn.Parameter(torch.randn(1, 1 + size[0] // stride * (size[1] // stride), width))
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class Sounds(nn.Module):
    """Mel features (B, 20, T), halved once, to positions as many as there are; its head reads the mean."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.max_source_positions = 12
        self.conv1, self.conv2 = nn.Conv1d(20, width, 3, padding=1), nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.positions = nn.Embedding(12, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(x)))).transpose(1, 2) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def proof_of(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[Sample]]:
    """Paths that are split, and what the whole model was proved on."""
    samples, found = [], ModelRuns._found

    def watch(runs: ModelRuns, *plan: object) -> head_counts.Verdict:
        verdict = found(runs, *plan)  # type: ignore[arg-type]
        if runs.model is model and not verdict.wrong:
            assert not verdict.unproved
            samples.append(runs._sample)
        return verdict

    monkeypatch.setattr(ModelRuns, "_found", watch)
    placed = TensorParallelSharder().place(model, {}, TP2)
    assert not any("not proved" in note for note in placed.notes)
    return sorted(placed.styles), samples


def test_images_of_the_size_that_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    split, samples = proof_of(Vision(), monkeypatch)
    assert {"blocks.0.attention.q", "blocks.1.attention.out", "blocks.1.mlp.0"} <= {*split}
    assert {tuple(s.feed.args[0].shape) for s in samples} == {(2, 3, 24, 16)}


def test_a_narrower_model_takes_images_as_large_though_they_are_as_wide_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split, samples = proof_of(Vision((384, 384), 64, 384, 6), monkeypatch)
    assert "blocks.0.attention.q" in split
    assert {384 in s.numbers.sizes for s in samples} == {True}
    assert {tuple(s.inputs(s.make())[0][0].shape) for s in samples} == {(2, 3, 384, 384)}


def test_sounds_as_long_as_the_positions_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    split, samples = proof_of(Sounds(), monkeypatch)
    assert "blocks.0.attention.q" in split
    assert {tuple(s.feed.args[0].shape) for s in samples} == {(2, 20, 24)}


class Waves(Sounds):
    """Samples (B, T) of one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, None])


def test_sounds_without_a_dim_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    split, samples = proof_of(Waves(), monkeypatch)
    assert "blocks.0.attention.q" in split
    assert {tuple(s.feed.args[0].shape) for s in samples} == {(2, 24)}


def test_as_few_patches_as_do_where_the_model_does_not_say_or_says_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for said in (None, (8 * 64, 8 * 64)):
        model = Vision((64, 64))
        model.patches = nn.Sequential(nn.Conv2d(3, 32, 8, 8), nn.Flatten(2), Turned())
        if said is not None:
            model.input_size = said  # type: ignore[assignment]
        _, samples = proof_of(model, monkeypatch)
        assert {tuple(s.feed.args[0].shape) for s in samples} == {(2, 3, 64, 64)}
        monkeypatch.undo()


class Turned(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


class Contrast(nn.Module):
    """How alike ids and images are, as CLIP takes them; one of them alone raises."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 32)
        self.text = nn.ModuleList(Block(32, 4) for _ in range(2))
        self.vision = Vision()
        self.project = nn.Linear(32, 10)

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor | None = None) -> torch.Tensor:
        if pixel_values is None:
            raise ValueError("give pixel_values")
        x = self.words(input_ids)
        for block in self.text:
            x = block(x)
        return self.project(x[:, 0]) @ self.vision(pixel_values).T


def test_ids_and_images_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tower was proved alone, and the vocabulary was left whole."""
    split, samples = proof_of(Contrast(), monkeypatch)
    assert {"words", "text.1.attention.q", "vision.blocks.1.attention.out"} <= {*split}
    assert {tuple(s.feed.kwargs["pixel_values"].shape) for s in samples} == {(2, 3, 24, 16)}
