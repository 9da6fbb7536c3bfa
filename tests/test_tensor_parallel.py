"""Tensor parallelism on real ranks, beside the unsharded model: gradients, training, whole weights, collectives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
)

from dmp import DistributedModelParallel, InputError, ShardError, ShardingEnv
from sharders import TensorParallelSharder
from tests.adapted import adapted
from tests.ranks import mesh, run_ranks
from tests.transformers_zoo import GPT, Bert, Llama, LlamaAttention, LlamaPositionsFirst, rotate

BATCH, LENGTH, VOCAB = 4, 8, 64
LR = 0.01
# Of the models' outputs, which a hook makes local; the project's own FSDP2 wrapper gives tensors of their own.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: Llama(kv_heads=4),
    "llama tied": lambda: Llama(kv_heads=4, tied=True),
    "positions first": LlamaPositionsFirst,
    "gpt": lambda: GPT(tied=False),
    "gpt tied": GPT,
    "bert": Bert,
    "qk norm": lambda: with_qk_norm(Llama(kv_heads=4)),
    "frozen": lambda: frozen(Llama(kv_heads=4)),
    "adapted": lambda: adapted(Llama(kv_heads=4)),
}


class NormedHeads(LlamaAttention):
    """Norms every query and key head, with weights that all heads share, as Qwen3 does."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__(dim, heads, kv_heads)
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)

    def forward(self, x: torch.Tensor, positions: Any) -> torch.Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, self.head_dim)) for m in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        out = F.scaled_dot_product_attention(rotate(q, positions), rotate(k, positions), v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


def with_qk_norm(model: Llama) -> Llama:
    for layer in model.layers:
        layer.attention = NormedHeads(32, 4, 4)
    return model


def frozen(model: nn.Module) -> nn.Module:
    """All but the norms, as when adapters are trained."""
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name)
    return model


def build(name: str) -> nn.Module:
    """With weights that tell wrong from right: norms are no identity, biases no zero.

    In float64, for Adam makes large differences of small ones where gradients are near zero.
    """
    torch.manual_seed(5)
    model = MODELS[name]().double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model


def split(model: nn.Module, shape: tuple[int, ...], names: tuple[str, ...], plan: Any = None, **options: Any) -> Any:
    """The placement, applied; and FSDP2 over it by hand on a shard axis."""
    where = mesh(shape, names)
    placement = TensorParallelSharder(plan, **options).place(model, {}, ShardingEnv.from_mesh(where))
    placement.apply(model)
    if "shard" in names:
        for block in blocks_of(model):
            fully_shard(block, mesh=where["shard"])
        fully_shard(model, mesh=where["shard"])
    return placement


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return next(list(m) for m in model.modules() if isinstance(m, nn.ModuleList))


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def batches(steps: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator) for _ in range(steps)]


def check_training(
    name: str, shape: tuple[int, ...], names: tuple[str, ...], plan: Any = None, with_loss: bool = False, **options: Any
) -> None:
    """Outputs and gradients of the first step, weights after three steps of AdamW."""
    reference = build(name)
    model = copy.deepcopy(reference)
    split(model, shape, names, plan, loss_parallel=with_loss, **options)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    assert all(isinstance(p, DTensor) for p in model.parameters())
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=LR, foreach=True) for m in (model, reference))
    env = ShardingEnv.from_mesh(mesh(shape, names))
    place, count = (env.coordinate[0], env.shape[0]) if env.data_size > 1 else (0, 1)
    for step, ids in enumerate(batches()):
        expected = reference(ids)
        loss_of(expected, ids).backward()
        mine = ids.chunk(count)[place]
        if with_loss:
            with loss_parallel():
                out = model(mine)
                assert isinstance(out, DTensor) and out.placements == (Shard(2),)
                loss_of(out, mine).backward()
        else:
            out = model(mine)
            assert type(out) is torch.Tensor
            loss_of(out, mine).backward()
        torch.testing.assert_close(whole(out), expected.chunk(count)[place], atol=1e-7, rtol=1e-7)
        if step == 0:
            for (n, p), (_, q) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), n
                if p.grad is not None:
                    assert p.grad.placements == p.placements, (n, p.grad.placements, p.placements)
                    torch.testing.assert_close(
                        whole(p.grad), q.grad, atol=1e-9, rtol=1e-7, msg=lambda m, n=n: f"{n}: {m}"
                    )
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (n, p), (_, q) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(whole(p), q, atol=1e-7, rtol=1e-6, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "adapted"])  # test_adapters has these
@pytest.mark.sampled(40)
def test_training_equals_one_process(name: str, sequence_parallel: bool) -> None:
    run_ranks(2, check_training, name, (2,), ("tp",), sequence_parallel=sequence_parallel)


