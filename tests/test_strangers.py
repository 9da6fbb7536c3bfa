"""Transformers that none of us wrote, on meshes with a tensor axis, beside the unsharded model on the global batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dmp import DistributedModelParallel, ShardingEnv, full_state_dict, load_checkpoint, replicate, save_checkpoint
from tests.ranks import mesh, run_ranks
from tests.strangers import HEADS, STRANGERS, WIDTH

STEPS = 3
SAMPLE = ("contrastive", "relative", "functional", "stacks")  # the others are marked slow


def transformer_of_hugging_face(name: str) -> nn.Module:
    """A tiny one; its logits alone."""
    import transformers as hf

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "max_position_embeddings": 24}
    kind = name.removesuffix("Model") if name == "CLIPModel" else name.removesuffix("ForMaskedLM")
    options: dict[str, Any] = {**sizes}
    if name == "CLIPModel":
        vision = {k: v for k, v in sizes.items() if k[0] in "hni"} | {"image_size": 8, "patch_size": 4}
        options = {"text_config": {**sizes, "eos_token_id": 2}, "vision_config": vision, "projection_dim": 16}
    elif name.startswith("Deberta"):
        options |= {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
    return getattr(hf, name)(getattr(hf, f"{kind}Config")(**options))  # type: ignore[no-any-return]


HUGGING_FACE = ("BertForMaskedLM", "RobertaForMaskedLM", "MPNetForMaskedLM", "DebertaForMaskedLM", "CLIPModel")


def batch_of(name: str, step: int, rank: int | None, ranks: int) -> dict[str, torch.Tensor]:
    """All samples, or a rank's; CLIP's batch is one for all, since its logits are of pairs."""
    generator = torch.Generator().manual_seed(step)
    given: dict[str, torch.Tensor] = {"input_ids": torch.randint(4, 63, (4, 8), generator=generator)}
    if name == "CLIPModel":
        return {**given, "pixel_values": torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)}
    return given if rank is None else {k: v.chunk(ranks)[rank] for k, v in given.items()}


def build(name: str) -> nn.Module:
    """In float64, with weights that tell wrong from right: biases no zero, norms no identity."""
    torch.manual_seed(5)
    model = (STRANGERS[name][0]() if name in STRANGERS else transformer_of_hugging_face(name)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def whole(t: torch.Tensor | None) -> torch.Tensor | None:
    return t.full_tensor() if isinstance(t, DTensor) else t


def loss_of(model: Callable[..., Any], name: str, step: int, rank: int | None, ranks: int) -> torch.Tensor:
    if name in STRANGERS:
        everyone = STRANGERS[name][1](step)
        out = model(*(everyone if rank is None else (t.chunk(ranks)[rank] for t in everyone)))
    else:
        result = model(**batch_of(name, step, rank, ranks))
        out = result[0]
    to = torch.randn(out.shape[1:], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (out - to).pow(2).mean()


def same(name: str, what: str, ours: torch.Tensor | None, theirs: torch.Tensor | None, tol: float) -> None:
    if theirs is None or ours is None:  # such as a head's pooler, which no loss reaches
        assert ours is theirs or not (ours if theirs is None else theirs).any(), f"{what} of {name}"  # type: ignore[union-attr]
        return
    torch.testing.assert_close(ours, theirs, atol=tol, rtol=1e-6, msg=lambda m: f"{what} of {name}: {m}")


def trains_as_whole(name: str, shape: tuple[int, ...], names: tuple[str, ...], path: str) -> float:
    """Losses, gradients, weights after three steps, names, and a checkpoint; the share of weights that is split."""
    env, plain = ShardingEnv.from_mesh(mesh(shape, names)), build(name)
    model = DistributedModelParallel(copy.deepcopy(plain), env=env)
    assert list(model.state_dict()) == list(plain.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain)]
    for step in range(STEPS):
        mine = loss_of(model, name, step, env.data_rank, env.data_size)
        parts = [loss_of(plain, name, step, rank, env.data_size) for rank in range(env.data_size)]
        same("output", f"step {step}", mine.detach(), parts[env.data_rank].detach(), 1e-9)
        mine.backward()
        (sum(parts, torch.zeros(())) / len(parts)).backward()
        if step == 0:
            held = dict(model.named_parameters())
            for key, p in plain.named_parameters():
                same(key, "gradient", whole(held[key].grad), p.grad, 1e-9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    save_checkpoint(path, model, optimizers[0])
    other = DistributedModelParallel(build(name), env=env)
    load_checkpoint(path, other, torch.optim.AdamW(other.parameters(), lr=1e-3))
    for state in (full_state_dict(model), full_state_dict(other)):
        for key, value in plain.state_dict().items():
            same(key, "weight", state[key], value, 1e-7)
    split = [p for p in model.parameters() if isinstance(p, DTensor) and p.placements[-1].is_shard()]
    return sum(p.numel() for p in split) / sum(p.numel() for p in model.parameters())


SPLIT = {"palm": 0.0, "contrastive": 0.2}
"""Share of the weights that is split at least, where it is not 0.4: those have all in one fused Linear."""


@pytest.mark.parametrize("name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.slow) for n in STRANGERS])
@pytest.mark.sampled(4)
def test_as_strangers_write_them(name: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, trains_as_whole, name, (2,), ("tp",), str(tmp_path / "saved"))
    assert first == second >= SPLIT.get(name, 0.4)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "names"), [((2, 2), ("shard", "tp")), ((2, 2), ("dp", "tp"))], ids=str)
@pytest.mark.parametrize("name", list(STRANGERS))
def test_as_strangers_write_them_on_two_axes(
    name: str, shape: tuple[int, ...], names: tuple[str, ...], tmp_path: Path
) -> None:
    run_ranks(math.prod(shape), trains_as_whole, name, shape, names, str(tmp_path / "saved"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "names"),
    [((2,), ("tp",)), ((2, 2), ("shard", "tp")), ((2, 2), ("dp", "tp")), ((2, 2, 2), ("replicate", "shard", "tp"))],
    ids=str,
)
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_heads_of_hugging_face(name: str, shape: tuple[int, ...], names: tuple[str, ...], tmp_path: Path) -> None:
    run_ranks(math.prod(shape), trains_as_whole, name, shape, names, str(tmp_path / "saved"))


def keeps_whole(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """A plan that replicates weights of every kind beside split ones: each holds them whole, trained as one."""
    env, plain = ShardingEnv.from_mesh(mesh(shape, names)), build("nano")
    kept = ["transformer.wpe.weight", "transformer.h.1.ln_1.weight", "transformer.ln_f.bias"]
    model = DistributedModelParallel(copy.deepcopy(plain), env=env, plan=dict.fromkeys(kept, replicate()))
    held = dict(model.named_parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain)]
    for step in range(STEPS):
        loss_of(model, "nano", step, env.data_rank, env.data_size).backward()
        loss_of(plain, "nano", step, None, 1).backward()
        for key, p in plain.named_parameters():
            same(key, f"gradient of step {step}", whole(held[key].grad), p.grad, 1e-9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for key in kept:
        local = held[key].to_local() if isinstance(held[key], DTensor) else held[key]  # type: ignore[attr-defined]
        assert local.shape == plain.get_parameter(key).shape
    for key, value in full_state_dict(model).items():
        same(key, "weight", value, plain.state_dict()[key], 1e-7)


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((2, 1), ("shard", "tp")),
        ((1, 2), ("shard", "tp")),
        pytest.param((2, 2), ("shard", "tp"), marks=pytest.mark.slow),
        pytest.param((2, 2), ("dp", "tp"), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.sampled(4)
def test_a_plan_replicates_weights_beside_split_ones(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    run_ranks(math.prod(shape), keeps_whole, shape, names)


def evaluates_padded(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """torch's own encoder gives its layers a nested tensor, and zeros where there is padding."""
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH)).double().eval()
    model = DistributedModelParallel(copy.deepcopy(plain), env=ShardingEnv.from_mesh(mesh(shape, names))).eval()
    assert any(isinstance(p, DTensor) and p.placements[-1].is_shard() for p in model.parameters())
    x, mask = torch.randn(3, 5, WIDTH, dtype=torch.float64), torch.arange(5) >= torch.tensor([[5], [2], [3]])
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(
                model(x, src_key_padding_mask=mask), plain(x, src_key_padding_mask=mask), atol=1e-12, rtol=0
            )
        torch.testing.assert_close(model(x), plain(x), atol=1e-12, rtol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize(
    ("shape", "names"),
    [((2,), ("tp",)), pytest.param((2, 2), ("shard", "tp"), marks=pytest.mark.slow)],
    ids=str,
)
def test_an_encoder_evaluates_padded_samples(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    run_ranks(math.prod(shape), evaluates_padded, shape, names)
