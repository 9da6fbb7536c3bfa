"""Style names: what a plan calls the ways to split a module over a tensor axis, and what each does to weights.

[Note: style names]
A *style* says how one module is split and which activations go in and out. Splits are torch's own:

| style | `nn.Linear` | `nn.Embedding` |
| --- | --- | --- |
| `colwise` | output features split, output split | columns split, output whole |
| `colwise_gather` | the same, output whole | |
| `colwise_loss_parallel` | the same, output a DTensor split over the last dim, for torch's `loss_parallel` | |
| `colwise_from_sequence` | as `colwise`, takes a chunk of the sequence | |
| `colwise_packed_2`, ... | as `colwise`, of so many weights held in one: each is split | |
| `rowwise` | input features split, takes a split input, output summed | vocabulary split, output whole |
| `rowwise_gather` | the same, takes a whole input | |
| `rowwise_packed_2`, ... | as `rowwise`, of so many weights held in one: each is split | |
| `rowwise_scatter` | as `rowwise`, output split along the sequence (dim 1) | |

- `colwise_norm`: a norm over all that colwise Linears give; its weights are split like their output features, and its
  statistics are those of all ranks' features, see [Note: wide norms].
- `experts`, `experts_interleaved`, `experts_transposed`: a module whose parameters are stacks of matrices, one for each
  expert of a mixture, is split by the inner size of all, see [Note: experts].
- `heads_0`, `heads_1`: what a module itself holds for each head of an attention is split along that dim, see
  [Note: values of heads].

The rest moves activations; modules stay whole. A *chunk* is a rank's part of the hidden state along dim 1:

- `sequence`: the module runs on chunks, so gradients of its weights are summed over the axis.
- `gather_input`: takes a chunk, and hands its colwise Linears the whole.
- `split_sequence`, `gather_sequence`: whole in, chunk on; chunk in, whole out.
- `sum_gradients`: runs on this rank's heads alone (a norm of single heads), so gradients of its weights are summed.
- `latent`: of what it gives, gradients of what lies behind the latent vector are summed, see [Note: latent attention].
- `replicate`: nothing.

Other names for some of them, as Hugging Face's plans have them, are in `ALIASES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from torch import nn

from dmp import Layout, PlanError, colwise, join_name, rowwise, sequence
from sharders.tensor_parallel.structure.beside import MOST_TIMES
from sharders.tensor_parallel.structure.experts import EXPERTS, experts_of
from sharders.tensor_parallel.structure.linears import features_of, is_joint_attention, is_transposed
from sharders.tensor_parallel.structure.of_heads import OF_HEADS, may_have_values
from sharders.tensor_parallel.structure.wide_norms import COLWISE_NORM, width_of_norm

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

Style: TypeAlias = Union[str, "ParallelStyle"]

PACKED = {f"colwise_packed_{parts}": parts for parts in range(2, MOST_TIMES + 1)}
"""Styles of weights that hold several in one, such as query, key and value, and how many."""
PACKED_ROWS = {f"rowwise_packed_{parts}": parts for parts in range(2, MOST_TIMES + 1)}
"""The same of weights that take several one behind the other, such as what an attention and an MLP give."""
COLWISE = ("colwise", "colwise_gather", "colwise_loss_parallel", "colwise_from_sequence", *PACKED)
ROWWISE = ("rowwise", "rowwise_gather", "rowwise_scatter", *PACKED_ROWS)
ON_CHUNKS = ("sequence", "split_sequence", "gather_sequence")  # of the sequence are the module's own weights used
ON_PARTS = (*ON_CHUNKS, "sum_gradients")  # of the activations are they used, so that gradients are parts of a sum
ACTIVATIONS = ("latent", "gather_input", "split_sequence", "gather_sequence", "sequence", "sum_gradients", "replicate")
SPLITTING = ("colwise", "rowwise", "norm", "experts", "heads")
"""Families of styles of modules that have a part of their weights on each rank."""
ALIASES = {
    "colwise_gather_output": "colwise_gather",
    "colwise_rep": "colwise_gather",
    "rowwise_rep": "rowwise_gather",
    "embedding_rowwise": "rowwise",
    "embedding_colwise": "colwise",
    "packed_colwise": "colwise_packed_2",
    "sequence_parallel": "sequence",
    "rowwise_split_input": "rowwise_gather",
    "mla_kv_a_proj": "latent",
    "moe_tp_experts": "experts",
    "replicated_with_grad_allreduce": "sum_gradients",
}
KNOWN = (*COLWISE, *ROWWISE, COLWISE_NORM, *EXPERTS, *OF_HEADS, *ACTIVATIONS)
_EMBEDDING_STYLES = ("colwise", "rowwise")


def canonical(style: Style, path: str, module: nn.Module) -> Style:
    """The style under our own name, once it is clear that the module can take it; torch's objects as they are.

    Raises:
        PlanError: an unknown name, not a style, or a module of another kind than the style splits.
    """
    if not isinstance(style, str):
        return _checked_object(style, path, module)
    name = ALIASES.get(style, style)
    if name not in KNOWN:
        close = get_close_matches(style, [*KNOWN, *ALIASES], n=2)
        raise PlanError(
            f"module {path!r}: unknown style {style!r}{f' (did you mean {close[0]!r}?)' if close else ''}; known: "
            f"{', '.join(_shown())}, and Hugging Face's {', '.join(ALIASES)}; or pass a torch ParallelStyle"
        )
    if name in ACTIVATIONS:
        return name
    if is_joint_attention(module) and name in PACKED:
        if name != "colwise_packed_3":
            raise PlanError(
                f"module {path!r} is an nn.MultiheadAttention, which is split by 'colwise_packed_3'; got {style!r}"
            )
        return name
    if name in EXPERTS:
        if name not in (ways := experts_of(module)):
            raise PlanError(
                f"module {path!r} is a {type(module).__name__}, which {style!r} cannot split: it splits parameters "
                "that are stacks of matrices, one for each expert, up to an inner size and down again"
                + (f"; this one's shapes take {', '.join(ways)}" if ways else "")
            )
        return name
    if name in OF_HEADS:
        shapes = {own: tuple(p.shape) for own, p in module._parameters.items() if p is not None}
        if len({shape[OF_HEADS[name] :][:1] for shape in shapes.values()} - {()}) != 1 or features_of(module):
            raise PlanError(
                f"module {path!r} is a {type(module).__name__}, which {style!r} cannot split: it splits, along dim "
                f"{OF_HEADS[name]}, what a module itself has, all values for each head; its own are {shapes or 'none'}"
            )
        return name
    if name == COLWISE_NORM:
        if width_of_norm(module) is None:
            shapes = {own: tuple(p.shape) for own, p in module._parameters.items() if p is not None}
            raise PlanError(
                f"module {path!r} is a {type(module).__name__}, which {style!r} cannot split: it splits the weight and "
                f"bias of a norm over one dim, by a forward of its class; its own are {shapes or 'none'}"
            )
        return name
    is_embedding = isinstance(module, nn.Embedding)
    if name == "colwise_loss_parallel" and is_transposed(module):
        raise PlanError(f"module {path!r}: {style!r} is for an nn.Linear; got a {type(module).__name__} of (in, out)")
    if not (is_embedding or features_of(module)) or module._parameters.get("weight") is None:
        raise PlanError(
            f"module {path!r} is a {type(module).__name__}, which {style!r} cannot split: it splits the weight of an "
            f"nn.Linear or nn.Embedding; for other modules there are {', '.join(ACTIVATIONS)}, or a torch ParallelStyle"
        )
    if is_embedding and name == "colwise_gather":  # its output is whole anyway
        name = "colwise"
    if (is_embedding and name not in _EMBEDDING_STYLES) or (style.startswith("embedding_") and not is_embedding):
        fits = _EMBEDDING_STYLES if is_embedding else [name for name in _shown() if name in (*COLWISE, *ROWWISE)]
        raise PlanError(f"module {path!r} is a {type(module).__name__} and takes {', '.join(fits)}; got {style!r}")
    return name


def _shown() -> list[str]:
    """Names of styles, of those that count parts the first."""
    return [name for name in KNOWN if parts_of(name) < 4]


def split_dim(style: Style, module: nn.Module) -> int | None:
    """The dim of the module's weight that is split; None for a style that splits none."""
    kind = family(style)
    if kind not in ("colwise", "rowwise"):
        return None
    features = features_of(module)
    if is_joint_attention(module):
        return 0
    out_dim = 1 if features is None else features.out_dim  # an embedding's are its columns
    return out_dim if kind == "colwise" else 1 - out_dim


