"""Plain `nn.EmbeddingBag` and `nn.Embedding` on a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from dmp import Layout, ParameterInfo, ShardError, ShardingEnv, fully_sharded, replicate
from sharders.embedding.as_written import is_plain
from sharders.embedding.batches.batch import Ids
from sharders.embedding.batches.input_checks import INTEGERS
from sharders.embedding.batches.input_faults import Fault, Kind, dtype_index
from sharders.embedding.exchange.placement import Table
from sharders.embedding.ids.call import Call
from sharders.embedding.lookup.given_optimizers import OptimizerReader
from sharders.embedding.originals import make_table
from sharders.embedding.table_module import InitFn, TableModule, TableSharder

_FIXED = frozenset(("max_norm", "norm_type", "scale_grad_by_freq", "sparse", "mode"))
"""Attributes of torch's that its forward reads, and a lookup here was made by, or goes without."""

_NOT_SENT = "ranks cannot send each other such values. Call the model with a whole batch, outside of it"


class _ShardedPlain(TableModule):
    """What the two share. Subclasses are of torch's class, and name it and the arguments that make one like another.

    Code finds tables by `isinstance(module, nn.Embedding)`, in each step too: to draw them anew, and to give them a
    weight decay or a term of the loss of their own. What is no table's here has torch's defaults.

    Attributes that a user put on the module are on it, and on its `unsharded`.
    """

    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False

    way_out = "Give it the plan entry replicate(): it is then a dense weight, which anybody may read"
    plain_type: type[nn.Embedding] | type[nn.EmbeddingBag]
    arguments: tuple[str, ...]
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None

    def __init__(self, original: Any = None, *where: Any, **options: Any) -> None:
        if not isinstance(original, nn.Module):
            plain = self.plain_type.__name__
            raise ShardError(
                f"{type(self).__name__} is the class of a table in a wrapped model, and makes none, as "
                f"type(module)(...) or its from_pretrained would: nn.{plain}(...) makes a plain one. A "
                "table gets another size in to_unsharded(model), wrapped anew"
            )
        super().__init__(original, *where, **options)
        for name in self.arguments:
            setattr(self, name, getattr(original, name))
        known = _attributes_of(self.plain_type)  # type: ignore[arg-type]
        self._users = {k: v for k, v in vars(original).items() if k not in known and not hasattr(self, k)}
        vars(self).update(self._users)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and value != getattr(self, name, value):
            raise ShardError(
                f"{name} of sharded table {self._engine.name!r} was set to {value!r} after wrapping, where its lookup "
                f"goes by {getattr(self, name)!r}: set it before the model is wrapped, or wrap to_unsharded(model), "
                "changed, anew"
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """What torch's shows, of the whole table, and by which kernels its rows are looked up."""
        of_torchs: str = self.plain_type.extra_repr(self)  # type: ignore[arg-type]
        return ", ".join(filter(None, (of_torchs, super().extra_repr())))

    def unsharded(self) -> nn.Module:
        """A plain module of the same structure, on meta."""
        arguments = {name: getattr(self, name) for name in self.arguments}
        plain = self.plain_type(**arguments, device="meta", dtype=self._engine.dtype_of(0))
        vars(plain).update({name: getattr(self, name) for name in self._users})
        return plain

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As torch's: each rank draws what it has of the table, by one number of its generator, see `drawn_later`.

        Raises:
            ShardError: the class of the plain module has one of its own, which is of a whole table.
        """
        own: Any = self._unsharded_type
        if own.reset_parameters is not self.plain_type.reset_parameters:
            raise ShardError(
                f"reset_parameters of {own.__name__} draws a whole table, of which this rank has a "
                "part: call it before the model is wrapped, or torch.nn.init.normal_(module.weight) and its like here"
            )
        (parameter,) = self._engine.store.parameters
        nn.init.normal_(parameter)
        self._fill_padding_idx_with_zero()

    @torch.no_grad()
    def _fill_padding_idx_with_zero(self) -> None:
        """Called by torch's users too, after they have drawn values."""
        if self.padding_idx is None:
            return
        (parameter,) = self._engine.store.parameters
        cut = self._engine.store.chunked_state().get("weight")
        for chunk, (first, _) in [(parameter, (0, 0))] if cut is None else zip(cut.chunks, cut.offsets, strict=True):
            if 0 <= self.padding_idx - first < chunk.shape[0]:
                chunk[self.padding_idx - first] = 0


class ShardedEmbeddingBag(_ShardedPlain, nn.EmbeddingBag):
    """As `nn.EmbeddingBag`: takes (B, n) ids, or (N,) ids with offsets; gives (B, dim).

    Gradients are means over the data ranks; an in-backward optimizer runs once for each backward through a forward.
    """

    likeness = "torchrec.distributed.embeddingbag:ShardedEmbeddingBag"
    plain_type = nn.EmbeddingBag
    arguments = ("num_embeddings", "embedding_dim", "mode", "include_last_offset", "padding_idx")
    mode: str
    include_last_offset: bool

    def ids_of(
        self, input: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> Ids:
        """Those of (B, n) ids, or of (N,) ids with offsets."""
        ids, weights = input, per_sample_weights
        _check_type(ids)
        ids, offsets = _values(ids), _values(offsets)
        if weights is not None and torch._C._functorch.is_functorch_wrapped_tensor(weights):
            raise ShardError(f"per_sample_weights are a tensor of torch.func's: {_NOT_SENT}")
        if weights is not None and self.mode != "sum":
            raise Fault(Kind.WEIGHTS_UNEXPECTED)
        if weights is not None and weights.numel() != ids.numel():
            raise Fault(Kind.WEIGHTS_LENGTH, value=weights.numel(), expected=ids.numel())
        if ids.dim() == 2 and offsets is None:
            lengths = torch.full((ids.shape[0],), ids.shape[1], dtype=torch.int64, device=ids.device)
        elif ids.dim() == 1 and offsets is not None:
            lengths = self._lengths(offsets, ids.numel())
        else:
            raise Fault(Kind.SHAPE, value=ids.dim())
        ids, weights = ids.reshape(-1), None if weights is None else weights.reshape(-1)
        if self.padding_idx is not None:
            kept = (ids != self.padding_idx).nonzero().squeeze(1)  # waits for the device, which must tell how many
            bags = torch.arange(lengths.numel(), device=ids.device).repeat_interleave(lengths, output_size=ids.numel())
            lengths = torch.zeros_like(lengths).index_add_(0, bags[kept], lengths.new_ones(kept.numel()))
            ids, weights = ids[kept], None if weights is None else weights[kept]
        return Ids(ids, lengths.view(1, -1), (0,), weights)

    def result_of(self, call: Call, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pooled embeddings (B, dim)."""
        return values[0].to(self._engine.dtype_of(0))

    def _lengths(self, offsets: torch.Tensor, count: int) -> torch.Tensor:
        if offsets.dtype not in INTEGERS:
            raise Fault(Kind.LENGTH_DTYPE, value=dtype_index(offsets.dtype))
        if self.include_last_offset:
            if not offsets.numel():
                raise Fault(Kind.OFFSETS, value=0, expected=count)
            bounds = offsets
        else:
            bounds = torch.cat([offsets, offsets.new_tensor([count])])
        lengths = bounds[1:] - bounds[:-1]
        if lengths.numel():
            # The bounds themselves too: a difference of two that are far apart wraps around.
            extremes = torch.stack([bounds[0], bounds[-1], *bounds.aminmax(), lengths.min()])
            first, last, lowest, highest, shortest = extremes.tolist()
            if first or lowest < 0 or highest > count or shortest < 0:
                wrong = (int(b) for a, b in pairwise([0, *bounds.tolist()]) if b < a or b > count)
                raise Fault(Kind.OFFSETS, value=next(wrong, first), expected=count)
            if last != count:
                raise Fault(Kind.LENGTH_SUM, value=last, expected=count)
        return lengths


class ShardedEmbedding(_ShardedPlain, nn.Embedding):
    """As `nn.Embedding`: takes ids of any shape, or jagged, gives (*shape, dim).

    Gradients and updates as in `ShardedEmbeddingBag`.
    """

    plain_type = nn.Embedding
    arguments = ("num_embeddings", "embedding_dim", "padding_idx")

    def ids_of(self, input: torch.Tensor) -> Ids:
        """All of them; of a jagged tensor of torch's those that it holds."""
        _check_type(input)
        input = _values(input)
        ids = input.values() if _is_jagged(input) else input
        count = torch.tensor([[ids.numel()]], dtype=torch.int64, device=ids.device)
        return Ids(ids.reshape(-1), count, (0,), source=input)

    def result_of(self, call: Call, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Embeddings (*shape of input, dim)."""
        given = call.whole.source
        input = given.values() if _is_jagged(given) else given
        rows = values[0].view(*input.shape, self.embedding_dim).to(self._engine.dtype_of(0))
        if self.padding_idx is not None and rows.requires_grad:
            # The row of padding is read but gets no gradient.
            rows = torch.where((input == self.padding_idx).unsqueeze(-1), rows.detach(), rows)
        if input is given:
            return rows
        # By the same offsets, by which torch knows that two tensors are ragged alike.
        return torch.nested.nested_tensor_from_jagged(rows, given.offsets(), given.lengths())


def _is_jagged(ids: Any) -> bool:
    return isinstance(ids, torch.Tensor) and ids.is_nested and ids.layout == torch.jagged


@cache
def _attributes_of(plain_type: type[nn.Module]) -> frozenset[str]:
    """Those that each of torch's has. To make one takes half of the time in which it is sharded: on meta too it draws
    values, in Python."""
    return frozenset(vars(plain_type(1, 1, device="meta")))


class _PlainSharder(TableSharder):
    """What the sharders of the two share."""

    module_type: type[nn.Module]
    names_features = False

    def tables(self, module: Any) -> list[tuple[Table, InitFn | None]]:
        """`weight`."""
        mode = getattr(module, "mode", "sum")
        if not is_plain(module, self.module_type) or mode not in ("sum", "mean"):
            return []
        table = make_table(module.weight, "weight", ["input"], OptimizerReader(), mean=mode == "mean")
        return [(table, _init_fn(module))]


class EmbeddingBagSharder(_PlainSharder):
    """Shards `nn.EmbeddingBag` (sum and mean); one with `max_norm`, `scale_grad_by_freq`, `sparse`, max
    pooling or numbers that are not real stays with the data-parallel part, as does a subclass with its own forward."""

    sharded_type = ShardedEmbeddingBag
    is_pooled = True
    module_type = nn.EmbeddingBag


class EmbeddingSharder(_PlainSharder):
    """Shards `nn.Embedding`; one with `max_norm`, `scale_grad_by_freq` or `sparse` stays with the data-parallel part,
    and so does a subclass with a forward of its own."""

    sharded_type = ShardedEmbedding
    is_pooled = False
    module_type = nn.Embedding

    def layouts(self, info: ParameterInfo, env: ShardingEnv) -> Iterable[Layout]:
        """A table's; and those of a dense weight, such as a transformer's vocabulary is."""
        yield from super().layouts(info, env)
        if info.optimizer is None and env.fully_sharded_axes:
            yield fully_sharded()
        if info.optimizer is None:
            yield replicate()


def _check_type(ids: Any) -> None:
    if not isinstance(ids, torch.Tensor):
        raise Fault(Kind.INPUT_TYPE)
    if ids.dtype not in INTEGERS:
        raise Fault(Kind.ID_DTYPE, value=dtype_index(ids.dtype))


def _values(ids: Any) -> Any:
    """Ids as they are below the levels of torch.func, where what was computed of them in `jvp` or `grad` has no memory.

    Raises:
        ShardError: `vmap` goes over them.
    """
    while isinstance(ids, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(ids):
        if torch._C._functorch.is_batchedtensor(ids):
            raise ShardError(f"ids are what torch.func.vmap goes over: {_NOT_SENT}")
        ids = torch._C._functorch.get_unwrapped(ids)
    return ids


def _init_fn(module: Any) -> Any:
    """torch's own initial values; None for a subclass with a `reset_parameters` of its own."""
    kind = nn.EmbeddingBag if isinstance(module, nn.EmbeddingBag) else nn.Embedding
    if type(module).reset_parameters is not kind.reset_parameters or module.padding_idx is not None:
        return None  # the padding row is zero: the module's own reset does it
    return nn.init.normal_
