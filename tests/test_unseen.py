"""What a proof on guessed inputs does not see: parts that none reaches, as an encoder of images where ids are fed, are
proved alone; random numbers that are not torch's are the same in every run, or nothing is proved.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dmp import DistributedModelParallel, PlanError, ShardingEnv, full_state_dict
from sharders import TensorParallelSharder
from sharders.tensor_parallel.proof import sample
from tests.ranks import mesh, run_ranks
from tests.transformers_zoo import Llama

TP2 = ShardingEnv.abstract((2,), ("tp",))
WIDTH, HEADS = 16, 4


class Attention(nn.Module):
    """Its heads are an attribute that has to be divided; `joint`: query, key and value are one weight."""

    def __init__(self, joint: bool) -> None:
        super().__init__()
        self.num_heads = HEADS
        if joint:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, needed: str) -> torch.Tensor:
        qkv = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        q, k, v = (each.view(*x.shape[:2], self.num_heads, WIDTH // HEADS).transpose(1, 2) for each in qkv)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, joint: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(joint)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, WIDTH))

    def forward(self, x: torch.Tensor, needed: str) -> torch.Tensor:
        x = x + self.attention(self.norm(x), needed)
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Images(nn.Module):
    """(B, 3, 8, 8) -> (B, 4, WIDTH); nobody else can run its blocks."""

    def __init__(self, joint: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.image_size = 8
        self.blocks = nn.ModuleList(Block(joint) for _ in range(2))

    def forward(self, images: torch.Tensor, needed: str = "that nobody guesses") -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, needed)
        return x


class Guarded(Images):
    """Does not run on its own either."""

    def forward(self, images: torch.Tensor, *, words: list[str]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(images)


class Both(nn.Module):
    """Ids, and images where there are any."""

    def __init__(self, kind: type[Images] = Images, joint: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text, self.images, self.to_text = Llama(), kind(joint), nn.Linear(WIDTH, 64)

    def forward(self, ids: torch.Tensor, images: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = self.text(ids)
        given: Any = {"words": []} if isinstance(self.images, Guarded) else {}
        return out if images is None else out + self.to_text(self.images(images, **given)).mean(1, keepdim=True)


def test_heads_of_what_is_not_reached_are_divided() -> None:
    """Taken as proved, the first image raised: all heads on every rank."""
    found = TensorParallelSharder().place(Both(), {}, TP2)
    assert found.styles["images.blocks.1.attention.q"] == "colwise"
    assert found.divided["images.blocks.1.attention", "num_heads"] == HEADS // 2
    assert found.notes[-1].endswith("; so are those of 'images' alone") and not found.warnings


def test_a_plan_for_what_is_not_reached_is_tried_too() -> None:
    wrong = {"images.blocks.*.attention.q": "colwise", "images.blocks.*.attention.out": "rowwise"}
    with pytest.raises(PlanError, match="in module 'images' alone, run split it raises"):
        TensorParallelSharder(wrong).place(Both(), {}, TP2)


@pytest.mark.parametrize("joint", [False, True])
def test_what_nothing_reaches_is_said_or_left_whole(joint: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A joint weight that nothing shows how to take apart is not split."""
    found = TensorParallelSharder().place(Both(Guarded, joint), {}, TP2)
    assert found.styles["images.blocks.1.mlp.0"] == "colwise", "an MLP runs alone"
    if joint:
        assert "images.blocks.1.attention.qkv" not in found.styles
        assert any("left whole, one weight holds several" in note for note in found.notes)
    else:
        assert "images.blocks.1.attention.q" in found.styles
        assert "no output of the sample depends on them" in caplog.text


def runs_with_images() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("tp",)))
    model, whole = DistributedModelParallel(Both().double(), env), Both().double()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, whole)]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(64, (2, 5), generator=generator)
        images = None if step == 1 else torch.randn(2, 3, 8, 8, generator=generator).double()
        results = [m(ids, images) for m in (model, whole)]
        torch.testing.assert_close(*results)
        for result, optimizer in zip(results, optimizers, strict=True):
            result.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    values = full_state_dict(model)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(values[name], value, msg=lambda m, n=name: f"{n}: {m}")


def test_images_beside_ids_train_as_in_one_process() -> None:
    run_ranks(2, runs_with_images)


