"""Experts of a mixture: modules whose own weights are stacks of matrices, one matrix for each expert.

[Note: experts] Every expert is an MLP: up from the hidden size, often with a gate in the same matrix or one of its own,
and down again. The tensor axis splits all of them by their inner size, as it splits any MLP, so that a rank has its
share of every expert and it does not matter which are chosen. What goes up ends where down begins, which tells one from
the other. Shapes do not always tell the order of a matrix's dims, nor whether a gate and what it gates lie one behind
the other in theirs or take turns. Each that fits is a *way* with a style of its own; the one that is proved is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.parameter import is_lazy

from sharders.tensor_parallel.structure.linears import DOWN

EXPERTS = ("experts", "experts_interleaved", "experts_transposed")
"""Styles of ways: the likeliest; where a gate and what it gates take turns; with the dims of matrices the other way."""
_LEAST = 2
"""Experts: a stack of one is no mixture."""


@dataclass(frozen=True)
class Experts:
    """What of such a module is split, and where.

    Args:
        width: hidden size.
        inner: size in between, of each expert.
        up: name of a parameter -> the dim that its inner features lie along: matrices, and biases.
        down: the same.
        parts: along those of what leads up, which lie one behind the other: 2 of a gate and what it gates.
    """

    width: int
    inner: int
    up: Mapping[str, int]
    down: Mapping[str, int]
    parts: int = 1


def experts_of(module: nn.Module) -> dict[str, Experts]:
    """Style -> way; none where the module's own parameters are no such stacks."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    if not own or any(is_lazy(p) for p in own.values()) or any(True for c in module.children() for _ in c.parameters()):
        return {}
    stacks = {name: tuple(p.shape) for name, p in own.items() if p.dim() == 3}
    biases = {name: tuple(p.shape) for name, p in own.items() if p.dim() == 2}
    counts = {p.shape[0] for p in own.values() if p.dim()}
    if len(stacks) + len(biases) < len(own) or len(stacks) not in (2, 3) or len(counts) != 1 or min(counts) < _LEAST:
        return {}
    downs = {name for name in stacks if any(True for _ in _ways(stacks, name))}
    downs = downs if len(downs) == 1 else {name for name in downs if DOWN.fullmatch(name.lower())}
    found: dict[str, Experts] = {}
    for way in _ways(stacks, *downs) if len(downs) == 1 else ():
        whole = _with_biases(way, stacks, biases)
        if whole is None:
            continue
        if found:
            found.setdefault("experts_transposed", whole)
            continue
        found["experts"] = whole
        if whole.parts > 1:
            found["experts_interleaved"] = replace(whole, parts=1)
    return found


def _ways(stacks: Mapping[str, tuple[int, ...]], down: str) -> Iterator[Experts]:
    """With this one as the matrix that leads down: as (hidden, inner), or transposed."""
    ups = {name: shape for name, shape in stacks.items() if name != down}
    for inner_dim in (2, 1):
        width, inner = stacks[down][3 - inner_dim], stacks[down][inner_dim]
        out_dim = 3 - inner_dim  # of what leads up
        for parts in (1, 2) if len(ups) == 1 else (1,):
            if all(shape[out_dim] == parts * inner and shape[3 - out_dim] == width for shape in ups.values()):
                yield Experts(width, inner, dict.fromkeys(ups, out_dim), {down: inner_dim}, parts)


def _with_biases(
    way: Experts, stacks: Mapping[str, tuple[int, ...]], biases: Mapping[str, tuple[int, ...]]
) -> Experts | None:
    """With those beside matrices that lead up, which are split as these are; None where one is beside none."""
    split = {}
    for name, shape in biases.items():
        beside = next((of for of in stacks if name.startswith(of)), "")
        out_dim = way.up[beside] if beside in way.up else 3 - way.down.get(beside, 0)
        if not beside or shape[1] != stacks[beside][out_dim]:
            return None
        if beside in way.up:
            split[name] = 1
    return replace(way, up={**way.up, **split})
