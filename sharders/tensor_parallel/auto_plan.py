"""A tensor-parallel plan for any transformer: by structure, proved on a small copy (`proof`).

The plan is data, module path -> style name, see [Note: style names]; `sharder` applies it. Linears of
a unit are split together or not at all. The token embedding and the head are both split over the vocabulary, so that
they may be tied. Norms of single heads see a rank's heads alone: the gradients of their weights are to be summed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from dmp import PlanError
from sharders.tensor_parallel.head_counts import Divided, Rehearsal, divided_attributes
from sharders.tensor_parallel.proof.sample import UnprovedError
from sharders.tensor_parallel.prove import Settled, say, settle
from sharders.tensor_parallel.sequence import sequence_styles
from sharders.tensor_parallel.split.patterns import with_ties
from sharders.tensor_parallel.structure.dry_run import DryRunError
from sharders.tensor_parallel.structure.find_transformer import Block, Transformer, Unit, join, within

_TRIES, _TRIES_OF_ONE = 8, 3  # ways to divide attributes; the likeliest come first

__all__ = ["Derived", "Rehearsal", "check_heads", "complete_sequence", "derive", "divided_attributes"]


@dataclass(frozen=True)
class Derived:
    """A plan and how it came about."""

    styles: Mapping[str, str]
    """Module path -> style name."""

    divided: Mapping[tuple[str, str], int]
    """(module path, attribute) -> the value it must have on each rank."""

    notes: tuple[str, ...]
    """What was left whole and why; whether a dry run verified the plan."""


@dataclass(frozen=True)
class _Part:
    """Styles that are taken or left together; a unit of every block of one structure, or the vocabulary."""

    name: str
    styles: Mapping[str, str]


def derive(rehearsal: Rehearsal, axis: str, *, sequence_parallel: bool = False, loss_parallel: bool = False) -> Derived:
    """A plan for every block that can be split; nothing is changed, parameters may be on meta.

    Args:
        rehearsal: of the model, for the number of ranks on the tensor axis.
        axis: the axis's name, for messages.
        sequence_parallel: also split norms and dropout over the sequence, see `complete_sequence`.
        loss_parallel: leave the logits split over the vocabulary.

    Raises:
        PlanError: heads, KV heads or a hidden size that the axis does not divide; with `loss_parallel` a vocabulary
            that it does not divide, or no head.
    """
    model, parts, size = rehearsal.model, rehearsal.parts, rehearsal.size
    if not parts.blocks:
        return Derived({}, {}, ("no transformer blocks: nothing to split by tensor parallelism",))
    for block in parts.blocks:
        for unit in block.units:
            _check_unit(join(block.path, unit.path), unit, size, axis)
    notes = list(_whole_notes(parts))
    vocabulary = list(_vocabulary_part(model, parts, size, axis, loss_parallel, notes))
    styles, divided = _decide(rehearsal, axis, list(_unit_parts(model, parts)), vocabulary, notes)
    if loss_parallel and "colwise_loss_parallel" not in styles.values():
        raise PlanError(
            f"loss_parallel needs a head whose logits can be split over axis {axis!r} of size {size}; this model has "
            "none; use TensorParallelSharder(loss_parallel=False), or name its head in a plan"
        )
    if sequence_parallel:
        styles, note = sequence_styles(rehearsal, styles, divided, axis)
        notes.append(note)
    return Derived(styles, divided, tuple(notes))


def complete_sequence(
    rehearsal: Rehearsal, styles: Mapping[str, str], axis: str, *, loss_parallel: bool = False
) -> Derived:
    """A plan of splits, completed for sequence parallelism: see [Note: sequence region].

    Args:
        styles: module path -> style, exact paths.
        loss_parallel: a head that gathers its logits leaves them split.

    Raises:
        PlanError: no blocks, several stacks of them, or a module in them that cannot run on a slice of the sequence.
    """
    divided = divided_attributes(rehearsal, styles)
    done, note = sequence_styles(rehearsal, styles, divided, axis, loss_parallel=loss_parallel)
    return Derived(done, divided, (note,))


def check_heads(parts: Transformer, styles: Mapping[str, str], size: int, axis: str) -> None:
    """Raise for attentions whose query, key or value are split in the middle of a head, under any plan.

    Raises:
        PlanError: names the module, its number of heads, and the axis.
    """
    for block in parts.blocks:
        for unit in block.units:
            if unit.heads is not None and any(styles.get(join(block.path, n)) == "colwise" for n in unit.up):
                _check_unit(join(block.path, unit.path), unit, size, axis)


def _check_unit(path: str, unit: Unit, size: int, axis: str) -> None:
    if unit.heads is None:
        counts = {"hidden size": unit.hidden}
    else:
        counts = {"number of heads": unit.heads.query, "number of key/value heads": unit.heads.key_value}
    for what, count in counts.items():
        if count % size:
            fitting = f"whose {axis!r} axis divides {count}" if count > 1 else f"without the axis {axis!r}"
            raise PlanError(
                f"module {path!r}: {what} {count} is not divisible by {size}, the size of mesh axis {axis!r}; use a "
                f"mesh {fitting}, or TensorParallelSharder({{...}}) with a plan of module paths and styles that leaves "
                "this module out"
            )


def _unit_parts(model: nn.Module, parts: Transformer) -> Iterator[_Part]:
    for first, blocks in _by_structure(parts):
        for unit in first.units:
            name = _counted(join(first.path, unit.path) if unit.path else join(first.path, unit.down), len(blocks))
            relative = _unit_styles(model.get_submodule(first.path), unit)
            yield _Part(name, {join(b.path, n): style for b in blocks for n, style in relative.items()})


def _unit_styles(block: nn.Module, unit: Unit) -> dict[str, str]:
    styles = {**dict.fromkeys(unit.up, "colwise"), unit.down: "rowwise"}
    if unit.heads is not None:
        for name, module in block.get_submodule(unit.path).named_modules():
            shapes = {tuple(p.shape) for p in module.parameters(recurse=False)}
            if shapes == {(unit.heads.size,)} and not isinstance(module, nn.Linear):
                styles[join(unit.path, name)] = "sum_gradients"
    return styles


def _vocabulary_part(
    model: nn.Module, parts: Transformer, size: int, axis: str, loss_parallel: bool, notes: list[str]
) -> Iterator[_Part]:
    styles = {}
    pair = [model.get_submodule(path) for path in (parts.embedding, parts.head) if path is not None]
    tied = len(pair) == 2 and pair[0].weight is pair[1].weight
    for path, style in (
        (parts.embedding, "rowwise"),
        (parts.head, "colwise_loss_parallel" if loss_parallel else "colwise_gather"),
    ):
        if path is None:
            continue
        module = model.get_submodule(path)
        assert isinstance(module, nn.Embedding | nn.Linear)
        rows = module.weight.shape[0]
        if rows % size:
            if loss_parallel:
                raise PlanError(
                    f"module {path!r}: vocabulary {rows} is not divisible by {size}, the size of mesh axis {axis!r}, "
                    f"which loss_parallel needs; pad the vocabulary to a multiple of {size}, use another mesh, or "
                    "TensorParallelSharder(loss_parallel=False)"
                )
            notes.append(f"{path}: left whole, its vocabulary {rows} is not divisible by {size}")
        elif isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
            notes.append(f"{path}: left whole, sparse gradients and max_norm are for whole rows on one rank")
            if tied:
                return
        elif hasattr(module.weight, "_optimizer_classes"):
            notes.append(f"{path}: left whole, its optimizer runs in the backward pass")
            if tied:
                return
        else:
            styles[path] = style
    if styles:
        yield _Part(" and ".join(styles), styles)


def _decide(
    rehearsal: Rehearsal, axis: str, units: list[_Part], vocabulary: list[_Part], notes: list[str]
) -> tuple[dict[str, str], Divided]:
    """What is proved of the model, else of each block alone, else what a dry run verifies or structure and source say.

    What is not proved is not right for certain, and the notes say so.
    """
    try:
        return _proved(rehearsal, axis, [*units, *vocabulary], notes)
    except UnprovedError as error:
        failure = str(error)
    vocabulary = _seen_vocabulary(rehearsal, units, vocabulary, notes)
    others = _merged(vocabulary)
    try:
        styles, divided = _proved_blocks(rehearsal, axis, notes)
    except UnprovedError:
        notes.append(f"not proved: {failure}")
        styles, divided = _verified(rehearsal, list(_without_disproved(rehearsal, axis, units, notes)), notes)
    else:
        notes.append(f"not proved outside the blocks: {failure}")
    return {**styles, **others}, divided


def _proved(
    rehearsal: Rehearsal, axis: str, candidates: list[_Part], notes: list[str]
) -> tuple[dict[str, str], Divided]:
    """Take all if they are proved together, else those that are proved one by one.

    Raises:
        UnprovedError: the model does not run with guessed inputs, or is too large.
    """
    kept, settled = candidates, _settled(rehearsal, axis, candidates, _TRIES)
    if settled.divided is None:
        kept, settled = [], Settled({})
        for part in candidates:
            with_part = _settled(rehearsal, axis, [*kept, part], _TRIES_OF_ONE)
            if with_part.divided is None:
                notes.append(f"{part.name}: left whole, because {with_part.failure}")
                say(notes[-1])
            else:
                kept, settled = [*kept, part], with_part
    notes.append(rehearsal.verified() + settled.note)
    return _merged(kept), settled.divided or {}


def _settled(rehearsal: Rehearsal, axis: str, parts: list[_Part], tries: int) -> Settled:
    styles = _merged(parts)
    tied = with_ties(rehearsal.model, styles)
    return settle(rehearsal, tied, itertools.islice(rehearsal.divisions(styles), tries), axis, alone=False)


def _seen_vocabulary(
    rehearsal: Rehearsal, units: list[_Part], vocabulary: list[_Part], notes: list[str]
) -> list[_Part]:
    """What of the vocabulary may be split though it is not proved."""
    try:
        if rehearsal.names(_merged([*units, *vocabulary])) is not None:
            return vocabulary
    except DryRunError:
        if rehearsal.parts.head is not None or not vocabulary:
            return vocabulary
    # The embedding may be the head as well, by its weight, and only a run would show that.
    notes += [f"{part.name}: left whole, it is neither proved nor verified by a dry run" for part in vocabulary]
    return []


def _proved_blocks(rehearsal: Rehearsal, axis: str, notes: list[str]) -> tuple[dict[str, str], Divided]:
    """One block of each structure on its own, with hidden states."""

    def decide(alone: Rehearsal, parts: list[_Part], of_block: list[str]) -> tuple[dict[str, str], Divided]:
        return _proved(alone, axis, parts, of_block)

    return _of_blocks(rehearsal, decide, notes)


def _without_disproved(rehearsal: Rehearsal, axis: str, units: list[_Part], notes: list[str]) -> Iterator[_Part]:
    """Units without those that run alone, of the first block of each structure, and are wrong there."""
    for part, block in zip(units, _blocks_of_units(rehearsal.parts), strict=True):
        styles = {path: style for path, style in part.styles.items() if within(path, block)}
        failure = settle(rehearsal, styles, [rehearsal.divide_by_source(styles)], axis).failure
        if failure:
            notes.append(f"{part.name}: left whole, because {failure}")
            say(notes[-1])
        else:
            yield part


def _blocks_of_units(parts: Transformer) -> Iterator[str]:
    """The path of the first block, for each unit in `_unit_parts`' order."""
    return (first.path for first, _ in _by_structure(parts) for _ in first.units)


