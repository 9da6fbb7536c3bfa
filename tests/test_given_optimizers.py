"""What is read of optimizers that users give, as classes or as TorchRec's `fused_params`, what is said and refused."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from dmp import ShardError
from dmp.ranks import say_once
from sharders.embedding.lookup.given_optimizers import OptimizerReader, optimizer_of, spec_of_fused_params
from sharders.embedding.lookup.optimizers import OptimizerSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's of its own TorchScript, FBGEMM's CPU build of what only GPUs have
    import torchrec.optim
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
    from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged, also where it was said before."""
    say_once.cache_clear()
    caplog.set_level(logging.INFO, "dmp")
    return caplog


def with_optimizer(cls: type, **kwargs: Any) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(3, 2))
    _apply_optimizer_in_backward(cls, [parameter], kwargs)
    return parameter


def test_none() -> None:
    assert optimizer_of(nn.Parameter(torch.zeros(2)), "t") is None


@pytest.mark.parametrize(
    ("cls", "kwargs", "expected"),
    [
        (torch.optim.SGD, {"lr": 0.1, "dampening": 0.5}, OptimizerSpec.make("sgd", lr=0.1)),
        (torch.optim.SGD, {}, OptimizerSpec.make("sgd", lr=1e-3)),
        (torch.optim.SGD, {"lr": torch.tensor(0.25)}, OptimizerSpec.make("sgd", lr=0.25)),
        (torch.optim.Adagrad, {"lr": 0.1}, OptimizerSpec.make("adagrad", lr=0.1, eps=1e-10)),
        (
            torch.optim.Adagrad,
            {"lr": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3, "foreach": True},
            OptimizerSpec.make("adagrad", lr=0.1, initial_accumulator_value=0.5, eps=1e-3),
        ),
        (torch.optim.Adam, {"lr": 0.1, "betas": (0.5, 0.6)}, OptimizerSpec.make("adam", lr=0.1, betas=(0.5, 0.6))),
        (torch.optim.SparseAdam, {"lr": 0.1}, OptimizerSpec.make("adam", lr=0.1, bias_corrected_eps=False)),
        (torchrec.optim.RowWiseAdagrad, {"lr": 0.1}, OptimizerSpec.make("rowwise_adagrad", lr=0.1)),
        (torchrec.optim.SGD, {"lr": 0.1}, OptimizerSpec.make("sgd", lr=0.1)),
        (torchrec.optim.Adagrad, {"lr": 0.1}, OptimizerSpec.make("adagrad", lr=0.1, eps=1e-8)),
        (torchrec.optim.Adam, {"beta1": 0.5}, OptimizerSpec.make("adam", lr=1e-2, betas=(0.5, 0.999))),
        (torchrec.optim.Adam, {"weight_decay": 0.2}, OptimizerSpec.make("adam", lr=1e-2, weight_decay=0.2)),
        (torchrec.optim.PartialRowWiseAdam, {"lr": 0.1}, OptimizerSpec.make("partial_rowwise_adam", lr=0.1)),
        (torchrec.optim.LAMB, {"eps": 1e-6, "beta2": 0.9}, OptimizerSpec.make("lamb", eps=1e-6, betas=(0.9, 0.9))),
        (torchrec.optim.PartialRowWiseLAMB, {}, OptimizerSpec.make("partial_rowwise_lamb", lr=1e-2)),
        (torchrec.optim.LarsSGD, {"momentum": 0.5}, OptimizerSpec.make("lars_sgd", momentum=0.5)),
        # which sharding by TorchRec has changed
        (
            torchrec.optim.SGD,
            {"learning_rate": 0.1, "optimizer": EmbOptimType.EXACT_SGD},
            OptimizerSpec.make("sgd", lr=0.1),
        ),
        (
            torchrec.optim.RowWiseAdagrad,
            {"learning_rate": 0.1, "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "beta1": 0.5, "betas": (0.1, 0.2)},
            OptimizerSpec.make("rowwise_adagrad", lr=0.1),
        ),
        (
            torchrec.optim.RowWiseAdagrad,
            {"lr": 0.1, "weight_decay": 0.2, "weight_decay_mode": WeightDecayMode.L2, "max_norm": 1.0},
            OptimizerSpec.make("rowwise_adagrad", lr=0.1, weight_decay=0.2, weight_decay_mode="l2", max_norm=1.0),
        ),
        # its own step would decay every row; TorchRec runs it by FBGEMM, which does not without a mode, and we say so
        (
            torchrec.optim.RowWiseAdagrad,
            {"lr": 0.1, "weight_decay": 0.2},
            OptimizerSpec.make("rowwise_adagrad", lr=0.1, weight_decay=0.2),
        ),
        (
            torchrec.optim.RowWiseAdagrad,
            {"lr": 0.1, "gradient_clipping": True, "max_gradient": 0.5},
            OptimizerSpec.make("rowwise_adagrad", lr=0.1, gradient_clipping=True, max_gradient=0.5),
        ),
    ],
)
def test_reads(cls: type, kwargs: dict[str, Any], expected: OptimizerSpec) -> None:
    spec = optimizer_of(with_optimizer(cls, **kwargs), "t")
    assert spec == expected
    assert hash(spec) == hash(expected)


@pytest.mark.parametrize(
    ("cls", "kwargs", "said"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "momentum=0.9"),
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}, "weight_decay=0.01"),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "momentum=0.9"),
        (torch.optim.Adagrad, {"lr_decay": 0.1}, "lr_decay=0.1"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad=True"),
        (torch.optim.SGD, {"lr": 0.1, "maximize": True}, "maximize=True"),
        (torch.optim.AdamW, {}, "torch.optim.adamw.AdamW"),
        (torch.optim.RMSprop, {}, "RMSprop"),
        (torchrec.optim.RowWiseAdagrad, {"lr_decay": 0.1}, "lr_decay=0.1"),
        (torchrec.optim.Adam, {"ensemble_mode": 1}, "ensemble_mode"),
    ],
)
def test_refuses(cls: type, kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(ShardError) as error:
        optimizer_of(with_optimizer(cls, **kwargs), "model.t.weight")
    for part in ("model.t.weight", said, "ordinary optimizer"):
        assert part in str(error.value)


def test_tables_that_are_read_one_after_another() -> None:
    """As each by itself: options of the one before stand for those that are the same, and for no others."""
    makes = [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 1}),
        (torch.optim.SGD, {"lr": True}),
        (torch.optim.SGD, {"lr": torch.tensor(0.1)}),
        (torch.optim.SGD, {"lr": torch.tensor(0.2)}),
        (torch.optim.Adam, {"lr": 0.1}),
        (torch.optim.Adam, {"lr": 0.1, "betas": (0.5, 0.9)}),
        (torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.9)}),
        (torchrec.optim.RowWiseAdagrad, {"lr": 0.1}),
        (torchrec.optim.RowWiseAdagrad, {"eps": 0.1}),
    ]
    parameters = [with_optimizer(cls, **kwargs) for cls, kwargs in makes]
    parameters.insert(2, nn.Parameter(torch.zeros(2)))
    changed = with_optimizer(torchrec.optim.RowWiseAdagrad, eps=0.1)
    changed._in_backward_optimizers[0].param_groups[0]["lr"] = 0.3  # type: ignore[attr-defined]
    reader = OptimizerReader()
    for parameter in [*parameters, changed]:
        found, alone = reader.read(parameter, "t"), optimizer_of(parameter, "t")
        assert repr(found) == repr(alone) and found == alone
    assert reader.read(parameters[0], "t") is reader.read(parameters[1], "t")
    with pytest.raises(ShardError, match=r"u: .*momentum"):
        reader.read(with_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9), "u")


