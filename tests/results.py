"""What modules return, reduced to a loss, and compared with the plain module's."""

from __future__ import annotations

import torch
from torch import nn


def loss_of(out: object) -> torch.Tensor:
    """A scalar in which every output element counts differently."""
    tensors = [out] if isinstance(out, torch.Tensor) else _tensors(out)
    total = torch.zeros(())
    for i, t in enumerate(tensors):
        weight = torch.linspace(0.5, 1.5, t.numel()).view(t.shape) + 0.1 * i
        total = total + (t * weight).sum() + (t * t).sum() * 0.3
    return total


def _tensors(out: object) -> list[torch.Tensor]:
    if isinstance(out, dict):
        return [v.values() for v in out.values()]
    return [out.values()]  # type: ignore[attr-defined]


def same_result(sharded: object, plain: object, near: float = 1e-5) -> None:
    """Same type, keys in the same order, shapes, dtypes and values."""
    assert type(sharded) is type(plain), (type(sharded), type(plain))
    if isinstance(plain, dict):
        assert isinstance(sharded, dict)
        assert list(sharded) == list(plain)
        for key in plain:
            torch.testing.assert_close(sharded[key].lengths(), plain[key].lengths())
    elif not isinstance(plain, torch.Tensor):
        assert sharded.keys() == plain.keys()  # type: ignore[attr-defined]
        assert sharded.length_per_key() == plain.length_per_key()  # type: ignore[attr-defined]
    many = [sharded] if isinstance(sharded, torch.Tensor) else _tensors(sharded)
    for a, b in zip(many, [plain] if isinstance(plain, torch.Tensor) else _tensors(plain), strict=True):
        assert a.shape == b.shape, (a.shape, b.shape)
        assert a.dtype == b.dtype, (a.dtype, b.dtype)
        torch.testing.assert_close(a.detach(), b.detach(), atol=near, rtol=near)


def is_empty(batch: tuple[object, ...]) -> bool:
    """TorchRec's own modules fail on a batch of no samples: what must come is (0, D)."""
    stride = getattr(batch[0], "stride", None)
    return callable(stride) and not isinstance(batch[0], torch.Tensor) and stride() == 0


def same_empty_result(out: object, plain: nn.Module) -> None:
    """Keys as ever, no rows, dims as ever."""
    if isinstance(out, dict):
        names = [n for names in plain.embedding_names_by_table() for n in names]  # type: ignore[operator]
        assert list(out) == names
        assert all(v.values().shape == (0, plain.embedding_dim()) for v in out.values())  # type: ignore[operator]
        return
    assert out.keys() == plain._embedding_names  # type: ignore[attr-defined]
    assert out.values().shape == (0, sum(plain._lengths_per_embedding))  # type: ignore[attr-defined,arg-type]
