"""Has a plan proved before it is used: on the whole model, else on the modules of it that run alone.

[Note: alone] A model that takes inputs nobody can guess is not run whole. Then each module around what is split runs
alone, the outermost that takes hidden states or ids; with parts of the sequence between modules none can.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn

from dmp import is_inside
from sharders.tensor_parallel.head_counts import Divided, ModelRuns
from sharders.tensor_parallel.proof.proof import RAISES
from sharders.tensor_parallel.proof.sample import UnprovedError
from sharders.tensor_parallel.split.styles import Style, family
from sharders.tensor_parallel.structure.find_transformer import recognise
from sharders.tensor_parallel.structure.transformer import outward


@dataclass(frozen=True)
class PlanProof:
    """What was found out about a plan."""

    divided: Divided | None
    """Local values of attributes with which the plan is right; None where it is wrong with all."""

    failure: str = ""
    """What is wrong, with the first values tried."""

    unproved: str = ""
    """Why it could not be proved, or not all of it."""

    on: str = ""
    """What it was proved on."""

    @property
    def note(self) -> str:
        """For showing."""
        return f"not proved: {self.unproved}" if self.unproved else f"proved: {self.on}"


def prove(
    runs: ModelRuns,
    styles: Mapping[str, Style],
    choices: Iterable[Divided],
    axis: str,
    *,
    alone: bool = True,
) -> PlanProof:
    """The first of `choices` with which the plan is proved.

    Args:
        choices: local values of attributes, the likeliest first; at least one.
        alone: prove modules on their own where the model does not run; see [Note: alone].

    Raises:
        UnprovedError: without `alone`, where the model does not run.
    """
    failure = ""
    for divided in choices:
        verdict = runs.verdict(styles, divided, axis)
        if verdict.unproved:
            if not alone:
                raise UnprovedError(verdict.unproved)
            return _prove_alone(runs, styles, divided, axis, verdict.unproved)
        if verdict.wrong is None:
            return PlanProof(divided, on=verdict.on)
        failure = failure or verdict.wrong
    return PlanProof(None, failure=failure)


def _prove_alone(runs: ModelRuns, styles: Mapping[str, Style], divided: Divided, axis: str, why: str) -> PlanProof:
    """Each of the outermost modules that run alone; those left over are named."""
    split = [path for path, style in styles.items() if family(style) in ("colwise", "rowwise")]
    if any(family(style) == "sequence" or style == "gather_input" for style in styles.values()):
        return PlanProof(divided, unproved=why)
    left: list[str] = []
    proved: list[str] = []
    for path in split:
        if any(is_inside(path, scope) for scope in proved):
            continue
        scope, wrong = _first_that_runs(runs, path, styles, divided, axis)
        if wrong:
            return PlanProof(None, failure=f"in module {scope!r} alone, {wrong}")
        (left if scope is None else proved).append(path if scope is None else scope)
    if not left:
        return PlanProof(divided, unproved=f"outside {', '.join(map(repr, proved[:3]))}: {why}")
    return PlanProof(divided, unproved=f"{', '.join(map(repr, left[:3]))}{' and others' * (len(left) > 3)}: {why}")


def _first_that_runs(
    runs: ModelRuns, path: str, styles: Mapping[str, Style], divided: Divided, axis: str
) -> tuple[str | None, str]:
    """The outermost module around `path` that runs alone, and what is wrong with the plan there."""
    around = [scope for scope in outward(path) if scope and scope != path]
    for scope in around[::-1]:
        module = runs.model.get_submodule(scope)
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        inside = {_below(p, scope): style for p, style in styles.items() if is_inside(p, scope)}
        values = {(_below(p, scope), name): value for (p, name), value in divided.items() if is_inside(p, scope)}
        verdict = _alone(runs, scope).verdict(inside, values, axis)
        wrong = verdict.wrong or ""
        if not verdict.unproved and not wrong.startswith(RAISES):
            return scope, wrong
    return None, ""


def _below(path: str, scope: str) -> str:
    return path[len(scope) + 1 :]


def _alone(runs: ModelRuns, scope: str) -> ModelRuns:
    block = next((b for b in runs.transformer.blocks if b.path == scope), None)
    if block is not None:
        return runs.of_block(block)
    module = runs.model.get_submodule(scope)
    transformer = recognise(module)
    if not transformer.width:
        width = next((m.in_features for m in module.modules() if isinstance(m, nn.Linear)), 0)
        transformer = replace(transformer, width=width)
    return ModelRuns(module, runs.size, transformer)


def warn_on_first_rank(text: str) -> None:
    """On rank 0, what is not seen from the numbers of a step."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logging.getLogger("dmp").warning("tensor parallel: %s", text)
