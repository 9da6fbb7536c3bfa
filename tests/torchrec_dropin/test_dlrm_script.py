"""`examples/torchrec_dlrm`, a script as TorchRec's users write it: with either import it comes to the same figures."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings(  # calls of TorchRec 1.8.0 that torch 2.13 deprecates, and its own
    "ignore:`torch.jit.[a-z]+` is deprecated:DeprecationWarning",
    "ignore:`broadcast_buffers` is deprecated:FutureWarning",
    "ignore:`torch.distributed.(reduce_scatter|all_gather_into)_tensor` is deprecated:FutureWarning",
    "ignore:HeuristicalStorageReservation is known to:FutureWarning",
    "ignore::FutureWarning:torchrec",
    "ignore::UserWarning:torchrec",
)
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "torchrec_dlrm"
SMALL = [
    *("--num_embeddings", "500", "--embedding_dim", "8", "--dense_arch_layer_sizes", "16,8", "--batch_size", "16"),
    *("--over_arch_layer_sizes", "16,1", "--limit_train_batches", "7", "--limit_val_batches", "3"),
    *("--limit_test_batches", "3", "--multi_hot_sizes", ",".join(["1", "3"] * 13)),
]
AS_USERS_DO = {
    "adagrad-dcn": ["--adagrad", "--interaction_type", "dcn", "--dcn_low_rank_dim", "4", "--print_sharding_plan"],
    "sgd-warm-up": ["--lr_warmup_steps", "2", "--lr_decay_start", "4", "--lr_decay_steps", "3", "--print_lr"],
    "projection": [
        *("--interaction_type", "projection", "--epochs", "2", "--validation_freq_within_epoch", "3"),
        *("--interaction_branch1_layer_sizes", "32,16", "--interaction_branch2_layer_sizes", "32,16"),
    ],
}


def filled(wrapper: Any) -> Any:
    """The wrapper, whose models begin with values that depend on names alone: theirs draws others on each rank."""

    def make(*args: Any, **options: Any) -> Any:
        model = wrapper(*args, **options)
        for index, (_, tensor) in enumerate(sorted(model.state_dict().items())):
            whole = torch.randn(tuple(tensor.size()), generator=torch.Generator().manual_seed(index)) * 0.1
            if hasattr(tensor, "local_shards"):
                for shard in tensor.local_shards():
                    (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                    shard.tensor.detach().copy_(whole[row : row + rows, column : column + columns])
            else:
                tensor.detach().copy_(whole)
        return model

    return make


def run_script(arguments: list[str], whose: str) -> dict[str, float]:
    from torchrec import distributed as theirs

    import dmp

    if str(SCRIPT) not in sys.path:
        sys.path.insert(0, str(SCRIPT))
    script = importlib.import_module("dlrm_main")
    package = {"dmp": dmp, "torchrec": theirs}[whose]
    with (
        warnings.catch_warnings(),
        mock.patch.object(script, "DistributedModelParallel", filled(package.DistributedModelParallel)),
        mock.patch.object(script, "TrainPipelineSparseDist", package.TrainPipelineSparseDist),
    ):
        if whose == "torchrec":  # its warnings are its own
            warnings.simplefilter("ignore")
        figures: dict[str, float] = script.main(arguments)
    return figures


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("adagrad-dcn", 2),
        *(pytest.param(case, ranks, marks=pytest.mark.slow) for case in AS_USERS_DO for ranks in (1, 2, 4)),
    ],
)
def test_the_script_comes_to_the_same_figures_with_either_import(case: str, ranks: int) -> None:
    arguments = [*SMALL, *AS_USERS_DO[case]]
    ours, theirs = (run_ranks(ranks, run_script, arguments, whose) for whose in ("dmp", "torchrec"))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