class PlacedAttention(nn.Module):
    """Reads its number of heads only where it is given places."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if places is not None:
            q = q * places[:, None, :, None].repeat(1, self.num_heads, 1, 1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(PlacedAttention() for _ in range(2))

    def forward(self, x: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, places)
        return x


def runs_with_places() -> None:
    env = ShardingEnv.from_mesh(mesh((2,), ("tp",)))
    model, whole = DistributedModelParallel(Placed().double(), env), Placed().double()
    assert model.module.layers[1].q.weight.to_local().shape[0] == WIDTH // 2
    x, places = torch.randn(2, 5, WIDTH).double(), torch.randn(2, 5).double()
    torch.testing.assert_close(model(x), whole(x))
    torch.testing.assert_close(model(x, places), whole(x, places))


def test_heads_that_are_read_where_more_is_given_are_divided() -> None:
    """V-JEPA 2's predictor has its attentions hide positions, which nobody guesses: it ended in torch's shapes."""
    run_ranks(2, runs_with_places)


class Masked(nn.Module):
    """Hides positions that are drawn by a generator of its own, or by NumPy's and Python's."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = Llama()
        self.masks = SHARED if own else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self.masks, Draws):
            return self.body(ids * self.masks.next(ids.shape))  # type: ignore[no-any-return]
        hidden = torch.from_numpy(np.random.rand(*ids.shape) < random.random())
        return self.body(ids.masked_fill(hidden, 0))  # type: ignore[no-any-return]


class Draws:
    """Of one object for all copies."""

    def __init__(self) -> None:
        self.from_seed = np.random.default_rng(0)

    def __deepcopy__(self, memo: Any) -> Draws:
        return self

    def next(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(self.from_seed.integers(0, 2, shape))


SHARED = Draws()


def test_numbers_of_numpy_and_python_are_drawn_alike_on_all_ranks_and_given_back() -> None:
    """A right plan was called wrong, and the program's own numbers went on elsewhere."""
    np.random.seed(1)
    random.seed(1)
    found = TensorParallelSharder().place(Masked(own=False), {}, TP2)
    assert found.notes[-1].startswith("proved") and "body.layers.1.attention.wq" in found.styles
    drawn = np.random.rand(), random.random()
    np.random.seed(1)
    random.seed(1)
    assert drawn == (np.random.rand(), random.random())


def test_a_model_that_is_another_each_time_is_not_called_wrong(caplog: pytest.LogCaptureFixture) -> None:
    found = TensorParallelSharder().place(Masked(own=True), {}, TP2)
    assert "body.layers.1.attention.wq" in found.styles
    assert "run twice, whole, it gives other numbers" in caplog.text


class Rooted(nn.Module):
    """The gradient of one weight is no number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.weight = Llama(), nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(ids) + (0 * self.weight).sqrt().sum()  # type: ignore[no-any-return]


def test_gradients_that_are_no_numbers_are_not_compared() -> None:
    """Longformer's with random weights: all that was split seemed wrong, and the model stayed whole."""
    found = TensorParallelSharder().place(Rooted(), {}, TP2)
    assert "body.layers.1.attention.wq" in found.styles and "body.layers.1.feed_forward.w2" in found.styles
    assert any("infinite gradients" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL", "Glm4v"])
@pytest.mark.sampled(2)
def test_encoders_of_packed_images_are_proved_by_block(kind: str) -> None:
    """They take sequences one behind the other, and where each ends; their attentions, of one weight, stayed whole."""
    import transformers

    config = getattr(transformers, f"{kind}Config")()
    encoder, text = config.vision_config, config.text_config
    encoder.depth, encoder.num_heads, encoder.hidden_size, encoder.intermediate_size = 2, 4, 64, 96
    encoder.out_hidden_size = text.hidden_size = 128
    text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads, text.intermediate_size = 2, 4, 2, 96
    text.vocab_size, text.head_dim = 512, 32
    text.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
    if hasattr(encoder, "deepstack_visual_indexes"):
        encoder.deepstack_visual_indexes = [0]
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}Model")(config)
    found = TensorParallelSharder().place(model, {}, TP2)
    assert found.styles["visual.blocks.1.attn.qkv"] == "colwise_packed_3"
    assert found.divided["visual.blocks.1.attn", "num_heads"] == 2


class Spoken(nn.Module):
    """As long as its weights say."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.lengths = Llama(), nn.Linear(64, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.body(ids)
        length = (self.lengths(x).square().sum() + 20).exp().clamp(max=1e6).long()
        places = torch.arange(int(length) if length.device.type == "cpu" else 1)
        return x * (places + 1.0).mean()  # type: ignore[no-any-return]


def test_a_model_that_is_endless_with_random_weights_is_not_run_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A voice's weights say how long each sound is: VITS was not wrapped within minutes, and took all memory."""
    monkeypatch.setattr(sample, "_LONGEST_BYTES", 1_000_000)
    found = TensorParallelSharder().place(Spoken(), {}, TP2)
    assert "body.layers.1.attention.wq" in found.styles
    assert any("is more than a sample's run is worth" in note for note in found.notes)
