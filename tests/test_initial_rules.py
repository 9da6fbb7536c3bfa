"""Values from meta follow a model's own rules: those of parents, and of transformers' `_init_weights`."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from dmp import DistributedModelParallel, ShardError, ShardingEnv
from tests.ranks import mesh, run_ranks

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SMALL["vocab_size"] = 120
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 120}
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 120}
BART = {**BART, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 1}
IMAGE = {**SMALL, "image_size": 16, "patch_size": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", T5),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 120, "n_positions": 64}),
    "mamba": ("MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 120, "state_size": 4}),
    "whisper": ("WhisperForConditionalGeneration", {**BART, "num_mel_bins": 8, "max_source_positions": 32}),
    "bert": ("BertForMaskedLM", SMALL),
    "llama": ("LlamaForCausalLM", SMALL),
    "falcon": ("FalconForCausalLM", SMALL),
    "bloom": ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 120}),
    "opt": ("OPTForCausalLM", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "vit": ("ViTForImageClassification", IMAGE),
    "deberta-v2": ("DebertaV2ForMaskedLM", SMALL),
    "mixtral": ("MixtralForCausalLM", {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}),
    "bart": ("BartForConditionalGeneration", BART),
}


def build(family: str, device: str) -> nn.Module:
    import transformers

    cls, options = FAMILIES[family]
    model_class = getattr(transformers, cls)
    config = model_class.config_class(**options)
    torch.manual_seed(7)
    with torch.device(device):
        return model_class(config)  # type: ignore[no-any-return]


def misfits(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Tensors that are not of the distribution: constants and formulas to the bit, else mean and deviation."""
    found = []
    for name, b in wanted.items():
        a, b = got[name].detach().double(), b.detach().double()
        if not b.numel() or torch.equal(a, b):
            continue
        spread = float(b.std(unbiased=False))
        if spread == 0 or b.numel() < 16:
            wrong = spread == 0 or not 0.2 < float(a.abs().mean() / b.abs().mean().clamp(min=1e-30)) < 5
        else:
            n = b.numel()
            wrong = abs(float(a.std(unbiased=False)) / spread - 1) > 6 / n**0.5
            wrong |= abs(float(a.mean() - b.mean())) > 6 * spread / n**0.5
            wrong |= (a == 0).sum() != (b == 0).sum()
        if wrong:
            found.append(f"{name}: {float(a.mean()):.3g}±{float(a.std()):.3g} for {float(b.mean()):.3g}±{spread:.3g}")
    return found


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(4)
def test_families_of_transformers(family: str) -> None:
    wanted = tensors(build(family, "cpu"))
    torch.manual_seed(3)
    model = DistributedModelParallel(build(family, "meta"), ShardingEnv.single())
    assert misfits(tensors(model.module), wanted) == []
    torch.manual_seed(3)
    again = DistributedModelParallel(build(family, "meta"), ShardingEnv.single())
    assert all(torch.equal(a, b) for a, b in zip(tensors(model).values(), tensors(again).values(), strict=True))


