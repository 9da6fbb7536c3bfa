"""What differs between a sharded model and the plain one, in words that name the tensor and the piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dmp import (
    ChunkedTensor,
    DistributedModelParallel,
    Shard,
    ShardingEnv,
    is_dtensor,
    local_of,
    ranks,
    rectangles_of,
    tensors_of,
    type_name,
)

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
Pieces = list[tuple[tuple[int, ...], torch.Tensor]]


def pieces_of(value: Any) -> Pieces:
    """(offset, values) of what this rank holds of a sharded tensor; a plain one is held whole."""
    if isinstance(value, ChunkedTensor):
        return list(zip(value.offsets, value.chunks, strict=True))
    if is_dtensor(value):
        return [(at, values.detach()) for at, values in rectangles_of(value)]
    return [((0,) * value.dim(), value.detach())]


def _part(whole: torch.Tensor, offset: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))]


def whole_of(value: Any, env: ShardingEnv) -> tuple[torch.Tensor, str]:
    """The tensor put together from all ranks' pieces, and what is wrong with them, if anything."""
    mine = [(offset, piece.cpu()) for offset, piece in pieces_of(value)]
    everyone: list[Pieces] = ranks.gather_objects("putting pieces together", mine, env.group())
    whole = torch.zeros(tuple(value.shape), dtype=value.dtype, device="cpu")
    known = torch.zeros(tuple(value.shape), dtype=torch.bool, device="cpu")
    for held in everyone:
        for offset, piece in held:
            target, is_known = _part(whole, offset, piece.shape), _part(known, offset, piece.shape)
            if not torch.equal(target[is_known], piece[is_known]):
                return whole, f"ranks that hold the same elements of the piece at {offset} differ"
            target.copy_(piece)
            is_known.fill_(True)
    missing = int((~known).sum())
    return whole, f"no rank holds {missing} of {known.numel()} elements" if missing else ""


def _difference(got: torch.Tensor, expected: torch.Tensor) -> str:
    """What differs, in words; empty when nothing does."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"expected {tuple(expected.shape)} {expected.dtype}, got {tuple(got.shape)} {got.dtype}"
    got, expected = got.detach().cpu(), expected.detach().cpu()
    if not got.is_floating_point():
        return "" if torch.equal(got, expected) else "integers differ"
    tolerance = _TOLERANCE.get(got.dtype, 1e-5)
    if torch.allclose(got, expected, rtol=tolerance, atol=tolerance):
        return ""
    gap = (got.double() - expected.double()).abs().nan_to_num(nan=float("inf"))
    at = tuple(int(i) for i in (gap == gap.max()).nonzero()[0])
    text = f"expected {float(expected[at]):.6g} at {at}, got {float(got[at]):.6g}"
    square = float((expected.double() ** 2).sum())
    ratio = float((got.double() * expected.double()).sum()) / square if square else 1.0
    if torch.allclose(got, expected * ratio, rtol=tolerance, atol=tolerance):
        text += f" (all of it is {ratio:.4g} times what is expected)"
    return text


def places(name: str, value: Any, shape: tuple[int, ...], mine: Sequence[Shard]) -> Iterator[str]:
    """Whether the pieces of this rank lie where `mine` does."""
    if tuple(value.shape) != shape:
        yield f"{name!r}: expected pieces of a tensor of shape {shape}; got {type_name(value)} {tuple(value.shape)}"
        return
    expected, held = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    for s in mine:
        _part(expected, s.offsets, s.sizes).add_(1)
    for offset, piece in pieces_of(value):
        _part(held, offset, piece.shape).add_(1)
    wrong = (held != expected).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        yield (
            f"{name!r}: {len(wrong)} of {held.numel()} elements are not held as planned; the first is {at}, "
            f"expected {int(expected[at])} times on this rank, got {int(held[at])}"
        )


def pieces(what: str, value: Any, expected: torch.Tensor) -> Iterator[str]:
    """This rank's pieces with the same rectangles of the whole tensor."""
    if tuple(value.shape) != tuple(expected.shape):
        yield f"{what}: expected shape {tuple(expected.shape)}, got {tuple(value.shape)}"
        return
    for offset, piece in pieces_of(value):
        if different := _difference(piece, _part(expected, offset, piece.shape)):
            yield f"{what}, piece at {offset}: {different}"


def state(model: DistributedModelParallel, plain: nn.Module, when: str) -> Iterator[str]:
    """Every tensor of the plain module's state, by this rank's pieces."""
    held = model.state_dict()
    for name, expected in plain.state_dict().items():
        if name in held:
            yield from pieces(f"{name!r}{when}", held[name], expected)
        else:
            yield f"{name!r} is missing from the state dict{when}"


def gradients(model: DistributedModelParallel, plain: nn.Module) -> Iterator[str]:
    """Of every parameter that has no in-backward optimizer."""
    held, fused = model.state_dict(), model.fused_optimizer.fused
    wanted = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if name in fused or not parameter.requires_grad:
            continue
        grads = (torch.zeros_like(p) if p.grad is None else p.grad for p in (parameter, wanted[name]))
        grad, expected = (g.to_dense() if g.is_sparse else g for g in grads)
        local, of_grad = local_of(parameter).detach(), local_of(grad).detach().as_subclass(torch.Tensor).contiguous()
        for offset, piece in pieces_of(held[name]):
            start = piece.storage_offset() - local.storage_offset() + of_grad.storage_offset()
            part = of_grad.as_strided(piece.shape, piece.stride(), start)
            if different := _difference(part, _part(expected, offset, piece.shape)):
                yield f"gradient of {name!r}, piece at {offset}: {different}"


def outputs(got: Any, expected: Any, when: str) -> Iterator[str]:
    """Every tensor of an output, by its place in it."""
    given, wanted = list(tensors_of(got)), list(tensors_of(expected))
    if [place for place, _ in given] != [place for place, _ in wanted]:
        shown = [[place or "a tensor" for place, _ in side] for side in (wanted, given)]
        yield f"{when}: expected outputs {shown[0]}, got {shown[1]}"
        return
    for (place, a), (_, b) in zip(given, wanted, strict=True):
        if different := _difference(a, b):
            yield f"output{place} {when}: {different}"
