"""Which integer attributes of attentions must have their local value when heads are divided over ranks.

An attention whose `forward` says `view(B, T, self.num_heads, self.head_dim)` needs `num_heads // size`; one that says
`view(B, T, -1, self.head_dim)` needs nothing. A dry run decides, see [Note: dry run]; where the model does not run with
guessed inputs, the source of its class does.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from torch import nn

from dmp import is_inside, join_name
from sharders.tensor_parallel.proof.proof import Verdict, disproof
from sharders.tensor_parallel.proof.sample import Sample, UnprovedError
from sharders.tensor_parallel.split.styles import SPLITTING, Style, family
from sharders.tensor_parallel.structure.adapters import base_of, in_place
from sharders.tensor_parallel.structure.claimed_width import width_read_by
from sharders.tensor_parallel.structure.dry_run import (
    DryRunError,
    Feed,
    Trace,
    dry_run,
    make_local,
    same_outside,
)
from sharders.tensor_parallel.structure.feeds import find_feed, guesses
from sharders.tensor_parallel.structure.find_transformer import recognise
from sharders.tensor_parallel.structure.linears import features_of, is_joint_attention
from sharders.tensor_parallel.structure.meta_copies import MetaCopies
from sharders.tensor_parallel.structure.numbers import by_name, number_of
from sharders.tensor_parallel.structure.sources import source_of
from sharders.tensor_parallel.structure.transformer import (
    AXES_OF_HEADS,
    CONFIGS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LOCAL_HEADS,
    Block,
    Transformer,
    outward,
)

Divided = dict[tuple[str, str], int]

_PROVED_TOO = ("sum_gradients", "replicate")
"""Styles that are right or wrong of a whole weight, beside those that split."""


@dataclass(frozen=True)
class Attribute:
    """An integer of an attention that may have to be divided."""

    path: str
    name: str
    value: int
    is_count: bool
    """A number of heads; otherwise heads times head size, which may also mean the hidden size."""

    down: str
    """The output Linear of its attention."""


@dataclass(frozen=True)
class Unsplit:
    """The unsplit model's dry run, and what of its attentions may have to be divided."""

    feed: Feed
    whole: Trace
    options: tuple[frozenset[str], ...]
    """Sets of attribute names to try, the smallest change first."""


