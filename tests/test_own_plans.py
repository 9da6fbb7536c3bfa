"""Plans that Hugging Face's models bring, beside what their structure says: the better one, and what is said of it."""

from __future__ import annotations

import logging

import pytest
import torch

from dmp import ShardingEnv
from sharders import TensorParallelSharder

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("kind", "others", "down", "note"),
    [
        # Its norms are over all heads together: it gathers queries and keys before them, where statistics are enough.
        ("Olmo2", {}, "rowwise", "own tp_plan is not used: it splits"),
        # It gathers query, key and value, and computes all heads on every rank; split by heads it needs not.
        ("Phi3", {}, "rowwise", "own tp_plan is not used: it splits"),
        # It names experts alone.
        ("GraniteMoe", {"num_local_experts": 4}, "rowwise", "own tp_plan is not used: it splits"),
        # It names the vocabulary alone; sinks are one value for each head.
        ("GptOss", {"num_local_experts": 4, "head_dim": 16}, "rowwise", "own tp_plan is not used: it splits"),
    ],
)
@pytest.mark.sampled(4)
def test_the_better_plan_is_taken(
    kind: str, others: dict[str, int], down: str, note: str, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    with torch.device("meta"):
        config = getattr(transformers, f"{kind}Config")(**SIZES, **others)
        model = transformers.AutoModelForCausalLM.from_config(config)
    caplog.set_level(logging.WARNING, "dmp")
    found = TensorParallelSharder().place(model, {}, ShardingEnv.abstract((2,), ("tp",)))
    assert found.styles.get("model.layers.1.self_attn.o_proj") == down
    assert any("proved" in each for each in found.notes) and not any("not proved" in each for each in found.notes)
    assert any(note in each for each in found.notes)
    assert not [each.message for each in caplog.records if each.name == "dmp"]
