"""A tensor-parallel plan for any transformer: by structure, proved on a small copy (`proof`).

The plan is data, module path -> style name, see [Note: style names]; `sharder` applies it. Linears of
a branch are split together or not at all. The token embedding and the head are both split over the vocabulary, so that
they may be tied. Norms of single heads see a rank's heads alone: the gradients of their weights are to be summed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from dmp import PlanError, is_inside, join_name
from sharders.tensor_parallel.candidates import Candidate, branch_candidates
from sharders.tensor_parallel.head_counts import Divided, ModelRuns
from sharders.tensor_parallel.left_whole import counts, does_not_divide, whole_notes, without_taken
from sharders.tensor_parallel.proof.sample import UnprovedError
from sharders.tensor_parallel.prove import PlanProof, prove
from sharders.tensor_parallel.sequence import sequence_styles
from sharders.tensor_parallel.split.patterns import with_ties
from sharders.tensor_parallel.split.styles import PACKED, SPLITTING, Style, family
from sharders.tensor_parallel.structure.dry_run import DryRunError
from sharders.tensor_parallel.structure.linears import features_of, kinds_in
from sharders.tensor_parallel.structure.transformer import Block, Branch
from sharders.tensor_parallel.vocabulary import vocabulary_styles

_TRIES, _TRIES_OF_ONE = 8, 3  # ways to divide attributes; the likeliest come first


BECAUSE = "left whole, because"
"""In notes on what was tried, and is wrong or raises: whoever takes the plan is to be warned."""

_OUTSIDE = "outside of it may be what it adds for each head"

_Found = tuple[dict[str, str], Divided]  # styles by module path, and local values of attributes


@dataclass(frozen=True)
class Choice:
    """A plan and how it came about."""

    styles: Mapping[str, Style]
    """Module path -> style; its name where it was derived."""

    divided: Mapping[tuple[str, str], int]
    """(module path, attribute) -> the value it must have on each rank."""

    notes: tuple[str, ...]
    """What was left whole and why; whether a dry run verified the plan."""


def derive(runs: ModelRuns, *, sequence_parallel: bool = False, loss_parallel: bool = False) -> Choice:
    """A plan for every block that can be split; nothing is changed, parameters may be on meta.

    Args:
        runs: of the model, for the number of ranks on the tensor axis.
        sequence_parallel: also split norms and dropout over the sequence, see `sequence_styles`.
        loss_parallel: leave the logits split over the vocabulary.

    Raises:
        PlanError: heads, KV heads or a hidden size that the axis does not divide, of attentions (or MLPs) with half of
            the weights of all or more (others are left whole, which notes say); with `loss_parallel` a vocabulary that
            it does not divide, or no head.
    """
    transformer = runs.transformer
    if not transformer.blocks:
        return Choice({}, {}, ("no transformer blocks: nothing to split by tensor parallelism",))
    _check_most(runs)
    notes = list(whole_notes(transformer, runs.size))
    vocabulary = vocabulary_styles(runs, loss_parallel, notes)
    of_vocabulary = [Candidate(" and ".join(vocabulary), "", vocabulary)] if vocabulary else []
    styles, divided = _decide(runs, list(branch_candidates(runs)), of_vocabulary, notes)
    if sequence_parallel:  # what is used on slices has parts of its gradient, which gathering would not sum
        whole = {join_name(block.path, each.path) for block in transformer.blocks for each in block.whole}
        styles = {path: style for path, style in styles.items() if path not in whole}
    notes = list(without_taken(transformer, styles, notes))
    if loss_parallel and "colwise_loss_parallel" not in styles.values():
        raise PlanError(
            f"loss_parallel needs a head whose logits can be split over axis {runs.axis!r} of size {runs.size}; this "
            "model has none; use TensorParallelSharder(loss_parallel=False), or name its head in a plan"
        )
    if sequence_parallel:
        styles, note = sequence_styles(runs, styles, divided)
        notes.append(note)
    return Choice(styles, divided, tuple(notes))


def _check_most(runs: ModelRuns) -> None:
    """Raise if most attentions, or most MLPs, are such as the axis does not divide; stages of few heads are few."""
    every = [(block, branch) for block in runs.transformer.blocks for branch in block.branches]
    for alike in ([e for e in every if e[1].heads is not None], [e for e in every if e[1].heads is None]):
        uneven = [e for e in alike if does_not_divide(e[1], runs.size) and not (e[1].is_joint or e[1].has_one_head)]
        if 2 * sum(_weights(runs.model, *e) for e in uneven) >= sum(_weights(runs.model, *e) for e in alike):
            for block, branch in uneven:
                _check_branch(join_name(block.path, branch.path), branch, runs)


def _weights(model: nn.Module, block: Block, branch: Branch) -> int:
    found = [features_of(model.get_submodule(join_name(block.path, name))) for name in (*branch.up, branch.down)]
    return sum(each.in_features * each.out_features for each in found if each is not None)


def check_heads(runs: ModelRuns, styles: Mapping[str, str]) -> None:
    """Raise for attentions whose query, key or value are split in the middle of a head, under any plan.

    Raises:
        PlanError: names the module, its number of heads, and the axis.
    """
    for block in runs.transformer.blocks:
        for branch in block.branches:
            split = (styles.get(join_name(block.path, n)) in ("colwise", *PACKED) for n in branch.up)
            if branch.heads is not None and any(split):
                _check_branch(join_name(block.path, branch.path), branch, runs)


def _check_branch(path: str, branch: Branch, runs: ModelRuns) -> None:
    size, axis = runs.size, runs.axis
    for what, count in counts(branch).items():
        if count % size:
            fitting = f"whose {axis!r} axis divides {count}" if count > 1 else f"without the axis {axis!r}"
            raise PlanError(
                f"module {path!r}: {what} {count} is not divisible by {size}, the size of mesh axis {axis!r}; use a "
                f"mesh {fitting}, or TensorParallelSharder({{...}}) with a plan of module paths and styles that leaves "
                "this module out"
            )


def _decide(runs: ModelRuns, branches: list[Candidate], vocabulary: list[Candidate], notes: list[str]) -> _Found:
    """What is proved of the model, else of each block alone, else what a dry run verifies or structure and source say.

    What is not proved is not right for certain, and the notes say so.
    """
    try:
        return _proved(runs, [*branches, *vocabulary], notes)
    except UnprovedError as error:
        failure = str(error)
    biased = [each for each in branches if each.biases]  # which blocks that run alone do not show
    if biased:
        named = ", ".join(each.name for each in biased)
        notes.append(f"{named}: {BECAUSE} {_OUTSIDE}, {biased[0].biases!r}, and is not proved to be theirs")
    branches = [each for each in branches if each not in biased]
    vocabulary = _seen_vocabulary(runs, branches, vocabulary, notes)
    others = _merged(vocabulary)
    of_blocks: list[str] = []
    try:
        # One block of each structure on its own, with hidden states.
        styles, divided = _of_blocks(runs, _proved, of_blocks, _merged(biased))
    except UnprovedError:
        notes.append(f"not proved: {failure}")
        branches, alone = _settled(runs, branches, notes)
        styles, divided = _verified(runs, branches, notes, {**_merged(biased), **alone[0]})
        styles, divided = {**styles, **alone[0]}, {**divided, **alone[1]}
    else:
        split = [each for each in branches if each.styles.keys() <= styles.keys()]
        split = [replace(each, styles={path: styles[path] for path in each.styles}) for each in split]
        if prove(runs, with_ties(runs.model, {**styles, **others}), [divided]).wrong:  # by what is around the blocks
            return _proved(runs, [*split, *vocabulary], notes, alone=True)
        notes += [*of_blocks, f"not proved outside the blocks: {failure}"]
    return {**styles, **others}, divided


def _proved(runs: ModelRuns, candidates: list[Candidate], notes: list[str], *, alone: bool = False) -> _Found:
    """Take all if they are proved together, else those that are proved one by one.

    Args:
        alone: by the modules around them that run alone, where the model does not.

    Raises:
        UnprovedError: without `alone`, the model does not run with guessed inputs, or is too large.
    """
    said: list[str] = []
    kept, proof = candidates, _prove(runs, candidates, _TRIES, alone)
    if proof.divided is None:
        more = [replace(each, styles={**each.styles, **each.outside}) for each in candidates]
        if any(each.outside for each in candidates):
            kept, proof = more, _prove(runs, more, _TRIES, alone)
    if proof.divided is None:
        kept, proof = [], PlanProof(divided={})
        for candidate in candidates:
            wrong = ""
            for styles in (candidate.styles, *candidate.otherwise):
                this = replace(candidate, styles=styles)
                with_this = _prove(runs, [*kept, this], _TRIES_OF_ONE, alone)
                wrong = wrong or with_this.wrong or ""
                if with_this.divided is not None:
                    kept, proof = [*kept, this], with_this
                    break
            else:
                said.append(f"{candidate.name}: {BECAUSE} {wrong}")
    if guessed := {path for each in kept for path in each.outside}.intersection(proof.left):
        return _proved(runs, [_without_outside(each, guessed) for each in candidates], notes, alone=alone)
    unseen = [each for each in kept if each.unless_proved and not each.styles.keys().isdisjoint(proof.left)]
    notes += said
    if unseen:
        notes += [f"{each.name}: left whole, {each.unless_proved}" for each in unseen]
        seen = [each for each in candidates if each.name not in {one.name for one in unseen}]
        return _proved(runs, seen, notes, alone=alone)
    notes.append(runs.verified() + proof.note)
    return _merged(kept), proof.divided or {}


def _without_outside(candidate: Candidate, paths: Collection[str]) -> Candidate:
    """Without values of heads that are only guessed to be: nothing is seen of them, and it is proved without them."""
    outside = {path: style for path, style in candidate.outside.items() if path not in paths}
    otherwise = tuple({p: style for p, style in way.items() if p not in paths} for way in candidate.otherwise)
    return replace(candidate, otherwise=otherwise, outside=outside)


def _prove(runs: ModelRuns, candidates: list[Candidate], tries: int, alone: bool) -> PlanProof:
    styles = _merged(candidates)
    tied = with_ties(runs.model, styles)
    return prove(runs, tied, itertools.islice(runs.divisions(styles), tries), alone=alone)


def _seen_vocabulary(
    runs: ModelRuns, branches: list[Candidate], vocabulary: list[Candidate], notes: list[str]
) -> list[Candidate]:
    """What of the vocabulary may be split though it is not proved."""
    try:
        if runs.names(_merged([*branches, *vocabulary])) is not None:
            return vocabulary
    except DryRunError:
        if runs.transformer.head is not None or not vocabulary:
            return vocabulary
    # The embedding may be the head as well, by its weight, and only a run would show that.
    notes += [f"{each.name}: left whole, it is neither proved nor verified by a dry run" for each in vocabulary]
    return []


def _settled(runs: ModelRuns, branches: list[Candidate], notes: list[str]) -> tuple[list[Candidate], _Found]:
    """Branches of which nothing runs alone; and what is proved of the others, by modules of the first block of each
    structure that do. What is wrong there in all ways, or raises, is left whole."""
    unseen, wrong = list[Candidate](), set[tuple[type, ...]]()
    found: dict[str, str] = {}
    local: Divided = {}
    for each in branches:
        failure = ""
        for styles in (each.styles, *each.otherwise):
            first = {path: style for path, style in styles.items() if is_inside(path, each.block)}
            proof = prove(runs, first, itertools.islice(runs.divisions(styles), _TRIES_OF_ONE))
            failure = failure or proof.wrong or proof.raised
            if proof.wrong or proof.raised:
                continue
            if proof.left or not all(family(style) in SPLITTING for style in styles.values()):
                unseen.append(each)
            else:
                found, local = {**found, **styles}, {**local, **(proof.divided or {})}
                notes.append(f"{each.name}: proved alone")
            break
        else:
            notes.append(f"{each.name}: {BECAUSE} {failure}")
            wrong.add(kinds_in(runs.model, first))
    alike = [each for each in unseen if kinds_in(runs.model, each.styles) in wrong]
    notes += [f"{each.name}: {BECAUSE} another of these classes is wrong, or raises" for each in alike]
    return [each for each in unseen if each not in alike], (found, local)


def _verified(runs: ModelRuns, branches: list[Candidate], notes: list[str], whole: Collection[str]) -> _Found:
    """What has the right shapes in a dry run of the model, else of each block; else what structure and source say."""
    branches = list(_without_joint(branches, notes))
    try:
        return _fitting(runs, branches, notes)
    except DryRunError as error:
        failure = str(error)
    try:
        return _of_blocks(runs, _fitting, notes, whole)
    except DryRunError:
        notes.append(f"not verified by a dry run: {failure}")
        styles = _merged(branches)
        return styles, runs.divide_by_source(styles)


def _without_joint(candidates: Iterable[Candidate], notes: list[str]) -> Iterator[Candidate]:
    """Those of which shapes tell enough."""
    for each in candidates:
        if each.unless_proved:
            notes.append(f"{each.name}: left whole, {each.unless_proved}")
        else:
            yield each


def _fitting(runs: ModelRuns, candidates: list[Candidate], notes: list[str]) -> _Found:
    """Take all if a dry run verifies them together, else those that it verifies one by one."""
    kept = candidates = list(_without_joint(candidates, notes))
    names = runs.names(_merged(kept))
    if names is None:
        kept, names = [], frozenset[str]()
        for each in candidates:
            with_this = runs.names(_merged([*kept, each]))
            if with_this is None:
                notes.append(f"{each.name}: left whole, a dry run with its local shapes failed or gave other shapes")
            else:
                kept, names = [*kept, each], with_this
    styles = _merged(kept)
    notes.append(f"{runs.verified()}not proved")
    return styles, runs.divide(styles, names)


def _of_blocks(
    runs: ModelRuns,
    decide: Callable[[ModelRuns, list[Candidate], list[str]], _Found],
    notes: list[str],
    whole: Collection[str],
) -> _Found:
    """What `decide` says of one block of each structure, for all of them; what is named in `whole` is left so."""
    styles: dict[str, str] = {}
    divided: Divided = {}
    said: list[str] = []
    for blocks in runs.transformer.by_structure():
        alone = runs.of_block(blocks[0])
        of_block: list[str] = []
        every = branch_candidates(alone)
        left = [each for each in every if not any(join_name(blocks[0].path, path) in whole for path in each.styles)]
        local, attributes = decide(alone, left, of_block)
        said += [f"{blocks[0].path}: {note}" for note in of_block]
        for path in (b.path for b in blocks):
            styles |= {join_name(path, name): style for name, style in local.items()}
            divided |= {(join_name(path, name), a): value for (name, a), value in attributes.items()}
    notes += said  # of all, or of none: where one block raises, its caller decides otherwise
    return styles, divided


def _merged(candidates: Iterable[Candidate]) -> dict[str, str]:
    return {path: style for each in candidates for path, style in each.styles.items()}