def _verified(rehearsal: Rehearsal, units: list[_Part], notes: list[str]) -> tuple[dict[str, str], Divided]:
    """What has the right shapes in a dry run of the model, else of each block; else what structure and source say."""
    try:
        return _fitting(rehearsal, units, notes)
    except DryRunError as error:
        failure = str(error)
    try:
        return _of_blocks(rehearsal, _fitting, notes)
    except DryRunError:
        notes.append(f"not verified by a dry run: {failure}")
        styles = _merged(units)
        return styles, rehearsal.divide_by_source(styles)


def _fitting(rehearsal: Rehearsal, candidates: list[_Part], notes: list[str]) -> tuple[dict[str, str], Divided]:
    """Take all if a dry run verifies them together, else those that it verifies one by one."""
    kept = candidates
    names = rehearsal.names(_merged(kept))
    if names is None:
        kept, names = [], frozenset[str]()
        for part in candidates:
            with_part = rehearsal.names(_merged([*kept, part]))
            if with_part is None:
                notes.append(f"{part.name}: left whole, a dry run with its local shapes failed or gave other shapes")
            else:
                kept, names = [*kept, part], with_part
    styles = _merged(kept)
    notes.append(f"{rehearsal.verified()}not proved")
    return styles, rehearsal.divide(styles, names)


