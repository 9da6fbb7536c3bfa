"""Eviction policies: who stays in a map of raw ids when new ids come; each is a score of counts and last accesses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dmp import ShardError

COUNTS, LAST_ACCESS = "counts", "last_access_iter"
Score = Callable[[Mapping[str, torch.Tensor], int], torch.Tensor]


@dataclass(frozen=True)
class Policy:
    """What a map keeps for each of its ids, and how it values them.

    Args:
        metadata: names of what is kept: how often an id came, in which step it came last.
        score: of (N,) metadata in a step; the lowest are evicted first.
        keep: chooses, of the counts of all ids that came, those that may enter; None lets all in.
    """

    metadata: tuple[str, ...]
    score: Score
    keep: Callable[[torch.Tensor], tuple[torch.Tensor, Any]] | None


def policy_of(given: Any) -> Policy:
    """What TorchRec's policy says.

    Raises:
        ShardError: one that is not TorchRec's own.
    """
    name = type(given).__name__
    keep = given._threshold_filtering_func
    if not type(given).__module__.startswith("torchrec.") or name not in _SCORES:
        raise ShardError(
            f"eviction policy {type(given).__module__}.{name} wants a whole map in one place; maps that are cut take "
            f"{', '.join(_SCORES)} of torchrec.modules.mc_modules"
        )
    metadata, score = _SCORES[name]
    exponent = getattr(given, "_decay_exponent", 1.0)
    return Policy(metadata, lambda kept, step: score(kept, step, exponent), keep)


def _age(kept: Mapping[str, torch.Tensor], step: int, exponent: float) -> torch.Tensor:
    return torch.pow(step - kept[LAST_ACCESS] + 1, exponent)


_SCORES: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, torch.Tensor], int, float], torch.Tensor]]] = {
    "LFU_EvictionPolicy": ((COUNTS,), lambda kept, step, exponent: kept[COUNTS]),
    "LRU_EvictionPolicy": ((LAST_ACCESS,), lambda kept, step, exponent: -_age(kept, step, exponent)),
    "DistanceLFU_EvictionPolicy": (
        (COUNTS, LAST_ACCESS),
        lambda kept, step, exponent: torch.div(kept[COUNTS], _age(kept, step, exponent)),
    ),
}
