"""Inputs that a model is tried with, guessed from what its first weights take: ids, hidden states, images, sounds.

[Note: data] A model of images or sounds starts with a convolution, whose channels are those of its input; where that is
one, samples may have no dim for it. How large an image is, or how long a sound, its tables of positions decide; the
model keeps it as an attribute of a usual name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import nn

from dmp import join_name, map_nested
from sharders.tensor_parallel.structure.dry_run import DryRunError, Feed, Trace, dry_run, sequence_length
from sharders.tensor_parallel.structure.find_transformer import is_of_torchrec
from sharders.tensor_parallel.structure.linears import features_of
from sharders.tensor_parallel.structure.meta_copies import MetaCopies
from sharders.tensor_parallel.structure.transformer import CONFIGS, IMAGE_SIZES, outward

BATCH = 2
SECOND = ("encoder_hidden_states", "key_value_states", "context", "memory")
VECTORS = ("temb",)
"""Names of inputs: a second sequence's hidden states, and a vector of the hidden size for each sample."""
_SOUND_POSITIONS = ("max_source_positions",)
_MOST = 1024
"""Patches or positions; a proof on more takes longer than it is worth, where one of each block is left."""
_FEW = 8
"""Patches along a side, or positions of a sound, where the model does not say."""
_TAKES_NONE = re.compile(r"\bOptional\[|\bNone\b")
_MORE = 4
"""Times as long are sounds without a dim of channels, of which models hide ten positions and more while they train."""


def guesses(copies: MetaCopies, size: int) -> Iterator[Feed]:
    """Inputs worth a try for the copied model: images or sounds where it starts with a convolution, ids, ids by Hugging
    Face's keywords, and with images, hidden states.

    None where its tables take jagged tensors.
    """
    if any(is_of_torchrec(m) for m in copies.model.modules()):
        return
    length, width = sequence_length(size), copies.transformer.width
    dtype = next((p.dtype for p in copies.model.parameters() if p.is_floating_point()), torch.float32)
    ids = torch.zeros((BATCH, length), dtype=torch.int64, device="meta")
    none = _left_none(copies.model)
    for kind, shape in _shapes_of_data(copies.model):
        data = torch.zeros((BATCH, *shape), dtype=dtype, device="meta")
        yield Feed(f"{kind} {tuple(data.shape)}", (data,), fixed=none, of_data=True)
        if kind == "sounds":
            name = f"{kind} {tuple(data.shape)} and decoder_input_ids {tuple(ids.shape)}"
            yield Feed(name, (data,), {"decoder_input_ids": ids}, of_data=True)
    yield Feed(f"ids {tuple(ids.shape)}", (ids,), fixed=none)
    # A mask of four dimensions is taken as it is by Hugging Face's models, which look into one they make themselves.
    mask = torch.ones((BATCH, 1, length, length), dtype=torch.bool, device="meta")
    yield Feed(f"input_ids {tuple(ids.shape)}", (), {"input_ids": ids, "attention_mask": mask})
    yield Feed(f"input_ids and decoder_input_ids {tuple(ids.shape)}", (ids,), {"decoder_input_ids": ids})
    for shape in _shapes_of_images(copies.model):
        kwargs = {"input_ids": ids, "pixel_values": torch.zeros((BATCH, *shape), dtype=dtype, device="meta")}
        yield Feed(f"input_ids {tuple(ids.shape)} and images {(BATCH, *shape)}", (), kwargs, of_data=True)
    hidden = torch.zeros((BATCH, length, width), dtype=dtype, device="meta")
    second = list(_with_second(copies, hidden))
    alone = [Feed(f"hidden states {tuple(hidden.shape)}", (hidden,), fixed=none)]
    yield from (*second, *alone) if _attends_to_two(copies) else (*alone, *second)
    rows = torch.zeros((BATCH, 3, length, width), dtype=dtype, device="meta")  # of windows, or aligned sequences
    yield Feed(f"hidden states {tuple(rows.shape)}", (rows,), fixed=none)
    yield from _packed(copies, length, dtype)


