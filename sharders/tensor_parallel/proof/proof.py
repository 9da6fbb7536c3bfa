"""Proves a tensor-parallel plan: every rank's outputs and gradients against those of the whole module.

[Note: proof] A sample of the module (`sample`) runs whole, then split by the very code that splits the model,
once for each rank of a simulated group (`simulated`). What must agree: every output, and the gradient of every
parameter and input, where each rank has all of it or its own part. Rounding is told from an error by size: an error
makes a difference as large as the numbers themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from dmp import local_of, strided
from sharders.tensor_parallel.proof.sample import Run, Sample, UnprovedError, part_of
from sharders.tensor_parallel.proof.simulated import simulate
from sharders.tensor_parallel.split.local import share_of_parts
from sharders.tensor_parallel.split.split import split
from sharders.tensor_parallel.split.styles import Style
from sharders.tensor_parallel.structure.claimed_width import is_width
from sharders.tensor_parallel.structure.dry_run import undisturbed
from sharders.tensor_parallel.structure.numbers import number_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RAISES = "run split it raises"
_SHARE = 1e-3
"""Of a tensor's largest number: rounding, even where a module computes in float32, stays below."""
_FLOOR = {torch.float64: 2e-6, torch.float32: 2e-5}
"""Of the largest of all gradients (outputs): below it a gradient that is zero but for rounding is not told from one."""


def disproof(
    sample: Sample, styles: Mapping[str, Style], divided: Mapping[tuple[str, str], int], axis: str
) -> str | None:
    """What is wrong with a plan: which output or parameter, and by how much. None where it is right.

    Args:
        styles: module path -> style.
        divided: (module path, attribute) -> the value it has on each rank.

    Raises:
        UnprovedError: the module gives other numbers each time that it runs.
    """
    found = _differs(sample, styles, divided, axis, apart=False)
    if found is None or all(isinstance(style, str) for style in styles.values()):
        return found
    # A style of one's own may make shards of different sizes: what one rank knows of DTensor is not another's then.
    return _differs(sample, styles, divided, axis, apart=True)