class ModelRuns:
    """Dry runs of one model for one size of the axis; its parts, meta tensors and unsplit run are found once.

    Args:
        size: ranks on the tensor axis.
        axis: its name.
        transformer: what `recognise` says of the model, or of a block that runs alone.
        given: inputs that the model takes, see `of_example`; guessed where there are none.
    """

    def __init__(
        self,
        model: nn.Module,
        size: int,
        axis: str,
        transformer: Transformer | None = None,
        given: tuple[Feed, ...] = (),
    ) -> None:
        self.model = model
        self.size = size
        self.axis = axis
        self.given = given
        self.transformer = recognise(model) if transformer is None else transformer
        self.copies = MetaCopies(model, self.transformer)
        self.parts: dict[str, ModelRuns] = {}
        """Of modules that were run alone, by path."""
        self._verdicts: dict[tuple[frozenset[Any], frozenset[Any]], Verdict] = {}

    def of_block(self, block: Block) -> ModelRuns:
        """Of one of the blocks, alone."""
        alone = Transformer((replace(block, path=""),), self.transformer.width, None, None)
        return ModelRuns(self.model.get_submodule(block.path), self.size, self.axis, alone)

    def unsplit(self) -> Unsplit:
        """Run the unsplit model, the first time.

        Raises:
            DryRunError: it does not run with guessed inputs.
        """
        if isinstance(self._unsplit, DryRunError):
            raise DryRunError(str(self._unsplit))
        return self._unsplit

    @cached_property
    def _unsplit(self) -> Unsplit | DryRunError:
        found = {(a.path, a.name): a for a in _attributes(self.model, self.transformer.representatives())}
        try:
            feed, whole = find_feed(self.copies, self.size, found, self.given)
        except DryRunError as error:
            return error
        # Where no product of activations shows the size of a head, shapes cannot tell: then counts are divided if read.
        read = [a for key, a in found.items() if key in whole.reads or "." in a.name]  # what a configuration has
        options = _options(read, only_counts=not whole.contractions)
        # Of what code reads that did not run: where it is called with more, it works on a rank's heads too.
        rest = (a for a in found.values() if a.is_count and a.name not in {each.name for each in read})
        unread = frozenset(a.name for a in rest if _is_used(type(self.model.get_submodule(a.path)), a))
        return Unsplit(feed, whole, tuple(dict.fromkeys((*(names | unread for names in options), *options))))

    def divisions(self, styles: Mapping[str, str]) -> Iterator[Divided]:
        """Local values of attributes worth a try under `styles`: what fits by shapes, the smallest change first; then
        what the source says; then the rest. Widths that are read from inputs come after what does without.
        """
        tried: list[Divided] = []
        for divided in self._divisions(styles):
            if divided not in tried:
                tried.append(divided)
                yield divided

    def _divisions(self, styles: Mapping[str, str]) -> Iterator[Divided]:
        if not self.transformer.blocks:
            yield {}
            return
        widths = self._widths(styles)
        try:
            options = self.unsplit().options
            for more in [{}, widths] if widths else [{}]:
                every = ({**self.divide(styles, names), **more} for names in options)
                yield from (divided for divided in every if self._fits(styles, divided))
        except DryRunError:
            options = _options(_attributes(self.model, self.transformer.representatives()))
        yield self.divide_by_source(styles)
        if widths:  # and often compared with an attribute that says the same
            yield {**self.divide_by_source(styles), **widths}
            yield {**self._local(styles, lambda _: True), **widths}
        yield from (self.divide(styles, names) for names in options)

    def verified(self) -> str:
        """What a dry run showed, for notes; empty where there is none."""
        try:
            return f"verified by a dry run with {self.unsplit().feed.name}; "
        except DryRunError:
            return ""

    def verdict(self, styles: Mapping[str, Style], divided: Divided) -> Verdict:
        """Whether a plan is right, see [Note: proof]; found once."""
        plan = frozenset(styles.items()), frozenset(divided.items())
        if plan not in self._verdicts:
            self._verdicts[plan] = self._found(styles, divided)
        return self._verdicts[plan]

    @cached_property
    def _sample(self) -> Sample | UnprovedError:
        """Of the inputs that a dry run found, else of those that the model runs with although it does not on meta."""
        try:
            unsplit = self.unsplit()
            feed = self.given[0] if self.given else unsplit.feed  # which has values
            return Sample(self.copies, feed, unsplit.whole, self.size)
        except UnprovedError as error:
            return error
        except DryRunError as error:
            failure = UnprovedError(str(error))
        for feed in self.given[:1] or guesses(self.copies, self.size):
            if not feed.suits(self.model):
                continue
            try:
                return Sample(self.copies, feed, None, self.size)
            except UnprovedError as error:
                failure = error if self.given else failure
        return failure

    def _found(self, styles: Mapping[str, Style], divided: Divided) -> Verdict:
        if isinstance(self._sample, UnprovedError):
            return Verdict(unproved=str(self._sample))
        unreached = self._sample.unreached(p for p, s in styles.items() if family(s) in SPLITTING or s in _PROVED_TOO)
        try:
            wrong = disproof(self._sample, styles, divided, self.axis)
        except UnprovedError as error:
            return Verdict(unproved=str(error))
        return Verdict(wrong, "", str(self._sample), unreached)

    def names(self, styles: Mapping[str, str]) -> frozenset[str] | None:
        """The first option with which the model runs under `styles`; None where none does.

        Raises:
            DryRunError: the unsplit model does not run with guessed inputs.
        """
        options = self.unsplit().options
        return next((names for names in options if self._fits(styles, self.divide(styles, names))), None)

    def _fits(self, styles: Mapping[str, str], divided: Divided) -> bool:
        """Whether the model runs with local shapes, and gives the same shapes outside the branches."""
        known = self.unsplit()
        insides = [p for b in self.transformer.representatives() for p in _insides(self.model, b, styles)]

        edit = partial(make_local, styles=styles, divided=divided, size=self.size)
        try:
            local = dry_run(self.copies, known.feed, edit, expected=known.whole)
        except DryRunError:
            return False
        return same_outside(known.whole, local, insides)

    def divide(self, styles: Mapping[str, str], names: Iterable[str]) -> Divided:
        """Local values of the attributes called `names`, in every attention that `styles` split."""
        names = set(names)
        return self._local(styles, lambda a: a.name in names) if names else {}

    def divide_by_source(self, styles: Mapping[str, str]) -> Divided:
        """The same, by what the methods of an attention's class do with the attribute; shapes are not verified."""
        return self._local(styles, lambda a: _is_used(type(self.model.get_submodule(a.path)), a))

    def _widths(self, styles: Mapping[str, str]) -> Divided:
        """What attentions that `styles` split may read of their inputs instead, see [Note: claimed width]."""
        every = _widths_read(self.model, self.transformer.blocks)
        return {(a.path, a.name): a.value // self.size for a in every if a.down in styles}

    def _local(self, styles: Mapping[str, str], is_divided: Callable[[Attribute], bool]) -> Divided:
        every = _attributes(self.model, self.transformer.blocks)
        return {(a.path, a.name): a.value // self.size for a in every if a.down in styles and is_divided(a)}


def _options(attributes: Iterable[Attribute], *, only_counts: bool = False) -> tuple[frozenset[str], ...]:
    """Sets of names of attributes to divide, the smallest change first."""
    every = list(attributes)
    counts = frozenset(a.name for a in every if a.is_count)
    products = sorted({a.name for a in every if not a.is_count})[:4]
    subsets = [frozenset(s) for n in range(len(products) + 1) for s in itertools.combinations(products, n)]
    bases = dict.fromkeys([counts] if only_counts else [frozenset[str](), counts])
    return tuple(b | s for b in bases for s in subsets)


def _attributes(model: nn.Module, blocks: Iterable[Block]) -> Iterator[Attribute]:
    """Of the attentions in `blocks`."""
    for block in blocks:
        for branch in block.branches:
            if (heads := branch.heads) is None:
                continue
            counts = {**dict.fromkeys(HEADS, heads.query), **dict.fromkeys(KV_HEADS, heads.key_value)}
            outer, down = join_name(block.path, branch.path), join_name(block.path, branch.down)
            every = [*in_place(model.get_submodule(outer))]
            for name, module in every:
                if features_of(module) is not None or is_joint_attention(module):
                    continue
                kind: Any = type(module)
                for attribute, value in vars(module).items():
                    if type(value) is not int or (attribute in HEAD_DIM and value == heads.size):
                        continue
                    is_local = attribute in LOCAL_HEADS and value in counts.values()
                    is_count = is_local or counts.get(attribute) == value
                    if not is_count and value in counts.values() and _is_in_source(kind, attribute, _SPLITS):
                        is_count = not any(_is_named(m, counts) for _, m in every)  # under another name, as `h`
                    if is_count or value in (heads.query * heads.size, heads.key_value * heads.size):
                        yield Attribute(join_name(outer, name), attribute, value, is_count, down)
                held = (
                    (holder, axis, by_name(x).get(axis)) for holder, x in vars(module).items() for axis in AXES_OF_HEADS
                )
                for holder, axis, count in held:
                    if type(count) is int and count in counts.values():
                        yield Attribute(join_name(outer, name), f"{holder}.{axis}", count, True, down)
                of_config = ((f"{c}.{attribute}", count) for c in CONFIGS for attribute, count in counts.items())
                for attribute, count in of_config:
                    if number_of(module, attribute) == count and _is_in_source(kind, attribute):
                        yield Attribute(join_name(outer, name), attribute, count, True, down)


def _is_named(module: nn.Module, counts: Mapping[str, int]) -> bool:
    """Whether it, or its configuration, has one of these numbers under its usual name."""
    prefixes = ("", *(f"{c}." for c in CONFIGS))
    return any(number_of(module, prefix + name) == count for name, count in counts.items() for prefix in prefixes)


def _widths_read(model: nn.Module, blocks: Iterable[Block]) -> Iterator[Attribute]:
    """Of attentions in `blocks` whose heads together are as wide as their input: of each module around the Linears that
    read it."""
    for block in blocks:
        for branch in block.branches:
            up = model.get_submodule(join_name(block.path, branch.up[0]))
            reads = features_of(up.get_submodule(base_of(up) or ""))
            if branch.heads is None or reads is None or reads.in_features != branch.hidden:
                continue
            down = join_name(block.path, branch.down)
            for path in outward(branch.up[0].rpartition(".")[0]):
                module = model.get_submodule(join_name(block.path, path))
                name = width_read_by(module)
                is_called = is_inside(path, branch.path) and not isinstance(module, nn.Sequential | nn.ModuleList)
                if is_called and name is not None:
                    yield Attribute(join_name(block.path, path), name, branch.hidden, False, down)


def _insides(model: nn.Module, block: Block, styles: Mapping[str, str]) -> Iterator[str]:
    """Modules of a block whose outputs are local when its branches are split."""
    for branch in block.branches:
        if join_name(block.path, branch.down) not in styles:
            continue
        if branch.path:
            yield join_name(block.path, branch.path)
            continue
        # Directly in the block: an activation or dropout between up and down cannot be told from others.
        yield from (join_name(block.path, n.partition(".")[0]) for n in (*branch.up, *dict(branch.second)))
        children = model.get_submodule(block.path).named_children()
        yield from (join_name(block.path, n) for n, child in children if not any(True for _ in child.parameters()))


_JOINS = r"((view|reshape)\([^()]*|(size\(\)|shape)\[:-\d\] *\+ *[(\[][^()]*)"
"""Where heads are joined: at once, or by a shape written before, `x.size()[:-2] + (self.all_head_size,)`."""

_SPLITS = r"(view|reshape|unflatten|rearrange)\((?:[^()]|\([^()]*\))*"
"""Where heads are split."""


def _is_used(cls: Any, attribute: Attribute) -> bool:
    # The hidden size has many uses; only that of joining heads is divided.
    return _is_in_source(cls, attribute.name, before="" if attribute.is_count else _JOINS)


@lru_cache(maxsize=1024)
def _is_in_source(cls: Any, name: str, before: str = "") -> bool:
    """Whether methods of a class or of its bases, but for `__init__`, read an attribute behind such an expression."""
    source = source_of(cls) or ""
    return re.search(rf"{before}self\.{re.escape(name)}\b", source) is not None
