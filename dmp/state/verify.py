"""Does the sharded model compute what the plain one does? Ask it, on a real batch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dmp.chunked import as_chunks, chunk_views
from dmp.deep_copy import deep_copy
from dmp.env import ShardingEnv
from dmp.errors import CheckpointError, DmpError, RanksError, ShardError
from dmp.foreign import type_name
from dmp.inference_mode import outside_inference_mode
from dmp.nested import tensors_of
from dmp.ranks import entry, fail_together
from dmp.state.find_wrapped import env_of, fused_parameters, in_force, wrapped_in
from dmp.state.gather import full_state_dict
from dmp.state.local_chunks import sharded_parameters
from dmp.wrap.values.whole import gather

_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_SHOWN = 5


@dataclass(frozen=True)
class VerifyReport:
    """Largest absolute differences between sharded and plain model, over all ranks."""

    outputs: dict[str, float]
    """By place in the output: `""` for a single tensor, `"[0]"`, `"['key']"`, ..."""

    gradients: dict[str, float]
    """By parameter name."""

    not_compared: tuple[str, ...]
    """Parameters updated in the backward pass: they have no gradient to compare."""

    of_heads: tuple[str, ...] = ()
    """Outputs of which a rank has its heads alone, and was compared with these."""

    def __str__(self) -> str:
        own = dict.fromkeys(self.of_heads, " (a rank has its heads)")
        lines = [f"output{where}: {diff:.3g}{own.get(where, '')}" for where, diff in self.outputs.items()]
        lines += [f"gradient of {name}: {diff:.3g}" for name, diff in self.gradients.items()]
        lines += [f"gradient of {name}: not compared, updated in the backward pass" for name in self.not_compared]
        return "\n".join(lines)


@outside_inference_mode()
def verify(model: nn.Module, module: nn.Module, batch: Any) -> VerifyReport:
    """Run `batch` through copies of the sharded model and of the plain `module` with its weights, and compare.

    Outputs are compared on each rank; then gradients of a fixed random projection of them, averaged over the ranks.
    What attentions give head by head, (B, H, ...) with all of the plain module's H split over the tensor axes (caches
    of keys and values), is compared with this rank's heads.
    Neither argument is changed, nor the random state. Collective over `model.env`; needs room for both copies and their
    gradients, so use a small model of the same build.

    Args:
        model: a `DistributedModelParallel`.
        module: the unsharded module; its values do not matter.
        batch: this rank's batch: a tuple of arguments, or a single one.

    Raises:
        DmpError: on every rank, naming each output and gradient that differs by more than rounding explains, or the
            rank on which the plain module fails.
    """
    env, model = env_of(model), in_force(model).get("", model)
    if not isinstance(module, nn.Module) or wrapped_in(module):
        raise ShardError(f"verify(model, module, batch): expected the unsharded module second; got {type_name(module)}")
    with entry("verify", env.everyone):
        return _verify(model, module, batch, env)


def _verify(model: nn.Module, module: nn.Module, batch: Any, env: ShardingEnv) -> VerifyReport:
    args = batch if isinstance(batch, tuple) else (batch,)
    plain = deep_copy(module)
    try:
        plain.load_state_dict(full_state_dict(model))
    except RanksError:
        raise
    except (RuntimeError, CheckpointError) as error:
        raise DmpError(f"the model's names and shapes are not those of {type(module).__name__}: {error}") from error
    plain.to(env.device)
    _take_modes(plain, model)
    sharded = copy.deepcopy(model)

    def run(candidate: nn.Module, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        candidate.zero_grad(set_to_none=True)
        outputs = dict(tensors_of(candidate(*args)))
        _project(outputs, whole, env)
        return outputs

    with torch.random.fork_rng():
        expected = fail_together(
            lambda: run(plain, {}), env.everyone, "verify: the plain module on the batch", kind=DmpError
        )
        got = run(sharded, expected)
    if got.keys() != expected.keys():
        raise DmpError(f"the output has {sorted(got)}, the plain module's {sorted(expected)}")
    outputs = {at: _compare(got[at].detach(), _heads_of(out.detach(), got[at], env)) for at, out in expected.items()}
    of_heads = tuple(at for at, out in expected.items() if got[at].shape != out.shape)  # of others that is an error
    gradients, not_compared = _compare_gradients(sharded, plain, env)
    return replace(_judge(outputs, gradients, not_compared, env), of_heads=of_heads)


def _take_modes(plain: nn.Module, model: nn.Module) -> None:
    """Each module's mode; inside what a sharder has replaced, that of the module that took its place."""
    modes = {name: m.training for name, m in model.named_modules(remove_duplicate=False)}
    for name, module in plain.named_modules(remove_duplicate=False):
        while name not in modes:
            name = name.rpartition(".")[0]
        module.training = modes[name]


