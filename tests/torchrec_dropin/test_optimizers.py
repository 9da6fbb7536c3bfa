"""TorchRec's optimizer wrappers around `model.fused_optimizer`, as published scripts have them, under either import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.ranks import run_ranks
from tests.torchrec_dropin.scripts import IGNORED, LR, both, feed, model_of, same_as_unsharded, start, wrapper

pytestmark = IGNORED
CPU = torch.device("cpu")


def train(
    model: Any, opt: Any, steps: int, after: Callable[[], object] | None = None, rank: int | None = None
) -> list[torch.Tensor]:
    losses = []
    for step in range(steps):
        opt.zero_grad()
        loss = model(feed(model, step, rank))
        loss.backward()
        opt.step()
        if after is not None:
            after()
        losses.append(loss.detach())
    return losses


def dense_of(model: Any, optimizer: Any = torch.optim.SGD) -> Any:
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    return KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: optimizer(params, lr=LR)
    )


def combined(DistributedModelParallel: Any, in_backward: Any, keys: tuple[str, str]) -> list[torch.Tensor]:
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

    model = start(DistributedModelParallel(module=model_of(in_backward, lr=LR), device=CPU))
    assert isinstance(model.fused_optimizer, KeyedOptimizer)
    dense = dense_of(model)
    opt = CombinedOptimizer([(keys[0], model.fused_optimizer), (keys[1], dense)])
    names = {CombinedOptimizer.prepend_opt_key(name, keys[1]) for name in dense.params}
    names |= {CombinedOptimizer.prepend_opt_key(name, keys[0]) for name in model.fused_optimizer.params}
    assert set(opt.params) == names
    return train(model, opt, 4)


def _combined() -> Any:
    from torchrec.optim import RowWiseAdagrad

    both(combined, RowWiseAdagrad, ("fused", "dense"))
    both(combined, torch.optim.Adagrad, ("", ""))
    return both(combined, torch.optim.SGD, ("", "")), combined(wrapper("dmp"), None, ("fused", "dense"))


def test_combined_optimizer() -> None:
    results = run_ranks(2, _combined)
    for which in range(2):  # updated in the backward; no fused table at all
        same_as_unsharded(combined, [r[which] for r in results], ("", ""))


def warmed_up(DistributedModelParallel: Any, in_backward: Any, over: str) -> list[torch.Tensor]:
    from torchrec.optim.keyed import CombinedOptimizer
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

    stages = [
        WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=2, value=0.1, lr_scale=2.0),
        WarmupStage(policy=WarmupPolicy.STEP, max_iters=5, value=0.5, decay_iters=2),
    ]
    model = start(DistributedModelParallel(module=model_of(in_backward, lr=LR), device=CPU))
    fused, dense = model.fused_optimizer, dense_of(model)
    if over == "all":
        opt = WarmupOptimizer(CombinedOptimizer([fused, dense]), stages, lr=LR)
    else:
        opt = CombinedOptimizer([("fused", WarmupOptimizer(fused, stages, lr=LR)), ("dense", dense)])
        if in_backward is not None:
            assert "fused.__warmup" in opt.params
    return train(model, opt, 6)


def scheduled(DistributedModelParallel: Any, in_backward: Any, over: str) -> list[torch.Tensor]:
    from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
    from torchrec.optim.keyed import CombinedOptimizer

    model = start(DistributedModelParallel(module=model_of(in_backward, lr=LR), device=CPU))
    fused, dense = model.fused_optimizer, dense_of(model)
    opt = CombinedOptimizer([fused, dense])
    if over == "all" or in_backward is None:
        schedulers: list[Any] = [StepLR(opt, step_size=1, gamma=0.3)]
    else:
        schedulers = [StepLR(part, step_size=1, gamma=0.3) for part in (fused, dense)]
    if over == "all":
        schedulers.append(CosineAnnealingLR(opt, T_max=4))
    return train(model, opt, 5, lambda: [s.step() for s in schedulers])


def clipped(DistributedModelParallel: Any, in_backward: Any, how: str) -> list[torch.Tensor]:
    from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
    from torchrec.optim.keyed import CombinedOptimizer

    model = start(DistributedModelParallel(module=model_of(in_backward, lr=LR), device=CPU))
    combination = CombinedOptimizer([model.fused_optimizer, dense_of(model)])
    opt = GradientClippingOptimizer(combination, clipping=GradientClipping[how], max_gradient=0.05)
    return train(model, opt, 4)


LR_SCRIPTS = [(warmed_up, "all"), (warmed_up, "fused"), (scheduled, "all"), (scheduled, "parts")]


def _learning_rates() -> list[list[torch.Tensor]]:
    return [both(script, torch.optim.SGD, over) for script, over in LR_SCRIPTS]


def test_learning_rates_of_tables_follow() -> None:
    results = run_ranks(2, _learning_rates)
    for i, (script, over) in enumerate(LR_SCRIPTS):
        if (script, over) != (warmed_up, "fused"):  # of the plain model nothing is fused
            same_as_unsharded(script, [r[i] for r in results], over)
    assert len({tuple(map(float, losses)) for losses in results[0]}) == len(LR_SCRIPTS)


def _clipping() -> list[list[torch.Tensor]]:
    fused = [both(clipped, torch.optim.SGD, how) for how in ("NORM", "VALUE", "NONE")]
    assert not torch.equal(torch.stack(fused[0]), torch.stack(fused[2]))
    return [clipped(wrapper("dmp"), None, how) for how in ("NORM", "VALUE")]


def test_gradients_are_clipped() -> None:
    results = run_ranks(2, _clipping)
    for i, how in enumerate(("NORM", "VALUE")):  # tables with a gradient: the norm is the whole model's
        same_as_unsharded(clipped, [r[i] for r in results], how)
