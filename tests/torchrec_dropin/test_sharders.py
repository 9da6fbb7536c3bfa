"""TorchRec's sharders where ours are taken: by module type, with their optimizer and their wire formats."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import dmp
from dmp import ShardError, ShardingEnv, row_wise
from tests.equality import LR, attach, check_case, env_of, layouts_for, loss_of, make_batch, make_module
from tests.ranks import run_ranks

FUSED = {"exact_sgd": "sgd", "exact_adagrad": "adagrad", "exact_row_wise_adagrad": "rowwise_adagrad", "adam": "adam"}


def _optimizer(name: str) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return EmbOptimType(name)


def _default_sharders() -> None:
    from torchrec.distributed.sharding_plan import get_default_sharders

    env = env_of("dp2")
    for kind in ("ebc", "ec"):
        check_case(kind, layouts_for(env)["mixed"], "adagrad", env, sharders=get_default_sharders())


def test_the_default_sharders_of_torchrec() -> None:
    run_ranks(2, _default_sharders)


def _twins(kind: str) -> list[str]:
    """Fused parameters of a sharder against the same optimizer applied in backward; what each has as its state."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    env, found = env_of("dp2"), []
    theirs = EmbeddingCollectionSharder if kind == "ec" else EmbeddingBagCollectionSharder
    for fused, ours in FUSED.items():
        models = []
        for side in ("fused_params", "applied"):
            module = make_module(kind)
            plan = {name: row_wise() for name, _ in module.named_parameters()}
            given = {"optimizer": _optimizer(fused), "learning_rate": LR, "eps": 1e-10}
            if ours == "adam":  # which adds eps to the plain root
                given["eps"] = 1e-8
            if side == "applied":
                attach(module, ours)
            sharders = [theirs(fused_params=given) if side == "fused_params" else theirs()]
            models.append(dmp.DistributedModelParallel(module, env=env, plan=plan, sharders=sharders))
            for step in range(2):
                loss_of(models[-1](*make_batch(kind, env.rank, step))).backward()
        for name, value in dmp.full_state_dict(models[0]).items():
            torch.testing.assert_close(value, dmp.full_state_dict(models[1])[name], msg=f"{fused} {name}")
        found.append(",".join(sorted(next(iter(models[0].fused_optimizer.state_dict()["state"].values())))))
    return found


@pytest.mark.parametrize("kind", ["ebc", "ec"])
@pytest.mark.sampled(2)
def test_fused_params_are_the_optimizer_in_backward(kind: str) -> None:
    for found in run_ranks(2, _twins, kind):
        assert found == ["", "step,sum", "step,sum", "exp_avg,exp_avg_sq,step"]


def _sharder(**options: Any) -> Any:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    return EmbeddingBagCollectionSharder(**options)


def _wrapped(*sharders: Any) -> dmp.DistributedModelParallel:
    return dmp.DistributedModelParallel(make_module("ebc"), env=ShardingEnv.single(), sharders=sharders)


def test_what_no_sharder_of_ours_does_is_refused_by_name() -> None:
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

    for params, word in (
        ({"optimizer": _optimizer("shampoo")}, "'shampoo'"),
        ({"learning_rat": 0.1}, "'learning_rat'"),
        ({"output_dtype": torch.float16}, "'output_dtype'"),
    ):
        with pytest.raises(ShardError, match=f"EmbeddingBagCollectionSharder: fused_params.*{word}"):
            _wrapped(_sharder(fused_params=params))
    for precision in (CommType.FP8, CommType.INT8, CommType.MX4):
        registry = get_qcomm_codecs_registry(QCommsConfig(precision, precision), device=torch.device("cpu"))
        with pytest.raises(ShardError, match="qcomm_codecs_registry"):
            _wrapped(_sharder(qcomm_codecs_registry=registry))


def test_the_last_of_one_module_type_wins_and_ours_may_stand_beside() -> None:
    from sharders import EmbeddingBagCollectionSharder

    first = _sharder(fused_params={"learning_rate": 0.1})
    assert not _wrapped(first, _sharder()).fused_optimizer.fused
    assert _wrapped(_sharder(), first).fused_optimizer.fused
    assert not _wrapped(first, EmbeddingBagCollectionSharder()).fused_optimizer.fused


