"""A Hugging Face Llama on a mesh by its own plans: initial values, losses and gradients of one process, and back."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path

import pytest
import torch
import transformers

from dmp import DistributedModelParallel, DmpError, ShardingEnv, clip_grad_norm_, full_state_dict, to_unsharded, verify
from tests.programs import run_program
from tests.ranks import mesh as mesh_of
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = str(ROOT / "examples" / "hf_llama.py")
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def check_equals_plain(shape: tuple[int, ...], names: tuple[str, ...], is_tied: bool) -> None:
    """Made on meta, filled on the mesh; then loss, norm of the gradient and a step, as the plain model's."""
    env = ShardingEnv.from_mesh(mesh_of(shape, names))
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=is_tied)
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    model = DistributedModelParallel(module, env)
    oracle = transformers.LlamaForCausalLM(config)
    for name, buffer in oracle.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    for name, value in full_state_dict(model).items():
        if name.endswith("norm.weight"):
            assert torch.equal(value, torch.ones_like(value)), name
        else:
            assert value.std().item() == pytest.approx(config.initializer_range, rel=0.1), name
    oracle.load_state_dict(full_state_dict(model))

    rng = torch.Generator().manual_seed(0)
    batches = torch.randint(256, (env.data_size, 2, 17), generator=rng)
    group = env.group("replicate", "shard")
    mine, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle))
    for _ in range(2):
        losses = [oracle(input_ids=ids, labels=ids).loss for ids in batches]
        (sum(losses) / len(losses)).backward()
        rank = 0 if group is None else group.rank()
        loss = model(input_ids=batches[rank], labels=batches[rank]).loss
        loss.backward()
        torch.testing.assert_close(loss.detach(), losses[rank].detach(), atol=1e-5, rtol=1e-5)
        want = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
        torch.testing.assert_close(clip_grad_norm_(model, 0.5), want, atol=1e-5, rtol=1e-5)
        for optimizer in (mine, plain):
            optimizer.step()
            optimizer.zero_grad()
    values = full_state_dict(model)
    for name, value in oracle.state_dict().items():
        torch.testing.assert_close(values[name], value, atol=1e-5, rtol=1e-5, msg=f"{name} differs")


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((2,), ("shard",)),
        *(
            pytest.param(shape, names, marks=pytest.mark.slow)
            for shape, names in (((2, 2), ("shard", "tp")), ((2, 2), ("replicate", "shard")), ((4,), ("dp",)))
        ),
    ],
    ids=lambda x: "x".join(map(str, x)),
)
@pytest.mark.sampled(2)
def test_equals_the_plain_model(shape: tuple[int, ...], names: tuple[str, ...], is_tied: bool) -> None:
    run_ranks(math.prod(shape), check_equals_plain, shape, names, is_tied)


def ties_again() -> None:
    env, config = ShardingEnv.from_mesh(mesh_of((2,), ("tp",))), transformers.LlamaConfig(**SIZES)
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    oracle = transformers.LlamaForCausalLM(config)
    model = DistributedModelParallel(copy.deepcopy(oracle), env)
    ids = torch.arange(6).view(2, 3)
    for each in (model, oracle):
        each.tie_weights()
        each(input_ids=ids, labels=ids).loss.backward()
    places = [model.module.get_submodule(path)._parameters["weight"] for path in ("model.embed_tokens", "lm_head")]
    assert places[0] is places[1] and places[0] is not None and places[0].grad is not None
    torch.testing.assert_close(places[0].grad.full_tensor(), oracle.lm_head.weight.grad)  # type: ignore[attr-defined]


def test_weights_are_tied_again() -> None:
    """A method that is told a path computed with what is here of a weight, and found no parameter there."""
    run_ranks(2, ties_again)


