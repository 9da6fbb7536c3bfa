"""A tensor-parallel plan for any transformer: by structure, proved on a small copy (`proof`).

The plan is data, module path -> style name, see [Note: style names]; `sharder` applies it. Linears of
a branch are split together or not at all. The token embedding and the head are both split over the vocabulary, so that
they may be tied. Norms of single heads see a rank's heads alone: the gradients of their weights are to be summed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torch import nn
from torch.nn.parameter import is_lazy

from dmp import PlanError, is_inside, join_name
from sharders.tensor_parallel.head_counts import Divided, ModelRuns
from sharders.tensor_parallel.left_whole import counted, counts, does_not_divide, of_width, whole_notes, without_taken
from sharders.tensor_parallel.proof.sample import UnprovedError
from sharders.tensor_parallel.prove import PlanProof, prove
from sharders.tensor_parallel.sequence import sequence_styles
from sharders.tensor_parallel.split.patterns import with_ties
from sharders.tensor_parallel.split.styles import PACKED, SPLITTING, Style, family
from sharders.tensor_parallel.structure.dry_run import DryRunError
from sharders.tensor_parallel.structure.linears import features_of, kinds_in
from sharders.tensor_parallel.structure.of_heads import OF_HEADS, biases_outside, norms_of_heads, values_of_heads
from sharders.tensor_parallel.structure.of_samples import vectors_of_samples
from sharders.tensor_parallel.structure.transformer import Block, Branch
from sharders.tensor_parallel.structure.wide_norms import COLWISE_NORM, wide_norms
from sharders.tensor_parallel.vocabulary import vocabulary_styles

_TRIES, _TRIES_OF_ONE = 8, 3  # ways to divide attributes; the likeliest come first


BECAUSE = "left whole, because"
"""In notes on what was tried, and is wrong or raises: whoever takes the plan is to be warned."""

_JOINT = "one weight holds several, and how is neither proved nor to be seen"
_BACK = "which of its Linears leads back is neither proved nor to be seen"
_SECOND = "how its Linears beside query, key and value are used is not proved"
_BESIDE = "how its Linears beside query, key, value and output are used is not proved"
_SHARED = "whether its single numbers, or values of all heads, are a rank's is neither proved nor to be seen"
_NORMS = "that what it has for all heads, or hidden units, is a norm of theirs is not proved"
_VALUES = "that what it holds as many of as heads is theirs is not proved"
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


@dataclass(frozen=True)
class _Candidate:
    """Styles that are taken or left together; a branch of every block of one structure, or the vocabulary."""

    name: str
    block: str
    """Path of the first that it is of; empty for the vocabulary."""

    styles: Mapping[str, str]
    otherwise: tuple[Mapping[str, str], ...] = ()
    """Where shapes do not tell how what is held in one is to be split: other styles to try."""

    unless_proved: str = ""
    """Why it is left whole where it is not proved; for those whose shapes are alike where they are split wrongly."""

    outside: Mapping[str, str] = field(default_factory=dict)
    """Styles of values for each head that may be of it, and lie elsewhere in the model."""

    biases: str = ""
    """The first of what has a column for each of its heads elsewhere, as tables of relative positions have."""


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
    of_vocabulary = [_Candidate(" and ".join(vocabulary), "", vocabulary)] if vocabulary else []
    styles, divided = _decide(runs, list(_branch_candidates(runs)), of_vocabulary, notes)
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


def _branch_candidates(runs: ModelRuns) -> Iterator[_Candidate]:
    model = runs.model
    for blocks in runs.transformer.by_structure():
        first = blocks[0]
        for branch in first.branches:
            if does_not_divide(branch, runs.size):
                continue
            name = counted(join_name(first.path, branch.path or branch.down), len(blocks))
            ways = [
                {join_name(b.path, n): style for b in blocks for n, style in relative.items()}
                for way in branch.ways
                for relative in (
                    {**_branch_styles(model.get_submodule(first.path), way, n), **dict(beside)}
                    for n in way.parts
                    for beside in way.beside or ((),)
                )
            ]
            norms = {join_name(b.path, n): COLWISE_NORM for n in _norms(runs, first, branch) for b in blocks}
            ways = [{**way, **norms} for way in ways if norms] + ways  # of what it gives, else of the hidden state
            shared = {join_name(b.path, n): "sum_gradients" for b in blocks for n in _shared(model, first, branch)}
            ways = [{**way, **shared} for way in ways if shared] + ways  # of what is split, else of what is whole
            outside = _values_outside(runs, branch)
            ways += [{**way, **outside} for way in ways if outside]
            has_values = not OF_HEADS.keys().isdisjoint(dict(branch.adapters).values())
            open_are = {
                _JOINT: branch.is_joint,
                _VALUES: has_values,
                _BACK: branch.others,
                _BESIDE: branch.beside,
                _NORMS: norms,
                _SHARED: shared,
            }
            unless_proved = next((why for why, is_open in {**open_are, _SECOND: branch.second}.items() if is_open), "")
            biases = next(biases_outside(model, branch.heads, outside, runs.transformer), "") if branch.heads else ""
            yield _Candidate(name, first.path, ways[0], tuple(ways[1:]), unless_proved, outside, biases)
        for path, every in first.experts:
            ways = [
                {join_name(b.path, path): style for b in blocks}
                for style, way in of_width(every, runs.transformer.width).items()
                if way.inner % runs.size == 0
            ]
            if ways:
                name = counted(join_name(first.path, path), len(blocks))
                yield _Candidate(name, first.path, ways[0], tuple(ways[1:]), _JOINT)
        with suppress(DryRunError):
            for path in vectors_of_samples(model, first, runs.unsplit().whole, runs.size):
                name = counted(join_name(first.path, path), len(blocks))
                yield _Candidate(name, first.path, {join_name(b.path, path): "colwise_gather" for b in blocks})


def _norms(runs: ModelRuns, block: Block, branch: Branch) -> list[str]:
    """Norms over all that a branch's Linears give, by their path in the block."""
    order: list[str] = []
    with suppress(DryRunError):
        order = runs.unsplit().whole.order
    return list(wide_norms(runs.model, block, branch, order))