def parts_of(style: Style) -> int:
    """How many weights are held in one that it splits."""
    return {**PACKED, **PACKED_ROWS}.get(style, 1) if isinstance(style, str) else 1


def is_local(style: Style, module: nn.Module) -> bool:
    """Whether the module runs on plain tensors, of what is here: torch has no style that splits it so."""
    if not isinstance(style, str):
        return False
    return style in (*PACKED, *PACKED_ROWS, COLWISE_NORM, *EXPERTS, *OF_HEADS) or (
        is_transposed(module) and style in (*COLWISE, *ROWWISE)
    )


def styled(module: nn.Module, layouts: Mapping[str, Layout]) -> str:
    """The style that gives a module's parameters, by their names in it, these layouts, at least one of them."""
    if ways := experts_of(module):
        return next((style for style in ways if layouts.items() <= layouts_of(style, module).items()), EXPERTS[0])
    layout = next(iter(layouts.values()))
    if layout == colwise() and width_of_norm(module) is not None:
        return COLWISE_NORM
    if may_have_values(module):
        return next((style for style in OF_HEADS if set(layouts.values()) == {_of_heads(style)}), layout.name)
    return layout.name if layout.num_parts == 1 else f"{layout.name}_packed_{layout.num_parts}"


def family(style: Style) -> str:
    """`"colwise"`, `"rowwise"`, `"norm"`, `"experts"`, `"heads"`, `"sequence"`; `""` for a style that places none."""
    if style in EXPERTS:
        return "experts"
    if style in OF_HEADS:
        return "heads"
    if style == COLWISE_NORM:
        return "norm"
    if isinstance(style, str):
        return "colwise" if style in COLWISE else "rowwise" if style in ROWWISE else "sequence" * (style in ON_CHUNKS)
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    kinds = {ColwiseParallel: "colwise", RowwiseParallel: "rowwise", SequenceParallel: "sequence"}
    return next((name for kind, name in kinds.items() if isinstance(style, kind)), "")


