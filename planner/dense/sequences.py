"""How many tokens a sample has: what the user says, what the module's configuration says, or a guess, in this order."""

from __future__ import annotations

from typing import Any

from torch import nn

from dmp import attribute_of, join_name

_LONGEST = 4096
"""Tokens that are assumed at most where only a limit is known: models train on less than they can read."""
_GUESS = 512
_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "max_length",
    "max_len",
    "context_length",
    "block_size",
    "seq_len",
)


def tokens_per_sample(module: nn.Module, given: int | None, attends: bool) -> tuple[int, str]:
    """Tokens of a sample that dense weights see, and whose word that is.

    Args:
        given: what the user says.
        attends: whether there is an attention in the module; without one a sample is one row.
    """
    if given is not None:
        return given, "as given"
    if not attends:
        return 1, "no attention: a sample is one row"
    for path, m in module.named_modules():
        config = getattr(m, "config", None)
        for holder, of in ((config, "config."), (m, "")) if config is not None else ((m, ""),):
            for name in _NAMES:
                limit = _value(holder, name)
                if limit is not None:
                    where = join_name(path, f"{of}{name}")
                    found = min(limit, _LONGEST)
                    cut = "" if found == limit else f", at most {_LONGEST} taken"
                    return found, f"{where} = {limit}{cut}; say ShardingPlanner(sequence_length=...)"
    return _GUESS, "a guess: the module does not say; say ShardingPlanner(sequence_length=...)"


def _value(holder: Any, name: str) -> int | None:
    value = attribute_of(holder, name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def active_share(module: nn.Module) -> float:
    """The part of a mixture's experts that a token goes through, as the configuration says; 1 where there is none."""
    config = getattr(module, "config", None)
    active = _value(config, "num_experts_per_tok") or _value(config, "num_selected_experts")
    total = next(
        (n for name in ("num_local_experts", "num_experts", "n_routed_experts") if (n := _value(config, name))), 0
    )
    return min(1.0, active / total) if active and total else 1.0