def test_what_is_passed_over_is_said_of_each_table(said: pytest.LogCaptureFixture) -> None:
    reader = OptimizerReader()
    for name in ("one", "two"):
        reader.read(with_optimizer(torchrec.optim.RowWiseAdagrad, lr=0.1, cache_precision=None), name)
    assert "one: " in said.text and "two: " in said.text


def test_subclasses_are_strangers() -> None:
    class Mine(torch.optim.SGD):
        pass

    with pytest.raises(ShardError, match="Mine"):
        optimizer_of(with_optimizer(Mine, lr=0.1), "t")


def test_refuses_two() -> None:
    parameter = with_optimizer(torch.optim.SGD, lr=0.1)
    _apply_optimizer_in_backward(torch.optim.Adam, [parameter], {})
    with pytest.raises(ShardError, match="got 2"):
        optimizer_of(parameter, "t")


def test_row_wise_adagrad_is_said_to_have_no_weight_decay(said: pytest.LogCaptureFixture) -> None:
    optimizer_of(with_optimizer(torchrec.optim.RowWiseAdagrad, weight_decay=0.2), "t")
    assert "weight_decay=0.2 without a weight_decay_mode" in said.text


def test_a_sharders_options_lie_beneath_a_tables() -> None:
    """As TorchRec merges them: by what is given, whatever the defaults are."""
    own = optimizer_of(with_optimizer(torch.optim.Adagrad, lr=0.1), "t")
    sharders = spec_of_fused_params({"learning_rate": 0.5, "eps": 0.25, "gradient_clipping": True, "beta1": 0.5})
    assert own is not None and sharders is not None
    assert own.over(sharders) == OptimizerSpec.make("adagrad", lr=0.1, eps=0.25, gradient_clipping=True)


