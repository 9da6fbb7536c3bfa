"""TorchRec's own tests pass with our class in the place of theirs."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.torchrec_dropin.rank_tests import run_test

pytestmark = pytest.mark.filterwarnings(  # calls of TorchRec 1.8.0 that torch 2.13 deprecates
    "ignore:`torch.jit.[a-z]+` is deprecated:DeprecationWarning",
    "ignore:`broadcast_buffers` is deprecated:FutureWarning",
    "ignore:`torch.distributed.(reduce_scatter|all_gather_into)_tensor` is deprecated:FutureWarning",
)


def test_parameters_present_are_kept_and_those_on_meta_get_values() -> None:
    ran = run_ranks(1, run_test, "test_model_parallel_base:ModelParallelStateDictBase", "test_parameter_init", {})
    assert ran == ["passed"]
