"""TorchRec's own tests pass with our class in the place of theirs: all that TorchRec itself passes on a CPU.

Left out are those that ask for a kernel that no CPU has (`fused_uvm`, `fused_uvm_caching`), which TorchRec's planner
refuses by itself; and three that look into TorchRec's class rather than at what it does:
`test_initialize_torch_state_error_includes_table_name`, which replaces a private method of it,
`test_sharding_ebc_validate_input_only_once`, which waits for a line of its log, and the end of
`test_load_state_dict_cw_multiple_shards`, which takes every entry of an optimizer's state dict for a dict, where ours
has `param_groups`, a list as torch's is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.torchrec_dropin.rank_tests import run_test

pytestmark = pytest.mark.filterwarnings(  # calls of TorchRec 1.8.0 that torch 2.13 deprecates
    "ignore:`torch.jit.[a-z]+` is deprecated:DeprecationWarning",
    "ignore:`broadcast_buffers` is deprecated:FutureWarning",
    "ignore:`torch.distributed.(reduce_scatter|all_gather_into)_tensor` is deprecated:FutureWarning",
    "ignore::FutureWarning:torchrec",
    "ignore::UserWarning:torchrec",
)
ON_RANKS = "test_model_parallel:_ModelParallelBase"
OF_STATE = "test_model_parallel_base:ModelParallelStateDictBase"
OF_TABLES = "test_model_parallel_base:ModelParallelSparseOnlyBase"
FUSED = {"sharder_type": "embedding_bag_collection", "kernel_type": "fused"}
DENSE = {**FUSED, "kernel_type": "dense"}
WIRE = [None, ("FP16", "BF16")]
IN_BACKWARD = [
    None,
    {"embedding_bags": (torch.optim.SGD, {"lr": 0.01}), "embeddings": (torch.optim.SGD, {"lr": 0.2})},
]
POOLING, DTYPES, EITHER = ["SUM", "MEAN"], ["FP32", "FP16"], [False, True]
LAYOUTS = ["table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise"]
COMMON = {"qcomms_config": WIRE, "apply_optimizer_in_backward_config": IN_BACKWARD, "variable_batch_size": EITHER}

TESTS: list[tuple[int, str, str, dict[str, Any], dict[str, list[Any]]]] = [
    # ranks, class, method, arguments, and arguments of which each value is tried: the first of each in the quick run
    (2, ON_RANKS, "test_sharding_dp", {**DENSE, "apply_optimizer_in_backward_config": None}, {"data_type": DTYPES}),
    (2, ON_RANKS, "test_sharding_tw", FUSED, {**COMMON, "data_type": DTYPES}),
    (2, ON_RANKS, "test_sharding_cw", FUSED, {**COMMON, "data_type": DTYPES, "allow_zero_batch_size": EITHER}),
    (2, ON_RANKS, "test_sharding_twcw", FUSED, {**COMMON, "data_type": DTYPES}),
    (2, ON_RANKS, "test_sharding_rw", FUSED, {**COMMON, "pooling": POOLING, "data_type": DTYPES}),
    (2, ON_RANKS, "test_sharding_twrw", FUSED, {**COMMON, "pooling": POOLING, "data_type": DTYPES}),
    (
        2,
        ON_RANKS,
        "test_sharding_variable_batch",
        {},
        {
            "sharding_type": ["table_wise", "column_wise", "row_wise", "data_parallel"],
            "global_constant_batch": EITHER,
            "pooling": POOLING,
            "data_type": DTYPES,
        },
    ),
    (
        4,
        ON_RANKS,
        "test_sharding_grid",
        FUSED,
        {"qcomms_config": WIRE, "apply_optimizer_in_backward_config": IN_BACKWARD, "pooling": POOLING},
    ),
    (
        2,
        ON_RANKS,
        "test_sharding_diff_table_index_type",
        FUSED,
        {"dtype": [torch.int32, torch.int64], "use_offsets": EITHER},
    ),
    (1, OF_STATE, "test_parameter_init", {}, {}),
    (1, OF_STATE, "test_meta_device_dmp_state_dict", {}, {}),
    (1, OF_STATE, "test_load_state_dict", FUSED, {"sharding_type": LAYOUTS, "is_training": EITHER}),
    (1, OF_STATE, "test_optimizer_load_state_dict", FUSED, {"sharding_type": LAYOUTS}),
    (1, OF_STATE, "test_load_state_dict_dp", {**DENSE, "sharding_type": "data_parallel"}, {"is_training": EITHER}),
    (1, OF_STATE, "test_load_state_dict_prefix", FUSED, {"sharding_type": LAYOUTS, "is_training": EITHER}),
    (1, OF_STATE, "test_params_and_buffers", FUSED, {"sharding_type": LAYOUTS}),
    (1, OF_STATE, "test_rowwise_adagrad_numerical_equivalence", {**FUSED, "sharding_type": "table_wise"}, {}),
    (1, OF_TABLES, "test_sharding_ebc_as_top_level", {}, {}),
    (1, OF_TABLES, "test_sharding_fused_ebc_as_top_level", {}, {}),
    (1, OF_TABLES, "test_sharding_ebc_input_validation_enabled", {}, {}),
]
FAILS_ON_A_CPU = ("sharding_rw", "sharding_twrw", "sharding_variable_batch", "sharding_grid")
"""With TorchRec's own class, for some arguments: theirs skips the first three on gloo and the last without GPUs."""


def cases() -> Iterator[Any]:
    for ranks, base, method, fixed, tried in TESTS:
        for index, values in enumerate(product(*tried.values())):
            arguments = {**fixed, **dict(zip(tried, values, strict=True))}
            marks = [pytest.mark.slow] if index else []
            yield pytest.param(ranks, base, method, arguments, marks=marks, id=f"{method[5:]}-{index}")


def as_theirs(arguments: dict[str, Any]) -> dict[str, Any]:
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig
    from torchrec.modules.embedding_configs import DataType, PoolingType

    enums = {"pooling": PoolingType, "data_type": DataType}
    made = {name: enums[name][value] if name in enums else value for name, value in arguments.items()}
    if made.get("qcomms_config"):
        forward, backward = (CommType[name] for name in made["qcomms_config"])
        made["qcomms_config"] = QCommsConfig(forward_precision=forward, backward_precision=backward)
    return made


def run_case(base: str, method: str, arguments: dict[str, Any], whose: str) -> str:
    return run_test(base, method, as_theirs(arguments), whose)


@pytest.mark.parametrize(("ranks", "base", "method", "arguments"), list(cases()))
@pytest.mark.sampled(6)
def test_passes_with_our_class(ranks: int, base: str, method: str, arguments: dict[str, Any]) -> None:
    assert run_ranks(ranks, run_case, base, method, arguments, "dmp") == ["passed"] * ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "base", "method", "arguments"), [case for case in cases() if not case.id.startswith(FAILS_ON_A_CPU)]
)
def test_theirs_passes_too(ranks: int, base: str, method: str, arguments: dict[str, Any]) -> None:
    """That the harness runs TorchRec's tests as TorchRec does: else passing them would say little."""
    assert run_ranks(ranks, run_case, base, method, arguments, "torchrec") == ["passed"] * ranks
