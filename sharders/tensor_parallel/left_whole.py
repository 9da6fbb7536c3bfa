"""What of a transformer is left whole, in words: what the axis does not divide, and what is not recognised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dmp import join_name
from sharders.tensor_parallel.structure.experts import Experts
from sharders.tensor_parallel.structure.transformer import Branch, Transformer


def counts(branch: Branch) -> dict[str, int]:
    """What the axis must divide."""
    if branch.heads is None:
        return {"hidden size": branch.hidden}
    return {"number of heads": branch.heads.query, "number of key/value heads": branch.heads.key_value}


def of_width(ways: Mapping[str, Experts], width: int) -> dict[str, Experts]:
    """Those of experts that take the hidden size, or all."""
    return {style: way for style, way in ways.items() if way.width == width} or dict(ways)


def does_not_divide(branch: Branch, size: int) -> str:
    """The count that the axis does not divide, in words; empty where it divides all."""
    return next((f"{what} {count}" for what, count in counts(branch).items() if count % size), "")


def whole_notes(transformer: Transformer, size: int) -> Iterator[str]:
    """One for each that blocks of one structure have."""
    for blocks in transformer.by_structure():
        whole = [(each.path, each.why) for each in blocks[0].whole]
        whole += [
            (branch.path or branch.down, f"its {uneven} is not divisible by {size}")
            for branch in blocks[0].branches
            if (uneven := does_not_divide(branch, size))
        ]
        whole += [
            (path, f"the inner size {way.inner} of its experts is not divisible by {size}")
            for path, every in blocks[0].experts
            for way in list(of_width(every, transformer.width).values())[:1]
            if way.inner % size
        ]
        for path, why in whole:
            yield f"{counted(join_name(blocks[0].path, path), len(blocks))}: left whole, {why}"


def without_taken(transformer: Transformer, styles: Mapping[str, str], notes: Iterable[str]) -> Iterator[str]:
    """Notes on what was left whole, but for what has been split since."""
    alike = [(blocks[0], len(blocks)) for blocks in transformer.by_structure()]
    paths = [(join_name(block.path, each.path), count) for block, count in alike for each in block.whole]
    taken = {counted(path, count) for path, count in paths if path in styles}
    return (note for note in notes if note.partition(": left whole")[0] not in taken)


def counted(path: str, count: int) -> str:
    """The first of so many that are alike."""
    return path if count == 1 else f"{path} (and {count - 1} like it)"