def layouts_of(style: Style, module: nn.Module) -> dict[str, Layout]:
    """Layouts of the module's own parameters that the style places, by their names in it."""
    own = [name for name, p in module._parameters.items() if p is not None]
    kind = family(style)
    if kind == "sequence":
        return dict.fromkeys(own, sequence())
    if not kind:
        return {}
    if kind == "norm":
        return dict.fromkeys(own, colwise())
    if kind == "heads":
        return dict.fromkeys(own, _of_heads(str(style)))
    if kind == "experts":
        experts = experts_of(module)[str(style)]
        up = {name: colwise(dim, experts.parts) for name, dim in experts.up.items()}
        return {**up, **{name: rowwise(dim) for name, dim in experts.down.items()}}
    if isinstance(module, nn.Embedding):
        return dict.fromkeys(own, colwise(dim=1) if kind == "colwise" else rowwise(dim=0))
    parts = parts_of(style)
    layout = colwise(parts=parts) if kind == "colwise" else rowwise(parts=parts)
    found = dict.fromkeys(own, layout)
    if is_transposed(module):
        found["weight"] = colwise(1, parts) if kind == "colwise" else rowwise(0, parts)
    return found


def _of_heads(style: str) -> Layout:
    return colwise(OF_HEADS[style] or None)


