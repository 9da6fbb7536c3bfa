"""What a transformer is made of: blocks, and their branches, attentions and MLPs.

[Note: transformer]
- A branch is what tensor parallelism splits as one: Linears that read the hidden size ("up"), and one that returns
  to it ("down"). An attention is a branch with heads; a gated or plain MLP is one without. Where its up is one Linear
  that holds several in one, shapes do not tell how: query, key and value one behind the other, or all three of each
  head; a gate and what it gates likewise. It is split as the one that is proved.
- A block is what repeats: the hidden state goes in and comes out. Branches are looked for inside blocks only, so a
  recommender's MLP towers, which no attention accompanies, are never touched.
- Blocks with equal `structure` are one decision: the same parts at the same relative paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sharders.tensor_parallel.structure.experts import Experts

HEADS = (
    *("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead", "num_head", "nheads", "_n_heads"),
    "num_attn_heads",
)
KV_HEADS = (
    *("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_kv_head", "kv_heads", "num_key_value_head"),
    *("n_query_groups", "num_query_groups"),
)
LOCAL_HEADS = ("n_local_heads", "num_local_heads", "n_local_kv_heads", "num_local_kv_heads")
HEAD_DIM = ("head_dim", "d_head", "dim_head", "attention_head_size", "head_size", "kv_channels", "d_k", "d_kv")
CONFIGS = ("config", "cfg", "args", "params")
AXES_OF_HEADS = ("h", "heads", "num_heads")
"""Names of attributes that hold numbers of heads, of key/value heads, of either (in code that was written to be split:
Meta's Llama has query heads by the first, gpt-fast keys and values), the size of a head, other attributes, and an
axis of heads where sizes are held by name."""

IMAGE_SIZES = ("image_size", "img_size", "input_size", "sample_size")
"""Names of attributes that hold the height and width of images: a number or two."""


@dataclass(frozen=True)
class Heads:
    """Numbers of heads of a grouped-query attention; `query == key_value` where it is not grouped."""

    query: int
    key_value: int
    size: int


@dataclass(frozen=True)
class Branch:
    """Linears that are split together; paths as the field that holds it says."""

    path: str
    """The smallest module that holds all of them; an attention's numbers of heads are attributes in it."""

    up: tuple[str, ...]
    """Read the hidden size: query, key, value, or an MLP's first one or two."""

    down: str
    """Returns to the hidden size."""

    hidden: int
    """Width between up and down: an MLP's hidden size, an attention's heads times head size."""

    heads: Heads | None = None

    parts: tuple[int, ...] = (1,)
    """Into how many equal parts, each of them to be split, its up may have to be taken apart; the likeliest first."""

    adapters: tuple[tuple[str, str], ...] = ()
    """Linears that are beside these, and what becomes of them; see [Note: adapters], [Note: latent attention]."""

    second: tuple[tuple[str, str], ...] = ()
    """Linears of a second sequence that it attends to together with its own, or of an MLP whose output its own takes
    too, and their styles."""

    beside: tuple[tuple[tuple[str, str], ...], ...] = ()
    """Styles that an attention's further Linears may have, the likeliest first; see [Note: beside]."""

    widths: tuple[int, ...] = ()
    """Of heads together, where they are others than heads times head size."""

    others: tuple[Branch, ...] = ()
    """What it may be as well, where shapes do not tell which of its Linears leads back; the likeliest first."""

    @property
    def ways(self) -> tuple[Branch, ...]:
        """All that it may be, the likeliest first."""
        return (self, *self.others)

    @property
    def further(self) -> tuple[str, ...]:
        """An attention's further Linears."""
        return tuple(path for path, _ in self.beside[0]) if self.beside else ()

    @property
    def has_one_head(self) -> bool:
        """Whether no axis divides its heads: then it is whole, on any mesh."""
        return self.heads is not None and self.heads.query == 1

    @property
    def is_joint(self) -> bool:
        """Whether its up is one Linear that holds several in one."""
        return len(self.up) == 1 and (self.heads is not None or len(self.parts) > 1)


@dataclass(frozen=True)
class Whole:
    """Something of a block that is not split."""

    path: str
    why: str


@dataclass(frozen=True)
class Block:
    """One of the repeated modules of a transformer."""

    path: str
    structure: int
    """A number, equal for blocks of one model that are the same but for their weights."""

    branches: tuple[Branch, ...]
    """Paths relative to the block."""

    whole: tuple[Whole, ...]
    """Paths relative to the block."""

    experts: tuple[tuple[str, Mapping[str, Experts]], ...] = ()
    """Mixtures of them: path relative to the block, and the ways to split each by style."""


@dataclass(frozen=True)
class Transformer:
    """What was recognised in a model; no blocks where it is none."""

    blocks: tuple[Block, ...]
    width: int
    """Hidden size; 0 without blocks."""

    embedding: str | None
    """Token embedding outside the blocks."""

    head: str | None
    """Linear from the hidden size to the vocabulary."""

    def by_structure(self) -> list[list[Block]]:
        """Blocks that are one decision."""
        found: dict[int, list[Block]] = {}
        for block in self.blocks:
            found.setdefault(block.structure, []).append(block)
        return list(found.values())

    def representatives(self) -> list[Block]:
        """The first block of each structure."""
        return [blocks[0] for blocks in self.by_structure()]


def below(path: str, outer: str) -> str:
    """The path relative to `outer`, which it is inside of."""
    return path.removeprefix(outer).removeprefix(".")


def outward(path: str) -> Iterator[str]:
    """The path itself, its parent, ... and the model."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""