@pytest.mark.slow  # a quick test of tests/test_transformers.py is on four ranks too
@pytest.mark.parametrize("name", ["llama", "gpt tied", "bert"])
def test_on_four_ranks(name: str) -> None:
    run_ranks(4, check_training, name, (4,), ("tp",), sequence_parallel=name != "bert")


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("name", ["llama tied", "gpt", "bert", "qk norm"])
@pytest.mark.sampled(8)
def test_under_fsdp2(name: str, sequence_parallel: bool) -> None:
    run_ranks(4, check_training, name, (2, 2), ("shard", "tp"), sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
@pytest.mark.sampled(2)
def test_loss_parallel(sequence_parallel: bool) -> None:
    run_ranks(2, check_training, "llama", (2,), ("tp",), with_loss=True, sequence_parallel=sequence_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
def test_loss_parallel_under_fsdp2(sequence_parallel: bool) -> None:
    run_ranks(
        4, check_training, "gpt tied", (2, 2), ("shard", "tp"), with_loss=True, sequence_parallel=sequence_parallel
    )


def test_plans_of_names_and_of_torchs_styles() -> None:
    names = {
        "layers.*.attention.w[qkv]": "colwise",
        "layers.*.attention.wo": "rowwise",
        "layers.*.feed_forward.w[13]": "colwise",
        "layers.*.feed_forward.w2": "rowwise",
        "output": "colwise",
    }
    styles = {"colwise": ColwiseParallel(), "rowwise": RowwiseParallel()}
    objects = {pattern: styles[name] for pattern, name in names.items() if pattern != "output"}
    run_ranks(2, check_training, "llama tied", (2,), ("tp",), plan=names)
    run_ranks(2, check_training, "llama", (2,), ("tp",), plan=names, sequence_parallel=True)
    run_ranks(2, check_training, "llama", (2,), ("tp",), plan=objects)


def check_hugging_face(sequence_parallel: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        *(),
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    reference = LlamaForCausalLM(config)
    model = copy.deepcopy(reference)
    placement = split(model, (2,), ("tp",), sequence_parallel=sequence_parallel)
    assert placement.styles["lm_head"] == "colwise_gather" and placement.styles["model.embed_tokens"] == "rowwise"
    ids = batches()[0]
    expected, out = (m(ids, labels=ids, attention_mask=torch.ones_like(ids)) for m in (reference, model))
    torch.testing.assert_close(out.logits, expected.logits, atol=1e-5, rtol=1e-4)
    for result in (expected, out):
        result.loss.backward()
    for (n, p), (_, q) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, atol=1e-6, rtol=1e-4, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
@pytest.mark.sampled(2)
def test_hugging_face_by_its_own_plan(sequence_parallel: bool) -> None:
    pytest.importorskip("transformers")
    run_ranks(2, check_hugging_face, sequence_parallel)


def check_grouped_experts() -> None:
    """Their own plan, with an entry for experts and others for what is split of them."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    torch.manual_seed(0)
    reference = MixtralForCausalLM(config)
    model = copy.deepcopy(reference)
    placement = split(model, (2,), ("tp",))
    assert placement.styles["model.layers.0.self_attn.q_proj"] == "colwise"
    assert placement.styles["model.layers.0.mlp.experts"] == "experts"
    assert not any("not used" in note for note in placement.notes)
    ids = batches()[0]
    for m in (reference, model):
        m(ids, labels=ids).loss.backward()
    for (n, p), (_, q) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, atol=1e-6, rtol=1e-4, msg=lambda m, n=n: f"{n}: {m}")


def test_hugging_face_experts_in_groups() -> None:
    pytest.importorskip("transformers")
    run_ranks(2, check_grouped_experts)


def check_dropout() -> None:
    """The ranks come with different random states; the first one's is that of one process."""
    torch.manual_seed(2)
    reference = GPT(dropout=0.3)
    model = copy.deepcopy(reference)
    torch.manual_seed(100 + dist.get_rank())
    split(model, (2,), ("tp",))
    ids = batches()[0]
    ours = [model(ids) for _ in range(2)]
    torch.manual_seed(100)
    for out in ours:
        torch.testing.assert_close(out, reference(ids), atol=1e-5, rtol=1e-4)

    tower = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    torch.manual_seed(dist.get_rank())
    split(tower, (2,), ("tp",))  # nothing of it is split
    assert type(tower[0].weight) is nn.Parameter
    mine = torch.rand(3)
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(mine, first)


def test_dropout_is_one_process_s() -> None:
    run_ranks(2, check_dropout)


def read_by(norm: nn.Module) -> torch.Tensor:
    """The weight as the module's own forward reads it."""
    read: list[Any] = []
    kind = nn.functional.layer_norm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            F, "layer_norm", lambda x, shape, weight, *rest: read.append(weight) or kind(x, shape, weight, *rest)
        )
        norm(torch.zeros(1, 32, dtype=torch.float64))
    return read[0]


def check_whole_weights() -> None:
    model = build("gpt")
    kinds = [type(m) for m in model.modules()]
    values = copy.deepcopy(model.state_dict())
    split(model, (2,), ("tp",))
    norm: Any = model.h[0].ln_1
    assert isinstance(norm, nn.LayerNorm) and type(norm).__name__ == "LayerNorm"
    assert [isinstance(m, k) for m, k in zip(model.modules(), kinds, strict=True)] == [True] * len(kinds)
    held = dict(norm.named_parameters())["weight"]
    assert isinstance(held, DTensor) and held.placements == (Replicate(),) and isinstance(held, nn.Parameter)
    assert norm.weight is held and not isinstance(read_by(norm), DTensor) and torch.equal(read_by(norm), whole(held))
    assert set(model.state_dict()) == set(values)
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor) and torch.equal(whole(value), values[name]), name

    read_by(norm).sum().backward()
    assert isinstance(held.grad, DTensor) and held.grad.placements == (Replicate(),)
    held.grad = None

    twin = copy.deepcopy(model)
    assert type(twin.h[0].ln_1) is type(norm) and twin.h[0].ln_1._parameters["weight"] is not held
    ids = batches()[0]
    with torch.inference_mode():  # whose tensors have no version
        assert torch.equal(twin.eval()(ids), model.eval()(ids))
    loss_of(twin(ids), ids).backward()
    assert held.grad is None and twin.h[0].ln_1._parameters["weight"].grad is not None

    with torch.no_grad():
        twin.h[0].ln_1._parameters["weight"].zero_()
        assert not read_by(twin.h[0].ln_1).any()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(read_by(twin.h[0].ln_1), read_by(norm))

    norm.weight = nn.Parameter(torch.full((32,), 3.0, dtype=torch.float64))
    assert norm.weight is norm._parameters["weight"] and bool((norm.weight == 3).all())
    held.requires_grad_(False)
    norm.weight = held
    assert norm.weight.requires_grad is False
    with pytest.raises(AttributeError, match="wieght"):
        _ = norm.wieght
    del norm.weight
    with pytest.raises(AttributeError, match="weight"):
        _ = norm.weight


def test_whole_weights_are_plain_tensors_for_the_model() -> None:
    run_ranks(2, check_whole_weights)


def check_whole_weights_under_fsdp2() -> None:
    """Loading makes FSDP2 read its parameters by attribute."""
    model, twin = build("gpt"), build("gpt")
    for m in (model, twin):
        split(m, (2, 2), ("shard", "tp"))
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    twin.load_state_dict(model.state_dict())
    ids = batches()[0]
    assert torch.equal(twin(ids), model(ids))
    assert type(model.h[0].ln_1.weight.placements[0]) is Shard  # between steps it is what FSDP2 made of it


def test_whole_weights_under_fsdp2() -> None:
    run_ranks(4, check_whole_weights_under_fsdp2)


def check_meta() -> None:
    with torch.device("meta"):
        model = GPT().double()
    split(model, (2,), ("tp",))
    assert all(isinstance(p, DTensor) and p.is_meta for p in model.parameters())
    assert model.lm_head._parameters["weight"] is model.wte._parameters["weight"]
    assert model.wte._parameters["weight"].to_local().shape == (VOCAB // 2, 32)
    model.to_empty(device="cpu")
    reference = build("gpt tied")
    for name, p in model.named_parameters():
        own = dict(reference.named_parameters())[name]
        p.data.copy_(DTensor.from_local(own.data, p.device_mesh, [Replicate()]).redistribute(placements=p.placements))
    ids = batches()[0]
    torch.testing.assert_close(model(ids), reference(ids))


def test_parameters_on_meta() -> None:
    run_ranks(2, check_meta)


def check_lengths() -> None:
    model = build("llama")
    split(model, (2,), ("tp",), sequence_parallel=True)
    model(torch.zeros(1, 7, dtype=torch.int64))


def test_a_length_that_does_not_divide() -> None:
    for error in run_ranks(2, check_lengths, expect=InputError):
        assert all(word in str(error) for word in ("length 7", "2 ranks", "'tp'", "8 positions"))


class Tied(nn.Module):
    """Scores by the weight of a layer, which it reads past that."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.down(self.up(x).relu()), self.up.weight)


def _read_past_a_split_layer() -> None:
    env = ShardingEnv.from_mesh(mesh((1, 2), ("shard", "tp")))
    sharder = TensorParallelSharder({"up": "colwise", "down": "rowwise"})
    model = DistributedModelParallel(Tied(), env, sharders=[sharder])
    with pytest.raises(
        ShardError, match=r"split over the tensor axis, beside plain tensors \(test_tensor_parallel.py:\d+\)"
    ):
        model(torch.ones(2, 4))


def test_a_weight_of_the_tensor_axis_that_is_read_past_its_layer() -> None:
    """It was said to be in pieces between units, of which there are none."""
    run_ranks(2, _read_past_a_split_layer)