def _left_none(model: nn.Module) -> dict[str, None]:
    """Inputs behind the first that a `forward` asks for and takes None for: masks, and what is annotated so."""
    try:
        _, *others = inspect.signature(model.forward).parameters.values()
    except ValueError:  # of what has no signature nobody knows, nor takes one without inputs any
        return {}
    asked = (p for p in others if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return {p.name: None for p in asked if "mask" in p.name or _TAKES_NONE.search(str(p.annotation))}


def _attends_to_two(copies: MetaCopies) -> bool:
    """Whether some attention has Linears of a second sequence, or keys of another width."""
    model = copies.model
    for block in copies.transformer.representatives():
        for branch in block.branches:
            every = [features_of(model.get_submodule(join_name(block.path, n))) for n in branch.up]
            if branch.second or len({each.in_features for each in every if each is not None}) > 1:
                return True
    return False


def _with_second(copies: MetaCopies, hidden: torch.Tensor) -> Iterator[Feed]:
    """Hidden states and those of a second sequence, of another length, for what takes such by a usual name; and a
    vector for each sample, if it takes one."""
    try:
        names = inspect.signature(copies.model.forward).parameters
    except ValueError:  # of what has no signature nobody knows
        return
    name = next((name for name in SECOND if name in names), None)
    if name is None:
        return
    batch, length, width = hidden.shape
    for of_second in _widths_of_second(copies):
        kwargs = {name: hidden.new_zeros((batch, length + 2, of_second))}
        vector = {v: hidden.new_zeros((batch, width)) for v in VECTORS if v in names}
        shapes = " and ".join(f"{name} {tuple(x.shape)}" for name, x in (kwargs | vector).items())
        none = _left_none(copies.model)
        yield Feed(f"hidden states {tuple(hidden.shape)} and {shapes}", (hidden,), kwargs | vector, none)


def _widths_of_second(copies: MetaCopies) -> list[int]:
    """Hidden sizes that a second sequence may have, the likeliest first."""
    found = [copies.transformer.width]
    for block in copies.transformer.representatives():
        for branch in block.branches:
            own = [n for n, style in branch.second if style.startswith("colwise")] or branch.up
            every = [features_of(copies.model.get_submodule(join_name(block.path, n))) for n in own]
            found += [each.in_features for each in every if each is not None]
    return list(dict.fromkeys(found[::-1]))


def _packed(copies: MetaCopies, length: int, dtype: torch.dtype) -> Iterator[Feed]:
    """Hidden states (T, D) of two sequences, for blocks that are told by `cu_seqlens` where each ends, as those of
    Qwen's encoders of images are, and by `position_embeddings` the cosine and sine of each position, (T, head size).
    """
    try:
        names = inspect.signature(copies.model.forward).parameters
    except ValueError:  # of what has no signature nobody knows
        return
    if "cu_seqlens" not in names:
        return
    hidden = torch.zeros((2 * length, copies.transformer.width), dtype=dtype, device="meta")
    fixed: dict[str, Any] = {"cu_seqlens": torch.tensor([0, length, 2 * length], dtype=torch.int32)}
    heads = (b.heads for block in copies.transformer.blocks for b in block.branches if b.heads is not None)
    if "position_embeddings" in names and (first := next(heads, None)) is not None:
        angle = torch.outer(torch.arange(2.0 * length), torch.arange(1.0, first.size + 1))
        fixed["position_embeddings"] = (angle.cos(), angle.sin())
    yield Feed(f"packed hidden states {tuple(hidden.shape)}", (hidden,), fixed=fixed)


def of_example(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Feed, ...]:
    """Inputs that somebody gives, with their values; and without, for a run on meta that takes no others."""

    def kept(x: Any, _: str) -> Any:
        return x.detach().to("cpu", copy=True) if isinstance(x, torch.Tensor) and not x.is_meta else x

    def emptied(x: Any, _: str) -> Any:
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    own = map_nested((args, dict(kwargs)), kept)
    return tuple(Feed("the example inputs", given=g, of_data=True) for g in (own, map_nested(own, emptied)))


def find_feed(
    copies: MetaCopies, size: int, watch: Collection[tuple[str, str]] = (), given: Collection[Feed] = ()
) -> tuple[Feed, Trace]:
    """The first guess that the unsplit model runs with; of what is given, the first, if it runs with one.

    Raises:
        DryRunError: none does; says how the first one failed.
    """
    failure = ""
    for feed in given or guesses(copies, size):
        try:
            return feed, dry_run(copies, feed, watch=watch)
        except DryRunError as error:
            failure = failure or str(error)
    raise DryRunError(failure or "its tables take jagged tensors")


def _shapes_of_data(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Kinds and shapes of samples, see [Note: data]; none where the first weights are no convolution's."""
    path, first = next(((path, m) for path, m in model.named_modules() if "weight" in m._parameters), ("", None))
    if isinstance(first, nn.Conv2d):
        yield from (("images", shape) for shape in _sizes_of_images(model, path, first))
    elif isinstance(first, nn.Conv1d):
        strides = prod(m.stride[0] for m in model.modules() if isinstance(m, nn.Conv1d))
        positions = _said_of(model, path, _SOUND_POSITIONS)
        length = strides * (_FEW if positions is None or positions[0] > _MOST else positions[0])
        yield "sounds", (first.in_channels, length)
        if first.in_channels == 1:
            yield "sounds", (length if positions else length * _MORE,)


def _shapes_of_images(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Of samples of a model that takes something else too: by its first convolution."""
    path, first = next(((path, m) for path, m in model.named_modules() if isinstance(m, nn.Conv2d)), ("", None))
    if first is not None:
        yield from _sizes_of_images(model, path, first)


def _sizes_of_images(model: nn.Module, path: str, first: nn.Conv2d) -> Iterator[tuple[int, ...]]:
    said = _said_of(model, path, IMAGE_SIZES)
    if said is not None and prod(said) <= _MOST * prod(first.stride):
        yield first.in_channels, *said
    yield first.in_channels, *(_FEW * stride for stride in first.stride)


def _said_of(model: nn.Module, path: str, names: Collection[str]) -> tuple[int, int] | None:
    """Two numbers, or one twice, that a module around `path` has under one of the names; the innermost, or its
    configuration.
    """
    for outer in outward(path):
        own: dict[str, Any] = vars(model.get_submodule(outer))
        for owner in (own, *(vars(own[c]) for c in CONFIGS if hasattr(own.get(c), "__dict__"))):
            for name in names:
                value = owner.get(name)
                if type(value) is int and value > 0:
                    return value, value
                if isinstance(value, list | tuple) and len(value) == 2 and all(type(v) is int for v in value):
                    return value[0], value[1]
    return None
