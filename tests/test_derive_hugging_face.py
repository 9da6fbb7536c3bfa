"""Derived tensor-parallel plans of Hugging Face models: their own where they have one, else what their parts allow."""

from __future__ import annotations

from torch import nn

from sharders.tensor_parallel.auto_plan import derive
from sharders.tensor_parallel.head_counts import ModelRuns
from tests.test_derive import is_verified, of_block, with_sequence


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
        )
    )


def test_hugging_face_llama_equals_its_own_plan() -> None:
    model = tiny_llama()
    found = derive(ModelRuns(model, 2, "tp"))
    assert found.divided == {}, "its forward says -1 for the number of heads"
    assert is_verified(found)
    names = {"colwise_gather_output": "colwise_gather", "embedding_rowwise": "rowwise"}
    own = {
        pattern.replace("*", i): names.get(style, style) for pattern, style in model.tp_plan.items() for i in ("0", "1")
    }
    assert found.styles == {"model.embed_tokens": "rowwise", **own}, "which older plans of its own leave whole"
    sequence = with_sequence(model, own)
    assert sequence["model.layers.1.input_layernorm"] == "sequence"
    assert sequence["model.norm"] == "gather_sequence"


def test_hugging_face_gpt2_holds_query_key_and_value_in_one_transposed_weight() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    found = derive(ModelRuns(GPT2LMHeadModel(config), 2, "tp"))
    blocks = {
        "attn.c_attn": "colwise_packed_3",
        "attn.c_proj": "rowwise",
        "mlp.c_fc": "colwise",
        "mlp.c_proj": "rowwise",
    }
    inside = {f"transformer.h.{i}.{path}": style for i in range(2) for path, style in blocks.items()}
    assert found.styles == {"transformer.wte": "rowwise", **inside, "lm_head": "colwise_gather"}
    assert found.divided == {(f"transformer.h.{i}.attn", "split_size"): 16 for i in range(2)}
    assert is_verified(found)


def test_hugging_face_bert() -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    found = derive(ModelRuns(BertForMaskedLM(config), 2, "tp"), sequence_parallel=True)
    assert of_block(found.styles, "bert.encoder.layer.1") == {
        "attention.self": "gather_input",
        "attention.self.query": "colwise",
        "attention.self.key": "colwise",
        "attention.self.value": "colwise",
        "attention.output.dense": "rowwise_scatter",
        "attention.output.LayerNorm": "sequence",
        "intermediate": "gather_input",
        "intermediate.dense": "colwise",
        "output.dense": "rowwise_scatter",
        "output.LayerNorm": "sequence",
    }
    assert found.styles["cls.predictions.decoder"] == "colwise_gather"
    assert found.divided == {}


def test_hugging_face_qwen3_norms_single_heads() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        head_dim=16,
    )
    found = derive(ModelRuns(Qwen3ForCausalLM(config), 2, "tp"))
    norms = {p: s for p, s in found.styles.items() if "norm" in p}
    assert norms == {f"model.layers.0.self_attn.{n}_norm": "sum_gradients" for n in "qk"}
    assert is_verified(found)


def test_hugging_face_t5_shares_its_position_bias_between_blocks() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4))
    found = derive(ModelRuns(model, 2, "tp"))
    assert len([p for p in found.styles if "SelfAttention" in p]) == 4 * 4 + 2
    assert found.styles["decoder.block.0.layer.0.SelfAttention.relative_attention_bias"] == "heads_1"
    assert len([p for p in found.styles if "DenseReluDense" in p]) == 8