def _differs(
    sample: Sample, styles: Mapping[str, Style], divided: Mapping[tuple[str, str], int], axis: str, *, apart: bool
) -> str | None:
    def job(mesh: DeviceMesh) -> Run:
        model = sample.make()
        modules = dict(model.named_modules())
        # A copy: a style object may keep something of the module it is applied to.
        here = {path: copy.copy(style) for path, style in styles.items() if path in modules}
        there = {key: value for key, value in divided.items() if key[0] in modules}
        held = {key: _held(sample, modules[key[0]], key[1], value) for key, value in there.items()}
        attributes = {key: value // sample.ranks for key, value in held.items() if value is not None}  # of no stand-in
        split(model, mesh, here, attributes)
        return sample.run(model, mesh.get_rank(), modules)

    try:
        with undisturbed():
            ranks = simulate(sample.ranks, axis, job, apart=apart)
    except Exception as error:  # a user's forward, or style, may raise anything
        text = str(error).strip().partition("\n")[0]
        return f"{RAISES} {type(error).__name__}: {text[:300]}"
    wrong = _compare(sample, ranks)
    return None if wrong is None else wrong + _departure(sample, _again(sample), ranks[0])


def _held(sample: Sample, module: nn.Module, name: str, local: int) -> int | None:
    """A number of the sample's, which may be narrower; None where the module has none.

    Args:
        local: its value on one rank of the model itself.
    """
    held = number_of(module, name)
    if held is None or not is_width(name):
        return held
    whole = local * sample.size
    return sample.numbers.sizes.get(whole, whole)


def _compare(sample: Sample, ranks: list[Run]) -> str | None:
    whole = sample.whole
    scale = _largest(whole.outputs)
    for i, output in enumerate(whole.outputs):
        for r, rank in enumerate(ranks):
            if len(rank.outputs) != len(whole.outputs):
                return f"{len(rank.outputs)} outputs instead of {len(whole.outputs)} on rank {r}"
            here = local_of(rank.outputs[i])
            try:
                part = part_of(output, here.shape, r, len(ranks))
            except ValueError as error:
                return f"output {i} on rank {r}: {error}"
            wrong = _difference(sample, here, part, scale)
            if wrong is not None:
                return f"output {i} {tuple(output.shape)} on rank {r} {wrong}"
    scale = _largest([g for g, _ in whole.gradients.values() if g is not None])
    for name, (expected, _) in whole.gradients.items():
        wrong = _gradient_differs(sample, name, expected, ranks, scale)
        if wrong is not None:
            return wrong
    return None


def _gradient_differs(
    sample: Sample, name: str, expected: torch.Tensor | None, ranks: list[Run], scale: float
) -> str | None:
    every = [rank.gradients.get(name, (None, None)) for rank in ranks]
    if all(here is None for here, _ in every):
        is_zero = expected is None or _largest([expected]) <= _FLOOR[sample.dtype] * scale
        return None if is_zero else f"the gradient of {name!r} is missing on every rank"
    first = next(placement for here, placement in every if here is not None)
    if first is not None and first.is_partial():
        total = torch.stack([here for here, _ in every if here is not None]).sum(0)
        every = [(total, None)] * len(every)
    for r, (here, _) in enumerate(every):
        if expected is None:
            part = None if here is None else torch.zeros_like(here)
        elif first is not None and (several := strided(first)) is not None:
            part = share_of_parts(expected, *several, len(ranks), r)
        elif first is not None and first.is_shard():
            part = _chunk(expected, first.dim, r, len(ranks))
        else:
            part = expected
        here = torch.zeros_like(part) if here is None and part is not None else here
        if here is None or part is None:
            continue
        if here.shape != part.shape:
            return f"the gradient of {name!r} on rank {r} has shape {tuple(here.shape)} instead of {tuple(part.shape)}"
        wrong = _difference(sample, here, part, scale)
        if wrong is not None:
            return f"the gradient of {name!r} on rank {r} {wrong}"
    return None


def _chunk(whole: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    """torch's `Shard`: the last ranks may have fewer, or none."""
    parts = whole.chunk(ranks, dim)
    return parts[rank] if rank < len(parts) else whole.narrow(dim, 0, 0)


def _difference(sample: Sample, here: torch.Tensor, expected: torch.Tensor, scale: float) -> str | None:
    if not expected.numel():
        return None
    error = float((here.double() - expected.double()).abs().max())
    largest = float(expected.abs().max())
    if error <= _SHARE * largest + _FLOOR[sample.dtype] * scale:
        return None
    return f"differs from the whole module's by {error:.3g}, where the largest value is {largest:.3g}"


def _largest(tensors: list[torch.Tensor]) -> float:
    return max((float(x.abs().max()) for x in tensors if x.numel()), default=0.0)


def _again(sample: Sample) -> Run:
    """The whole module once more, and what is between its modules.

    Raises:
        UnprovedError: its outputs are not those of the first time: nothing can be said by comparing.
    """
    model = sample.make()
    with undisturbed():
        (whole,) = simulate(1, "whole", lambda _: sample.run(model, None, dict(model.named_modules())))
    scale = _largest(sample.whole.outputs)
    for first, second in zip(sample.whole.outputs, whole.outputs, strict=True):
        if first.shape != second.shape or _difference(sample, second, first, scale) is not None:
            raise UnprovedError("run twice, whole, it gives other numbers: it draws some from a generator of its own")
    return whole


def _departure(sample: Sample, whole: Run, run: Run) -> str:
    """The first module whose output is another one's on rank 0."""
    scale = _largest(list(whole.between.values()))
    for path, expected in whole.between.items():
        here = run.between.get(path)
        if here is None:
            continue
        if here.shape == expected.shape and _difference(sample, here, expected, scale) is not None:
            return f"; the first module whose output is another is {path!r}"
    return ""


@dataclass(frozen=True)
class Verdict:
    """What is known of a plan for a model."""

    wrong: str | None = None
    unproved: str = ""
    on: str = ""
    """What ran."""

    unreached: tuple[str, ...] = ()
    """Modules that are split, and that no output depended on: nothing was seen of them."""