def check_divides(style: Style, path: str, module: nn.Module, size: int, axis: str) -> None:
    """Raise `PlanError` unless what the style splits divides over the axis."""
    if family(style) == "experts" and (inner := experts_of(module)[str(style)].inner) % size:
        raise PlanError(
            f"module {path!r}: {style} splits the inner size {inner} of each expert over the {size} ranks of "
            f"mesh axis {axis!r}, which does not divide it; make the axis smaller, or leave this module out of the plan"
        )
    if family(style) == "heads":
        count = next(p.shape[OF_HEADS[str(style)]] for p in module._parameters.values() if p is not None)
        if count % size:
            raise PlanError(
                f"module {path!r}: {style} splits the values of {count} heads over the {size} ranks of mesh axis "
                f"{axis!r}, which does not divide them; make the axis smaller, or leave this attention out of the plan"
            )
        return
    width = width_of_norm(module) if style == COLWISE_NORM else None
    if width is not None and width % size:
        raise PlanError(
            f"module {path!r}: {style} splits {width} features over the {size} ranks of mesh axis {axis!r}, which does "
            "not divide them; make the axis smaller, or leave this module (and those that work with it) out of the plan"
        )
    dim = split_dim(style, module)
    if is_joint_attention(module) and dim is not None:
        return  # its heads are what is split, and are asked for as all attentions' are
    if dim is None or not (isinstance(module, nn.Embedding) or features_of(module)):
        return
    names = ("num_embeddings", "embedding_dim") if isinstance(module, nn.Embedding) else ("out_features", "in_features")
    names = names[::-1] if is_transposed(module) else names
    weight: Any = module.weight
    length, multiple = weight.shape[dim], size * parts_of(style)
    if length % multiple:
        shown = style if isinstance(style, str) else type(style).__name__
        raise PlanError(
            f"module {path!r}: {shown} splits {names[dim]}={length} over the {size} ranks of mesh axis {axis!r}, and "
            f"{length} does not divide by {multiple}; pad it to a multiple of {multiple}, make the axis smaller, or "
            "leave this module (and those that work with it) out of the plan",
            table=join_name(path, "weight"),
        )


def torch_style(style: Style, module: nn.Module) -> ParallelStyle | None:
    """torch's style that splits the module so; None where the style splits nothing, or torch has none."""
    if not isinstance(style, str):
        return style
    if style in ACTIVATIONS or is_local(style, module):
        return None
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if isinstance(module, nn.Embedding):
        by_rows = style == "rowwise"
        return RowwiseParallel(input_layouts=Replicate()) if by_rows else ColwiseParallel(output_layouts=Replicate())
    if style in COLWISE:
        gives_local = style != "colwise_loss_parallel"
        out = Replicate() if style == "colwise_gather" else Shard(-1)
        return ColwiseParallel(output_layouts=out, use_local_output=gives_local)
    taken = Replicate() if style == "rowwise_gather" else Shard(-1)
    return RowwiseParallel(input_layouts=taken, output_layouts=Shard(1) if style == "rowwise_scatter" else Replicate())


def _checked_object(style: ParallelStyle, path: str, module: nn.Module) -> ParallelStyle:
    from torch.distributed.tensor.parallel import ParallelStyle

    if not isinstance(style, ParallelStyle):
        raise PlanError(
            f"module {path!r}: expected a style's name or a torch ParallelStyle object; got "
            f"{style.__name__ + ' (the class; call it)' if isinstance(style, type) else repr(style)}"
        )
    if family(style) in ("colwise", "rowwise") and not isinstance(module, (nn.Linear, nn.Embedding)):
        raise PlanError(
            f"module {path!r} is a {type(module).__name__}, which {type(style).__name__} cannot split; it splits "
            f"nn.Linear and nn.Embedding: leave it out of the plan, or give it one of {', '.join(ACTIVATIONS)}"
        )
    return style