class Scaled(nn.Module):
    """A parent that sets its children's weights, by a method of its own."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(40, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, 4)
        self.register_buffer("positions", torch.arange(6))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table.weight, std=0.001)
        for i, layer in enumerate(self.layers):
            nn.init.normal_(layer.weight, std=0.1 * (i + 1))
            layer.bias.data = torch.full((len(layer.bias),), float(i), device=layer.bias.device)
        self.positions.copy_(torch.arange(6))


class Inside(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        with torch.device(device):
            self.scaled, self.t = Scaled(), nn.Transformer(16, 2, 1, 1, 32, batch_first=True)


def test_parents_of_torchs_own_kind() -> None:
    wanted = tensors(Inside("cpu"))
    model = DistributedModelParallel(Inside("meta"), ShardingEnv.single())
    assert misfits(tensors(model.module), wanted) == []
    assert not torch.equal(model.module.scaled.layers[0].weight, model.module.scaled.layers[1].weight / 2)


def filled(kind: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    from dmp import full_state_dict

    torch.manual_seed(3)
    module = Inside("meta") if kind == "inside" else build(kind, "meta")
    env = ShardingEnv.from_mesh(mesh(shape, axes))
    return full_state_dict(DistributedModelParallel(module, env))


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("inside", ("dp",)),
        ("inside", ("shard",)),
        ("t5", ("shard",)),
        pytest.param("gpt2", ("shard",), marks=pytest.mark.slow),
        pytest.param("t5", ("dp",), marks=pytest.mark.slow),
        pytest.param("llama", ("tp",), marks=pytest.mark.slow),
        pytest.param("mamba", ("shard",), marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(3)
def test_the_same_on_every_mesh(kind: str, axes: tuple[str, ...]) -> None:
    torch.manual_seed(3)
    module = Inside("meta") if kind == "inside" else build(kind, "meta")
    wanted = DistributedModelParallel(module, ShardingEnv.single()).state_dict()
    for got in run_ranks(2, filled, kind, (2,), axes):
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(got[name], torch.as_tensor(value)), name


def test_a_large_table_is_filled_by_its_parents_rule_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmp.wrap.values.initial_values.TOGETHER_ELEMENTS", 100)
    monkeypatch.setattr("dmp.wrap.values.initial_rules.TOGETHER_ELEMENTS", 100)
    model = DistributedModelParallel(Inside("meta"), ShardingEnv.single())
    assert misfits(tensors(model.module), tensors(Inside("cpu"))) == []


class Looks(nn.Module):
    """Its rule looks at values: two layers are made alike."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.one.weight.copy_(torch.eye(4) * (1.0 + float(self.one.weight.abs().max() < 10)))
            self.other.weight.copy_(self.one.weight)


def test_a_rule_that_looks_at_values_is_run_on_them() -> None:
    model = DistributedModelParallel(Looks().to("meta"), ShardingEnv.single())
    assert torch.equal(model.module.other.weight, torch.eye(4) * 2)


def test_what_nothing_gives_values_is_an_error() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("ids", torch.arange(4))

        def reset_parameters(self) -> None:
            nn.init.zeros_(self.layer.bias)

    with pytest.raises(ShardError, match=r"\(Counted\) is on meta, and nothing gave \['ids'\] values"):
        DistributedModelParallel(Counted().to("meta"), ShardingEnv.single())


def test_what_a_constructor_does_is_said_not_to_be_done_again(caplog: pytest.LogCaptureFixture) -> None:
    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            nn.init.xavier_normal_(self.layer.weight)

    with caplog.at_level(logging.WARNING, "dmp"):
        DistributedModelParallel(nn.Sequential(Sets().to("meta")), ShardingEnv.single())
        DistributedModelParallel(nn.Sequential(Sets()), ShardingEnv.single())
    (record,) = caplog.records
    assert "Sets.__init__ calls xavier_normal_ (module '0')" in record.getMessage()


class Adapted(nn.Linear):
    """A layer as low-rank adapters extend it: the second factor is zeros, made where it is built."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(4, 2))


class ScaledRows(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.scale


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)  # type: ignore[no-any-return,no-untyped-call]


@pytest.mark.parametrize(
    ("make", "names"),
    [(Adapted, "['lora_a', 'lora_b']"), (ScaledRows, "['scale']"), (pruned, "['weight_orig', 'weight_mask']")],
)
def test_what_was_added_to_a_layer_of_torchs_is_not_drawn_as_its_weight(
    make: Callable[[], nn.Module], names: str
) -> None:
    """Zeros, ones and masks became uniform numbers, in silence."""
    with torch.device("meta"):
        module = nn.Sequential(make())
    with pytest.raises(ShardError, match=re.escape(f"is on meta, and nothing gave {names} values")):
        DistributedModelParallel(module, ShardingEnv.single())