@dataclass
class _Difference:
    """Largest absolute difference, and the largest that rounding explains."""

    found: float
    allowed: float
    note: str = ""


def _project(outputs: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor], env: ShardingEnv) -> None:
    """Backward of a sum with fixed random weights, so that errors do not cancel."""
    total: Any = 0.0
    generator = torch.Generator().manual_seed(0)
    for where, output in outputs.items():
        if output.requires_grad:
            weights = torch.rand(whole.get(where, output).shape, generator=generator, dtype=torch.float64) + 0.5
            total = total + (output * _heads_of(weights, output, env).to(output)).sum()
    if isinstance(total, torch.Tensor):
        total.backward()


def _heads_of(whole: torch.Tensor, part: torch.Tensor, env: ShardingEnv) -> torch.Tensor:
    """This rank's heads of what is (B, H, ..., ...) in the plain module, where the sharded one has so many."""
    batch, heads, *others = whole.shape if whole.dim() == 4 else (0, 0)
    mine = heads // env.tensor_size
    if env.tensor_size == 1 or heads % env.tensor_size or part.shape != (batch, mine, *others):
        return whole
    return whole.narrow(1, env.place_of(env.rank, "tensor") * mine, mine)


def _compare(got: torch.Tensor, expected: torch.Tensor) -> _Difference:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        note = f"is {tuple(got.shape)} {got.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
        return _Difference(float("inf"), 0.0, note)
    if not expected.numel():
        return _Difference(0.0, 0.0)
    difference = (got.double() - expected.double()).abs()
    largest = float(difference.nan_to_num(nan=float("inf")).max())
    return _Difference(largest, _TOLERANCE.get(expected.dtype, 0.0) * max(1e-3, float(expected.double().abs().max())))


def _compare_gradients(
    sharded: nn.Module, plain: nn.Module, env: ShardingEnv
) -> tuple[dict[str, _Difference], list[str]]:
    pieces = sharded_parameters(sharded)
    not_compared = sorted(fused_parameters(sharded))
    mine: dict[str, torch.Tensor] = {}
    for name, parameter in sharded.named_parameters():
        grad = parameter.grad
        if name in not_compared or grad is None:
            continue
        mine[name] = chunk_views(grad.contiguous(), *pieces[name]) if name in pieces else as_chunks(grad)
    whole = gather(mine, env)
    differences: dict[str, _Difference] = {}
    for name, parameter in plain.named_parameters():
        if name in not_compared:
            continue
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        grad = grad.to_dense() if grad.is_sparse else grad
        if env.everyone is not None:
            grad = grad.contiguous()
            dist.all_reduce(grad, group=env.everyone)
            grad = grad / env.size
        got = whole.get(name)
        differences[name] = _compare(torch.zeros_like(grad, device="cpu") if got is None else got, grad.cpu())
    return differences, not_compared


def _judge(
    outputs: dict[str, _Difference], gradients: dict[str, _Difference], not_compared: list[str], env: ShardingEnv
) -> VerifyReport:
    """The worst rank's differences on every rank."""
    mine = [*outputs.values(), *gradients.values()]
    excess = torch.tensor([[d.found, float(not d.found <= d.allowed)] for d in mine], dtype=torch.float64)
    excess = excess.to(env.device)
    if env.everyone is not None:
        dist.all_reduce(excess, dist.ReduceOp.MAX, group=env.everyone)
    labels = [f"output{where}" for where in outputs] + [f"gradient of {name}" for name in gradients]
    wrong = [
        f"{label} differs by {found:.3g}" + (f" (here it {d.note})" if d.note else "")
        for label, (found, bad), d in zip(labels, excess.tolist(), mine, strict=True)
        if bad
    ]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        shown = "; ".join(wrong[:_SHOWN])
        raise DmpError(f"the sharded model does not compute what the plain one does: {shown}{more}")
    found = [value for value, _ in excess.tolist()]
    return VerifyReport(
        dict(zip(outputs, found, strict=False)),
        dict(zip(gradients, found[len(outputs) :], strict=True)),
        tuple(not_compared),
    )
