"""The optimizers of the oracle, which update the unsharded module, and how each is asked for in the backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from dmp import Shard
from tests.row_oracles import CASES

LR = 0.1


@dataclass
class Oracle:
    """Unsharded optimizers, by hand where the sharded kernels' documented exceptions apply.

    Those of 16 bits are computed in float32, and so is their state kept. The rate is whatever `lr` is by then.
    """

    kind: str | None
    shards: dict[str, tuple[Shard, ...]]
    state: dict[str, dict[str, torch.Tensor]]
    steps: int = 0
    lr: float = LR

    def step(self, module: nn.Module) -> None:
        """Update the module from its `.grad`s, and clear them."""
        self.steps += 1
        for name, p in module.named_parameters():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            state = self.state.setdefault(name, {})
            with torch.no_grad():
                update = self._by_row if self.kind in CASES else getattr(self, f"_{self.kind or 'sgd'}")
                wide = p.to(torch.promote_types(p.dtype, torch.float32))
                update(name, wide, grad.to(wide.dtype), state)
                p.copy_(wide)
            p.grad = None

    def _sgd(self, name: str, p: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        p -= self.lr * grad

    def _adagrad(self, name: str, p: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        total = state.setdefault("sum", torch.zeros_like(p))
        total += grad * grad
        touched = (grad != 0).any(1)  # others would be 0 / 0 where the dtype has no 1e-10
        p[touched] -= self.lr * grad[touched] / (total[touched].sqrt() + 1e-10)

    def _rowwise_adagrad(self, name: str, p: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """One accumulator for each row of each rectangle: rows whole -> the unsharded optimizer."""
        total = state.setdefault("sum", torch.zeros_like(p))  # every column of a rectangle holds its row's sum
        for rows, cols in self._rectangles(name, p):
            g = grad[rows, cols]
            total[rows, cols] += (g * g).mean(1, keepdim=True)
            step = self.lr * g / (total[rows, cols].sqrt() + 1e-10)
            p[rows, cols] -= step.where((g != 0).any(1, keepdim=True), 0)

    def _rectangles(self, name: str, p: torch.Tensor) -> Iterator[tuple[slice, slice]]:
        for s in self.shards[name]:
            if (s.offsets[0], s.sizes) == (0, p.shape) and s.rank > 0 and len(self.shards[name]) > 1:
                continue  # another whole copy
            yield slice(s.offsets[0], s.offsets[0] + s.sizes[0]), slice(s.offsets[1], s.offsets[1] + s.sizes[1])

    def _by_row(self, name: str, p: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """Rows of each rectangle, one by one; every column of a rectangle holds its row's state."""
        assert self.kind is not None
        case = CASES[self.kind]
        whole = {key: state.setdefault(key, torch.zeros_like(p)) for key in case.state}
        for rows, cols in self._rectangles(name, p):
            for row in range(rows.start, rows.stop):
                if grad[row].any():  # else it is in no batch
                    own = {key: whole[key][row, cols][: 1 if case.state[key] else None].clone() for key in whole}
                    case.step(p[row, cols], grad[row, cols], own, {**case.options, "lr": self.lr}, self.steps)
                    for key, value in own.items():
                        whole[key][row, cols] = value

    def _adam(self, name: str, p: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """Lazy: rows without gradient rest."""
        m = state.setdefault("exp_avg", torch.zeros_like(p))
        v = state.setdefault("exp_avg_sq", torch.zeros_like(p))
        touched = (grad != 0).any(1)
        g = grad[touched]
        m[touched] = 0.9 * m[touched] + 0.1 * g
        v[touched] = 0.999 * v[touched] + 0.001 * g * g
        m_hat, v_hat = m[touched] / (1 - 0.9**self.steps), v[touched] / (1 - 0.999**self.steps)
        p[touched] -= self.lr * m_hat / (v_hat.sqrt() + 1e-8)


def in_backward(kind: type[torch.optim.Optimizer], parameters: Iterable[nn.Parameter], **options: float) -> None:
    """Give each of the parameters an optimizer that runs in the backward pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's of its own TorchScript
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(kind, parameters, options)


def attach(module: nn.Module, kind: str | None) -> None:
    """Put an optimizer on every parameter, to run in the backward pass."""
    if kind is None:
        return
    if kind in CASES:
        return CASES[kind].attach(list(module.parameters()))
    if kind == "rowwise_adagrad":
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad as optimizer
    else:
        optimizer = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[kind]
    in_backward(optimizer, module.parameters(), lr=LR)
