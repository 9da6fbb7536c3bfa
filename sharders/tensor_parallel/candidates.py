"""In which ways each branch of a transformer's blocks may be split: what belongs together, and what only a proof tells.

A branch's Linears are split together. What shapes leave open, such as what one weight holds, has several ways, the
likeliest first; `auto_plan` chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from torch import nn
from torch.nn.parameter import is_lazy

from dmp import is_inside, join_name
from sharders.tensor_parallel.head_counts import ModelRuns
from sharders.tensor_parallel.left_whole import counted, does_not_divide, of_width
from sharders.tensor_parallel.split.styles import Style
from sharders.tensor_parallel.structure.dry_run import DryRunError
from sharders.tensor_parallel.structure.linears import features_of
from sharders.tensor_parallel.structure.of_heads import OF_HEADS, biases_outside, norms_of_heads, values_of_heads
from sharders.tensor_parallel.structure.of_samples import vectors_of_samples
from sharders.tensor_parallel.structure.transformer import Block, Branch
from sharders.tensor_parallel.structure.wide_norms import COLWISE_NORM, wide_norms

_JOINT = "one weight holds several, and how is neither proved nor to be seen"
_BACK = "which of its Linears leads back is neither proved nor to be seen"
_SECOND = "how its Linears beside query, key and value are used is not proved"
_BESIDE = "how its Linears beside query, key, value and output are used is not proved"
_SHARED = "whether its single numbers, or values of all heads, are a rank's is neither proved nor to be seen"
_NORMS = "that what it has for all heads, or hidden units, is a norm of theirs is not proved"
_VALUES = "that what it holds as many of as heads is theirs is not proved"


@dataclass(frozen=True)
class Candidate:
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


def branch_candidates(runs: ModelRuns) -> Iterator[Candidate]:
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
            yield Candidate(name, first.path, ways[0], tuple(ways[1:]), unless_proved, outside, biases)
        for path, every in first.experts:
            ways = [
                {join_name(b.path, path): style for b in blocks}
                for style, way in of_width(every, runs.transformer.width).items()
                if way.inner % runs.size == 0
            ]
            if ways:
                name = counted(join_name(first.path, path), len(blocks))
                yield Candidate(name, first.path, ways[0], tuple(ways[1:]), _JOINT)
        with suppress(DryRunError):
            for path in vectors_of_samples(model, first, runs.unsplit().whole, runs.size):
                name = counted(join_name(first.path, path), len(blocks))
                yield Candidate(name, first.path, {join_name(b.path, path): "colwise_gather" for b in blocks})


def _norms(runs: ModelRuns, block: Block, branch: Branch) -> list[str]:
    """Norms over all that a branch's Linears give, by their path in the block."""
    order: list[str] = []
    with suppress(DryRunError):
        order = runs.unsplit().whole.order
    return list(wide_norms(runs.model, block, branch, order))


def _values_outside(runs: ModelRuns, branch: Branch) -> dict[str, str]:
    """Of a model's modules that are in no attention, what holds values for each head; see [Note: values of heads]. And
    what all heads share, as wide as one of them: of what each rank makes with its own heads, gradients are summed."""
    if branch.heads is None or branch.widths:
        return {}
    blocks = runs.transformer.blocks
    closed = [join_name(b.path, x.path) for b in blocks for x in b.branches if x.heads is not None]
    found = values_of_heads(runs.model, branch.heads, ()).items()
    outside = {path: s for path, s in found if s in OF_HEADS and not any(is_inside(path, c) for c in closed)}
    if branch.heads.size != runs.transformer.width:
        for path, module in runs.model.named_modules():
            if _is_wide(module, branch.heads.size) and not any(is_inside(path, block.path) for block in blocks):
                outside.setdefault(path, "sum_gradients")
    return outside


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
        is_single = {p.numel() for p in module.parameters(recurse=False) if not is_lazy(p)} == {1}
        path = join_name(branch.path, name)
        if (
            (is_single or _is_wide(module, of_head))
            and path not in beside
            and not any(is_inside(path, other) for other in others)
        ):
            yield path


def _is_wide(module: nn.Module, width: int | None) -> bool:
    """Whether its own parameters, none of a Linear's or a convolution's, have rows as wide as this."""
    if features_of(module) is not None or hasattr(module, "kernel_size"):
        return False
    own = [p for p in module.parameters(recurse=False) if not is_lazy(p)]
    return bool(own) and all(p.dim() > 1 and p.shape[-1] == width for p in own)