def test_options_of_memory_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = _wrapped(_sharder(fused_params={"cache_load_factor": 0.25, "prefetch_pipeline": True}))
    assert not model.fused_optimizer.fused
    assert "['cache_load_factor', 'prefetch_pipeline'] say how FBGEMM holds tables" in caplog.text


def _halved() -> float:
    """How far 16 bits on the wire move a step's results, and what travels."""
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

    env, outs = env_of("dp2"), []
    config = QCommsConfig(CommType.FP16, CommType.FP16, forward_loss_scale=2.0, backward_loss_scale=8.0)
    for registry in (None, get_qcomm_codecs_registry(config, device=torch.device("cpu"))):
        module = make_module("ebc")
        plan = {name: row_wise() for name, _ in module.named_parameters()}
        sharder = _sharder(qcomm_codecs_registry=registry, fused_params={"learning_rate": LR})
        model = dmp.DistributedModelParallel(module, env=env, plan=plan, sharders=[sharder])
        out = model(*make_batch("ebc", 0, 0))
        loss_of(out).backward()
        outs.append([out.values().detach(), *dmp.full_state_dict(model).values()])
    for exact, halved in zip(*outs, strict=True):
        torch.testing.assert_close(halved, exact, rtol=2**-9, atol=2**-9)
    return float(sum((a - b).abs().sum() for a, b in zip(*outs, strict=True)))


def test_wire_formats_of_16_bits() -> None:
    assert all(moved > 0 for moved in run_ranks(2, _halved))


def _rows_alone() -> dict[str, str]:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    class RowsAlone(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [self.allowed]

    found = {}
    for RowsAlone.allowed in ("row_wise", "data_parallel"):
        module = make_module("ebc")
        longer = {name for name, p in module.named_parameters() if len(p) > 1}  # one row is whole on a rank either way
        plan = dmp.DistributedModelParallel(module, env=env_of("dp2"), sharders=[RowsAlone()]).plan
        found[RowsAlone.allowed] = ", ".join(sorted({str(plan[name].layout) for name in longer}))
    RowsAlone.allowed = "host_wise"
    model = dmp.DistributedModelParallel(make_module("ebc"), env=env_of("dp2"), sharders=[RowsAlone()])
    assert {*model.plan} == longer | {*plan}
    return found


def test_sharding_types_of_ones_own_are_all_that_the_planner_is_offered() -> None:
    for found in run_ranks(2, _rows_alone):
        assert found == {"row_wise": "row_wise()", "data_parallel": "data_parallel()"}


def _sums() -> None:
    from torchrec.distributed.comm_ops import set_gradient_division

    module = make_module("ebc")
    plan = {name: row_wise() for name, _ in module.named_parameters()}
    set_gradient_division(False)
    try:
        dmp.DistributedModelParallel(module, env=env_of("dp2"), plan=plan)
    finally:
        set_gradient_division(True)


def test_sums_of_gradients_that_were_asked_of_torchrec_are_refused() -> None:
    for error in run_ranks(2, _sums, expect=ShardError):
        assert "set_gradient_division(False)" in str(error) and "mean over 2 ranks" in str(error)


def _forgets() -> None:
    """As TorchRec's example of a copied table does: the plan's kernel, then the optimizer that its filter feeds."""
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    env, module = env_of("dp2"), make_module("ebc")
    plain, names = copy.deepcopy(module), [name for name, _ in module.named_parameters()]
    attach(module, "sgd")
    plan: dict[str, Any] = {name: dmp.data_parallel() for name in names}
    plan[names[0]] = dmp.ParameterSharding(dmp.data_parallel(), kernel="dense")
    model = dmp.DistributedModelParallel(module, env=env, plan=plan)
    held = dict(in_backward_optimizer_filter(model.module.named_parameters()))
    assert [*held] == names[:1] and [*model.fused_optimizer.fused] == names[1:]
    optimizers = [RowWiseAdagrad(p, lr=LR) for p in ([held[names[0]]], [plain.get_parameter(names[0])])]
    for step in (2, 3):  # in which no rank is without samples
        loss_of(model(*make_batch("ebc", env.data_rank, step))).backward()
        (sum(loss_of(plain(*make_batch("ebc", rank, step))) for rank in range(2)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(held[names[0]].data, plain.get_parameter(names[0]).data)


def test_a_dense_kernel_gives_a_table_to_the_optimizer_that_a_script_makes() -> None:
    run_ranks(2, _forgets)