def _values_outside(runs: ModelRuns, branch: Branch) -> dict[str, str]:
    """Of a model's modules that are in no attention, what holds values for each head; see [Note: values of heads]."""
    if branch.heads is None or branch.widths:
        return {}
    branches = [(b, x) for b in runs.transformer.blocks for x in b.branches if x.heads is not None]
    closed = [join_name(b.path, x.path) for b, x in branches]
    found = values_of_heads(runs.model, branch.heads, ()).items()
    return {path: s for path, s in found if s in OF_HEADS and not any(is_inside(path, c) for c in closed)}


def _branch_styles(block: nn.Module, branch: Branch, parts: int) -> dict[str, str]:
    up = "colwise" if parts == 1 else f"colwise_packed_{parts}"
    beside = dict(branch.adapters)
    styles = {**dict.fromkeys(branch.up, "colwise"), branch.down: "rowwise", **beside, **dict(branch.second)}
    styles = {name: up if style == "colwise" else style for name, style in styles.items()}
    return {**dict.fromkeys(norms_of_heads(block, branch), "sum_gradients"), **styles}


def sums_of_heads(runs: ModelRuns, styles: Mapping[str, Style]) -> dict[str, str]:
    """What a plan of others' may leave out: norms of single heads in attentions that it splits, and of all together, by
    module path."""
    found: dict[str, str] = {}
    firsts = {block.structure: block for block in runs.transformer.representatives()}
    for block in runs.transformer.blocks:
        for branch in block.branches:
            if all(styles.get(join_name(block.path, n)) == "colwise" for n in branch.up):
                names = dict.fromkeys(norms_of_heads(runs.model.get_submodule(block.path), branch), "sum_gradients")
                names |= dict.fromkeys(_norms(runs, firsts[block.structure], branch), COLWISE_NORM)
                found |= {p: style for n, style in names.items() if (p := join_name(block.path, n)) not in styles}
    return found


def _shared(model: nn.Module, block: Block, branch: Branch) -> Iterator[str]:
    """Modules in a branch, by their path in the block, that hold single numbers, such as an activation's slope; or for
    all heads what is as wide as one, such as relative positions (distances, head size)."""
    beside = {*branch.up, branch.down, *dict(branch.adapters), *branch.further}
    others = [b.path for b in block.branches if b.path and not is_inside(branch.path, b.path)]  # of a flat block's MLP
    of_head = branch.heads.size if branch.heads is not None and not branch.widths else None
    for name, module in model.get_submodule(join_name(block.path, branch.path)).named_modules():
        own = [p for p in module.parameters(recurse=False) if not is_lazy(p)]
        is_single = {p.numel() for p in own} == {1}
        is_wide = bool(own) and all(p.dim() > 1 and p.shape[-1] == of_head for p in own) and features_of(module) is None
        path = join_name(branch.path, name)
        if (is_single or is_wide) and path not in beside and not any(is_inside(path, other) for other in others):
            yield path