FUSED: list[tuple[dict[str, Any], OptimizerSpec | None, str]] = [
    # as given, what is read, a word of what is said
    ({}, None, ""),
    ({"cache_load_factor": 0.2, "prefetch_pipeline": True}, None, "hold"),
    ({"optimizer": EmbOptimType.NONE}, None, ""),
    ({"learning_rate": 0.1}, OptimizerSpec.make("sgd", lr=0.1), ""),
    ({"optimizer": "exact_row_wise_adagrad"}, OptimizerSpec.make("rowwise_adagrad", eps=1e-8), ""),
    ({"optimizer": EmbOptimType.EXACT_ADAGRAD, "eps": 0.5}, OptimizerSpec.make("adagrad", eps=0.5), ""),
    ({"optimizer": EmbOptimType.ADAM, "beta2": 0.5}, OptimizerSpec.make("adam", lr=1e-2, betas=(0.9, 0.5)), ""),
    ({"optimizer": EmbOptimType.LAMB, "output_dtype": SparseType.FP32}, OptimizerSpec.make("lamb"), ""),
    ({"optimizer": EmbOptimType.LARS_SGD, "eta": 0.5}, OptimizerSpec.make("lars_sgd", eta=0.5), "batch's rows alone"),
    ({"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM}, OptimizerSpec.make("partial_rowwise_adam"), ""),
    ({"optimizer": EmbOptimType.PARTIAL_ROWWISE_LAMB}, OptimizerSpec.make("partial_rowwise_lamb"), ""),
    ({"optimizer": EmbOptimType.EXACT_SGD, "weight_decay": 0.5}, OptimizerSpec.make("sgd", lr=1e-2), "no weight_decay"),
    ({"optimizer": EmbOptimType.EXACT_SGD, "momentum": 0.5}, OptimizerSpec.make("sgd", lr=1e-2), "no momentum"),
    (
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "weight_decay": 0.5},
        OptimizerSpec.make("rowwise_adagrad", eps=1e-8, weight_decay=0.5),
        "without a weight_decay_mode",
    ),
    (
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "weight_decay": 0.5, "weight_decay_mode": 2},
        OptimizerSpec.make("rowwise_adagrad", eps=1e-8, weight_decay=0.5, weight_decay_mode="decouple"),
        "batch's rows alone",
    ),
    (
        {"optimizer": EmbOptimType.ADAM, "weight_decay": 0.5, "weight_decay_mode": WeightDecayMode.L2},
        OptimizerSpec.make("adam", lr=1e-2, weight_decay=0.5),
        "decoupled, also where the mode is L2",
    ),
]


@pytest.mark.parametrize(("params", "expected", "word"), FUSED, ids=str)
def test_fused_params(
    params: dict[str, Any], expected: OptimizerSpec | None, word: str, said: pytest.LogCaptureFixture
) -> None:
    before = dict(params)
    for _ in range(2):
        assert spec_of_fused_params(params) == expected
    assert params == before
    assert said.text.count(word) == 1 if word else not said.text


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"optimizer": EmbOptimType.SHAMPOO}, "SHAMPOO"),
        ({"optimizer": EmbOptimType.SGD}, "EXACT_SGD"),
        ({"learning_rat": 0.1}, "learning_rat"),
        ({"learning_rate": "0.1"}, "a number for lr"),
        ({"optimizer": EmbOptimType.ADAM, "beta1": None}, "a number for betas"),
        ({"output_dtype": SparseType.FP16}, "output_dtype"),
        ({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "weight_decay_mode": WeightDecayMode.COUNTER}, "COUNTER"),
        ({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "global_weight_decay": object()}, "global_weight_decay"),
    ],
)
def test_fused_params_are_refused_by_name(params: dict[str, Any], word: str) -> None:
    with pytest.raises(ShardError, match=word):
        spec_of_fused_params(params)