def _of_blocks(
    rehearsal: Rehearsal,
    decide: Callable[[Rehearsal, list[_Part], list[str]], tuple[dict[str, str], Divided]],
    notes: list[str],
) -> tuple[dict[str, str], Divided]:
    """What `decide` says of one block of each structure, for all of them."""
    parts = rehearsal.parts
    styles: dict[str, str] = {}
    divided: Divided = {}
    said: list[str] = []
    for first, blocks in _by_structure(parts):
        module = rehearsal.model.get_submodule(first.path)
        alone = Transformer((replace(first, path=""),), parts.width, None, None)
        of_block: list[str] = []
        rehearsed = Rehearsal(module, rehearsal.size, alone)
        local, attributes = decide(rehearsed, list(_unit_parts(module, alone)), of_block)
        said += [f"{first.path}: {note}" for note in of_block]
        for path in (b.path for b in blocks):
            styles |= {join(path, name): style for name, style in local.items()}
            divided |= {(join(path, name), a): value for (name, a), value in attributes.items()}
    notes += said
    return styles, divided


def _merged(parts: Iterable[_Part]) -> dict[str, str]:
    return {path: style for part in parts for path, style in part.styles.items()}


def _by_structure(parts: Transformer) -> Iterator[tuple[Block, list[Block]]]:
    """The first block of each structure, and all of them."""
    found: dict[int, list[Block]] = {}
    for block in parts.blocks:
        found.setdefault(block.structure, []).append(block)
    yield from ((blocks[0], blocks) for blocks in found.values())


def _whole_notes(parts: Transformer) -> Iterator[str]:
    for first, blocks in _by_structure(parts):
        for whole in first.whole:
            yield f"{_counted(join(first.path, whole.path), len(blocks))}: left whole, {whole.why}"


def _counted(path: str, count: int) -> str:
    return path if count == 1 else f"{path} (and {count - 1} like it)"