def _decide(runs: ModelRuns, branches: list[_Candidate], vocabulary: list[_Candidate], notes: list[str]) -> _Found:
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
    try:
        # One block of each structure on its own, with hidden states.
        styles, divided = _of_blocks(runs, _proved, notes, _merged(biased))
    except UnprovedError:
        notes.append(f"not proved: {failure}")
        branches, alone = _settled(runs, branches, notes)
        styles, divided = _verified(runs, branches, notes, {**_merged(biased), **alone[0]})
        styles, divided = {**styles, **alone[0]}, {**divided, **alone[1]}
    else:
        notes.append(f"not proved outside the blocks: {failure}")
    return {**styles, **others}, divided


def _proved(runs: ModelRuns, candidates: list[_Candidate], notes: list[str]) -> _Found:
    """Take all if they are proved together, else those that are proved one by one.

    Raises:
        UnprovedError: the model does not run with guessed inputs, or is too large.
    """
    said: list[str] = []
    kept, proof = candidates, _prove(runs, candidates, _TRIES)
    if proof.divided is None:
        more = [replace(each, styles={**each.styles, **each.outside}) for each in candidates]
        if any(each.outside for each in candidates):
            kept, proof = more, _prove(runs, more, _TRIES)
    if proof.divided is None:
        kept, proof = [], PlanProof(divided={})
        for candidate in candidates:
            wrong = ""
            for styles in (candidate.styles, *candidate.otherwise):
                this = replace(candidate, styles=styles)
                with_this = _prove(runs, [*kept, this], _TRIES_OF_ONE)
                wrong = wrong or with_this.wrong or ""
                if with_this.divided is not None:
                    kept, proof = [*kept, this], with_this
                    break
            else:
                said.append(f"{candidate.name}: {BECAUSE} {wrong}")
    if guessed := {path for each in kept for path in each.outside}.intersection(proof.left):
        return _proved(runs, [_without_outside(each, guessed) for each in candidates], notes)
    unseen = [each for each in kept if each.unless_proved and not each.styles.keys().isdisjoint(proof.left)]
    notes += said
    if unseen:
        notes += [f"{each.name}: left whole, {each.unless_proved}" for each in unseen]
        return _proved(runs, [each for each in candidates if each.name not in {one.name for one in unseen}], notes)
    notes.append(runs.verified() + proof.note)
    return _merged(kept), proof.divided or {}


def _without_outside(candidate: _Candidate, paths: Collection[str]) -> _Candidate:
    """Without values of heads that are only guessed to be: nothing is seen of them, and it is proved without them."""
    outside = {path: style for path, style in candidate.outside.items() if path not in paths}
    otherwise = tuple({p: style for p, style in way.items() if p not in paths} for way in candidate.otherwise)
    return replace(candidate, otherwise=otherwise, outside=outside)


def _prove(runs: ModelRuns, candidates: list[_Candidate], tries: int) -> PlanProof:
    styles = _merged(candidates)
    tied = with_ties(runs.model, styles)
    return prove(runs, tied, itertools.islice(runs.divisions(styles), tries), alone=False)


def _seen_vocabulary(
    runs: ModelRuns, branches: list[_Candidate], vocabulary: list[_Candidate], notes: list[str]
) -> list[_Candidate]:
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


def _settled(runs: ModelRuns, branches: list[_Candidate], notes: list[str]) -> tuple[list[_Candidate], _Found]:
    """Branches of which nothing runs alone; and what is proved of the others, by modules of the first block of each
    structure that do. What is wrong there in all ways, or raises, is left whole."""
    unseen, wrong = list[_Candidate](), set[tuple[type, ...]]()
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


def _verified(runs: ModelRuns, branches: list[_Candidate], notes: list[str], whole: Collection[str]) -> _Found:
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


def _without_joint(candidates: Iterable[_Candidate], notes: list[str]) -> Iterator[_Candidate]:
    """Those of which shapes tell enough."""
    for each in candidates:
        if each.unless_proved:
            notes.append(f"{each.name}: left whole, {each.unless_proved}")
        else:
            yield each


def _fitting(runs: ModelRuns, candidates: list[_Candidate], notes: list[str]) -> _Found:
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
    decide: Callable[[ModelRuns, list[_Candidate], list[str]], _Found],
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
        every = _branch_candidates(alone)
        left = [each for each in every if not any(join_name(blocks[0].path, path) in whole for path in each.styles)]
        local, attributes = decide(alone, left, of_block)
        said += [f"{blocks[0].path}: {note}" for note in of_block]
        for path in (b.path for b in blocks):
            styles |= {join_name(path, name): style for name, style in local.items()}
            divided |= {(join_name(path, name), a): value for (name, a), value in attributes.items()}
    notes += said  # of all, or of none: where one block raises, its caller decides otherwise
    return styles, divided


def _merged(candidates: Iterable[_Candidate]) -> dict[str, str]:
    return {path: style for each in candidates for path, style in each.styles.items()}