def test_example_trains_and_gives_a_plain_model_back(tmp_path: Path) -> None:
    result = run_program([EXAMPLE, "--axes", "tp", "--steps", "20", "--save", str(tmp_path / "saved")], 2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"2 x model\.layers\.\*\.mlp\.down_proj\.weight +rowwise", result.stdout)  # the plan
    losses = [float(x) for x in re.findall(r"^step \d+: loss ([0-9.]+)$", result.stdout, re.M)]
    assert losses[0] > 5.3 > 4.5 > losses[-1]  # from log(256), all bytes alike
    assert re.search(r"^LlamaForCausalLM writes: b'from __future__ .+'$", result.stdout, re.M)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved", local_files_only=True)
    ids = torch.tensor([list(Path(EXAMPLE).read_bytes()[:64])])
    assert loaded(input_ids=ids, labels=ids).loss < 4.5


def generates(axis: str) -> None:
    """Each rank's own number of tokens: transformers goes on until all ranks are done, as torch tells it of FSDP2."""
    torch.manual_seed(0)
    oracle = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    model = DistributedModelParallel(copy.deepcopy(oracle), ShardingEnv.from_mesh(mesh_of((2,), (axis,))))
    rank = model.env.rank
    ids, number = torch.tensor([[3 + rank, 5, 7]]), 2 + 4 * rank
    want = oracle.generate(ids, max_new_tokens=number, do_sample=False)
    assert torch.equal(model.module.generate(ids, max_new_tokens=number, do_sample=False), want)
    torch.distributed.barrier()
    plain = to_unsharded(model)
    if rank == 0:  # alone: of a plain model it waits for nobody
        assert torch.equal(plain.generate(ids, max_new_tokens=2, do_sample=False), want)


def test_rows_of_different_lengths_are_generated() -> None:
    run_ranks(2, generates, "shard")


def _verified() -> None:
    """With a cache, of which each rank has its heads: equal to the plain model's, and not to another's."""
    env = ShardingEnv.from_mesh(mesh_of((2,), ("tp",)))
    model = DistributedModelParallel(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), env)
    ids = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    report = verify(model, transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), ids)
    assert [where.rpartition("[")[2] for where in report.of_heads] == ["'keys']", "'values']"] * 2
    assert str(report).count("(a rank has its heads)") == 4
    other = transformers.LlamaConfig(**SIZES)
    other.rope_parameters = {"rope_type": "default", "rope_theta": 7.0}
    with pytest.raises(DmpError, match=r"'keys'.* differs by"):
        verify(model, transformers.LlamaForCausalLM(other), ids)


def test_is_verified_with_its_cache() -> None:
    run_ranks(2, _verified)


def _distils_attention(axes: tuple[str, ...]) -> None:
    """In training, and in evaluation, of the whole and of a part; the cache beside them stays a rank's heads."""
    torch.manual_seed(0)
    oracle = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attn_implementation="eager"))
    model = DistributedModelParallel(copy.deepcopy(oracle), ShardingEnv.from_mesh(mesh_of((2,), axes)))
    ids = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    for each in (oracle, model):
        out = each(input_ids=ids, labels=ids, output_attentions=True)
        assert [a.shape for a in out.attentions] == [(2, 4, 9, 9)] * 2
        (out.loss + sum(a.square().sum() for a in out.attentions)).backward()
    for (name, mine), want in zip(model.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), want.grad, msg=name)  # type: ignore[union-attr]
    model.eval()
    with torch.no_grad():
        out, want = (each.eval()(input_ids=ids, output_attentions=True) for each in (model, oracle))
        part = model.module.model(input_ids=ids, output_attentions=True)
    torch.testing.assert_close(out.attentions, want.attentions)
    torch.testing.assert_close(part.attentions, want.attentions)
    assert out.past_key_values.layers[0].keys.shape[1] == 1 < want.past_key_values.layers[0].keys.shape[1]


def test_attention_weights_are_those_of_all_heads() -> None:
    """Each rank gave out its own heads', and a loss of them trained each rank otherwise."""
    run_ranks(2, _distils_attention, ("tp",))
