"""Has a plan proved before it is used: on the whole model, else on the modules of it that run alone.

[Note: alone] A model that takes inputs nobody can guess is not run whole; of one that takes several kinds, a part may
not be reached by those that were guessed, as an encoder of images by ids. Then each module around what is split runs
alone, the outermost that takes hidden states or ids; with parts of the sequence between modules none can.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from dmp import is_inside, join_name
from sharders.tensor_parallel.head_counts import Divided, ModelRuns
from sharders.tensor_parallel.proof.proof import RAISES, Verdict
from sharders.tensor_parallel.proof.sample import UnprovedError
from sharders.tensor_parallel.split.styles import SPLITTING, Style, family
from sharders.tensor_parallel.structure.find_transformer import recognise
from sharders.tensor_parallel.structure.linears import features_of
from sharders.tensor_parallel.structure.transformer import below, outward

UNPROVED = "not proved"
"""With which the note on a plan begins that could not be tried."""


_TRIES_ALONE = 8
"""Local values of attributes that are tried of modules one by one."""


@dataclass(frozen=True)
class PlanProof(Verdict):
    """What was found out about a plan; where it is wrong with all values of attributes, what is with the first."""

    divided: Divided | None = None
    """Local values of attributes with which the plan is right; None where it is wrong with all."""

    raised: str = ""
    """What a module that runs alone raised once it was split, where none around what is split could be compared."""

    left: tuple[str, ...] = ()
    """Modules that are split, of which nothing was seen."""

    @property
    def note(self) -> str:
        """For showing."""
        return f"{UNPROVED}: {self.unproved}" if self.unproved else f"proved: {self.on}"


def prove(runs: ModelRuns, styles: Mapping[str, Style], choices: Iterable[Divided], *, alone: bool = True) -> PlanProof:
    """The first of `choices` with which the plan is proved.

    Args:
        choices: local values of attributes, the likeliest first; at least one.
        alone: prove modules on their own where the model does not run; see [Note: alone].

    Raises:
        UnprovedError: without `alone`, where the model does not run.
    """
    wrong, unproved, tried = "", None, 0
    for divided in choices:
        verdict = runs.verdict(styles, divided)
        if verdict.unproved:
            if not alone:
                raise UnprovedError(verdict.unproved)
            found = _prove_alone(runs, styles, divided, verdict.unproved)
            if not found.wrong and not found.raised:
                return found
            unproved, tried = unproved or found, tried + 1
            if tried == _TRIES_ALONE:
                break
            continue
        if verdict.wrong is None and not verdict.unreached:
            return PlanProof(on=verdict.on, divided=divided)
        if verdict.wrong is None:
            rest = _prove_rest(runs, styles, divided, verdict)
            if rest.wrong is None:
                return rest
            verdict = rest
        wrong = wrong or verdict.wrong or ""
    return unproved or PlanProof(wrong)


def _prove_alone(runs: ModelRuns, styles: Mapping[str, Style], divided: Divided, why: str) -> PlanProof:
    """Of a model that does not run each of the outermost modules that run alone."""
    if _is_by_sequence(styles):
        return PlanProof(unproved=why, divided=divided)
    split = [path for path, style in styles.items() if family(style) in SPLITTING]
    found = _each_alone(runs, split, styles, divided)
    if found.wrong:
        return PlanProof(found.wrong)
    where = _named(found.left) if found.left else f"outside {_named(found.proved, '')}"
    return PlanProof(unproved=f"{where}: {why}", divided=divided, raised=found.raised, left=tuple(found.left))


def _prove_rest(runs: ModelRuns, styles: Mapping[str, Style], divided: Divided, verdict: Verdict) -> PlanProof:
    """What was not reached in a run of the whole: each of the outermost modules around it that run alone."""
    why = "no output of the sample depends on them"
    if _is_by_sequence(styles):
        return PlanProof(unproved=f"{_named(verdict.unreached)}: {why}", divided=divided, left=verdict.unreached)
    found = _each_alone(runs, verdict.unreached, styles, divided)
    if found.wrong or found.raised:
        return PlanProof(found.wrong or found.raised)
    if found.left:
        return PlanProof(unproved=f"{_named(found.left)}: {why}", divided=divided, left=tuple(found.left))
    return PlanProof(on=f"{verdict.on}; so are those of {_named(found.proved)} alone", divided=divided)


def _is_by_sequence(styles: Mapping[str, Style]) -> bool:
    """Whether parts of the sequence are between modules: none runs alone then."""
    return any(family(style) == "sequence" or style == "gather_input" for style in styles.values())


def _named(paths: Sequence[str], others: str = " and others") -> str:
    return ", ".join(map(repr, paths[:3])) + others * (len(paths) > 3)


class _Alone(NamedTuple):
    """What was found of modules that were run alone.

    Args:
        proved: modules that ran.
        left: what is split that lies in none of these.
        raised: by what was run alone, and lies in none that ran.
        wrong: of the first that is wrong; empty where none is.
    """

    proved: list[str]
    left: list[str]
    raised: str
    wrong: str


def _each_alone(runs: ModelRuns, split: Iterable[str], styles: Mapping[str, Style], divided: Divided) -> _Alone:
    left: list[str] = []
    proved: dict[str, set[str]] = {}  # with what was not reached
    raised = ""
    for path in split:
        if any(is_inside(path, scope) and path not in unreached for scope, unreached in proved.items()):
            continue
        scope, wrong, unreached = _first_that_runs(runs, path, styles, divided)
        if scope is not None and wrong:
            return _Alone([*proved], left, raised, wrong)
        raised = raised or wrong
        if scope is None:
            left.append(path)
        else:
            proved[scope] = unreached
    return _Alone([*proved], left, raised, "")


def _first_that_runs(
    runs: ModelRuns, path: str, styles: Mapping[str, Style], divided: Divided
) -> tuple[str | None, str, set[str]]:
    """The outermost module around `path` that runs alone and split, what is wrong with the plan there, and what in it
    is not reached; where none runs split, what the innermost of those that run whole raises."""
    raised = ""
    around = [scope for scope in outward(path) if scope and scope != path]
    for scope in around[::-1]:
        module = runs.model.get_submodule(scope)
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        inside = {below(p, scope): style for p, style in styles.items() if is_inside(p, scope)}
        values = {(below(p, scope), name): value for (p, name), value in divided.items() if is_inside(p, scope)}
        verdict = _alone(runs, scope).verdict(inside, values)
        if below(path, scope) in verdict.unreached:
            continue
        wrong = verdict.wrong or ""
        said = wrong and f"in module {scope!r} alone, {wrong}"
        if not verdict.unproved and not wrong.startswith(RAISES):
            return scope, said, {join_name(scope, unreached) for unreached in verdict.unreached}
        raised = said or raised
    return None, raised, set()


def _alone(runs: ModelRuns, scope: str) -> ModelRuns:
    """Runs of a module of the model, or of the one that it repeats in the first block like its own."""
    repeated = next((path for path in outward(scope) if path in runs.copies.repeats), "")
    scope = runs.copies.repeats[repeated] + scope[len(repeated) :] if repeated else scope
    if scope not in runs.parts:
        runs.parts[scope] = _runs_of(runs, scope)
    return runs.parts[scope]


def _runs_of(runs: ModelRuns, scope: str) -> ModelRuns:
    block = next((b for b in runs.transformer.blocks if b.path == scope), None)
    if block is not None:
        return runs.of_block(block)
    module = runs.model.get_submodule(scope)
    transformer = recognise(module)
    if not transformer.width:
        width = next((found.in_features for found in map(features_of, module.modules()) if found), 0)
        transformer = replace(transformer, width=width)
    return ModelRuns(module, runs.size, runs.axis, transformer)


def warn_on_first_rank(text: str) -> None:
    """On rank 0, what is not seen from the numbers of a step."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logging.getLogger("dmp").warning("tensor parallel: %s", text)
